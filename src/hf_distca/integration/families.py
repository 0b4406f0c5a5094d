"""Model families for which distca is proven, and those it refuses, with reasons.

The lists, in families.txt, are written by `tests/models/generate.py`, which runs a tiny model of
every causal-LM type of transformers and compares it with transformers' own attention; a test fails
where the lists and a new run differ. This file also derives from a config, for plans before the
first step, the kinds of attention layers of a model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.resources import files
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey
from hf_distca.config import CostSource, DistCAConfig
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.processes import warn_once
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.profiles import Profile

__all__ = [
    "CUT_DOCUMENT_FAMILIES",
    "FAMILIES",
    "PING_PONG_FAMILIES",
    "PROVEN_GROUPS",
    "REFUSAL_REASONS",
    "WHOLE_DOCUMENT_FAMILIES",
    "WHOLE_DOCUMENT_REASONS",
    "check_cut_documents",
    "check_family",
    "check_layerdrop",
    "check_mask_numbers",
    "choose_rate_source",
    "count_layers",
    "list_layer_keys",
    "make_initial_cost",
    "no_mask_numbers_reason",
    "no_segments_reason",
    "warn_of_packing",
    "warn_of_unproven_family",
    "whole_document_reason",
]


def _read_table() -> dict[str, list[str]]:
    """Read the model types of each group."""
    table: dict[str, list[str]] = {}
    model_types: list[str] = []
    for line in (files(__package__) / "families.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            model_types += line.split()
        elif line and not line.startswith("#"):
            model_types = table[line] = []
    return table


_TABLE = _read_table()

PROVEN_GROUPS = {
    "PROVEN": "proven",
    "PACKED": "proven: its recurrent layers begin anew with each document",
    "CARRIES_STATE": (
        "proven, one document a row: its other layers carry state over packed documents"
    ),
    "NO_POSITIONS": "proven, one document a row: it takes no position ids",
}

REFUSAL_REASONS = {
    "NO_ATTENTION": "it has no attention to balance",
    "BYPASSED": "it computes attention by itself, not through transformers' attention interface",
    "SPARSE": (
        "its attention selects or compresses keys, so which keys a query needs is not known before"
        " the layer runs"
    ),
    "OWN_MASK": "it computes with the mask itself, and distca has no dense mask",
    "POSITION_BIAS": "it adds a learned bias to the scores",
    "BIDIRECTIONAL": "it has an encoder, cross attention or bidirectional masks",
    "UNBUILT": "no small model of it could be built, so nothing is proven",
}

# Why documents of a family must be whole. Other families are in `CUT_DOCUMENT_FAMILIES`, or were
# never tried.
WHOLE_DOCUMENT_REASONS = {
    "CARRIES_STATE": "their other layers carry state from token to token, which stays on its rank",
    "NO_POSITIONS": "they take no position ids, and count each rank's tokens from 0",
    "OWN_LOSS": (
        "their loss reads only `labels`, and the next token of a part that ends within a document"
        " is on another rank"
    ),
    "CHUNKS": (
        "they attend in chunks, which are cut only where a document lies on one rank, and scale"
        " queries by the place in the row"
    ),
}

# Language towers of composite models that are compared in tests/models/test_vision_language.py.
_COMPARED_PARTS = frozenset({"qwen2_vl_text"})

_ENCODER_DECODER_REASON = (
    "this one is an encoder with a decoder, which has cross attention and bidirectional masks"
)

FAMILIES = {name: group for group in (*PROVEN_GROUPS, *REFUSAL_REASONS) for name in _TABLE[group]}
PING_PONG_FAMILIES = frozenset(_TABLE["PING_PONG"])
CUT_DOCUMENT_FAMILIES = frozenset(_TABLE["OVER_RANKS"])
WHOLE_DOCUMENT_FAMILIES = {
    name: group for group in WHOLE_DOCUMENT_REASONS for name in _TABLE[group]
}


def check_family(model_type: str | None, *, encoder_decoder: bool = False) -> None:
    """Raise for a family that distca does not compute exactly.

    Families that are not in the table (models outside transformers, parts of larger models, newer
    releases) pass: the arguments of every attention call are checked too.

    Args:
        model_type: type in the model's config.
        encoder_decoder: whether the model is an encoder with a decoder; the table is about causal
            language models alone.

    Raises:
        UnsupportedError: with the reason, and a remedy.
    """
    group = FAMILIES.get(model_type or "")
    reason = _ENCODER_DECODER_REASON if encoder_decoder else REFUSAL_REASONS.get(str(group))
    if reason is not None:
        raise UnsupportedError(
            f'distca does not support {model_type} models: {reason}. Use attn_implementation="sdpa"'
            ' or "eager".'
        )


def whole_document_reason(model_type: str | None) -> str | None:
    """Return why documents of a family must lie in one piece on one rank; None if they need not, or
    the family is unknown.
    """
    return WHOLE_DOCUMENT_REASONS.get(WHOLE_DOCUMENT_FAMILIES.get(model_type or "", ""))


def no_segments_reason(model_type: str | None) -> str | None:
    """Return the reason as `whole_document_reason`, for a model that gave its recurrent layers no
    document boundaries.
    """
    return (
        WHOLE_DOCUMENT_REASONS["CARRIES_STATE"]
        if FAMILIES.get(model_type or "") == "PACKED"
        else whole_document_reason(model_type)
    )


# Types that make something else of a mask than which tokens are padding.
_MASK_READERS = dict.fromkeys(("biogpt", "opt"), "they count positions by it")


def no_mask_numbers_reason(model_type: str | None, config: PreTrainedConfig | None) -> str | None:
    """Return why a mask must not number documents for a model; None if only attention reads it, and
    keeps documents apart.
    """
    if FAMILIES.get(model_type or "") != "PROVEN":
        return "it is not proven that attention alone reads it"
    if getattr(config, "output_router_logits", False):
        return "the loss of their routers (output_router_logits=True) weighs tokens by it"
    return _MASK_READERS.get(model_type or "")


def check_mask_numbers(model_type: str | None, unnumbered: str | None) -> None:
    """Raise for a mask that numbers documents, if `no_mask_numbers_reason` gave a reason.

    Raises:
        UnsupportedError: with the reason, and a remedy.
    """
    if unnumbered is not None:
        raise UnsupportedError(
            f"attention_mask numbers the documents of a row, and must not for {model_type} models:"
            f" {unnumbered}. Give a mask of 1 and 0, and position_ids that begin again with each"
            " document; or PackingCollator, which reads such rows."
        )


# LayerDrop's names in the configs of transformers.
_LAYERDROP_FIELDS = ("layerdrop", "layer_drop", "decoder_layerdrop", "encoder_layerdrop")


def check_layerdrop(config: PreTrainedConfig | None) -> None:
    """Raise for a model with LayerDrop: ranks share the attention of each layer, and each would
    skip others.

    Raises:
        UnsupportedError: names the attribute of the config and its value.
    """
    for name in _LAYERDROP_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            raise UnsupportedError(
                f"the config of this {getattr(config, 'model_type', None)} model has"
                f" {name}={value}: in training each rank would skip layers at random, and ranks"
                f" share the attention of every layer. Set {name}=0.0 in the model's config."
            )


def warn_of_unproven_family(model_type: str | None) -> None:
    """Warn, once a family, that it was never compared with another attention."""
    if model_type is not None and model_type not in FAMILIES and model_type not in _COMPARED_PARTS:
        warn_once(
            "%s models were never compared under distca with another attention. The arguments of"
            " every attention call are checked. Before you rely on it, train a few steps with"
            ' attn_implementation="sdpa" and the same seed as well, and compare losses and gradient'
            " norms.",
            model_type or "unnamed",
        )


_PACKING_WARNINGS = {
    "PACKED": (
        "this batch has packed documents, and layers of this %s model (state space, convolution,"
        " linear attention) carry state from one to the next. distca lets each begin anew in those"
        " of transformers 5.23, and these are others. Upgrade transformers, load the model without"
        " code of its own, or give it one document a row."
    ),
    "CARRIES_STATE": (
        "this batch has packed documents, and %s models have layers (state space, convolution,"
        " linear attention) that carry state from one to the next, with any attention. Attention"
        " itself keeps them apart. Give these models one document a row."
    ),
    "NO_POSITIONS": (
        "this batch has packed documents, and %s models take no position ids: attention keeps"
        " documents apart, but positions count on from one to the next. Give these models one"
        " document a row."
    ),
}


def warn_of_packing(model_type: str | None) -> None:
    """Warn, once a family, that attention keeps packed documents apart but the rest of the model
    does not.

    For models that gave their recurrent layers no document boundaries.
    """
    text = _PACKING_WARNINGS.get(FAMILIES.get(model_type or "", ""))
    if text is not None:
        warn_once(text, model_type)


def check_cut_documents(model_type: str | None, whole: str | None) -> None:
    """Raise for documents in several parts, if attention would be right but other parts of the
    model would not.

    Args:
        model_type: type of the model; for families never tried in this way, a warning is logged
            once.
        whole: reason why its documents must not be cut; None if they may be.

    Raises:
        UnsupportedError: with the reason.
    """
    if whole is not None:
        raise UnsupportedError(
            f"a document of this batch is in several parts, and {model_type} models need whole"
            f" ones: {whole}. Give each document to one rank, in one piece."
        )
    if model_type not in CUT_DOCUMENT_FAMILIES:
        warn_once(
            "documents of this batch are in several parts, and %s models were never tried so:"
            " attention is exact, but whatever else mixes tokens would not see those of other"
            " parts. Compare with one process before you rely on it.",
            model_type,
        )


_HEAD_FIELDS = ("num_attention_heads", "decoder_attention_heads", "n_head")
_WIDTH_FIELDS = ("hidden_size", "d_model", "n_embd")


def list_layer_keys(model: Any, dtype: torch.dtype | None, device: str) -> list[PlanKey]:
    """Return the plan key of each kind of layer, those without a window first.

    Layers that a config does not describe are found at the first forward: their plans are made
    there. Arguments and errors are those of `count_layers`.
    """
    return list(count_layers(model, dtype, device))


def count_layers(model: Any, dtype: torch.dtype | None, device: str) -> dict[PlanKey, int]:
    """Count the layers of each plan key, those without a window first; 1 if all layers are of one
    kind.

    Args:
        model: a config (of a composite model, the config of all parts), or a model with a config.
        dtype: dtype of attention; the model's if None, or float32 if it has none.
        device: type of the device that computes it.

    Raises:
        ConfigError: if the config names no heads and widths, or no layers of attention.
    """
    model_config = getattr(model, "config", model)
    if not isinstance(model_config, PreTrainedConfig):
        raise ConfigError(
            f"model={type(model).__name__} is no model of transformers and no config: give one, or"
            " shapes."
        )
    config = model_config.get_text_config(decoder=True)
    bytes_ = (dtype or _choose_dtype(model, config, model_config)).itemsize
    kinds = getattr(config, "layer_types", None) or [None]
    # A layer of each kind; layers may differ in more than what `layer_types` says.
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
    """Return the cost model for plans of a kind of layers, before anything is measured.

    This is the cost model of the settings, for the key's shape and window, or built-in figures for
    its device.
    """
    if isinstance(config.cost_model, CostModel):
        return replace(config.cost_model, shape=key.shape, window=key.window)
    if isinstance(config.cost_model, Profile):
        return config.cost_model.make_cost_model(key.shape, key.window, tile=config.tile)
    return replace(
        CostModel.analytic(key.shape, device_type=key.device, tile=config.tile), window=key.window
    )


def choose_rate_source(config: DistCAConfig) -> CostSource:
    """Return the initial source of rates: the `cost_model` of the settings, unless
    it is timed and torch must be deterministic.
    """
    timed = config.cost_model == "calibrated"
    return (
        "analytic" if timed and torch.are_deterministic_algorithms_enabled() else config.cost_model
    )


def _make_key(config: Any, kind: str | None, element_bytes: int, device: str) -> PlanKey | None:
    """Return the plan key of layers of a kind; None if they are not attention.

    Without kinds, all layers have the window, if any.
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
        # Latent attention: keys and values are made for every head before they are attended to.
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionShape(heads, heads, head_dim, config.v_head_dim, element_bytes)
    hidden = _read_first_number(config, *_WIDTH_FIELDS)
    head_dim = _read_first_number(config, "head_dim") or (
        hidden // heads if heads and hidden else None
    )
    if not heads or not head_dim:
        raise ConfigError(
            f"{type(config).__name__} does not say what its attention is like: looked for one of"
            f" {', '.join(_HEAD_FIELDS)}, and for head_dim or one of {', '.join(_WIDTH_FIELDS)}."
            " Give shapes=[(AttentionShape(...), window), ...] of its kinds of layers."
        )
    # JetMoe repeats keys and values for the experts of a token before they are attended to.
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
    """Return the first of these attributes that is a number."""
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int)), None
    )


def _choose_dtype(*sources: Any) -> torch.dtype:
    dtypes = (getattr(source, "dtype", None) for source in sources)
    first_dtype = next((dtype for dtype in dtypes if dtype is not None), torch.float32)
    return getattr(torch, first_dtype) if isinstance(first_dtype, str) else first_dtype
