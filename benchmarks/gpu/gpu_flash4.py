"""flash-attn-4, called directly, as one more kernel to measure.

torch's own way to it, `torch.nn.attention.activate_flash_attention_impl("FA4")`, takes two results from its forward, in torch
2.11 as in 2.13. In 4.0.0b36 the forward has five.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import torch

from hf_distca.kernels import Scores
from hf_distca.kernels.cuda import flash_attention_unsupported
from hf_distca.kernels.varlen import Sequences, VarlenKernel


def _options(sequences: Sequences, scores: Scores) -> dict[str, Any]:
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
        module: Any = import_module("flash_attn.cute.interface")
        options = _options(sequences, scores)
        options["softcap"] = options["softcap"] or None
        results = module._flash_attn_fwd(q_THD, k_TKD, v_TKD, return_lse=True, **options)  # noqa: SLF001
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
        module: Any = import_module("flash_attn.cute.interface")
        leaves = (q_THD, k_TKD, v_TKD, o_THD, do_THD, lse_HT)
        results = module._flash_attn_bwd(*leaves, **_options(sequences, scores))  # noqa: SLF001
        return results[0], results[1], results[2]


class Flash4Kernel(VarlenKernel):
    """Flash-attention 4: CuTe kernels, compiled at their first call for each head dim and kind of mask."""

    name: ClassVar[str] = "flash-attn-4"

    def __init__(self) -> None:
        super().__init__(_Flash4())

    def unsupported(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores
    ) -> str | None:
        """Why the case cannot run, or None; see `Kernel.unsupported`."""
        try:
            import_module("flash_attn.cute.interface")
        except Exception as error:  # it imports a compiler, which raises what it likes
            return f"flash-attn-4 cannot be imported ({type(error).__name__}: {error})"
        return flash_attention_unsupported(device, dtype, head_dim, value_head_dim)
