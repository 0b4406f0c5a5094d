"""Entry points that load distca in other trainers: one that verl reads, and a class that axolotl
finds by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import forks
import hf_distca
from hf_distca import ConfigError, UnsupportedError
from ranks import RankPool
from tiny_runs import COMMON, documents, losses, tiny_llama


def load_plugin() -> Any:
    """Load the plugin with a fake of the part of axolotl that it needs: axolotl's pinned versions
    conflict with these tests.
    """
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("axolotl", "axolotl.integrations"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, base.__name__, base)
        return import_module("hf_distca.plugins.axolotl").DistCAPlugin()


def train_under_its_name(result: Path) -> None:
    config = {"attn_implementation": "distca", "sample_packing": True}
    found = load_plugin()
    found.register(config)

    from hf_distca.integration.attention_names import find_distca_configs

    model = tiny_llama(config["attn_implementation"])
    (callback,) = found.add_callbacks_pre_trainer(config, model)
    asking = len(find_distca_configs(model))
    result.write_text(f"{config['attn_implementation']} {asking} {type(callback).__name__}")


PACKING, OURS = {"sample_packing": True}, {"attn_implementation": "distca"}
NEAREST = "distca: there is no setting 'pingpong'; the nearest is 'ping_pong'."


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"attn_implementation": "eager"}, UnsupportedError, "cannot replace .*: eager"),
        ({}, UnsupportedError, "cannot replace attn_implementation: None"),
        ({**OURS, "context_parallel_size": 2}, UnsupportedError, "_size: 2 cuts sequences"),
        (
            {**PACKING, "distca": {"tokens_per_rank": 64}},
            UnsupportedError,
            "sample_packing: true .* Remove one of the two settings",
        ),
        ({**OURS, "distca": {"pingpong": True}}, ConfigError, NEAREST),
        ({**OURS, "distca": {"tokens_per_rank": 0}}, ConfigError, "=0 must be at least 1"),
        ({**OURS, "distca": True}, ConfigError, "distca: True should be names and values of"),
    ],
)
def test_configuration_of_axolotl_that_distca_cannot_run_is_refused(
    config: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        load_plugin().register(config)


def test_configuration_class_of_axolotl_keeps_the_distca_settings() -> None:
    """axolotl builds this class from the classes that plugins name."""
    module, _, name = load_plugin().get_input_args().rpartition(".")
    values = getattr(import_module(module), name)(
        distca={"ping_pong": True, "tokens_per_rank": 16384}
    ).model_dump()
    assert values == {"distca": {"ping_pong": True, "tokens_per_rank": 16384}}


class AxolotlTrainer(Trainer):
    """Omits, like axolotl's Trainer, a flag that a loss over all ranks needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


def train_dealt(rank: int, ranks: int, folder: str) -> tuple[list[float], hf_distca.DistCAConfig]:
    """Call the plugin as axolotl does, with the arguments that axolotl gives a Trainer."""
    config: dict[str, Any] = {**OURS, "distca": {"tokens_per_rank": 96 // ranks, "tile": 8}}
    found = load_plugin()
    found.register(config)
    model = tiny_llama(config["attn_implementation"])
    of_axolotl = {"average_tokens_across_devices": False, "max_steps": 50}
    of_axolotl |= {"num_train_epochs": 2, "learning_rate": 1e-2}
    arguments = TrainingArguments(**{**COMMON, "output_dir": folder, **of_axolotl})
    data = Dataset.from_dict({"input_ids": documents(200, 7, 33, 90, 64, 12, 150)})
    callbacks = found.add_callbacks_pre_trainer(config, model)
    trainer = AxolotlTrainer(model, arguments, train_dataset=data, callbacks=callbacks)
    found.post_trainer_create(config, trainer)
    trainer.train()
    return losses(trainer), callbacks[0].config


@pytest.mark.slow
def test_axolotl_plugin_deals_documents_as_the_configuration_sets(tmp_path: Path) -> None:
    """Two ranks that share a long document give the losses of one. Training lasts for its epochs,
    not for the steps that axolotl counted.
    """
    results = []
    for ranks in (1, 2):
        with closing(RankPool(ranks)) as pool:
            results.append(pool(train_dealt, ranks, str(tmp_path))[0])
    (alone, config), (together, _) = results
    assert len(alone) == 2 * 2 * 5
    assert together == pytest.approx(alone, rel=1e-5)
    assert config == hf_distca.DistCAConfig(tile=8)


def load_as_verl_does(result: Path) -> None:
    (found,) = [one for one in entry_points(group="verl.plugins") if one.name == "hf_distca"]
    found.load()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    result.write_text(str("distca" in ALL_ATTENTION_FUNCTIONS))


@pytest.mark.parametrize(
    ("function", "result"),
    [(train_under_its_name, "flash_attention_2 1 DistCACallback"), (load_as_verl_does, "True")],
)
def test_axolotl_and_verl_find_distca(
    function: Callable[[Path], None], result: str, tmp_path: Path
) -> None:
    """axolotl trains packed samples under an attention name that it accepts. verl finds the entry
    point.
    """
    process = forks.start(function, tmp_path / "result")
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "result").read_text() == result
