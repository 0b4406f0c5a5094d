"""Which kinds of attention layers a model has, read from its config: heads, widths, windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.profiles import Profile

__all__ = ["known_cost", "layer_keys"]

_HEADS = ("num_attention_heads", "decoder_attention_heads", "n_head")
_WIDTHS = ("hidden_size", "d_model", "n_embd")


def layer_keys(model: Any, dtype: torch.dtype | None, device: str) -> list[PlanKey]:
    """The plan of each kind of layer, those without a window first.

    What a config does not say is found at the first forward: plans for such layers are made there.

    Args:
        model: a config, of composite models that of all parts, or a model that has one.
        dtype: in which attention computes; that of the model if None, or float32 if it has none.
        device: type of the device that computes it.

    Raises:
        ConfigError: if the config names no heads and widths, or no layers of attention.
    """
    whole = getattr(model, "config", model)
    if not isinstance(whole, PreTrainedConfig):
        raise ConfigError(f"model={type(model).__name__} is no model of transformers and no config: give one, or shapes.")
    config = whole.get_text_config(decoder=True)
    bytes_ = (dtype or _dtype(model, config, whole)).itemsize
    kinds = getattr(config, "layer_types", None)
    keys = [_key(_of_layer(config, at), kind, bytes_, device) for at, kind in _each(kinds)]
    found = list(dict.fromkeys(key for key in keys if key is not None))
    if not found:
        named = ", ".join(dict.fromkeys(kinds or ()))
        raise ConfigError(f"{type(config).__name__} has layer_types {named}, and none of them is attention. Give shapes instead.")
    return sorted(found, key=lambda key: (key.window is not None, key.chunk is not None))


def known_cost(key: PlanKey, config: DistCAConfig) -> CostModel:
    """The cost model that layers of a kind are planned with, before anything is measured.

    That of the settings, for the key's shape and window, or built-in figures for its device.
    """
    if isinstance(config.cost_model, CostModel):
        return replace(config.cost_model, shape=key.shape, window=key.window)
    if isinstance(config.cost_model, Profile):
        return config.cost_model.cost_model(key.shape, key.window, tile=config.tile)
    return replace(CostModel.analytic(key.shape, device_type=key.device, tile=config.tile), window=key.window)


def _each(kinds: Sequence[str] | None) -> list[tuple[int, str | None]]:
    """A layer of each kind."""
    if not kinds:
        return [(0, None)]
    return [(kinds.index(kind), kind) for kind in dict.fromkeys(kinds)]


def _of_layer(config: Any, layer: int) -> Any:
    """The config of a layer, where layers differ in more than what `layer_types` says."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def _key(config: Any, kind: str | None, element_bytes: int, device: str) -> PlanKey | None:
    """The plan of layers of a kind, None if they are no attention. Without kinds, all layers have the window, if there is one."""
    if kind is not None and ("linear" in kind or not ("attention" in kind or "hybrid" in kind)):
        return None
    window = chunk = None
    if kind is None or "sliding" in kind:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    elif "chunked" in kind:
        chunk = config.attention_chunk_size
    return PlanKey(_shape(config, element_bytes), device, window, chunk)


def _shape(config: Any, element_bytes: int) -> AttentionShape:
    heads = _first(config, *_HEADS)
    if heads and _first(config, "kv_lora_rank") and _first(config, "qk_nope_head_dim"):
        # Latent attention: keys and values are made for every head before they are attended to.
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionShape(heads, heads, head_dim, config.v_head_dim, element_bytes)
    hidden = _first(config, *_WIDTHS)
    head_dim = _first(config, "head_dim") or (hidden // heads if heads and hidden else None)
    if not heads or not head_dim:
        raise ConfigError(
            f"{type(config).__name__} does not say what its attention is like: looked for one of {', '.join(_HEADS)}, and for "
            f"head_dim or one of {', '.join(_WIDTHS)}. Give shapes=[(AttentionShape(...), window), ...] of its kinds of layers."
        )
    key_value_heads = _first(config, "num_key_value_heads") or heads
    return AttentionShape(heads, key_value_heads, head_dim, _first(config, "v_head_dim") or head_dim, element_bytes)


def _first(config: Any, *names: str) -> int | None:
    """The first of these attributes that is a number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _dtype(*sources: Any) -> torch.dtype:
    named = (getattr(source, "dtype", None) for source in sources)
    found = next((dtype for dtype in named if dtype is not None), torch.float32)
    return getattr(torch, found) if isinstance(found, str) else found
