"""The mask function: instead of a dense mask it returns the handle of a micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask

from hf_distca.integration.families import check_family
from hf_distca.integration.handle import AttentionHandle, CachedMask, ForeignMask
from hf_distca.integration.layers import cut_layers
from hf_distca.integration.mesh import mesh_of
from hf_distca.integration.session import current_session

__all__ = ["distca_mask"]

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# The parts that transformers builds causal masks from. Anything else changes who sees whom.
_CHUNKS = "chunked_overlay"
_BLOCKS = "blockwise_overlay"
_KNOWN_PARTS = {
    "causal_mask_function",
    "and_masks",
    "packed_sequence_mask_function",
    "sliding_window_overlay",
    "remap_positions_for_packed_sequence",
    _CHUNKS,
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def distca_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | AttentionHandle | ForeignMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> AttentionHandle | CachedMask | ForeignMask:
    """The mask function registered as "distca". Takes what transformers' mask interface passes, returns no dense mask.

    A mask that is not causal, or has an overlay, comes back as a `ForeignMask`.

    Raises:
        UnsupportedError: if the model is of a family that is refused.
    """
    if isinstance(attention_mask, (AttentionHandle, ForeignMask)):
        return attention_mask
    model_type = getattr(config, "model_type", None)
    check_family(model_type, encoder_decoder=getattr(config, "is_encoder_decoder", False))
    parts = set(_parts(mask_function))
    foreign = sorted(parts - _KNOWN_PARTS)
    if use_vmap or foreign:
        return ForeignMask(", ".join(foreign) or "a custom mask function")
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
    creator = _calling_frame(lambda frame: frame.f_globals.get("__name__") == create_causal_mask.__module__)
    _prepare_model(creator)
    # A model can be left in training mode while one rank generates: the mode alone does not tell that the others take part.
    alone = _calling_frame(lambda frame: frame.f_code is _GENERATE, creator) is not None
    return AttentionHandle(
        batch_size,
        q_length,
        padding,
        window=window,
        chunk=chunk,
        position_ids=_positions(creator),
        model_type=model_type,
        alone=alone,
        # Only what is computed while gradients are recorded can be recomputed. Layers under reentrant checkpointing record none
        # in their first forward, but their mask is made before.
        recomputes=torch.is_grad_enabled(),
    )


def _prepare_model(creator: FrameType | None) -> None:
    """Take from the model that asks for a mask what only it knows: the mesh, and the layers that may run as halves."""
    session = current_session()
    if session.looks_for_mesh:
        # Of the models whose forwards led here, from the inside out, the mesh is on the one that was loaded.
        owner = _calling_frame(lambda frame: mesh_of(frame.f_locals.get("self")) is not None, creator)
        mesh = None if owner is None else mesh_of(owner.f_locals["self"])
        if mesh is not None:
            session.found_mesh(mesh)
    if session.config.ping_pong:
        caller = _calling_frame(lambda frame: isinstance(frame.f_locals.get("self"), PreTrainedModel), creator)
        if caller is not None:
            cut_layers(caller.f_locals["self"])


def _calling_frame(wanted: Callable[[FrameType], bool], frame: FrameType | None = None) -> FrameType | None:
    """The innermost wanted frame among the callers."""
    frame = frame or inspect.currentframe()
    while frame is not None and not wanted(frame):
        frame = frame.f_back
    return frame


def _positions(creator: FrameType | None) -> torch.Tensor | None:
    """The position ids given to the `create_..._mask` that called the mask function.

    With a padding mask or a cache, transformers looks for no packed documents and hands its mask functions no positions. Some
    models pass none to attention either (Llama 4, Persimmon): the caller's argument is then all that tells documents apart.
    """
    positions = None if creator is None else creator.f_locals.get("position_ids")
    return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions that a mask function is composed of, read from what they close over.

    Without blocks of tokens that see each other both ways where the batch has none, as in Gemma 4's masks of text alone.
    """
    name = _name(function)
    if not inspect.isfunction(function):
        yield name
        return
    inner = inspect.getclosurevars(function).nonlocals.values()
    functions = [part for value in inner for part in (value if isinstance(value, (tuple, list)) else (value,)) if callable(part)]
    if name == "or_masks":
        functions = [part for part in functions if not _hides_all(part)]
    if name != "or_masks" or len(functions) > 1:
        yield name
    for part in functions:
        yield from _parts(part)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).split(".")[0]


def _hides_all(function: Callable[..., Any]) -> bool:
    """Whether a part of a union of masks lets no token see any: an overlay of blocks, where no token is in one.

    Reads the device once a mask, for models with such blocks only.
    """
    if _name(function) != _BLOCKS:
        return False
    ids = inspect.getclosurevars(function).nonlocals.get("block_sequence_ids")
    return isinstance(ids, torch.Tensor) and bool((ids < 0).all())
