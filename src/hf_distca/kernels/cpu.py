"""Attention through torch's fused CPU kernel, which also serves `scaled_dot_product_attention`.

The kernel supports two shapes. In a *rectangle*, every row sees every key. In a causal *square*,
row i sees keys 0..i. A task of n query rows and m keys is divided into a rectangle of its n rows
and first m - n keys, and a square of its n rows and last n keys. The two outputs are merged by
their log-sum-exps. In backward, rectangle and square both get the merged output and log-sum-exp.
Each therefore recomputes its probabilities under the softmax of the whole task, and the gradients
are added.

The kernel takes grouped key/value heads without a copy, and sums the gradients of a group. In tasks
of fewer than 768 rows, it uses smaller blocks, and takes longer for the same work than in a whole
document: 5 to 10% longer at 512 rows, and 20 to 50% longer at 128 rows. The time of larger tasks is
proportional to their work.

With a *window*, the rows of a task are divided into blocks. If the window hides keys of a block,
the block is one call with an additive mask and only the keys that its rows see. The mask of a
smaller block is the lower right corner of a full block's mask, so one mask is built for each
window.

Shape suffix beyond those of `base`: B batch, always 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, starmap
from typing import ClassVar, NamedTuple, Self

import torch

from hf_distca.borrowed import cpu_attention, cpu_attention_backward
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
    find_first_reason,
    pad_last,
)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Query rows of one masked call. Each row also computes this many scores outside its window. In a
# document of 16K tokens, with windows of 4096, 1024, 512 and 128 keys, a visible query-key pair
# took 1.2, 1.3, 1.6 and 3.4 times as long as without a window in forward (float32), 1.1, 1.3, 1.5
# and 2.9 times in backward (float32), and 1.5, 1.8, 2.2 and 4.4 times in backward (bfloat16). Calls
# of 512 rows take a fifth longer at a window of 1024. In calls of fewer than 192 rows, the kernel
# uses blocks of 32 rows, and backward in bfloat16 takes a quarter longer.
_BLOCK_ROWS = 192


# A call of the kernel: first key, number of keys, whether the call is causal, and its mask.
_Call = tuple[int, int, bool, torch.Tensor | None]


class _Task(NamedTuple):
    """A task, or a block of a task's rows: first row, number of rows, first key, number of keys.

    A block begins with the first key that its first row sees. Only a block can have more keys than
    the window.
    """

    row: int
    rows: int
    key: int
    keys: int

    @property
    def prefix(self) -> int:
        """Number of keys before the first row's own key."""
        return self.keys - self.rows


