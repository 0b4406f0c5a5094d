"""What a config.json need not say: the defaults of its family, as predictions read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_distca.doctor.model import with_defaults
from hf_distca.errors import ConfigError
from hf_distca.simulate.models import find_model

SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
SIZES |= {"intermediate_size": 14336, "vocab_size": 128256}


@pytest.mark.parametrize(
    ("config", "window", "windowed"),
    [
        ({"model_type": "gemma2"}, 4096, 16),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, 1024, 27),
        ({"model_type": "cohere2"}, 4096, 24),
        ({"model_type": "olmo3"}, 4096, 24),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20}, 4096, 12),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, None, 0),
        ({"model_type": "llama"}, None, 0),
    ],
)
def test_what_a_config_does_not_say_is_that_of_its_family(
    config: dict[str, Any], window: int | None, windowed: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **config}))
    found = find_model(str(path), with_defaults)
    assert (found.window, found.windowed_layers) == (window, windowed)


def test_the_text_of_a_larger_model_need_not_say_much(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found = find_model(str(path), with_defaults)
    assert (found.query_heads, found.key_value_heads, found.head_dim, found.tied) == (8, 4, 256, True)
    assert found.kinds == ((None, 5), (1024, 29))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma9", "sliding_window": 8}, "does not say in which layers"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "is no config that 'gemma3_text' models take"),
        ({"model_type": "mixtral"}, "mixture of experts"),
    ],
)
def test_what_cannot_be_read(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **config}))
    with pytest.raises(ConfigError, match=message):
        find_model(str(path), with_defaults)
