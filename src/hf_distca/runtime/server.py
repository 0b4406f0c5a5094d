"""`AttentionServer`: a rank in its role of running CA-tasks, in batches, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_distca.kernels.base import Kernel, Scores, TaskBatch
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route

__all__ = ["AttentionServer"]


@dataclass(frozen=True, eq=False)
class AttentionServer:
    """Runs the tasks of a route with one kernel. Keeps nothing between calls.

    Shape suffixes as in `hf_distca.kernels.base`. A first tensor axis of "home" tensors is the rank's own tokens, that of
    "received" tensors the rows that other ranks sent, in rank order.

    Attributes:
        kernel: the attention kernel.
        scores: scale, window and softcap of the layer.
        meter: where kernel seconds are counted.
    """

    kernel: Kernel
    scores: Scores
    meter: Meter

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, tasks: TaskBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o_THV and lse_TH of a batch; zeros in rows that no task covers."""
        with self.meter.kernel(q_THD.device):
            return self.kernel.forward(q_THD, k_TKD, v_TKV, tasks, self.scores)

    def backward(self, saved: Sequence[torch.Tensor], tasks: TaskBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of a batch from ``(do, q, k, v, o, lse)``."""
        do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH = saved
        with self.meter.kernel(q_THD.device):
            return self.kernel.backward(do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH, tasks, self.scores)

    def serve(
        self, route: Route, home: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Run the arrived tasks forward.

        Args:
            route: the route of this micro-batch.
            home, received: q, k, v of this rank's tokens and of the rows that came.

        Returns:
            (o, lse) for ``route.home_queries`` and (o, lse) for the received query rows.
        """
        pools = _pools(route, 1, home, received)
        o_THV, lse_TH = self.forward(pools[0], pools[1], pools[2], route.arrived)
        return _cut(route, (o_THV, lse_TH))

    def serve_backward(
        self, route: Route, home: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Run the arrived tasks backward.

        Args:
            route: the route of this micro-batch.
            home, received: do, q, o, lse, k, v of this rank's tokens and of the rows that came.

        Returns:
            (dq,) for ``route.home_queries``, (dq,) for the received query rows, and the gradients (dk, dv) of the key pool.
        """
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = _pools(route, 4, home, received)
        dq_THD, dk_TKD, dv_TKV = self.backward((do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH), route.arrived)
        home_dq, received_dq = _cut(route, (dq_THD,))
        return home_dq, received_dq, (dk_TKD, dv_TKV)


def _pools(route: Route, query_like: int, home: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pools of the first `query_like` tensors (rows of queries) and of the others (rows of keys)."""
    pools = []
    for place, (own, came) in enumerate(zip(home, received, strict=True)):
        if place >= query_like:
            pools.append(route.pool.assemble(own, came))
        elif len(route.home_queries):
            pools.append(torch.cat([own.index_select(0, route.home_queries), came]))
        else:
            pools.append(came)
    return pools


def _cut(route: Route, pools: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pools of query rows, cut into the home rows in front and the received rows behind them."""
    front = len(route.home_queries)
    return [pool[:front] for pool in pools], [pool[front:] for pool in pools]
