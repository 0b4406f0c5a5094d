"""Builds a tiny random model of any causal-LM type of transformers from its config class."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import transformers
from tiny_sizes import ALWAYS, CONFIG_TYPES, OVERRIDES, SIZES
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
# Smaller ids are padding, image and other special tokens.
FIRST_ORDINARY_TOKEN = 32


class NoVision(PreTrainedModel):
    """Stands for the vision tower of Gemma 3n, which needs another package and is not used here."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.post_init()


AutoModel.register(Gemma3nVisionConfig, NoVision, exist_ok=True)

_OFF = re.compile("dropout|pdrop|layerdrop|jitter")
_TOKEN = re.compile("token_(id|index)$|_index$")


def build(model_type: str, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with the same random weights for every implementation."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config._attn_implementation = implementation
    model_class = class_of(model_type)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "eager"  # grouped products do not support float64
    model = model_class(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Parameters that start as zero would hide the layers before them.
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(parameter.dtype))
    return model.to(dtype).train()


def lengthen_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Make states last for hundreds of tokens, so that a lost or leaked state changes results."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # The default dtype draws the same rates for every dtype of the model.
            rates = torch.empty(parameter.shape).uniform_(0.005, 0.05, generator=generator)
            parameter.data.copy_(rates.log_())
    return model


def class_of(model_type: str) -> type[PreTrainedModel]:
    """Get the class that AutoModelForCausalLM would build."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Make a config: 2 to 5 layers of all kinds, 4 heads of width 16, windows of 8 tokens."""
    config_class = CONFIG_MAPPING[CONFIG_TYPES.get(model_type, model_type)]
    parts = [spec.config_class for spec in config_class.sub_configs_defaults.values()]
    # The causal LM is the text part of a larger model.
    if class_of(model_type).config_class in parts:
        config_class = class_of(model_type).config_class
    return _tiny(config_class, OVERRIDES.get(model_type, {}))


def _tiny(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    values: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(config_class)}
    defaults = _make_defaults(config_class)
    for field in dataclasses.fields(config_class):
        value = _shrink(field.name, vars(defaults).get(field.name) if defaults else None)
        if value is not None:
            values[field.name] = value
    kinds = _list_kinds(defaults) if "layer_types" in names else None
    if kinds:
        values["layer_types"] = kinds
        values["num_hidden_layers"] = len(kinds)
    overrides = dict(overrides)
    for name, spec in config_class.sub_configs_defaults.items():
        inner = overrides.pop(name, {})
        if inner is None or (spec.optional and name not in names):
            continue
        sub_class = spec.config_class
        if not issubclass(sub_class, PreTrainedConfig):
            sub_class = CONFIG_MAPPING[spec.model_type]
        values[name] = _tiny(sub_class, inner)
    if {"kv_lora_rank", "num_key_value_heads"} <= names:
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    values |= ALWAYS
    values |= overrides
    return config_class(**{name: value for name, value in values.items() if value != "default"})


def _make_defaults(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return config_class()
    except Exception:
        return None


def _shrink(name: str, default: object) -> object:
    """Return the tiny value of a config field, or None to keep the default."""
    if name in SIZES:
        return SIZES[name]
    if _OFF.search(name) and isinstance(default, (int, float)) and not isinstance(default, bool):
        return 0.0
    if (
        _TOKEN.search(name)
        and isinstance(default, int)
        and not isinstance(default, bool)
        and default >= 3
    ):
        return 3 + sum(map(ord, name)) % (FIRST_ORDINARY_TOKEN - 3)
    return None


def _list_kinds(defaults: PreTrainedConfig | None) -> list[str] | None:
    """List each kind of layer of the default model once or twice, in order."""
    kinds = list(dict.fromkeys(vars(defaults).get("layer_types") or [])) if defaults else []
    return [kind for kind in kinds for _ in range(1 if len(kinds) > 1 else 2)] * (
        2 if len(kinds) == 2 else 1
    ) or None
