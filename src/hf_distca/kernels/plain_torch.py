"""Attention in plain torch operations, for any device and floating dtype. Other kernels are checked
against it.

Shape suffix beyond those of `base`: G rows of one key/value head in a chunk (query heads that share
this head, times query rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

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
)

# The most scores in memory at a time, over all heads. 2**24 float32 scores take 64 MiB. All scores
# of a 16K document would take 1 GiB for each head.
_SCORES_PER_CHUNK = 2**24

# The most rows of a chunk. A chunk of r rows computes about r * r / 2 scores that the causal mask
# hides. If there is a window, the chunk computes about r * r / 2 more scores, which the window
# hides.
_ROWS_PER_CHUNK = 256


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some query rows of one task and all keys that they see, as offsets in the pools."""

    rows: slice
    keys: slice
    scores: ScoreOptions

    def compute_scores(self, q_KGD: torch.Tensor, k_KTD: torch.Tensor) -> torch.Tensor:
        """Compute the scores of all rows with all keys, hidden keys included: (K, G, keys)."""
        scores_KGT = (q_KGD * self.scores.scale) @ k_KTD.mT
        if self.scores.softcap is not None:
            scores_KGT.div_(self.scores.softcap).tanh_().mul_(self.scores.softcap)
        return scores_KGT

    def mask_scores(self, scores_KGT: torch.Tensor) -> torch.Tensor:
        """Write -inf into `scores_KGT` for keys after a row's own position or before its window."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        by_row = scores_KGT.view(scores_KGT.shape[0], -1, rows, keys)
        behind = torch.ones(rows, rows, dtype=torch.bool, device=scores_KGT.device).triu_(1)
        by_row[..., keys - rows :].masked_fill_(behind, float("-inf"))
        window = self.scores.find_hiding_window(keys)
        if window is not None:
            before = torch.ones(
                rows, keys - window, dtype=torch.bool, device=scores_KGT.device
            ).tril_(keys - window - rows)
            by_row[..., : keys - window].masked_fill_(before, float("-inf"))
        return scores_KGT

    def multiply_by_slope(self, ds_KGT: torch.Tensor, scores_KGT: torch.Tensor) -> torch.Tensor:
        """Multiply `ds_KGT`, in place, by 1 - tanh^2, the derivative of the softcap. `scores_KGT`
        are the capped scores.
        """
        if self.scores.softcap is None:
            return ds_KGT
        return ds_KGT.addcmul_(ds_KGT, (scores_KGT / self.scores.softcap).square_(), value=-1)


class ReferenceKernel:
    """Exact attention that favours clarity over speed. It computes in float64 for float64 inputs,
    else in float32.
    """

    name: ClassVar[str] = "reference"

    def unsupported_reason(self, case: KernelRequest) -> str | None:
        """Return None for every floating dtype."""
        return None if case.dtype.is_floating_point else f"{case.dtype} is not a floating dtype"

    @torch.no_grad()
    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        """See `Kernel.forward`."""
        check_pools(pools, tasks)
        q_THD, k_TKD, v_TKV = pools
        wide = choose_accumulation_dtype(q_THD.dtype)
        heads, key_heads = q_THD.shape[1], k_TKD.shape[1]
        o_THV = q_THD.new_zeros(q_THD.shape[0], heads, v_TKV.shape[2])
        lse_TH = q_THD.new_zeros(q_THD.shape[:2], dtype=wide)
        for chunk in _cut_chunks(tasks, heads, scores):
            q_KGD = _group_heads(q_THD[chunk.rows], key_heads, wide)
            k_KTD, v_KTV = (x[chunk.keys].to(wide).transpose(0, 1) for x in (k_TKD, v_TKV))
            scores_KGT = chunk.mask_scores(chunk.compute_scores(q_KGD, k_KTD))
            # Every row sees its own key, so the largest score is finite. `logsumexp` would compute
            # the exponentials a second time.
            largest_KG1 = scores_KGT.amax(-1, keepdim=True)
            weights_KGT = scores_KGT.sub_(largest_KG1).exp_()
            sum_KG1 = weights_KGT.sum(-1, keepdim=True)
            o_THV[chunk.rows] = _ungroup_heads((weights_KGT @ v_KTV).div_(sum_KG1), heads).to(
                o_THV.dtype
            )
            lse_TH[chunk.rows] = _ungroup_heads(sum_KG1.log_().add_(largest_KG1), heads).squeeze(-1)
        return Outputs(o_THV, lse_TH)

    @torch.no_grad()
    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        """See `Kernel.backward`."""
        check_pools(pools.operands, tasks)
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = pools
        wide = choose_accumulation_dtype(q_THD.dtype)
        heads, key_heads = q_THD.shape[1], k_TKD.shape[1]
        dq_THD = torch.zeros_like(q_THD)
        dk_TKD = torch.zeros_like(k_TKD, dtype=wide)
        dv_TKV = torch.zeros_like(v_TKV, dtype=wide)
        for chunk in _cut_chunks(tasks, heads, scores):
            q_KGD, o_KGV, do_KGV = (
                _group_heads(x[chunk.rows], key_heads, wide) for x in (q_THD, o_THV, do_THV)
            )
            lse_KG1 = _group_heads(lse_TH[chunk.rows].unsqueeze(-1), key_heads, wide)
            k_KTD, v_KTV = (x[chunk.keys].to(wide).transpose(0, 1) for x in (k_TKD, v_TKV))
            # d score = p (dp - sum_j p_j dp_j). The sum over keys equals the dot product of do and
            # o.
            ds_KGT = (
                (do_KGV @ v_KTV.mT).sub_((do_KGV * o_KGV).sum(-1, keepdim=True)).mul_(scores.scale)
            )
            scores_KGT = chunk.compute_scores(q_KGD, k_KTD)
            chunk.multiply_by_slope(ds_KGT, scores_KGT)
            p_KGT = chunk.mask_scores(scores_KGT).sub_(lse_KG1).exp_()
            ds_KGT.mul_(p_KGT)
            dq_THD[chunk.rows] = _ungroup_heads(ds_KGT @ k_KTD, heads).to(dq_THD.dtype)
            dk_TKD[chunk.keys] += (ds_KGT.mT @ q_KGD).transpose(0, 1)
            dv_TKV[chunk.keys] += (p_KGT.mT @ do_KGV).transpose(0, 1)
        dtype = choose_key_gradient_dtype(tasks, k_TKD.dtype)
        return Grads(dq_THD, dk_TKD.to(dtype), dv_TKV.to(dtype))


def _cut_chunks(tasks: TaskBatch, heads: int, scores: ScoreOptions) -> Iterator[_Chunk]:
    """Cut the tasks into pieces of at most `_SCORES_PER_CHUNK` scores."""
    for query_start, query_length, key_start, key_length in tasks.runs:
        window = scores.find_hiding_window(key_length) or key_length
        step = min(
            _ROWS_PER_CHUNK,
            max(1, _SCORES_PER_CHUNK // (heads * min(key_length, window + _ROWS_PER_CHUNK))),
        )
        for first in range(0, query_length, step):
            last = min(first + step, query_length)
            before = key_length - query_length
            yield _Chunk(
                slice(query_start + first, query_start + last),
                slice(key_start + max(0, before + first + 1 - window), key_start + before + last),
                scores,
            )


def _group_heads(x_THD: torch.Tensor, key_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Gather the rows of all query heads that share a key/value head. One matrix product then
    computes all these rows without copies of K and V.
    """
    tokens, _, width = x_THD.shape
    return (
        x_THD.to(dtype)
        .view(tokens, key_heads, -1, width)
        .permute(1, 2, 0, 3)
        .reshape(key_heads, -1, width)
    )


def _ungroup_heads(x_KGD: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo `_group_heads`. The result has shape (tokens, heads, width)."""
    key_heads, _, width = x_KGD.shape
    return x_KGD.view(key_heads, heads // key_heads, -1, width).permute(2, 0, 1, 3).flatten(1, 2)
