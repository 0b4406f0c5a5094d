"""Attention functions of the arms: packed varlen attention, Ulysses and a ring around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_3_available

from gpu_models import PLAIN, PLAIN_4
from hf_distca.kernels import KernelRequest, ScoreOptions
from hf_distca.kernels.flash import FLASH_ATTN_4

ULYSSES, RING = "eight_ulysses", "eight_ring"
# The attention that Ulysses calls inside.
_INNER = [PLAIN]


def find_packed(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Find the fastest packed attention that is installed, by its name in transformers."""
    if config.model_type == "gpt_oss":  # kernels with sinks
        return "flash_attention_3" if device.type == "cuda" else "eager"
    width = config.head_dim
    if device.type != "cuda":
        return PLAIN
    if not FLASH_ATTN_4.unsupported_reason(
        KernelRequest(device, dtype, width, width, ScoreOptions(1.0))
    ):
        return PLAIN_4
    return "flash_attention_3" if is_flash_attn_3_available() else PLAIN


def resolve_name(attention: str, packed: str) -> str:
    """Return the name of an arm's attention in transformers; Ulysses calls `packed` inside."""
    _INNER[0] = packed
    return {"packed": packed, "ulysses": ULYSSES, "ring": RING}.get(attention, attention)


def make_dense_masks(bounds: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """Make the masks of packed documents for gpt-oss under eager attention, (1, 1, tokens, tokens)
    float32.

    The model code of gpt-oss passes no position ids to its masks (transformers 5.23), so that
    packed documents would see the documents before them.
    """
    number = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff().cpu().long())
    place = torch.arange(len(number))
    back = place[:, None] - place[None, :]
    same = (number[:, None] == number[None, :]) & (back >= 0)
    seen = {"full_attention": same, "sliding_attention": same & (back < window)}
    least = torch.finfo(torch.float32).min
    return {kind: torch.where(mask, 0.0, least)[None, None] for kind, mask in seen.items()}


class _Exchange(torch.autograd.Function):
    """An all-to-all in both directions: part i of the first dimension goes to rank i."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


def _to_heads(states_BHTD: torch.Tensor, ranks: int) -> torch.Tensor:
    """Exchange all heads of this rank's tokens for some heads of all ranks' tokens."""
    heads, tokens, width = states_BHTD.shape[1:]
    if heads < ranks:  # each rank needs a head
        states_BHTD, heads = states_BHTD.repeat_interleave(ranks // heads, dim=1), ranks
    parts = _Exchange.apply(states_BHTD.reshape(ranks, heads // ranks, tokens, width))
    return parts.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, width)


def ulysses(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute some heads of all documents by packed attention. The documents are those of all
    ranks' rows in order; ranks have equally many tokens.
    """
    ranks = dist.get_world_size()
    states = [_to_heads(x, ranks) for x in (query, key, value)]
    out = ALL_ATTENTION_FUNCTIONS[_INNER[0]](module, *states, None, **kwargs)[0]
    parts = out[0].unflatten(0, (ranks, -1))  # ranks, tokens, heads of this rank, width
    back = _Exchange.apply(parts)
    return back.permute(1, 0, 2, 3).flatten(1, 2)[None], None


_prepared: tuple[torch.Tensor | None, tuple[Any, ...]] = None, ()


def ring(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by ring-flash-attn's Llama 3 method, which gathers all ranks' keys."""
    global _prepared
    from ring_flash_attn import (
        llama3_flash_attn_prepare_cu_seqlens,
        llama3_flash_attn_varlen_func,
    )

    if _prepared[0] is not cu_seq_lens_q:  # this waits for the device, so only once a step
        ranks = dist.get_rank(), dist.get_world_size()
        _prepared = (
            cu_seq_lens_q,
            llama3_flash_attn_prepare_cu_seqlens(cu_seq_lens_q, True, *ranks),
        )
    *ends, local = _prepared[1]
    states = (x[0].transpose(0, 1) for x in (query, key, value))
    out = llama3_flash_attn_varlen_func(
        *states, *ends, 1, local, softmax_scale=scaling, causal=True, group=dist.group.WORLD
    )
    return out[None], None


def _no_mask(**_: Any) -> None:
    return None


for _name, _function in ((ULYSSES, ulysses), (RING, ring)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _no_mask)
