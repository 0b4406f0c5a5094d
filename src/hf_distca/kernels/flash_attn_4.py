"""Attention through FlashAttention 4, where it is installed: flash-attn-4, which compiles its kernels as they are needed.

It is called directly: torch's own way to it, `torch.nn.attention.activate_flash_attention_impl("FA4")`, takes two results from
its forward, in torch 2.11 as in 2.13; flash-attn-4 4.0.0b36 gives five.

Written against the package's source (4.0.0b36). It has not run yet: `hf_distca.kernels.check` compares it on the device before it
is taken.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_distca.kernels.base import Scores
from hf_distca.kernels.cuda import flash_attention_unsupported
from hf_distca.kernels.packages import imported
from hf_distca.kernels.varlen import Sequences, VarlenKernel

__all__ = ["FlashAttn4Kernel"]

# Compute capabilities whose backward the package has.
_MAJORS = (9, 10, 11, 12)


def _interface() -> Any:
    """The package's module, or the exception that importing it raised."""
    return imported("flash_attn.cute.interface")


def _op(name: str) -> Any:
    """A function of the package."""
    return getattr(_interface(), name)


def _options(sequences: Sequences, scores: Scores) -> dict[str, Any]:
    """The arguments that forward and backward have in common."""
    left = None if scores.window is None else scores.window - 1
    return {
        "softmax_scale": scores.scale,
        "causal": True,
        "window_size_left": left,
        "window_size_right": None if left is None else 0,
        "softcap": scores.softcap or 0.0,
        "cu_seqlens_q": sequences.cu_rows,
        "cu_seqlens_k": sequences.cu_keys,
        "max_seqlen_q": sequences.max_rows,
        "max_seqlen_k": sequences.max_keys,
    }


class _Flash4:
    """`VarlenOp` over the package's functions below its autograd layer."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = _op("_flash_attn_fwd")(q=q_THD, k=k_TKD, v=v_TKD, return_lse=True, **_options(sequences, scores))
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
        results = _op("_flash_attn_bwd")(
            q=q_THD,
            k=k_TKD,
            v=v_TKD,
            out=o_THD,
            dout=do_THD,
            lse=lse_HT,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_options(sequences, scores),
        )
        return results[0], results[1], results[2]


class FlashAttn4Kernel(VarlenKernel):
    """FlashAttention 4: bfloat16 and float16, Hopper and Blackwell GPUs. Not run yet.

    Head dimensions go up to 256 on Hopper; on Blackwell up to 128, and 256.
    """

    name: ClassVar[str] = "flash_attn_4"

    def __init__(self) -> None:
        super().__init__(_Flash4())

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        reason = flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
        if reason is not None:
            return reason
        major = torch.cuda.get_device_capability(device)[0]
        if major not in _MAJORS:
            return f"FlashAttention 4 is for Hopper and Blackwell GPUs, {device} has compute capability {major}"
        width = max(head_dim, value_head_dim)
        if major != 9 and 128 < width <= 248:
            return f"FlashAttention 4 has head dimensions up to 128 and 256 on {device}, not {width}"
        if isinstance(found := _interface(), Exception):
            return f"flash-attn-4 cannot be imported ({type(found).__name__}: {found})"
        return None
