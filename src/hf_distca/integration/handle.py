"""The mask function and the handle it returns, which travels to every layer as `attention_mask`.

A model makes its mask once per forward and kind of layer. Instead of a dense mask it gets a small object. Because that is an
argument, it is the same object in the recompute of activation checkpointing and another one for every micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask

from hf_distca.errors import UnsupportedError
from hf_distca.integration.families import check_family
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route

__all__ = ["AttentionHandle", "CachedMask", "Work", "distca_mask"]

# The parts that transformers builds causal masks from. Anything else changes who sees whom.
_CHUNKS = "chunked_overlay"
_KNOWN_PARTS = {
    "causal_mask_function",
    "and_masks",
    "packed_sequence_mask_function",
    "sliding_window_overlay",
    "remap_positions_for_packed_sequence",
    _CHUNKS,
}


@dataclass(frozen=True, eq=False)
class Work:
    """What the first layer found out for all layers.

    Attributes:
        route: this rank's route.
        keep: int64 indices of the tokens that are not padding, on the device of q; None if there is no padding.
        window: keys that a row sees at most; None if no document on any rank is longer than the layer's window.
        collective: whether other ranks take part.
        meter: counts what this micro-batch does in this kind of layer.
        outputs: outputs of the layers, for activation checkpointing.
    """

    route: Route
    keep: torch.Tensor | None
    window: int | None
    collective: bool
    meter: Meter
    outputs: OutputStore = field(default_factory=OutputStore)


@dataclass(eq=False)
class AttentionHandle:
    """Stands for the mask of one forward and one kind of layer.

    Attributes:
        batch_size, length: shape of the batch in tokens.
        padding: (batch_size, length) bool mask as the user gave it, true for tokens.
        window: keys that a row of this kind of layer sees at most, None for all.
        chunk: length of the chunks that documents are cut into in this kind of layer, None for no cuts.
        position_ids: those the mask was made with, for models that pass none to attention.
        work: filled by the first layer, by window: some models tell the window only to the attention function.
    """

    batch_size: int
    length: int
    padding: torch.Tensor | None
    window: int | None = None
    chunk: int | None = None
    position_ids: torch.Tensor | None = None
    work: dict[int | None, Work] = field(default_factory=dict, repr=False)
    # Generation with static caches makes masks ahead of the forward and handles them as 4-D tensors.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> AttentionHandle:
        """The handle itself."""
        return self


class CachedMask(torch.Tensor):
    """The dense mask of a forward that reads a key/value cache: such calls are sdpa's, on this rank alone.

    A tensor, because generation with static caches handles masks as tensors; a class, to tell it from a user's own mask.
    """


@torch.compiler.disable  # type: ignore[untyped-decorator]
def distca_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | AttentionHandle | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> AttentionHandle | CachedMask:
    """The mask function registered as "distca". Takes what transformers' mask interface passes, returns no dense mask.

    Raises:
        UnsupportedError: if the mask is not causal, or has an overlay.
    """
    if isinstance(attention_mask, AttentionHandle):
        return attention_mask
    check_family(getattr(config, "model_type", None))
    parts = set(_parts(mask_function))
    foreign = sorted(parts - _KNOWN_PARTS)
    if use_vmap or foreign:
        what = ", ".join(foreign) or "a custom mask function"
        raise UnsupportedError(
            f"this model's attention mask uses {what}; distca computes causal attention within documents. "
            'Use attn_implementation="sdpa" for it.'
        )
    if kv_offset or kv_length != q_length or not isinstance(q_offset, int) or q_offset:
        # One token at a time reads the whole cache: no query rows to move, and only this rank is generating.
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]  # a tensor for static caches
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **{**kwargs, "config": config, "allow_is_causal_skip": False},
        )
        return torch.Tensor.as_subclass(mask, CachedMask)  # type: ignore[arg-type]  # never None without skips
    padding = None if attention_mask is None else attention_mask[:, :q_length]
    chunk, window = (local_size, None) if _CHUNKS in parts else (None, local_size)
    return AttentionHandle(batch_size, q_length, padding, window, chunk, _caller_positions())


def _caller_positions() -> torch.Tensor | None:
    """The position ids given to the `create_..._mask` that called the mask function.

    With a padding mask or a cache, transformers looks for no packed documents and hands its mask functions no positions. Some
    models pass none to attention either (Llama 4, Persimmon): the caller's argument is then all that tells documents apart.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != create_causal_mask.__module__:
        frame = frame.f_back
    positions = None if frame is None else frame.f_locals.get("position_ids")
    return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions that a mask function is composed of, read from what they close over."""
    yield function.__qualname__.split(".")[0]
    for inner in inspect.getclosurevars(function).nonlocals.values():
        for part in inner if isinstance(inner, (tuple, list)) else (inner,):
            if inspect.isfunction(part):
                yield from _parts(part)
