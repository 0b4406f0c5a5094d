"""Attention through torch's fused CPU kernel, the one behind `scaled_dot_product_attention`.

The kernel knows two shapes: every row sees every key, and row i sees keys 0..i. A task of n query rows and m keys is one of
each: a *rectangle* of its n rows and first m - n keys, and a causal *square* of its n rows and last n keys. The two outputs
are merged by their log-sum-exps. In backward each part is called with the merged output and log-sum-exp, which makes the
probabilities it recomputes those of the whole task; the gradients add.

Grouped key/value heads go to the kernel as they are: it reads each where it lies and sums the gradients of a group. Equal tasks
are not batched: 64 documents of 256 tokens run 6 to 18% faster one at a time, whose keys stay in cache, and the calls saved
would be 2% of that. Rows of a task below 768 go through the kernel in smaller blocks, 5 to 10% slower at 512 and 20 to 50% at
128 than a whole document; larger slices cost what their share of the whole document costs.

A *window* cuts the rows in blocks, and each block goes through the kernel with the keys its rows can see and an additive mask.
All blocks of a window have the same mask, seen from its last row and last key, so one is built and kept.

Beyond the suffixes of `base`: B batch, always 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from hf_distca.kernels.base import Scores, TaskBatch
from hf_distca.kernels.pools import accumulation_dtype, check_pools, key_gradient_dtype, pad_last

__all__ = ["CpuKernel"]

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Query rows a masked call, which computes that many scores a row beside its window. Time a pair of a 16K document, over that
# without a window, forward and backward: 1.2 and 1.1 at a window of 4096, 1.3 and 1.3 at 1024, 1.6 and 1.5 at 512, 3.4 and 2.9
# at 128, in float32; in bfloat16 backward is 1.5, 1.8, 2.2 and 4.4. At 512 rows a window of 1024 takes a fifth longer than at
# 192; below 192 the kernel's own blocks shrink to 32 rows, and backward in bfloat16 takes a quarter longer.
_BLOCK_ROWS = 192


class _Pools(NamedTuple):
    """q, k and v as the kernel wants them: heads before tokens, one width for all three; views of the pools."""

    q_BHTD: torch.Tensor
    k_BKTD: torch.Tensor
    v_BKTD: torch.Tensor


class _Saved(NamedTuple):
    """What backward needs besides `_Pools`, of all rows: gradient of the output, output, log-sum-exp."""

    do_BHTD: torch.Tensor
    o_BHTD: torch.Tensor
    lse_BHT: torch.Tensor


class _Task(NamedTuple):
    """Offsets of one task, or of a block of its rows, in the pools, and its number of query rows and keys.

    With a window, one that has more keys than the window is a block whose first row sees its first key.
    """

    row: int
    rows: int
    key: int
    keys: int

    @property
    def prefix(self) -> int:
        """Keys that every row sees."""
        return self.keys - self.rows


class CpuKernel:
    """Exact attention on the CPU, without copies of keys and values, and without masks where there is no window."""

    name: ClassVar[str] = "cpu"

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Runs on CPUs in float64, float32, bfloat16 and float16, with any head dimensions and windows, without softcap."""
        if device.type != "cpu":
            return f"it runs on CPUs, the tensors are on {device.type!r}"
        if dtype not in _DTYPES:
            return f"it computes in {', '.join(map(str, _DTYPES))}, not in {dtype}"
        if scores.softcap is not None:
            return "torch's fused CPU kernel has no softcap"
        return None

    @torch.no_grad()
    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, tasks: TaskBatch, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        check_pools(q_THD, k_TKD, v_TKV, tasks)
        pools = _pools(q_THD, k_TKD, v_TKV)
        value_width = v_TKV.shape[2]
        allocate = torch.empty if sum(tasks.query_length) == q_THD.shape[0] else torch.zeros
        o_THV = allocate((*q_THD.shape[:2], value_width), dtype=q_THD.dtype)
        lse_TH = allocate(q_THD.shape[:2], dtype=accumulation_dtype(q_THD.dtype))
        for task in _each(tasks, scores):
            o_BHTD, lse_BHT = _forward_task(pools, task, scores)
            rows = slice(task.row, task.row + task.rows)
            o_THV[rows] = o_BHTD[0].transpose(0, 1)[..., :value_width]
            lse_TH[rows] = lse_BHT[0].T
        return o_THV, lse_TH

    @torch.no_grad()
    def backward(
        self,
        do_THV: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        o_THV: torch.Tensor,
        lse_TH: torch.Tensor,
        tasks: TaskBatch,
        scores: Scores,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        check_pools(q_THD, k_TKD, v_TKV, tasks)
        pools = _pools(q_THD, k_TKD, v_TKV)
        width = pools.q_BHTD.shape[3]
        saved = _Saved(_heads_first(pad_last(do_THV, width)), _heads_first(pad_last(o_THV, width)), lse_TH.T.unsqueeze(0))
        dtype = key_gradient_dtype(tasks, k_TKD.dtype)
        # A key is in several blocks of a window, so its gradient is a sum even where no task shares it.
        summed = dtype if scores.window is None else accumulation_dtype(dtype)
        grads = _Pools(
            *(
                _heads_first(torch.zeros((*x.shape[:2], width), dtype=wanted))
                for x, wanted in ((q_THD, q_THD.dtype), (k_TKD, summed), (v_TKV, summed))
            )
        )
        for task in _each(tasks, scores):
            _backward_task(grads, pools, saved, task, scores)
        dq_THD, dk_TKD, dv_TKV = (x[0].transpose(0, 1) for x in grads)
        dk_TKD, dv_TKV = dk_TKD[..., : k_TKD.shape[2]].to(dtype), dv_TKV[..., : v_TKV.shape[2]].to(dtype)
        return dq_THD[..., : q_THD.shape[2]], dk_TKD, dv_TKV


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)


