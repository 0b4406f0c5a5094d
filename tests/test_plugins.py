"""What loads distca in the processes of other trainers: an entry point, and a class that axolotl finds by its name."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import forks
from hf_distca import UnsupportedError


def plugin() -> Any:
    """The plugin, with the part of axolotl that it needs: no environment can have axolotl's pins and these."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("axolotl", "axolotl.integrations"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, base.__name__, base)
        return import_module("hf_distca.plugins.axolotl").DistCAPlugin()


def train_under_its_name(result: Path) -> None:
    config = {"attn_implementation": "distca", "sample_packing": True}
    found = plugin()
    found.register(config)
    from hf_distca.integration.loading import distca_configs
    from tiny_runs import tiny_llama

    model = tiny_llama(config["attn_implementation"])
    (callback,) = found.add_callbacks_pre_trainer(config, model)
    result.write_text(f"{config['attn_implementation']} {len(distca_configs(model))} {type(callback).__name__}")


def test_axolotl_trains_packed_samples_with_distca_under_a_name_that_it_takes(tmp_path: Path) -> None:
    process = forks.start(train_under_its_name, tmp_path / "result")
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "result").read_text() == "flash_attention_2 1 DistCACallback"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"attn_implementation": "eager"}, "attn_implementation: eager is not distca's"),
        ({}, "attn_implementation: None is not distca's"),
        ({"attn_implementation": "distca", "context_parallel_size": 2}, "context_parallel_size cuts sequences over ranks"),
    ],
)
def test_axolotl_is_told_what_distca_does_not_do(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        plugin().register(config)


def load_as_verl_does(result: Path) -> None:
    (found,) = [one for one in entry_points(group="verl.plugins") if one.name == "hf_distca"]
    found.load()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    result.write_text(str("distca" in ALL_ATTENTION_FUNCTIONS))


def test_verl_finds_distca_by_its_entry_point(tmp_path: Path) -> None:
    process = forks.start(load_as_verl_does, tmp_path / "result")
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "result").read_text() == "True"
