"""Memory-efficient attention (arXiv 2112.05682) of torch's CUDA wheels, for cases that flash
attention does not support.

It supports any head dimension, float32, and GPUs before Ampere. `hf_distca.kernels.check` compares
it with plain torch on the device before its first use. On an H100 with torch 2.11, the results for
whole documents and for slices without a window were right.

The op's causal mask is aligned with the last key, but in backward its window is aligned with the
first key. The two alignments agree only if a sequence has as many rows as keys. A slice with fewer
rows than keys therefore gets rows of zeros in front, which add 0 to the gradients. With a window of
w keys, at most w - 1 rows are added. Compared with a slice without these rows, backward computes
1.5 times as many query-key pairs for a slice of w rows, and three times as many for a slice of w /
4 rows.

Shape suffixes beyond those of `base`: B sequences of a call, M rows of the longest sequence,
rounded up to 32. The op takes and returns log-sum-exps as (B, H, M). In backward, rows after the
end of a sequence have the log-sum-exp infinity, which gives them no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from hf_distca.borrowed import efficient_attention, efficient_attention_backward
from hf_distca.kernels.base import (
    BackwardInputs,
    Grads,
    KernelRequest,
    Operands,
    Outputs,
    ScoreOptions,
    TaskBatch,
    choose_accumulation_dtype,
    find_capability,
    find_first_reason,
    get_key_rows,
    get_query_rows,
)
from hf_distca.kernels.varlen import Sequences, VarlenKernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CAUSAL_BOTTOM_RIGHT = 2
# The op pads log-sum-exps of a sequence to a multiple of this number of rows.
_LSE_ROWS = 32
# The op needs offsets and strides that are multiples of this number of elements.
_ALIGNMENT = 8


class AtenEfficient:
    """`VarlenOp` over ``aten::_efficient_attention_forward`` and
    ``aten::_efficient_attention_backward``.

    Both ops need as many key heads as query heads. Therefore one call takes the first query head of
    each key head, the next call takes the second query head, and so on. All calls use the same k
    and v without copies.
    """

    takes_gaps = False
    width_multiple = 8

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        """See `VarlenOp.forward`."""
        q_THD, k_TKD, v_TKD = map(_align, pools)
        places = _find_padded_rows(sequences, len(q_THD))
        outputs = []
        lses = []
        for q_TKD in _split_query_groups(q_THD, k_TKD):
            output, lse_BKM, *_ = efficient_attention(
                q_TKD[None],
                k_TKD[None],
                v_TKD[None],
                None,
                *sequences,
                0.0,
                _CAUSAL_BOTTOM_RIGHT,
                True,
                **_make_options(scores),
            )
            outputs.append(output[0])
            lses.append(lse_BKM.transpose(1, 2).flatten(0, 1).index_select(0, places))
        return Outputs(_merge_query_groups(outputs), _merge_query_groups(lses))

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        """See `VarlenOp.backward`."""
        if scores.window is not None and len(pools.q_THD) != len(pools.k_TKD):
            return self._run_backward_of_slices(pools, sequences, scores)
        do_THD, q_THD, o_THD, lse_TH, k_TKD, v_TKD = (
            x if x is pools.lse_TH else _align(x) for x in pools
        )
        sequence_count = len(sequences.cu_rows) - 1
        longest = _round_up(sequences.max_rows)
        lse_RH = lse_TH.new_full((sequence_count * longest, lse_TH.shape[1]), math.inf)
        lse_RH.index_copy_(0, _find_padded_rows(sequences, len(q_THD)), lse_TH)
        # The op needs random states only for dropout.
        unused = torch.empty((), dtype=torch.int64, device=q_THD.device)
        dq: list[torch.Tensor] = []
        sums = [
            x.new_zeros(x.shape, dtype=choose_accumulation_dtype(x.dtype)) for x in (k_TKD, v_TKD)
        ]
        for do_TKD, q_TKD, o_TKD, lse_RK in zip(
            *(_split_query_groups(x, k_TKD) for x in (do_THD, q_THD, o_THD, lse_RH)), strict=True
        ):
            lse_BKM = lse_RK.unflatten(0, (sequence_count, longest)).transpose(1, 2).contiguous()
            grads = efficient_attention_backward(
                do_TKD.contiguous()[None],
                q_TKD[None],
                k_TKD[None],
                v_TKD[None],
                None,
                o_TKD.contiguous()[None],
                *sequences,
                lse_BKM,
                0.0,
                unused,
                unused,
                _CAUSAL_BOTTOM_RIGHT,
                False,
                **_make_options(scores),
            )
            dq.append(grads[0][0])
            for total, grad in zip(sums, grads[1:3], strict=True):
                total.add_(grad[0])
        return Grads(_merge_query_groups(dq), sums[0].to(k_TKD.dtype), sums[1].to(v_TKD.dtype))

    def _run_backward_of_slices(
        self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions
    ) -> Grads:
        """Compute gradients of a windowed call, some of whose sequences have more keys than rows.

        These sequences get rows of 0 in front.
        """
        row, sequence = _number_rows(sequences, len(pools.q_THD))
        places = row + (sequences.cu_keys - sequences.cu_rows)[1:].index_select(0, sequence)
        padded = (
            x.new_zeros(len(pools.k_TKD), *x.shape[1:]).index_copy_(0, places, x)
            for x in get_query_rows(pools)
        )
        whole = Sequences(
            sequences.cu_keys, sequences.cu_keys, sequences.max_keys, sequences.max_keys
        )
        dq_THD, dk_TKD, dv_TKD = self.backward(
            BackwardInputs(*padded, *get_key_rows(pools)), whole, scores
        )
        return Grads(dq_THD.index_select(0, places), dk_TKD, dv_TKD)


def _make_options(scores: ScoreOptions) -> dict[str, Any]:
    """Return the arguments for the scale and the window. A window includes the row's own key."""
    return {"scale": scores.scale} | (
        {} if scores.window is None else {"window_size": scores.window}
    )


