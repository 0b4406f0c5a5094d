"""A tiny random model of any causal-LM type of transformers, built from its config class alone."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny_sizes import ALWAYS, OVERRIDES, SIZES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
FIRST_ORDINARY_TOKEN = 32  # smaller ids are padding, image and other tokens that models treat in their own way

_OFF = re.compile("dropout|pdrop|layerdrop|jitter")
_TOKEN = re.compile("token_(id|index)$|_index$")


def build(model_type: str, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same random weights for every implementation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # so that nothing that starts as zero hides what flows through it
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(parameter.dtype))
    return model.to(dtype).train()


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Two to five layers, one of each kind at least, 4 heads of width 16, windows of 8 tokens."""
    return _tiny(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def _tiny(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    values: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(config_class)}
    defaults = _defaults(config_class)
    for field in dataclasses.fields(config_class):
        value = _shrunk(field.name, vars(defaults).get(field.name) if defaults else None)
        if value is not None:
            values[field.name] = value
    kinds = _layer_kinds(defaults) if "layer_types" in names else None
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
    values |= ALWAYS
    values |= overrides
    return config_class(**{name: value for name, value in values.items() if value != "default"})


def _defaults(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return config_class()
    except Exception:
        return None


def _shrunk(name: str, default: object) -> object:
    """The tiny value of a config field, or None to leave it at its default."""
    if name in SIZES:
        return SIZES[name]
    if _OFF.search(name) and isinstance(default, (int, float)) and not isinstance(default, bool):
        return 0.0
    if _TOKEN.search(name) and isinstance(default, int) and not isinstance(default, bool) and default >= 3:
        return 3 + sum(map(ord, name)) % (FIRST_ORDINARY_TOKEN - 3)
    return None


def _layer_kinds(defaults: PreTrainedConfig | None) -> list[str] | None:
    """Each kind of layer of the default model once or twice, in the order in which they appear."""
    kinds = list(dict.fromkeys(vars(defaults).get("layer_types") or [])) if defaults else []
    return [kind for kind in kinds for _ in range(1 if len(kinds) > 1 else 2)] * (2 if len(kinds) == 2 else 1) or None
