"""Read the kinds of attention layers from a model's config, to plan before the first step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel

_HEAD_FIELDS = ("num_attention_heads", "decoder_attention_heads", "n_head")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd")


def list_layer_keys(model: Any, dtype: torch.dtype | None, device: str) -> list[PlanKey]:
    """Return the plan key of each kind of layer, kinds without a window first.

    Kinds of layers that the config does not describe are planned in the first forward. For
    arguments and errors, see `count_layers`.
    """
    return list(count_layers(model, dtype, device))


def count_layers(model: Any, dtype: torch.dtype | None, device: str) -> dict[PlanKey, int]:
    """Count the layers of each plan key, keys without a window first. If the config does not list
    the types of its layers, all layers together count as one.

    Args:
        model: a config, or a model with a config. For a composite model, give the config of all
            parts.
        dtype: dtype of attention. If None, it is the model's dtype, or float32 if the model has no
            dtype.
        device: type of the device that computes attention.

    Raises:
        ConfigError: if the config names no heads and widths, or no layers of attention.
    """
    model_config = getattr(model, "config", model)
    if not isinstance(model_config, PreTrainedConfig):
        raise ConfigError(
            f"model={type(model).__name__} is neither a model nor a config of transformers: give"
            " one of these, or shapes."
        )
    config = model_config.get_text_config(decoder=True)
    bytes_ = (dtype or _choose_dtype(model, config, model_config)).itemsize
    kinds = getattr(config, "layer_types", None) or [None]
    # The index of the first layer of each kind. In a heterogeneous config, the config of that layer
    # is read.
    layers = {kind: kinds.index(kind) for kind in kinds}
    configs = (
        config.per_layer_config
        if getattr(config, "is_heterogeneous", False)
        else dict.fromkeys(layers.values(), config)
    )
    counts: Counter[PlanKey] = Counter()
    for kind, layer in layers.items():
        if (key := _make_key(configs[layer], kind, bytes_, device)) is not None:
            counts[key] += kinds.count(kind)
    if not counts:
        raise ConfigError(
            f"{type(config).__name__} has layer_types {', '.join(layers)}, and none of them is"
            " attention. Give shapes instead."
        )
    return dict(
        sorted(
            counts.items(), key=lambda item: (item[0].window is not None, item[0].chunk is not None)
        )
    )


def make_initial_cost(key: PlanKey, config: DistCAConfig) -> CostModel:
    """Return the cost model for a kind of layer before anything is measured.

    If the settings have a cost model, it is used with the key's shape and window. Otherwise the
    cost model is made from built-in figures for the key's device.
    """
    if isinstance(config.cost_model, CostModel):
        return replace(config.cost_model, shape=key.shape, window=key.window)
    return replace(
        CostModel.make_analytic(key.shape, device_type=key.device, tile=config.tile),
        window=key.window,
    )


def _make_key(config: Any, kind: str | None, element_bytes: int, device: str) -> PlanKey | None:
    """Return the plan key of a kind of layer; None if the layers have no attention.

    If `kind` is None, all layers are of one kind, and have the window of the config if there is
    one.
    """
    if kind is not None and ("linear" in kind or not ("attention" in kind or "hybrid" in kind)):
        return None
    window = chunk = None
    if kind is None or "sliding" in kind:
        window = (
            getattr(config, "sliding_window", None)
            if getattr(config, "use_sliding_window", True)
            else None
        )
    elif "chunked" in kind:
        chunk = config.attention_chunk_size
    return PlanKey(_read_shape(config, element_bytes), device, window, chunk)


def _read_shape(config: Any, element_bytes: int) -> AttentionShape:
    heads = _read_first_number(config, *_HEAD_FIELDS)
    if (
        heads
        and _read_first_number(config, "kv_lora_rank")
        and _read_first_number(config, "qk_nope_head_dim")
    ):
        # Latent attention makes keys and values for every head before attention.
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionShape(heads, heads, head_dim, config.v_head_dim, element_bytes)
    hidden = _read_first_number(config, *_WIDTH_FIELDS)
    head_dim = _read_first_number(config, "head_dim") or (
        hidden // heads if heads and hidden else None
    )
    if not heads or not head_dim:
        raise ConfigError(
            f"{type(config).__name__} does not describe its attention: it must have one of"
            f" {', '.join(_HEAD_FIELDS)}, and head_dim or one of {', '.join(_WIDTH_FIELDS)}. Give"
            " shapes=[(AttentionShape(...), window), ...] instead, one for each kind of layer."
        )
    # JetMoe repeats keys and values for the experts of a token before attention.
    key_value_heads = (
        heads
        if config.model_type == "jetmoe"
        else _read_first_number(config, "num_key_value_heads") or heads
    )
    return AttentionShape(
        heads,
        key_value_heads,
        head_dim,
        _read_first_number(config, "v_head_dim") or head_dim,
        element_bytes,
    )


def _read_first_number(config: Any, *names: str) -> int | None:
    """Return the first integer among the named attributes of a config, or None."""
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int)), None
    )


def _choose_dtype(*sources: Any) -> torch.dtype:
    dtypes = (getattr(source, "dtype", None) for source in sources)
    first_dtype = next((dtype for dtype in dtypes if dtype is not None), torch.float32)
    return getattr(torch, first_dtype) if isinstance(first_dtype, str) else first_dtype
