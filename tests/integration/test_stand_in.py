"""distca under the name of another attention (`instead_of`), and the cases that are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers import modeling_flash_attention_utils as flash
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_distca
from hf_distca import UnsupportedError, borrowed
from hf_distca.integration import attention_names
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.hooks.attention import distca_attention
from ranks import RankPools
from tiny_runs import losses, make_trainer, rows, settings, tiny_llama


@contextmanager
def restore_attention() -> Iterator[None]:
    """Restore afterwards all that `instead_of` changes in the process."""
    interfaces = [
        interface._global_mapping for interface in (AttentionInterface, AttentionMaskInterface)
    ]
    kept = [dict(mapping) for mapping in [*interfaces, attention_names._registered]]
    passing, check = dict(borrowed._passing), PreTrainedModel._check_and_adjust_attn_implementation
    forward = flash._flash_attention_forward
    try:
        yield
    finally:
        for mapping, was in zip([*interfaces, attention_names._registered], kept, strict=True):
            mapping.clear()
            mapping.update(was)
        borrowed._passing.clear()
        borrowed._passing.update(passing)
        PreTrainedModel._check_and_adjust_attn_implementation = check
        flash._flash_attention_forward = forward
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("flash_attention_2", None)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restore_attention():
        yield


def train_under_name(rank: int, name: str, standing_in: bool) -> tuple[list[float], bool, str]:
    """Train under a name; return losses and gradient norms, whether distca logged figures, and the
    name in the model's config.
    """
    with restore_attention():
        if standing_in:
            hf_distca.configure(instead_of=name)
        trainer = make_trainer(name, rows(6), config=settings(), max_steps=3, bf16=False)
        trainer.train()
        figures = any(
            "distca/imbalance_estimated_before" in row for row in trainer.state.log_history
        )
        return losses(trainer), figures, trainer.model.config._attn_implementation


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
def test_instead_of_runs_distca_under_the_given_name(rank_pool: RankPools, name: str) -> None:
    """flash-attn is not installed for this test, so transformers must not look for it."""
    plain = rank_pool(2)(train_under_name, "sdpa", False)
    ours = rank_pool(2)(train_under_name, name, True)
    for (wanted, without, _), (got, figures, seen) in zip(plain, ours, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)
        assert figures
        assert not without
        assert seen == name


def test_instead_of_warns_once_of_the_replaced_function(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_distca"):
        hf_distca.configure(instead_of="flash_attention_2")
        hf_distca.configure(instead_of="flash_attention_2")
    (record,) = caplog.records
    assert 'stands in for attn_implementation="flash_attention_2"' in record.getMessage()
    assert (
        "transformers.integrations.flash_attention.flash_attention_forward" in record.getMessage()
    )
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is distca_attention


@pytest.mark.parametrize(
    "name",
    ["eager", "flex_attention", "paged|sdpa", "kernels-community/flash-attn2", "", "distca2"],
)
def test_instead_of_an_unsupported_attention_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="distca cannot stand in for"):
        hf_distca.configure(instead_of=name)


def test_find_distca_configs_follows_the_replaced_name() -> None:
    hf_distca.configure(instead_of="flash_attention_2")
    model = tiny_llama("flash_attention_2")
    assert find_distca_configs(model) == [model.config]
    assert find_distca_configs(tiny_llama("sdpa")) == []
    model.set_attn_implementation("sdpa")
    assert find_distca_configs(model) == []
    model.set_attn_implementation("flash_attention_2")
    assert find_distca_configs(model) == [model.config]


def over_ranks(*args: Any, **kwargs: Any) -> Any:
    """Stand for the attention of a package that cuts sequences over ranks."""
    return distca_attention(*args, **kwargs)


def wrap_in_the_instance() -> None:
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = partial(over_ranks, causal=True)


def wrap_for_all() -> None:
    AttentionInterface.register("flash_attention_2", over_ranks)


def replace_flash_attention() -> None:
    flash._flash_attention_forward = over_ranks


CHANGES = [wrap_in_the_instance, wrap_for_all, replace_flash_attention]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prepared", [True, False])
def test_attention_that_is_wrapped_after_its_replacement_is_refused(
    change: Callable[[], None], prepared: bool
) -> None:
    hf_distca.configure(instead_of="flash_attention_2")
    model = tiny_llama("flash_attention_2")
    ids = torch.arange(8)[None]
    model(input_ids=ids)
    change()
    with pytest.raises(
        UnsupportedError, match=r"a package has put .*test_stand_in\.over_ranks in front of it"
    ):
        hf_distca.prepare(model) if prepared else model(input_ids=ids)


@pytest.mark.parametrize("change", CHANGES)
def test_instead_of_a_wrapped_attention_is_refused(change: Callable[[], None]) -> None:
    change()
    with pytest.raises(
        UnsupportedError, match=r"test_stand_in\.over_ranks has been put in its place"
    ):
        hf_distca.configure(instead_of="flash_attention_2")


@pytest.mark.parametrize("name", ["distca", "flash_attention_2"])
def test_saved_configurations_do_not_name_distca(tmp_path: Path, name: str) -> None:
    """A trained model must load without the package."""
    if name != "distca":
        hf_distca.configure(instead_of=name)
    trainer = make_trainer(name, rows(2), folder=str(tmp_path / "run"), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.model.generation_config.save_pretrained(tmp_path / "model")
    written = sorted((tmp_path / "model").glob("*.json"))
    assert {"config.json", "generation_config.json"} <= {path.name for path in written}
    for path in written:
        assert "distca" not in path.read_text()
        assert name not in path.read_text()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert again.config._attn_implementation == "sdpa"


# Peft reads a deprecated property.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_saved_adapter_does_not_name_distca(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    model = peft.get_peft_model(tiny_llama("distca"), peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    for path in tmp_path.glob("*.*"):
        assert b"distca" not in path.read_bytes(), path.name
