"""distca under the name of another attention: trainers with closed lists get it, and what it cannot
keep is refused.
"""

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
def restored() -> Iterator[None]:
    """Put back afterwards what standing in changes in the process."""
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
    with restored():
        yield


def trained(rank: int, name: str, standing_in: bool) -> tuple[list[float], bool, str]:
    """Losses and gradient norms of a run under a name, whether distca had figures, and the name
    that the model has.
    """
    with restored():
        if standing_in:
            hf_distca.configure(instead_of=name)
        trainer = make_trainer(name, rows(6), config=settings(), max_steps=3, bf16=False)
        trainer.train()
        figures = any(
            "distca/imbalance_estimated_before" in row for row in trainer.state.log_history
        )
        return losses(trainer), figures, trainer.model.config._attn_implementation


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
def test_a_trainer_that_takes_no_other_name_has_distca(rank_pool: RankPools, name: str) -> None:
    """flash-attn is installed on no machine that runs this test: transformers must not look for
    it.
    """
    plain = rank_pool(2)(trained, "sdpa", False)
    ours = rank_pool(2)(trained, name, True)
    for (wanted, without, _), (got, figures, seen) in zip(plain, ours, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)
        assert figures
        assert not without
        assert seen == name


def test_it_says_once_what_it_replaced(caplog: pytest.LogCaptureFixture) -> None:
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
def test_it_stands_in_for_no_attention_that_it_cannot_replace(name: str) -> None:
    with pytest.raises(UnsupportedError, match="distca cannot stand in for"):
        hf_distca.configure(instead_of=name)


def test_the_parts_of_a_model_that_have_it_are_known() -> None:
    hf_distca.configure(instead_of="flash_attention_2")
    model = tiny_llama("flash_attention_2")
    assert find_distca_configs(model) == [model.config]
    assert find_distca_configs(tiny_llama("sdpa")) == []
    model.set_attn_implementation("sdpa")
    assert find_distca_configs(model) == []
    model.set_attn_implementation("flash_attention_2")
    assert find_distca_configs(model) == [model.config]


def over_ranks(*args: Any, **kwargs: Any) -> Any:
    """As packages write them that cut sequences over ranks."""
    return distca_attention(*args, **kwargs)


def wrapped_by_an_instance() -> None:
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = partial(over_ranks, causal=True)


def wrapped_for_all() -> None:
    AttentionInterface.register("flash_attention_2", over_ranks)


def flash_attention_replaced() -> None:
    flash._flash_attention_forward = over_ranks


CHANGES = [wrapped_by_an_instance, wrapped_for_all, flash_attention_replaced]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prepared", [True, False])
def test_sequences_cut_by_somebody_else_are_refused(
    change: Callable[[], None], prepared: bool
) -> None:
    hf_distca.configure(instead_of="flash_attention_2")
    model = tiny_llama("flash_attention_2")
    ids = torch.arange(8)[None]
    model(input_ids=ids)
    change()
    with pytest.raises(
        UnsupportedError, match=r"test_stand_in\.over_ranks has been put in front of it"
    ):
        hf_distca.prepare(model) if prepared else model(input_ids=ids)


@pytest.mark.parametrize("change", CHANGES)
def test_it_stands_in_front_of_nobody_else(change: Callable[[], None]) -> None:
    change()
    with pytest.raises(
        UnsupportedError, match=r"test_stand_in\.over_ranks has been put in its place"
    ):
        hf_distca.configure(instead_of="flash_attention_2")


@pytest.mark.parametrize("name", ["distca", "flash_attention_2"])
def test_nothing_of_it_is_written_into_saved_configurations(tmp_path: Path, name: str) -> None:
    """Also after training: a model goes to people who do not have the package."""
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


# Peft asks for it.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_says_nothing_of_it_either(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    model = peft.get_peft_model(tiny_llama("distca"), peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    for path in tmp_path.glob("*.*"):
        assert b"distca" not in path.read_bytes(), path.name
