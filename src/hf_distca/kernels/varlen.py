"""Turn tasks into calls of a varlen flash-attention op, for all kernels of `flash` and `efficient`.

A varlen op takes one run of query rows and one run of keys, divided into sequences by cumulative
lengths. Its backward writes the gradient of a key once, so each key may be in only one sequence of
a call. Slices of one document share keys. A batch is therefore split into sets of tasks that have
no key in common, and each set is one call.

If the tasks of a call are contiguous in the pool (packed documents, or a single slice), the call
gets a view of the pool. Otherwise it gets a gathered copy, which is freed after the call. Copies
are expensive: on an H100 with FlashAttention 4 they took up to a tenth of the time of a rank's
tasks. To save copies, the op gets the whole pools if the batch is a single call whose tasks have
their rows and keys in the same order. The rows of a gap between tasks are then a sequence without
keys, and the keys of a gap are a sequence without rows. These sequences are cheap. An op that does
not accept them gets copies.

Index tensors are built once for each batch and device, without making the host wait, and later
calls reuse them. They are made on the stream of the first call. The caller must order other streams
after this stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch

from hf_distca.kernels.base import (
    BackwardInputs,
    Grads,
    KernelRequest,
    Operands,
    Outputs,
    ScoreOptions,
    TaskBatch,
    check_pools,
    choose_accumulation_dtype,
    choose_key_gradient_dtype,
    disable_gradients,
    get_key_rows,
    get_query_rows,
    pad_last,
)


class Sequences(NamedTuple):
    """Sequences of a call. Sequence i has rows [cu_rows[i], cu_rows[i + 1]) and keys [cu_keys[i],
    cu_keys[i + 1]).

    Attributes:
        cu_rows, cu_keys: cumulative numbers of rows and of keys, starting with 0: (sequences + 1,)
            int32 on the device of the pools.
        max_rows, max_keys: largest number of rows and of keys of a sequence, on the host.
    """

    cu_rows: torch.Tensor
    cu_keys: torch.Tensor
    max_rows: int
    max_keys: int


class VarlenOp(Protocol):
    """A varlen flash-attention op. It is causal, aligned bottom right. The number of query heads
    (H) is a multiple of the number of key/value heads (K). All heads have the same width (D = V).

    ``scores.window`` is None or less than the most keys of a sequence. ``scores.softcap`` is None
    unless the kernel supports it.

    Attributes:
        takes_gaps: whether a sequence may have no rows or no keys. The gradients of such a sequence
            are 0, and its outputs are undefined.
        width_multiple: callers must make D a multiple of this.
    """

    takes_gaps: bool
    width_multiple: int

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        """Return the output in q's dtype and the log-sum-exp in the accumulation dtype, with any
        strides.
        """
        ...

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        """Return gradients of q, k and v in their dtypes. The pools of do and o are contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class _PoolRows:
    """Rows of a pool that a call uses, in the order of the call.

    If `index` is None, the rows are a contiguous range. Otherwise `index` lists them (int64, on the
    device).
    """

    start: int
    length: int
    index: torch.Tensor | None

    def is_whole(self, pool: torch.Tensor) -> bool:
        """Return whether these are all rows of the pool in order."""
        return self.index is None and self.length == pool.shape[0]

    def take(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the rows, as a view if they are contiguous."""
        return (
            pool.narrow(0, self.start, self.length)
            if self.index is None
            else pool.index_select(0, self.index)
        )

    def put(self, pool: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows` to their places in the pool."""
        if self.index is None:
            pool.narrow(0, self.start, self.length).copy_(rows)
        else:
            pool.index_copy_(0, self.index, rows.to(pool.dtype))

    def add(self, pool: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `rows` at their places in the pool, in the pool's dtype."""
        if self.index is None:
            pool.narrow(0, self.start, self.length).add_(rows)
        else:
            pool.index_add_(0, self.index, rows.to(pool.dtype))


@dataclass(frozen=True, slots=True)
class _OpCall:
    """A call of the op. `gaps` are the indices of its rows that no task covers (int64, on the
    device), or None.
    """

    rows: _PoolRows
    keys: _PoolRows
    sequences: Sequences
    gaps: torch.Tensor | None = None

    def clear_gaps(self, outputs: torch.Tensor) -> torch.Tensor:
        """Set the outputs in the rows of gaps to 0."""
        return outputs if self.gaps is None else outputs.index_fill_(0, self.gaps, 0.0)

    def drop_idle_window(self, scores: ScoreOptions) -> ScoreOptions:
        """Drop a window that hides no key in this call, because ops are faster without one."""
        if scores.window is None or scores.window < self.sequences.max_keys:
            return scores
        return replace(scores, window=None)


class VarlenKernel:
    """A `Kernel` that runs a `VarlenOp`.

    `why_not` returns why the op cannot run a case. Without this function, the kernel runs all
    cases.
    """

    def __init__(
        self,
        op: VarlenOp,
        name: str = "varlen",
        why_not: Callable[[KernelRequest], str | None] | None = None,
    ) -> None:
        self._op, self.name, self._why_not = op, name, why_not

    def unsupported_reason(self, case: KernelRequest) -> str | None:
        """See `Kernel.unsupported_reason`."""
        return None if self._why_not is None else self._why_not(case)

    def split(self, tasks: TaskBatch) -> list[list[int]]:
        """Divide task indices into as few calls as possible. Tasks of a call are in the order of
        their keys and have no key in common.

        Tasks are taken in the order of their first keys. Each task joins the first call whose keys
        end before the keys of the task begin. So the number of calls is the largest number of tasks
        that share a key.
        """
        starts, lengths = tasks.key_start, tasks.key_length
        calls: list[list[int]] = []
        for task in sorted(range(len(tasks)), key=lambda i: (starts[i], tasks.query_start[i])):
            for call in calls:
                if starts[call[-1]] + lengths[call[-1]] <= starts[task]:
                    call.append(task)
                    break
            else:
                calls.append([task])
        return calls

    @disable_gradients
    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        """See `Kernel.forward`."""
        check_pools(pools, tasks)
        q_THD, k_TKD, v_TKV = pools
        value_width = v_TKV.shape[2]
        width = self._choose_width(q_THD, v_TKV)
        padded = Operands(pad_last(q_THD, width), pad_last(k_TKD, width), pad_last(v_TKV, width))
        calls = self._get_calls(tasks, pools)
        if len(calls) == 1 and calls[0].rows.is_whole(q_THD):
            # The call has all rows of the pool in order, so no rows are gathered.
            call = calls[0]
            keys = calls[0].keys
            taken = (
                padded
                if keys.is_whole(k_TKD)
                else Operands(padded.q_THD, keys.take(padded.k_TKD), keys.take(padded.v_TKV))
            )
            o, lse = self._op.forward(taken, call.sequences, call.drop_idle_window(scores))
            return Outputs(
                call.clear_gaps(_cut_width(o, value_width).contiguous()), call.clear_gaps(lse)
            )
        o_THV = q_THD.new_zeros(*q_THD.shape[:2], value_width)
        lse_TH = q_THD.new_zeros(q_THD.shape[:2], dtype=choose_accumulation_dtype(q_THD.dtype))
        for call in calls:
            taken = Operands(call.rows.take(padded[0]), *map(call.keys.take, get_key_rows(padded)))
            o, lse = self._op.forward(taken, call.sequences, call.drop_idle_window(scores))
            call.rows.put(o_THV, _cut_width(o, value_width))
            call.rows.put(lse_TH, lse)
        return Outputs(o_THV, lse_TH)

    @disable_gradients
    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        """See `Kernel.backward`."""
        check_pools(pools, tasks)
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = pools
        key_width = q_THD.shape[2]
        value_width = v_TKV.shape[2]
        width = self._choose_width(q_THD, v_TKV)
        rows = pad_last(do_THV, width), pad_last(q_THD, width), pad_last(o_THV, width), lse_TH
        padded = BackwardInputs(*rows, pad_last(k_TKD, width), pad_last(v_TKV, width))
        calls = self._get_calls(tasks, pools)
        if len(calls) == 1 and calls[0].rows.is_whole(q_THD) and calls[0].keys.is_whole(k_TKD):
            taken = padded._replace(
                do_THV=padded.do_THV.contiguous(), o_THV=padded.o_THV.contiguous()
            )
            dq, dk, dv = self._op.backward(
                taken, calls[0].sequences, calls[0].drop_idle_window(scores)
            )
            return Grads(
                _cut_width(dq, key_width), _cut_width(dk, key_width), _cut_width(dv, value_width)
            )
        dtype = choose_key_gradient_dtype(tasks, k_TKD.dtype)
        dq_THD, dk_TKD, dv_TKV = (
            q_THD.new_zeros(q_THD.shape),
            *(x.new_zeros(x.shape, dtype=dtype) for x in (k_TKD, v_TKV)),
        )
        for call in calls:
            do, q, o, lse = map(call.rows.take, get_query_rows(padded))
            keys = map(call.keys.take, get_key_rows(padded))
            taken = BackwardInputs(do.contiguous(), q, o.contiguous(), lse, *keys)
            dq, dk, dv = self._op.backward(taken, call.sequences, call.drop_idle_window(scores))
            call.rows.put(dq_THD, _cut_width(dq, key_width))
            call.keys.add(dk_TKD, _cut_width(dk, key_width))
            call.keys.add(dv_TKV, _cut_width(dv, value_width))
        return Grads(dq_THD, dk_TKD, dv_TKV)

    def _choose_width(self, q_THD: torch.Tensor, v_TKV: torch.Tensor) -> int:
        """Return the width to which q, k and v are padded for the op: the largest of their widths,
        rounded up.
        """
        multiple = self._op.width_multiple
        return -(-max(q_THD.shape[2], v_TKV.shape[2]) // multiple) * multiple

    def _get_calls(self, tasks: TaskBatch, pools: Operands | BackwardInputs) -> tuple[_OpCall, ...]:
        """Return the calls of a batch. The first layer builds them, and later layers reuse them."""
        device = pools.q_THD.device
        rows = len(pools.q_THD)
        keys = len(pools.k_TKD)
        calls: tuple[_OpCall, ...] | None = tasks.derived.get((self, device, rows, keys))
        if calls is None:
            split = self.split(tasks)
            # True if the rows of all tasks are in the same order as their keys.
            in_order = len(split) == 1 and all(
                tasks.query_start[a] < tasks.query_start[b] for a, b in pairwise(split[0])
            )
            if self._op.takes_gaps and in_order:
                calls = (_make_whole_call(tasks, split[0], rows, keys, device),)
            else:
                calls = tuple(_make_call(tasks, members, device) for members in split)
            tasks.derived[self, device, rows, keys] = calls
        return calls


def _cut_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first `width` columns of the last dimension."""
    return x if x.shape[-1] == width else x[..., :width]


def _make_whole_call(
    tasks: TaskBatch, members: list[int], rows: int, keys: int, device: torch.device
) -> _OpCall:
    """Make one call of all rows and keys of the pools, with separate sequences for the gaps between
    tasks.
    """
    lengths: list[tuple[int, int]] = []
    gaps: list[torch.Tensor] = []
    row = key = 0
    in_order = (tasks.runs[i] for i in members)
    for next_row, task_rows, next_key, task_keys in (*in_order, (rows, 0, keys, 0)):
        lengths += (next_row - row, 0), (0, next_key - key), (task_rows, task_keys)
        if next_row > row:
            gaps.append(torch.arange(row, next_row, device="cpu"))
        row, key = next_row + task_rows, next_key + task_keys
    row_lengths, key_lengths = zip(*filter(any, lengths), strict=True)
    sequences = _make_sequences(row_lengths, key_lengths, device)
    whole = _PoolRows(0, rows, None), _PoolRows(0, keys, None)
    return _OpCall(*whole, sequences, to_device(torch.cat(gaps), device) if gaps else None)


def _make_call(tasks: TaskBatch, members: list[int], device: torch.device) -> _OpCall:
    row_starts, row_lengths, key_starts, key_lengths = zip(
        *(tasks.runs[i] for i in members), strict=True
    )
    rows = _make_rows(row_starts, row_lengths, device)
    keys = _make_rows(key_starts, key_lengths, device)
    return _OpCall(rows, keys, _make_sequences(row_lengths, key_lengths, device))


def _make_sequences(
    row_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device
) -> Sequences:
    cu_rows = _make_bounds(row_lengths, device)
    # For whole documents, rows and keys have the same cumulative lengths.
    cu_keys = cu_rows if row_lengths == key_lengths else _make_bounds(key_lengths, device)
    return Sequences(cu_rows, cu_keys, max(row_lengths), max(key_lengths))


def _make_bounds(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu"), device
    )


def _make_rows(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> _PoolRows:
    expected = accumulate(lengths[:-1], initial=starts[0])
    if all(start == want for start, want in zip(starts, expected, strict=True)):
        return _PoolRows(starts[0], sum(lengths), None)
    index = torch.cat(
        [
            torch.arange(start, start + length, device="cpu")
            for start, length in zip(starts, lengths, strict=True)
        ]
    )
    return _PoolRows(0, sum(lengths), to_device(index, device))


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device through page-locked memory, so that the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
