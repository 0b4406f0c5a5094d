"""Layers with a window: those that transformers reads from the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_distca.simulate.models import find_model

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 31,  # of no period a multiple
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Layers that are not attention, experts, speech, and a part of a model.
OTHERS = {"lfm3", "recurrent_gemma", "dots1", "moshi", "kyutai_speech_to_text", "gemma4_assistant"}
COMPOSITE = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "voxtral_realtime_text", "muse_glimmer_text"}
# Keys of which each family reads some, and `sliding_window` or its default.
SWITCHED = {"use_sliding_window": True, "sliding_window": 512}
KEYS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 512},
    {"sliding_window": 512, "sliding_window_pattern": 3, "global_attn_every_n_layers": 5, "local_attention": 512},
    SWITCHED,
    {**SWITCHED, "max_window_layers": 20, "no_rope_layer_interval": 3},
    {**SWITCHED, "max_window_layers": 40, "no_rope_layers": [1, 0, 0] * 10 + [1]},
    {"sliding_window": 256, "layer_types": ["sliding_attention"] * 7 + ["full_attention"] * 24},
]


def read_by_transformers(config: dict[str, Any]) -> tuple[int | None, int]:
    """The window, and how many layers have it."""
    read = AutoConfig.for_model(config["model_type"], **{key: one for key, one in config.items() if key != "model_type"})
    read.allow_global_per_layer_attribute_access = True
    kinds = getattr(read, "layer_types", None) or ["sliding_attention"] * read.num_hidden_layers
    window = read.sliding_window if getattr(read, "use_sliding_window", True) else None
    count = kinds.count("sliding_attention") if window else 0
    return (window if count else None), count


def read_here(config: dict[str, Any], path: Path) -> tuple[int | None, int]:
    """The same, of a file with this."""
    path.write_text(json.dumps(config))
    found = find_model(str(path))
    return (found.window if found.windowed_layers else None), found.windowed_layers


def families() -> list[str]:
    """Decoders of attention alone whose class knows a window."""
    found = []
    for kind in sorted(COMPOSITE | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - OTHERS):
        config = CONFIG_MAPPING[kind]()
        config.allow_global_per_layer_attribute_access = True
        if config.get_text_config(decoder=True) is config and hasattr(config, "sliding_window"):
            found += [] if any(getattr(config, name, None) for name in EXPERTS) else [kind]
    return found


def test_windows_are_those_that_transformers_reads(tmp_path: Path) -> None:
    kinds = families()
    assert {"gemma2", "gemma3_text", "cohere2", "qwen2", "mistral"} <= set(kinds)
    configs = [{**SIZES, "model_type": kind, **keys} for kind in kinds for keys in KEYS]
    pairs = [(read_here(config, tmp_path / "config.json"), read_by_transformers(config)) for config in configs]
    assert not [(config, *pair) for config, pair in zip(configs, pairs, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize(("kind", "keys"), [("gemma3", {}), ("qwen2_vl", {**SWITCHED, "max_window_layers": 20})])
def test_the_family_of_a_composite_model_is_that_of_its_text(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Files on the Hub have the text in an object without a type of its own, or among the rest."""
    text = {**SIZES, **keys}
    for data in ({"text_config": text}, text):
        found = read_here({"model_type": kind, **data}, tmp_path / "config.json")
        assert found == read_by_transformers({"model_type": f"{kind}_text", **text})
