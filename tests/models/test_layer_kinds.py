"""The plan keys that a config gives are those that layers request in their first forward."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from hf_distca import ConfigError
from hf_distca.agreement.announce import PlanKey
from hf_distca.integration.handle import ForwardBatch
from hf_distca.integration.layer_kinds import list_layer_keys
from hf_distca.schedule.cost import AttentionShape

FAMILIES = (
    "llama gemma gemma2 gemma3_text gemma4_text gpt_oss gpt2 gpt_neox deepseek_v2 deepseek_v3 "
    "qwen2 qwen3 qwen3_moe mistral mixtral ministral phi3 olmo3 cohere2 llama4_text "
    "longcat_flash glm4_moe smollm3 minicpm3 modernbert-decoder gemma3 exaone4 opt jetmoe "
)


@pytest.mark.parametrize("family", FAMILIES.split())
def test_listed_plan_keys_are_those_that_layers_request(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()
    key = ForwardBatch.make_key

    def watched(self: ForwardBatch, *args: Any) -> PlanKey:
        asked.add(made := key(self, *args))
        return made

    monkeypatch.setattr(ForwardBatch, "make_key", watched)
    model = tiny.build(family, "distca", torch.float32)
    ids = torch.randint(32, 96, (1, 24))
    model(input_ids=ids, use_cache=False)
    keys = list_layer_keys(model, None, "cpu")
    assert set(keys) == asked
    assert len(keys) == len(asked)
    assert list_layer_keys(model.config, None, "cpu") == keys
    plain = [key.window is None for key in keys]
    assert plain == sorted(plain, reverse=True)  # keys without a window are first


def test_element_bytes_are_those_of_the_dtype_of_attention() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16"
    )
    (key,) = list_layer_keys(config, None, "cuda")
    assert key == PlanKey(AttentionShape(4, 2, 16, 16, 2), "cuda")
    assert list_layer_keys(config, torch.float64, "cuda")[0].shape.element_bytes == 8
    assert list_layer_keys(LlamaConfig(), None, "cpu")[0].shape.element_bytes == 4


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 6,
}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(**SMALL, sliding_window=None), [None]),
        (Qwen2Config(**SMALL, sliding_window=40), [None]),  # use_sliding_window is False
        (
            Qwen2Config(**SMALL, sliding_window=40, use_sliding_window=True, max_window_layers=3),
            [None, 40],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_windows_follow_the_layer_types_of_a_config(
    config: PreTrainedConfig, windows: list[int | None]
) -> None:
    assert [key.window for key in list_layer_keys(config, None, "cpu")] == windows


def test_latent_attention_has_separate_key_and_value_widths() -> None:
    config = DeepseekV3Config(
        num_attention_heads=8,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        kv_lora_rank=12,
    )
    assert list_layer_keys(config, None, "cpu")[0].shape == AttentionShape(8, 8, 32, 16, 4)


def test_configs_without_attention_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"must have one of num_attention_heads.*head_dim.*Give shapes="
    ):
        list_layer_keys(PreTrainedConfig(), None, "cpu")
    with pytest.raises(ConfigError, match="model=str is neither a model nor"):
        list_layer_keys("llama", None, "cpu")
    config = LlamaConfig()
    config.layer_types = ["linear_attention", "conv", "conv"]
    with pytest.raises(
        ConfigError, match="layer_types linear_attention, conv, and none of them is attention"
    ):
        list_layer_keys(config, None, "cpu")
