"""Attention through the flash-attn package, where it is installed."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from hf_distca.kernels.base import Scores
from hf_distca.kernels.cuda import flash_attention_unsupported
from hf_distca.kernels.varlen import Sequences, VarlenKernel

__all__ = ["FlashAttnKernel"]

_OLDEST = (2, 6, 2)


@cache
def _installed() -> tuple[int, ...] | None:
    """Major, minor and micro version of the installed package, None if there is none."""
    spec = find_spec("flash_attn")
    if spec is None or spec.origin is None:  # flash-attn-4 alone has flash_attn.cute, which makes flash_attn a namespace
        return None
    try:
        found = version("flash-attn")
    except PackageNotFoundError:  # a source tree on the path, or another distribution that provides the module
        found = str(getattr(import_module("flash_attn"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else (0, 0, 0)


@cache
def _op(name: str) -> Any:
    """A function of the package, which is imported on first use since it loads CUDA libraries."""
    return getattr(import_module("flash_attn.flash_attn_interface"), name)


def _options(sequences: Sequences, scores: Scores) -> dict[str, Any]:
    """The arguments that forward and backward have in common, as the installed version spells them."""
    # Keys to the left and to the right of a row's own; -1 is no limit, and causal attention sees none to the right.
    left, right = (-1, -1) if scores.window is None else (scores.window - 1, 0)
    one_argument = (_installed() or _OLDEST) < (2, 7)
    window = {"window_size": (left, right)} if one_argument else {"window_size_left": left, "window_size_right": right}
    return {
        "cu_seqlens_q": sequences.cu_rows,
        "cu_seqlens_k": sequences.cu_keys,
        "max_seqlen_q": sequences.max_rows,
        "max_seqlen_k": sequences.max_keys,
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": True,
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": None,
        **window,
    }


class _FlashAttn:
    """`VarlenOp` over the package's varlen functions below its autograd layer."""

    def forward(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = _op("_flash_attn_varlen_forward")(
            q=q_THD, k=k_TKD, v=v_TKD, return_softmax=False, **_options(sequences, scores)
        )
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
        scores: Scores,
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
            **_options(sequences, scores),
        )
        return dq_THD, dk_TKD, dv_TKD


class FlashAttnKernel(VarlenKernel):
    """Flash-attention 2 from the flash-attn package: bfloat16 and float16, head dimensions up to 256, Ampere and later."""

    name: ClassVar[str] = "flash_attn"

    def __init__(self) -> None:
        super().__init__(_FlashAttn())

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        installed = _installed()
        if installed is None:
            return "the package flash-attn is not installed: pip install flash-attn"
        if installed < _OLDEST or installed[0] != _OLDEST[0]:
            # Before 2.6 the log-sum-exp of a varlen call is padded to (sequences, heads, longest); before 2.6.2 backward has
            # no softcap.
            return f"flash-attn is installed in version {'.'.join(map(str, installed))}, it takes 2.6.2 or a later 2.x"
        return flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
