"""Attention through flash-attention 2 as it comes inside torch's CUDA wheels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_distca.borrowed import cuda_attention, cuda_attention_backward
from hf_distca.kernels.base import Scores
from hf_distca.kernels.varlen import Sequences, VarlenKernel

__all__ = ["CudaKernel", "flash_attention_unsupported"]

_MAX_HEAD_DIM = 256
_HALF = (torch.float16, torch.bfloat16)


def flash_attention_unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int) -> str | None:
    """Why flash-attention 2, from wherever it comes, cannot run the given case, or None if it can."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, the tensors are on {device.type!r}"
    if dtype not in _HALF:
        return f"it computes in bfloat16 and float16, not in {dtype}: run the model in half precision or under autocast"
    width = max(head_dim, value_head_dim)
    if width > _MAX_HEAD_DIM:
        return f"head dimensions go up to {_MAX_HEAD_DIM}, got {head_dim} for queries and keys and {value_head_dim} for values"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 0):
        return f"it needs compute capability 8.0 (Ampere) or later, {device} has {capability[0]}.{capability[1]}"
    if torch.version.hip is None and 192 < width <= 224 and capability != (8, 0) and capability[0] not in (9, 10):
        return (
            f"its backward runs head dimensions of 193 to 224 on GPUs of compute capability 8.0, 9 and 10 only, {device} has "
            f"{capability[0]}.{capability[1]} and the head dimension is {width}"
        )
    return None


def _window(scores: Scores) -> dict[str, int]:
    """The op counts the keys to the left of a row's own; without these arguments it hides none."""
    return {} if scores.window is None else {"window_size_left": scores.window - 1, "window_size_right": 0}


class _AtenFlash:
    """`VarlenOp` over ``aten::_flash_attention_forward`` and ``aten::_flash_attention_backward``.

    The forward returns the output, the log-sum-exp and then, in a number that differs between releases, what backward needs to
    repeat dropout. Without dropout backward ignores these, so placeholders of the right dtype take their place and nothing
    needs to be kept from forward.
    """

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op: Any = cuda_attention()
        o_THD, lse_HT, *_ = op(
            q_THD,
            k_TKD,
            v_TKD,
            sequences.cu_rows,
            sequences.cu_keys,
            sequences.max_rows,
            sequences.max_keys,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=scores.scale,
            **_window(scores),
        )
        return o_THD, lse_HT

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_HT: torch.Tensor,
        sequences: Sequences,
        scores: Scores,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        op: Any = cuda_attention_backward()
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q_THD.device)
        dq_THD, dk_TKD, dv_TKD = op(
            do_THD,
            q_THD,
            k_TKD,
            v_TKD,
            o_THD,
            lse_HT,
            sequences.cu_rows,
            sequences.cu_keys,
            sequences.max_rows,
            sequences.max_keys,
            0.0,
            True,
            rng_state,
            unused,
            scale=scores.scale,
            **_window(scores),
        )
        return dq_THD, dk_TKD, dv_TKD


class CudaKernel(VarlenKernel):
    """Flash-attention 2 from torch itself: bfloat16 and float16, head dimensions up to 256, Ampere GPUs and later."""

    name: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        super().__init__(_AtenFlash())

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        reason = flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
        if reason is None and scores.softcap is not None:
            return "torch's flash attention has no softcap, the flash-attn package has: pip install flash-attn"
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch comes without flash attention"
        return reason