class _WorkList(NamedTuple):
    """Work list of a task batch for one window.

    Attributes:
        tasks: the tasks or blocks to compute.
        calls: the kernel calls of each task or block.
        uncovered: runs of query rows that no task covers, up to the end of the pool.
        lengths: lengths of the documents, if the batch consists of whole documents that follow each
            other from row 0 and key 0 on; else empty.
    """

    tasks: list[_Task]
    calls: list[list[_Call]]
    uncovered: list[slice]
    lengths: list[int]

    @classmethod
    def from_tasks(cls, tasks: TaskBatch, scores: ScoreOptions, dtype: torch.dtype) -> Self:
        """Build the work list of a task batch for pools of this dtype."""
        end, uncovered = 0, []
        for start, rows, *_ in sorted(tasks.runs):
            uncovered += [slice(end, start)] if start > end else []
            end = start + rows
        parts = list(_cut_tasks(tasks, scores))
        calls = [_list_calls(task, scores, dtype) for task in parts]
        lengths = [task.rows for task in parts]
        packed = all(
            task.row == start and listed == [(start, task.rows, True, None)]
            for task, listed, start in zip(
                parts, calls, accumulate(lengths, initial=0), strict=False
            )
        )
        return cls(parts, calls, [*uncovered, slice(end, None)], lengths if packed else [])

    def allocate(
        self, rows: torch.Tensor, *shape: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Allocate a tensor for results, with as many rows as `rows`. Set the rows that no task
        covers to 0.
        """
        room = rows.new_empty((rows.shape[0], *shape), dtype=dtype)
        for uncovered in self.uncovered:
            room[uncovered].zero_()
        return room

    def is_all_of(self, pools: Operands | BackwardInputs) -> bool:
        """Return whether consecutive whole documents fill the pools."""
        return bool(self.lengths) and pools.q_THD.shape[0] == pools.k_TKD.shape[0] == sum(
            self.lengths
        )


class CpuKernel:
    """Exact attention on the CPU, without copies of keys and values. Only windows need masks."""

    name: ClassVar[str] = "cpu"

    def unsupported_reason(self, case: KernelRequest) -> str | None:
        """See `Kernel.unsupported_reason`.

        This kernel supports float64, float32, bfloat16 and float16 on CPUs, with any head
        dimensions and windows, but no softcap.
        """
        return find_first_reason(
            (
                case.device.type != "cpu",
                f"it runs on CPUs, the tensors are on {case.device.type!r}",
            ),
            (
                case.dtype not in _DTYPES,
                f"it computes in {', '.join(map(str, _DTYPES))}, not in {case.dtype}",
            ),
            (case.scores.softcap is not None, "torch's fused CPU kernel has no softcap"),
        )

    @disable_gradients
    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        """See `Kernel.forward`."""
        check_pools(pools, tasks)
        q_THD = pools.q_THD
        value_width = pools.v_TKV.shape[2]
        work = self._get_work(tasks, scores, q_THD.dtype)
        padded = _pad_widths(*pools)
        documents = work.is_all_of(pools)
        if documents and len(work.lengths) == 1:
            o_BHTD, lse_BHT = cpu_attention(
                *map(_move_heads_first, padded), 0.0, True, attn_mask=None, scale=scores.scale
            )
            return Outputs(
                _move_tokens_first(o_BHTD, value_width).contiguous(),
                _move_tokens_first(lse_BHT).contiguous(),
            )
        o_THV = work.allocate(q_THD, q_THD.shape[1], value_width)
        lse_TH = work.allocate(q_THD, q_THD.shape[1], dtype=choose_accumulation_dtype(q_THD.dtype))
        if documents:
            for q, k, v, o, lse in _split_by_document(work.lengths, *padded, o_THV, lse_TH):
                results = cpu_attention(q, k, v, 0.0, True, attn_mask=None, scale=scores.scale)
                o.copy_(results[0][..., :value_width])
                lse.copy_(results[1])
            return Outputs(o_THV, lse_TH)
        q_BHTD, k_BKTD, v_BKTD = map(_move_heads_first, padded)
        o_whole, lse_whole = _move_heads_first(o_THV), _move_heads_first(lse_TH)
        for task, calls in zip(work.tasks, work.calls, strict=True):
            rows_BHTD = q_BHTD.narrow(2, task.row, task.rows)
            parts = [
                cpu_attention(
                    rows_BHTD,
                    k_BKTD.narrow(2, start, length),
                    v_BKTD.narrow(2, start, length),
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=scores.scale,
                )
                for start, length, causal, mask in calls
            ]
            o_BHTD, lse_BHT = parts[0] if len(parts) == 1 else _merge(*parts)
            o_whole.narrow(2, task.row, task.rows).copy_(o_BHTD[..., :value_width])
            lse_whole.narrow(2, task.row, task.rows).copy_(lse_BHT)
        return Outputs(o_THV, lse_TH)

    @disable_gradients
    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        """See `Kernel.backward`."""
        check_pools(pools, tasks)
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = pools
        operands = (q_THD, k_TKD, v_TKV)
        work = self._get_work(tasks, scores, q_THD.dtype)
        padded = _pad_widths(*operands)
        width = padded[0].shape[2]
        rows = pad_last(do_THV, width), pad_last(o_THV, width), lse_TH
        documents = work.is_all_of(pools)
        if documents and len(work.lengths) == 1:
            do_BHTD, o_BHTD, lse_BHT, *views_BHTD = map(_move_heads_first, (*rows, *padded))
            grads = cpu_attention_backward(
                do_BHTD, *views_BHTD, o_BHTD, lse_BHT, 0.0, True, attn_mask=None, scale=scores.scale
            )
            return Grads(
                *(_move_tokens_first(dx, x.shape[2]) for dx, x in zip(grads, operands, strict=True))
            )
        if documents:
            totals = [torch.empty_like(x) for x in padded]
            for do, o, lse, q, k, v, *into in _split_by_document(
                work.lengths, *rows, *padded, *totals
            ):
                grads = cpu_attention_backward(
                    do, q, k, v, o, lse, 0.0, True, attn_mask=None, scale=scores.scale
                )
                for total, grad in zip(into, grads, strict=True):
                    total.copy_(grad)
            return Grads(*[dx[..., : x.shape[2]] for dx, x in zip(totals, operands, strict=True)])
        do_BHTD, o_BHTD, lse_BHT, q_BHTD, k_BKTD, v_BKTD = map(_move_heads_first, (*rows, *padded))
        dtype = choose_key_gradient_dtype(tasks, pools.k_TKD.dtype)
        # With a window, several blocks of one task share a key, so the gradient of a key is a sum.
        summed = dtype if scores.window is None else choose_accumulation_dtype(dtype)
        sums = [work.allocate(pools.q_THD, pools.q_THD.shape[1], width)]
        sums += [x.new_zeros((*x.shape[:2], width), dtype=summed) for x in padded[1:]]
        sums_BHTD = list(map(_move_heads_first, sums))
        of_rows = (do_BHTD, q_BHTD, o_BHTD, lse_BHT, sums_BHTD[0])
        for task, calls in zip(work.tasks, work.calls, strict=True):
            do, q, o, lse, dq = [x.narrow(2, task.row, task.rows) for x in of_rows]
            for number, (start, length, causal, mask) in enumerate(calls):
                k, v, dk, dv = [
                    x.narrow(2, start, length) for x in (k_BKTD, v_BKTD, *sums_BHTD[1:])
                ]
                added = cpu_attention_backward(
                    do, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scores.scale
                )
                (dq.add_ if number else dq.copy_)(added[0])
                dk.add_(added[1])
                dv.add_(added[2])
        dq_THD, dk_TKD, dv_TKV = (
            dx[..., : x.shape[2]] for dx, x in zip(sums, operands, strict=True)
        )
        return Grads(dq_THD, dk_TKD.to(dtype), dv_TKV.to(dtype))

    def _get_work(self, tasks: TaskBatch, scores: ScoreOptions, dtype: torch.dtype) -> _WorkList:
        work: _WorkList | None = tasks.derived.get((self, scores.window, dtype))
        if work is None:
            work = _WorkList.from_tasks(tasks, scores, dtype)
            tasks.derived[self, scores.window, dtype] = work
        return work


def _split_by_document(
    lengths: list[int], *of_all_TH: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield, for each document, views of its rows in all tensors, with heads before tokens."""
    return zip(
        *[x[None].transpose(1, 2).split_with_sizes(lengths, 2) for x in of_all_TH], strict=True
    )


def _move_heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    """Return a view of shape (1, H, T, ...)."""
    return x_THD[None].transpose(1, 2)


def _pad_widths(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad q, k and v to the same width."""
    width = q_THD.shape[2]
    if v_TKV.shape[2] == width and q_THD.stride(2) == k_TKD.stride(2) == v_TKV.stride(2) == 1:
        return q_THD, k_TKD, v_TKV
    width = max(width, v_TKV.shape[2])
    return pad_last(q_THD, width), pad_last(k_TKD, width), pad_last(v_TKV, width)


def _move_tokens_first(x_BHTD: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Return a view (B * T, H, ...) with last dimension `width`.

    The strides of torch's results allow this without a copy.
    """
    x_THD = x_BHTD.transpose(1, 2).flatten(0, 1)
    return x_THD if width in (None, x_THD.shape[-1]) else x_THD[..., :width]


def _cut_tasks(tasks: TaskBatch, scores: ScoreOptions) -> Iterator[_Task]:
    """Yield the tasks. If the window hides some keys of a task, yield its blocks instead."""
    for task in starmap(_Task, tasks.runs):
        window = scores.find_hiding_window(task.keys)
        yield from (task,) if window is None else _cut_blocks(task, window)


def _cut_blocks(task: _Task, window: int) -> Iterator[_Task]:
    """Yield a block of all rows that see the first key, if there are any, and then blocks of at
    most `_BLOCK_ROWS` rows.
    """
    whole = min(max(window - task.prefix, 0), task.rows)
    if whole:
        yield _Task(task.row, whole, task.key, task.prefix + whole)
    for first in range(whole, task.rows, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, task.rows - first)
        yield _Task(
            task.row + first, rows, task.key + task.prefix + first + 1 - window, rows + window - 1
        )


@lru_cache(maxsize=16)
def _make_block_mask(window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask (rows, rows + window - 1) of a full block: 0 where a row sees a key, -inf
    elsewhere.
    """
    keys, rows = (
        torch.arange(size, device="cpu") for size in (_BLOCK_ROWS + window - 1, _BLOCK_ROWS)
    )
    keys_behind = keys - rows[:, None]
    hidden = (keys_behind < 0) | (keys_behind >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))


def _list_calls(task: _Task, scores: ScoreOptions, dtype: torch.dtype) -> list[_Call]:
    """List the kernel calls of a task or block: a single call with a mask, or the causal square,
    followed by the rectangle if there is one.
    """
    if scores.window is not None and task.keys > scores.window:
        mask = _make_block_mask(scores.window, choose_accumulation_dtype(dtype))[
            -task.rows :, -task.keys :
        ]
        return [(task.key, task.keys, False, mask)]
    square = (task.key + task.keys - task.rows, task.rows, True, None)
    if task.rows == task.keys:
        return [square]
    return [square, (task.key, task.prefix, False, None)]


def _merge(
    square: tuple[torch.Tensor, torch.Tensor], rectangle: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the outputs and log-sum-exps of the two calls of a task."""
    (square_o, square_lse), (rectangle_o, rectangle_lse) = square, rectangle
    # The rectangle's weight is exp(rectangle_lse) / (exp(rectangle_lse) + exp(square_lse)), a
    # sigmoid of the difference. The outputs are merged in the log-sum-exp's dtype, so that half
    # precision adds one rounding instead of three.
    share_BHT1 = torch.sigmoid(rectangle_lse - square_lse).unsqueeze(-1)
    wide = share_BHT1.dtype
    o_BHTD = torch.lerp(square_o.to(wide), rectangle_o.to(wide), share_BHT1).to(square_o.dtype)
    return o_BHTD, torch.logaddexp(rectangle_lse, square_lse)
