"""Attention through FlashAttention 3, where it is installed: `flash_attn_interface`, built from the folder hopper of its sources.

torch has a way to it of its own, `torch.nn.attention.activate_flash_attention_impl("FA3")`, which changes the operations that the
kernel ``"cuda"`` calls. That holds for the whole process, `sdpa` of other models included, and knows no softcap. Here only core
attention runs in it.

Written against the package's source (commit 01afd16). It has not run yet: `hf_distca.kernels.check` compares it on the device
before it is taken.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_distca.kernels.base import Scores
from hf_distca.kernels.cuda import flash_attention_unsupported
from hf_distca.kernels.packages import imported
from hf_distca.kernels.varlen import Sequences, VarlenKernel

__all__ = ["FlashAttn3Kernel", "import_error"]


def _interface() -> Any:
    """The package's module, or the exception that importing it raised."""
    return imported("flash_attn_interface")


def import_error() -> Exception | None:
    """What importing the package raised, None if it is there."""
    found = _interface()
    return found if isinstance(found, Exception) else None


def _op(name: str) -> Any:
    """A function of the package."""
    return getattr(_interface(), name)


def _options(sequences: Sequences, scores: Scores) -> dict[str, Any]:
    """The arguments that forward and backward have in common."""
    # Keys to the left and to the right of a row's own; -1 is no limit, and causal attention sees none to the right.
    left, right = (-1, -1) if scores.window is None else (scores.window - 1, 0)
    return {
        "cu_seqlens_q": sequences.cu_rows,
        "cu_seqlens_k": sequences.cu_keys,
        "max_seqlen_q": sequences.max_rows,
        "max_seqlen_k": sequences.max_keys,
        "softmax_scale": scores.scale,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": scores.softcap or 0.0,
    }


class _Flash3:
    """`VarlenOp` over the package's functions below its autograd layer."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = _op("_flash_attn_forward")(q=q_THD, k=k_TKD, v=v_TKD, causal=True, num_splits=1, **_options(sequences, scores))
        return results[0], results[1]

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
        dq_THD, dk_TKD, dv_TKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD))
        _op("_flash_attn_backward")(
            dout=do_THD,
            q=q_THD,
            k=k_TKD,
            v=v_TKD,
            out=o_THD,
            softmax_lse=lse_HT,
            dq=dq_THD,
            dk=dk_TKD,
            dv=dv_TKD,
            is_causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_options(sequences, scores),
        )
        return dq_THD, dk_TKD, dv_TKD


class FlashAttn3Kernel(VarlenKernel):
    """FlashAttention 3: bfloat16 and float16, head dimensions up to 256, Hopper GPUs. Not run yet."""

    name: ClassVar[str] = "flash_attn_3"

    def __init__(self) -> None:
        super().__init__(_Flash3())

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        reason = flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
        if reason is not None:
            return reason
        if torch.cuda.get_device_capability(device)[0] != 9:
            return f"FlashAttention 3 is for Hopper GPUs (compute capability 9), {device} is none"
        if (error := import_error()) is not None:
            return f"FlashAttention 3 cannot be imported ({type(error).__name__}: {error})"
        return None
