"""`AttentionServer`: a rank in its role of running CA-tasks, in batches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from hf_distca.kernels.base import Kernel, Scores, TaskBatch
from hf_distca.runtime.exchange import Landed, Pending, joined, part_of, row_bytes
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Wave
from hf_distca.runtime.trace import Tracer

__all__ = ["AttentionServer", "Grads", "Operands", "Outputs", "Saved", "in_groups", "joined_groups"]


class Operands(NamedTuple):
    """What a task reads in forward: rows of queries first, then rows of keys, as in `Saved` and in every message."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor

    @property
    def query_rows(self) -> Sequence[torch.Tensor]:
        """Those with a row for each query."""
        return self[:1]

    @property
    def key_rows(self) -> Sequence[torch.Tensor]:
        """Those with a row for each key."""
        return self[1:]

    @property
    def answer_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes of a row of what tasks give for them: with a row for each query, and for each key."""
        rows, lse = self.q_THD.shape[1], torch.promote_types(self.q_THD.dtype, torch.float32)
        return [rows * self.v_TKV.shape[2] * self.q_THD.itemsize, rows * lse.itemsize], []


class Outputs(NamedTuple):
    """What a task gives in forward: output and log-sum-exp."""

    o_THV: torch.Tensor
    lse_TH: torch.Tensor


class Saved(NamedTuple):
    """What a task reads in backward: rows of queries first, then rows of keys."""

    do_THV: torch.Tensor
    q_THD: torch.Tensor
    o_THV: torch.Tensor
    lse_TH: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor

    @property
    def query_rows(self) -> Sequence[torch.Tensor]:
        """Those with a row for each query."""
        return self[:4]

    @property
    def key_rows(self) -> Sequence[torch.Tensor]:
        """Those with a row for each key."""
        return self[4:]

    @property
    def answer_bytes(self) -> tuple[list[int], list[int]]:
        """As of `Operands`: gradients, in the dtypes of what they are for."""
        return [row_bytes(self.q_THD)], [row_bytes(tensor) for tensor in self.key_rows]


class Grads(NamedTuple):
    """What a task gives in backward; dk and dv may be wider than k and v, for they are sums."""

    dq_THD: torch.Tensor
    dk_TKD: torch.Tensor
    dv_TKV: torch.Tensor


Tensors = TypeVar("Tensors", Operands, Outputs, Saved, Grads)


def in_groups(tensors: Tensors, groups: int) -> Tensors:
    """Tensors with so many rows a token, one for each head group: views, if they are contiguous."""
    if groups == 1:
        return tensors
    return type(tensors)(*(t.contiguous().view(len(t) * groups, t.shape[1] // groups, *t.shape[2:]) for t in tensors))


def joined_groups(tensors: Tensors, groups: int) -> Tensors:
    """What `in_groups` was given."""
    if groups == 1:
        return tensors
    return type(tensors)(*(t.view(len(t) // groups, t.shape[1] * groups, *t.shape[2:]) for t in tensors))


@dataclass(frozen=True, eq=False)
class AttentionServer:
    """Runs the tasks of a route with one kernel. Keeps nothing between calls, and nothing received beyond one.

    Shape suffixes as in `hf_distca.kernels.base`. The first axis of a rank's own tensors is its tokens; that of pools is the own
    rows that its tasks read with those of others, then the rows that other ranks sent, in rank order.

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

    def forward(self, pools: Operands, tasks: TaskBatch) -> Outputs:
        """Outputs of a batch; zeros in rows that no task covers."""
        device = pools.q_THD.device
        # Kernels compute in the dtypes that they are given, and in wider ones: the user's autocast is not for them.
        with self.reporting(), self.meter.kernel(device), self.tracer.span("server"), torch.autocast(device.type, enabled=False):
            return Outputs(*self.kernel.forward(*pools, tasks, self.scores))

    def backward(self, pools: Saved, tasks: TaskBatch) -> Grads:
        """Gradients of a batch."""
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = pools
        device = q_THD.device
        timed = self.meter.kernel(device, backward=True)
        with self.reporting(), timed, self.tracer.span("server"), torch.autocast(device.type, enabled=False):
            return Grads(*self.kernel.backward(do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH, tasks, self.scores))

    def serve(self, wave: Wave, own: Operands, dispatch: Pending | Landed | None) -> Outputs:
        """Run the arrived tasks of a wave forward.

        Args:
            wave: the wave that arrives.
            own: this rank's.
            dispatch: the same of the rows that come; None if none do.

        Returns:
            Those of ``wave.own_queries``, then those of the received query rows.
        """
        return self.forward(Operands(*_pools(wave, own, dispatch)), wave.arrived)

    def serve_backward(self, wave: Wave, own: Saved, dispatch: Pending | Landed | None) -> Grads:
        """As `serve`, backward: dq has rows as the outputs there, dk and dv those of the key pool."""
        return self.backward(Saved(*_pools(wave, own, dispatch)), wave.arrived)


def _pools(wave: Wave, own: Operands | Saved, dispatch: Pending | Landed | None) -> list[torch.Tensor]:
    """Pools of what a wave's tasks read.

    Rows go from the message straight to their pools and the message is gone afterwards; or it is the pools as it is. Not in part:
    one pool that is a view of the message would keep all of it.
    """
    received: list[list[torch.Tensor]] = [[] for _ in own] if dispatch is None else dispatch.sections()
    if wave.as_received:
        return [section for (section,) in received]
    cut = len(own.query_rows)
    queries = [
        joined([*(part_of(tensor, *run[1:]) for run in wave.own_queries), *sections], tensor)
        for tensor, sections in zip(own.query_rows, received[:cut], strict=True)
    ]
    return queries + [wave.pool.assemble(*each) for each in zip(own.key_rows, received[cut:], strict=True)]
