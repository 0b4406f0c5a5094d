"""Attention through the flash-attn package, where it is installed."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from hf_distca.kernels.cuda import flash_attention_unsupported
from hf_distca.kernels.varlen import Sequences, VarlenKernel

__all__ = ["FlashAttnKernel"]

_OLDEST = (2, 6)


@cache
def _installed() -> tuple[int, int] | None:
    """Major and minor version of the installed package, None if there is none."""
    if find_spec("flash_attn") is None:
        return None
    try:
        found = version("flash-attn")
    except PackageNotFoundError:  # a source tree on the path, or another distribution that provides the module
        found = str(getattr(import_module("flash_attn"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@cache
def _op(name: str) -> Any:
    """A function of the package, which is imported on first use since it loads CUDA libraries."""
    return getattr(import_module("flash_attn.flash_attn_interface"), name)


def _options(sequences: Sequences, scale: float) -> dict[str, Any]:
    """The arguments that forward and backward have in common, as the installed version spells them."""
    one_argument = (_installed() or _OLDEST) < (2, 7)
    window: dict[str, Any] = {"window_size": (-1, -1)} if one_argument else {"window_size_left": -1, "window_size_right": -1}
    return {
        "cu_seqlens_q": sequences.cu_rows,
        "cu_seqlens_k": sequences.cu_keys,
        "max_seqlen_q": sequences.max_rows,
        "max_seqlen_k": sequences.max_keys,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": True,
        "softcap": 0.0,
        "alibi_slopes": None,
        **window,
    }


class _FlashAttn:
    """`VarlenOp` over the package's varlen functions below its autograd layer."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sequences: Sequences, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = _op("_flash_attn_varlen_forward")(q=q_THD, k=k_TKD, v=v_TKD, return_softmax=False, **_options(sequences, scale))
        # Since 2.7: out, lse, probabilities, rng state. Before: out, q, k, v, padded out, lse, probabilities, rng state.
        return results[0], results[1] if len(results) == 4 else results[5]

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_HT: torch.Tensor,
        sequences: Sequences,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq_THD, dk_TKD, dv_TKD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD))
        _op("_flash_attn_varlen_backward")(
            dout=do_THD,
            q=q_THD,
            k=k_TKD,
            v=v_TKD,
            out=o_THD,
            softmax_lse=lse_HT,
            dq=dq_THD,
            dk=dk_TKD,
            dv=dv_TKD,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_options(sequences, scale),
        )
        return dq_THD, dk_TKD, dv_TKD


class FlashAttnKernel(VarlenKernel):
    """Flash-attention 2 from the flash-attn package: bfloat16 and float16, head dimensions up to 256, Ampere and later."""

    name: ClassVar[str] = "flash_attn"

    def __init__(self) -> None:
        super().__init__(_FlashAttn())

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        installed = _installed()
        if installed is None:
            return "the package flash-attn is not installed: pip install hf-distca[flash]"
        if installed < _OLDEST or installed[0] != _OLDEST[0]:
            # Before 2.6 the log-sum-exp of a varlen call is padded to (sequences, heads, longest).
            return f"flash-attn is installed in version {installed[0]}.{installed[1]}, it takes 2.6 or a later 2.x"
        return flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
