"""Counted weights and layers of a model equal hand counts, published numbers, and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_distca.errors import DistCAError
from hf_distca.tools.advise.counting import count_model
from hf_distca.tools.advise.known_models import KNOWN_MODELS
from turns import in_turn

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def write(folder: Path, kind: str, **changes: Any) -> Path:
    AutoConfig.for_model(kind, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "attending", "billions", "embedded"),
    [
        ("qwen3_next", 12, 3.9, 1),
        ("jamba", 4, 12.1, 1),
        ("mixtral", 32, 12.9, 1),
        ("gpt_oss", 36, 5.7, 1),
        ("deepseek_v3", 61, 37.6, 1),
        ("ernie4_5_moe", 28, 3.35, 0),
        ("zamba2", 9, 4.06, 0),  # 2.48 billion weights, some of them shared by several layers
        ("recurrent_gemma", 8, 2.01, 0),
        ("gpt2", 12, 0.124, 0),
    ],
)
def test_counted_weights_and_attention_layers_equal_known_numbers(
    kind: str, attending: int, billions: float, embedded: int, tmp_path: Path
) -> None:
    """Published weights of mixtures of experts are those that a token uses. Some include the input
    embedding (`embedded`), which the count leaves out.
    """
    found = count_model(write(tmp_path, kind))
    assert sum(count for *_, count in found.layers) == attending
    text = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    embedding = embedded * text.vocab_size * text.hidden_size
    assert (found.met_weights + embedding) / 1e9 == pytest.approx(billions, rel=0.03)


def test_counts_of_a_dense_model_equal_its_entry_in_known_models(tmp_path: Path) -> None:
    counted, known = count_model(write(tmp_path, "llama", **LLAMA)), KNOWN_MODELS["llama-3-8b"]
    assert counted.layers == known.layers
    assert counted.met_weights == pytest.approx(known.met_weights, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "gemma2"}, [(None, 16), (4096, 16)]),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, [(None, 5), (1024, 27)]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20},
            [(None, 20), (4096, 12)],
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, [(4096, 32)]),
        (
            {
                "model_type": "gemma3",
                "text_config": {"hidden_size": 2560, "num_hidden_layers": 34},
            },
            [(None, 5), (4096, 29)],
        ),
    ],
)
def test_windows_of_layers_come_from_the_config_and_its_family(
    config: dict[str, Any], kinds: list[tuple[int | None, int]], tmp_path: Path
) -> None:
    own = {} if "text_config" in config else LLAMA
    (tmp_path / "config.json").write_text(json.dumps({**own, **config}))
    found = count_model(tmp_path / "config.json")
    assert [(window, count) for _, window, count in found.layers] == kinds


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma9"}, "model type `gemma9` .*pip install --upgrade"),
        ({"model_type": "t5"}, "distca does not support t5 models"),
        ({"model_type": "mamba"}, "distca does not support mamba models|no layer with|heads"),
        ({"model_type": "bert"}, "no layer with causal attention"),
        ({"model_type": "llama4_text"}, "attend in chunks"),
        (
            {"model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": None},
            "how many experts a token uses",
        ),
    ],
)
def test_models_that_cannot_be_counted_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DistCAError, match=message):
        count_model(tmp_path)


RUN = ("olmo_hybrid", "nemotron_h", "gemma3_text", "mixtral", "mistral", "longcat_flash")


@pytest.mark.parametrize("kind", in_turn(RUN, 2))
def test_counted_attention_layers_are_those_that_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "models")
    from tiny import build, tiny_config

    calls = []

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        calls.append((query.shape[1], options.get("sliding_window")))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("counted", attend)
    AttentionMaskInterface.register("counted", sdpa_mask)
    tiny_config(kind).save_pretrained(tmp_path)
    found = count_model(tmp_path)
    model = build(kind, "counted", torch.float32)
    model(input_ids=torch.arange(1, 13)[None], use_cache=False)
    counted = [
        (shape.query_heads, window is not None)
        for shape, window, count in found.layers
        for _ in range(count)
    ]
    assert sorted(counted) == sorted((heads, window is not None) for heads, window in calls)