def _pools(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor) -> _Pools:
    width = max(q_THD.shape[2], v_TKV.shape[2])
    return _Pools(*(_heads_first(pad_last(x, width)) for x in (q_THD, k_TKD, v_TKV)))


def _each(tasks: TaskBatch, scores: Scores) -> Iterator[_Task]:
    """The tasks, in blocks of rows where a window hides keys from them."""
    for task in map(_Task, tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length):
        window = scores.window_within(task.keys)
        yield from (task,) if window is None else _blocks(task, window)


def _blocks(task: _Task, window: int) -> Iterator[_Task]:
    """First the rows whose window reaches back to the first key or beyond, in one piece; then blocks of at most `_BLOCK_ROWS`."""
    whole = min(max(window - task.prefix, 0), task.rows)
    if whole:
        yield _Task(task.row, whole, task.key, task.prefix + whole)
    for first in range(whole, task.rows, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, task.rows - first)
        yield _Task(task.row + first, rows, task.key + task.prefix + first + 1 - window, rows + window - 1)


@lru_cache(maxsize=16)
def _block_mask(window: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a row of a whole block sees a key, else -inf: (rows, rows + window - 1)."""
    keys_behind = torch.arange(_BLOCK_ROWS + window - 1) - torch.arange(_BLOCK_ROWS)[:, None]
    hidden = (keys_behind < 0) | (keys_behind >= window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _parts(task: _Task, scores: Scores, dtype: torch.dtype) -> list[tuple[int, int, bool, torch.Tensor | None]]:
    """The calls that make up a task or block: first key, number of keys, whether the call is causal, its mask."""
    if scores.window is not None and task.keys > scores.window:
        mask = _block_mask(scores.window, accumulation_dtype(dtype))[-task.rows :, -task.keys :]
        return [(task.key, task.keys, False, mask)]
    square = (task.key + task.prefix, task.rows, True, None)
    return [square, (task.key, task.prefix, False, None)] if task.prefix else [square]


def _forward_task(pools: _Pools, task: _Task, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (1, H, rows, width) in q's dtype and log-sum-exp (1, H, rows) of one task."""
    q_BHTD = pools.q_BHTD.narrow(2, task.row, task.rows)
    results = []
    for start, length, causal, mask in _parts(task, scores, q_BHTD.dtype):
        k_BKTD, v_BKTD = (x.narrow(2, start, length) for x in pools[1:])
        results.append(_FORWARD(q_BHTD, k_BKTD, v_BKTD, 0.0, causal, attn_mask=mask, scale=scores.scale))
    if len(results) == 1:
        o_BHTD, lse_BHT = results[0]
        return o_BHTD, lse_BHT
    (square_o, square_lse), (rectangle_o, rectangle_lse) = results
    # The rectangle's share is exp(rectangle_lse) / (exp(rectangle_lse) + exp(square_lse)), a sigmoid of the difference.
    # Multiplied in the log-sum-exp's dtype, so that half precision rounds once more and not three times.
    share_BHT1 = torch.sigmoid(rectangle_lse - square_lse).unsqueeze(-1)
    wide = share_BHT1.dtype
    o_BHTD = torch.lerp(square_o.to(wide), rectangle_o.to(wide), share_BHT1).to(square_o.dtype)
    return o_BHTD, torch.logaddexp(rectangle_lse, square_lse)


def _backward_task(grads: _Pools, pools: _Pools, saved: _Saved, task: _Task, scores: Scores) -> None:
    """Add the gradients of one task to those of the pools."""
    q_BHTD, dq_BHTD = (x.narrow(2, task.row, task.rows) for x in (pools.q_BHTD, grads.q_BHTD))
    do_BHTD, o_BHTD, lse_BHT = (x.narrow(2, task.row, task.rows) for x in saved)
    for start, length, causal, mask in _parts(task, scores, q_BHTD.dtype):
        k_BKTD, v_BKTD = (x.narrow(2, start, length) for x in pools[1:])
        dq, dk, dv = _BACKWARD(do_BHTD, q_BHTD, k_BKTD, v_BKTD, o_BHTD, lse_BHT, 0.0, causal, attn_mask=mask, scale=scores.scale)
        dq_BHTD.add_(dq)
        grads.k_BKTD.narrow(2, start, length).add_(dk)
        grads.v_BKTD.narrow(2, start, length).add_(dv)
