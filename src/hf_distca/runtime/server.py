"""`AttentionServer`: a rank in its role of running CA-tasks, in batches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from hf_distca.kernels.base import Kernel, Scores, TaskBatch
from hf_distca.runtime.exchange import Pending
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Wave
from hf_distca.runtime.trace import Tracer

__all__ = ["AttentionServer"]


@dataclass(frozen=True, eq=False)
class AttentionServer:
    """Runs the tasks of a route with one kernel. Keeps nothing between calls, and nothing received beyond one.

    Shape suffixes as in `hf_distca.kernels.base`. A first tensor axis of "home" tensors is the rank's own tokens, that of
    "received" tensors the rows that other ranks sent, in rank order.

    Attributes:
        kernel: the attention kernel.
        scores: scale, window and softcap of the layer.
        meter: where kernel seconds are counted.
        tracer: records when tasks run.
        reporting: a context for kernel calls, which tells other ranks of an exception.
    """

    kernel: Kernel
    scores: Scores
    meter: Meter
    tracer: Tracer = field(default_factory=Tracer)
    reporting: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, tasks: TaskBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o_THV and lse_TH of a batch; zeros in rows that no task covers."""
        with self.reporting(), self.meter.kernel(q_THD.device), self.tracer.span("server"):
            return self.kernel.forward(q_THD, k_TKD, v_TKV, tasks, self.scores)

    def backward(self, saved: Sequence[torch.Tensor], tasks: TaskBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of a batch from ``(do, q, k, v, o, lse)``."""
        do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH = saved
        with self.reporting(), self.meter.kernel(q_THD.device), self.tracer.span("server"):
            return self.kernel.backward(do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH, tasks, self.scores)

    def serve(
        self, wave: Wave, home: Sequence[torch.Tensor], dispatch: Pending
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Run the arrived tasks of a wave forward.

        Args:
            wave: the wave that arrives.
            home: q, k, v of this rank's tokens.
            dispatch: the same of the rows that come.

        Returns:
            (o, lse) for ``wave.home_queries`` and (o, lse) for the received query rows.
        """
        q_THD, k_TKD, v_TKV = _pools(wave, 1, home, dispatch)
        return _cut(wave, self.forward(q_THD, k_TKD, v_TKV, wave.arrived))

    def serve_backward(
        self, wave: Wave, home: Sequence[torch.Tensor], dispatch: Pending
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], list[torch.Tensor]]:
        """Run the arrived tasks of a wave backward.

        Args:
            wave: the wave that arrives.
            home: do, q, o, lse, k, v of this rank's tokens.
            dispatch: the same of the rows that come.

        Returns:
            (dq,) for ``wave.home_queries``, (dq,) for the received query rows, and the gradients [dk, dv] of the key pool.
        """
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = _pools(wave, 4, home, dispatch)
        dq_THD, dk_TKD, dv_TKV = self.backward((do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH), wave.arrived)
        home_dq, received_dq = _cut(wave, (dq_THD,))
        return home_dq, received_dq, [dk_TKD, dv_TKV]


def _pools(wave: Wave, query_like: int, home: Sequence[torch.Tensor], dispatch: Pending) -> list[torch.Tensor]:
    """Pools of the first `query_like` tensors (rows of queries) and of the others (rows of keys).

    Rows go from the message straight to their pools and the message is gone afterwards; or it is the pools as it is. Not in part:
    one pool that is a view of the message would keep all of it.
    """
    received = dispatch.sections()
    if wave.pool.received is None and not len(wave.home_queries) and all(len(sections) == 1 for sections in received):
        return [sections[0] for sections in received]
    pools = [
        torch.cat([own.index_select(0, wave.home_queries), *came]) for own, came in zip(home, received[:query_like], strict=False)
    ]
    return pools + [wave.pool.assemble(own, came) for own, came in zip(home[query_like:], received[query_like:], strict=True)]


def _cut(wave: Wave, pools: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pools of query rows, cut into the home rows in front and the received rows behind them."""
    front = len(wave.home_queries)
    return [pool[:front] for pool in pools], [pool[front:] for pool in pools]
