"""What is counted in a model: by hand, as its authors say, and as it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_distca.doctor.counting import count_model
from hf_distca.errors import ConfigError
from hf_distca.model_shape import KNOWN_MODELS
from hf_distca.simulate.hardware import find_hardware
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import estimate_layer_seconds
from turns import in_turn

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256}
PYTHIA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 16384,
    "vocab_size": 50432,
}


def write(folder: Path, kind: str, **changes: Any) -> Path:
    AutoConfig.for_model(kind, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "layers", "attending", "billions", "met"),
    [
        ("qwen3_5", {}, 32, 8, 8.95, None),
        ("olmo_hybrid", {}, 32, 8, 7.43, None),
        ("zamba2", {}, 54, 9, 2.48, None),
        ("recurrent_gemma", {}, 26, 8, 2.01, None),
        ("jamba", {}, 32, 4, 51.6, 12.1),
        ("ernie4_5_moe", {}, 28, 28, 21.8, 3.35),
        ("mixtral", {}, 32, 32, 46.7, 12.9),
        ("qwen3_next", {}, 48, 12, 79.7, 3.9),
        ("deepseek_v3", {}, 61, 61, 671.0, 37.6),
        ("gpt_oss", {}, 36, 36, 116.8, 5.7),
        ("gpt_neox", PYTHIA, 32, 32, 6.86, None),
        ("gpt2", {}, 12, 12, 0.124, None),
        ("opt", {}, 12, 12, 0.125, None),
        ("phi", {}, 24, 24, 1.42, None),
        ("llama", LLAMA, 32, 32, 8.03, None),
    ],
)
def test_weights_and_layers_of_attention_are_the_models(
    kind: str,
    changes: dict[str, Any],
    layers: int,
    attending: int,
    billions: float,
    met: float | None,
    tmp_path: Path,
) -> None:
    """`met`: of the published weights that a token meets, those with both embeddings, as their
    authors count.
    """
    found = count_model(write(tmp_path, kind, **changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
        )
    assert found.weights == sum(weight.numel() for weight in model.parameters())
    assert found.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert (found.layers, found.attention_layers) == (layers, attending)
    if met is not None:
        outside = found.hidden * found.vocabulary * (1 if found.tied else 2)
        assert (found.active + outside) / 1e9 == pytest.approx(met, rel=0.02)


def test_the_counts_of_a_dense_model_are_its_known_shape(tmp_path: Path) -> None:
    counted = count_model(write(tmp_path, "llama", **LLAMA))
    known = KNOWN_MODELS["llama-3-8b"]
    names = (
        "hidden",
        "layers",
        "query_heads",
        "key_value_heads",
        "head_dim",
        "feed_forward",
        "vocabulary",
        "tied",
        "kinds",
    )
    assert [getattr(counted, name) for name in names] == [getattr(known, name) for name in names]
    assert counted.parameters == pytest.approx(known.parameters, rel=1e-4)
    assert counted.active_share == 1.0
    assert counted.layer_parameters == pytest.approx(known.layer_parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "window", "windowed"),
    [
        ({"model_type": "gemma2"}, 4096, 16),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, 1024, 27),
        ({"model_type": "cohere2"}, 4096, 24),
        ({"model_type": "olmo3"}, 4096, 24),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20}, 4096, 12),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, None, 0),
        ({"model_type": "mistral", "sliding_window": 4096}, 4096, 32),
        ({"model_type": "llama"}, None, 0),
    ],
)
def test_what_a_config_does_not_say_is_that_of_its_family(
    config: dict[str, Any], window: int | None, windowed: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    found = count_model(tmp_path / "config.json")
    assert (found.window, found.windowed_layers) == (window, windowed)


def test_the_text_of_a_larger_model_is_counted(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found = count_model(tmp_path)
    assert (
        found.query_heads,
        found.key_value_heads,
        found.head_dim,
        found.tied,
        found.head_norms,
    ) == (8, 4, 256, True, True)
    assert found.kinds == ((None, 5), (1024, 29))


def test_numbers_that_json_does_not_have_are_read(tmp_path: Path) -> None:
    write(tmp_path, "bamba", attn_layer_indices=[9, 18, 27])
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    assert count_model(tmp_path).attention_layers == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gemma9"},
            "makes no 'gemma9' model of .* pip install --upgrade transformers",
        ),
        ({}, "must be an object with the key 'model_type'"),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 0},
            "is no config that 'gemma3_text' models take",
        ),
        ({"model_type": "llama", "num_attention_heads": 0}, "division|modulo|no config"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "^[^ ]*: a sliding window of 0 keys hides everything",
        ),
        ({"model_type": "t5"}, "distca does not support t5 models"),
        (
            {"model_type": "mamba"},
            "distca does not support mamba models|causal attention in no layer",
        ),
        ({"model_type": "bert"}, "causal attention in no layer.* need is_decoder=True"),
        ({"model_type": "llama4_text"}, "attend in chunks"),
        ({"model_type": "hrm_text"}, "counted in one stack of layers"),
        (
            {"model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": None},
            "and a token meets",
        ),
    ],
)
def test_what_is_not_counted_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        count_model(tmp_path)


def test_experts_take_the_time_of_those_that_are_used(tmp_path: Path) -> None:
    """Of eight experts two are used: the time of two, and the weights of all."""
    sizes = {**LLAMA, "vocab_size": 32000}
    shapes = [
        count_model(write(tmp_path / kind, kind, **{**sizes, **changes}))
        for kind, changes in (
            ("mixtral", {"sliding_window": None}),
            ("llama", {"intermediate_size": 2 * 14336}),
        )
    ]
    tokens = torch.full((1,), 65536.0).numpy()
    sparse, dense = (
        estimate_layer_seconds(Setting(shape, find_hardware("h100"), 8, 16384), tokens)
        for shape in shapes
    )
    assert sparse == pytest.approx(dense, rel=0.01)
    assert shapes[0].parameters / shapes[1].parameters == pytest.approx(46.7 / 12.9, rel=0.02)


RUN = (
    "qwen3_5_text",
    "olmo_hybrid",
    "zamba2",
    "nemotron_h",
    "gemma3_text",
    "mixtral",
    "mistral",
    "gpt2",
    "diffllama",
    "longcat_flash",
)


@pytest.mark.parametrize("kind", in_turn(RUN, 3))
def test_attention_is_counted_as_often_as_it_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "models")
    from tiny import build, tiny_config

    calls = []

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        calls.append(
            (query.shape[1], (query.shape[3] + value.shape[3]) // 2, options.get("sliding_window"))
        )
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("counted", attend)
    AttentionMaskInterface.register("counted", sdpa_mask)
    tiny_config(kind).save_pretrained(tmp_path)
    found = count_model(tmp_path)
    model = build(kind, "counted", torch.float32)
    model(input_ids=torch.arange(1, 13)[None], use_cache=False)
    assert len(calls) == found.attention_layers
    assert {(heads, width) for heads, width, _ in calls} == {(found.query_heads, found.head_dim)}
    assert sum(window is not None for *_, window in calls) == found.windowed_layers
    assert sum(weight.numel() for weight in model.parameters()) == found.weights
