"""Features that act once per row are refused on packed rows, and work on rows of one document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import Trainer

import hf_distca
from ranks import RankPools
from tiny_runs import documents, exact_arguments, settings, tiny_llama

LENGTHS = (40, 24, 30, 34)
TOKENS = 64
MARK, CAUSAL = [5, 6], {"task_type": "CAUSAL_LM"}


def make_rows() -> Dataset:
    ids = [[*some[:9], *MARK, *some[11:]] for some in documents(*LENGTHS)]
    return Dataset.from_dict({"input_ids": ids})


def adapt(adapter: PeftConfig) -> torch.nn.Module:
    return get_peft_model(tiny_llama("distca"), adapter)


NOISE, ADAPTER = "neftune_noise_alpha=5.0: ", r"alora_invocation_tokens=\[5, 6\]: the adapter looks"
# By case: a model, changes of arguments, and the error.
CASES: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], str]] = {
    "noise": (lambda: tiny_llama("distca"), {"neftune_noise_alpha": 5.0}, NOISE),
    "noise and adapter": (
        lambda: adapt(LoraConfig(**CAUSAL, r=2)),
        {"neftune_noise_alpha": 5.0},
        NOISE,
    ),
    "mark": (
        lambda: adapt(LoraConfig(**CAUSAL, r=2, alora_invocation_tokens=MARK)),
        {},
        ADAPTER,
    ),
    "prompt": (
        lambda: adapt(PromptTuningConfig(**CAUSAL, num_virtual_tokens=3)),
        {},
        "PROMPT_TUNING puts virtual tokens",
    ),
    "prefix": (
        lambda: adapt(PrefixTuningConfig(**CAUSAL, num_virtual_tokens=3)),
        {},
        "PREFIX_TUNING puts virtual tokens",
    ),
}


def make_trainer(name: str, **changes: Any) -> Trainer:
    disable_progress_bars()
    hf_distca.configure(settings())
    model, of_case, _ = CASES[name]
    args = exact_arguments(max_steps=1, **of_case, **changes)
    return Trainer(model(), args, train_dataset=make_rows())


def deal(name: str, ranks: int = 1) -> Trainer:
    return hf_distca.deal(make_trainer(name), TOKENS // ranks)


def pack(name: str, size: int = 2) -> Trainer:
    trainer = make_trainer(name, per_device_train_batch_size=size)
    trainer.data_collator = hf_distca.PackingCollator()
    return trainer


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize("door", [deal, pack])
@pytest.mark.parametrize("name", CASES)
def test_features_that_act_once_per_row_are_refused_on_packed_rows(
    name: str, door: Callable[[str], Trainer]
) -> None:
    named = CASES[name][2]
    if name == "prompt" and door is pack:
        named = "the documents have 64 tokens and the batch has 1 x 67"
    elif name == "prefix" and door is pack:
        named = "instead of prefix tuning, use another adapter"
    with pytest.raises(hf_distca.DistCAError, match=named):
        door(name).train()


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("name", ["noise", "mark"])
def test_features_that_act_once_per_row_train_on_rows_of_one_document(name: str) -> None:
    assert pack(name, size=1).train().training_loss > 0


def catch_refusal(rank: int, name: str) -> str:
    with pytest.raises(hf_distca.UnsupportedError) as refused:
        deal(name, ranks=2).train()
    return str(refused.value)


def test_neftune_noise_on_shares_is_refused_on_all_ranks(rank_pool: RankPools) -> None:
    for said in rank_pool(2)(catch_refusal, "noise"):
        assert said.startswith(NOISE)