def _split_query_groups(x_THD: torch.Tensor, k_TKD: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a view of the first query head of each key head, then of the second, and so on."""
    ratio = x_THD.shape[1] // k_TKD.shape[1]
    return (x_THD[:, number::ratio] for number in range(ratio))


def _merge_query_groups(parts: list[torch.Tensor]) -> torch.Tensor:
    """Undo `_split_query_groups`."""
    return torch.stack(parts, 2).flatten(1, 2)


def _align(x_THD: torch.Tensor) -> torch.Tensor:
    """Return `x_THD`, or a copy if the op does not accept its layout.

    The op checks even the stride of a dimension of size 1.
    """
    if any(n % _ALIGNMENT for n in (x_THD.storage_offset(), *x_THD.stride()[:2])):
        return x_THD.clone(memory_format=torch.contiguous_format)
    return x_THD


def _round_up(rows: int) -> int:
    return -(-rows // _LSE_ROWS) * _LSE_ROWS


def _find_padded_rows(sequences: Sequences, rows: int) -> torch.Tensor:
    """Return the index of each row among the padded rows of all sequences: (rows,), int64."""
    row, sequence = _number_rows(sequences, rows)
    return (
        row + sequence * _round_up(sequences.max_rows) - sequences.cu_rows.index_select(0, sequence)
    )


def _number_rows(sequences: Sequences, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices 0, 1, ..., and for each row the index of its sequence.

    Both results are (rows,) int64.
    """
    row = torch.arange(rows, device=sequences.cu_rows.device)
    return row, torch.bucketize(row, sequences.cu_rows[1:], right=True)


def _efficient_reason(case: KernelRequest) -> str | None:
    """Return why this kernel cannot run a case, or None if it can."""
    capability = find_capability(case.device)
    return find_first_reason(
        (
            case.device.type != "cuda",
            f"it runs on CUDA devices, the tensors are on {case.device.type!r}",
        ),
        (
            torch.version.hip is not None,
            "on AMD GPUs memory-efficient attention has no causal mask that is aligned with the"
            " last key",
        ),
        (
            case.dtype not in _DTYPES,
            f"it computes in bfloat16, float16 and float32, not in {case.dtype}",
        ),
        (case.scores.softcap is not None, "memory-efficient attention has no softcap"),
        (not torch.cuda.is_available(), "torch finds no CUDA device"),
        (
            case.dtype == torch.bfloat16 and capability < (8, 0),
            f"bfloat16 needs compute capability 8.0 (Ampere) or later, {case.device} has"
            f" {capability[0]}.{capability[1]}",
        ),
    )


class _EfficientKernel(VarlenKernel):
    def split(self, tasks: TaskBatch) -> list[list[int]]:
        """Split tasks into calls. The numbers of rows of a call's tasks differ by less than a
        factor of two.

        This limits the padding, because log-sum-exps of a call are padded to its longest task.
        """

        def measure_task(task: int) -> int:
            return tasks.query_length[task].bit_length()

        return [
            list(equal)
            for members in super().split(tasks)
            for _, equal in groupby(sorted(members, key=measure_task), key=measure_task)
        ]


# This kernel is part of torch. It supports any head dimension, but no softcap.
EFFICIENT = _EfficientKernel(AtenEfficient(), "efficient", _efficient_reason)
