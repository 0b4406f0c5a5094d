"""Unknown arguments, untested families and unsupported wrappers are refused or warned of."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from test_foreign_models import MineConfig, run_mine
from transformers import MixtralConfig, MixtralForCausalLM

import hf_distca
from hf_distca.integration import processes
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import (
    SIZES,
    logged,
    make_trainer,
    pack,
    rows,
    settings,
    share_documents,
    tiny_llama,
)

LOSSES: dict[str, Any] = {
    "return_token_accuracy": True,
    "use_token_scaling": True,
    "skip_logits": False,
    "mm_token_type_ids": torch.zeros(1, 12, dtype=torch.long),
    "some_flag_of_a_loss": True,
    "some_kind_of_loss": "sum",
}


@pytest.mark.parametrize("name", LOSSES)
def test_arguments_of_a_loss_do_not_change_attention(name: str) -> None:
    hf_distca.configure()
    given = {**pack(5, 7), "use_cache": False}
    hidden = tiny_llama("distca").model(**given, **{name: LOSSES[name]}).last_hidden_state
    assert torch.equal(hidden, tiny_llama("distca").model(**given).last_hidden_state)


@pytest.mark.parametrize(
    "value", [torch.ones(4), 3, 0.5, [torch.ones(4)]], ids=["tensor", "int", "float", "list"]
)
def test_unknown_argument_that_may_change_attention_is_refused(value: Any) -> None:
    hf_distca.configure()
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"LlamaAttention passes position_bias .*If it is for the loss",
    ):
        tiny_llama("distca")(**pack(5, 7), use_cache=False, position_bias=value)


def test_untested_model_family_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    processes.warn_once.cache_clear()
    for _ in range(2):
        run_mine("distca", {})
        tiny_llama("distca")(**pack(5, 7), use_cache=False)
    said = [
        record.getMessage() for record in caplog.records if "never compared" in record.getMessage()
    ]
    assert len(said) == 1
    assert said[0].startswith("distca was never compared with another attention on")
    assert f" {MineConfig.model_type} models. " in said[0]
    assert (
        'with attn_implementation="sdpa" and the same seed, and compare losses and gradient norms'
        in said[0]
    )


def test_data_parallel_replicas_are_refused() -> None:
    """The threads of DataParallel need GPUs, so a module with torch's name runs the model here."""
    parallel = types.ModuleType(torch.nn.parallel.parallel_apply.__module__)
    worker = "def worker(function, **arguments): return function(**arguments)"
    exec(
        compile(worker, torch.nn.parallel.parallel_apply.__code__.co_filename, "exec"),
        parallel.__dict__,
    )
    with pytest.raises(
        hf_distca.UnsupportedError, match=r"torch.nn.DataParallel .*torchrun or accelerate launch"
    ):
        parallel.worker(tiny_llama("distca"), **pack(5, 7), use_cache=False)


def build_moe() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        **SIZES,
        num_local_experts=2,
        num_experts_per_tok=1,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        attn_implementation="distca",
    )
    return MixtralForCausalLM(config).train()


def train_a_mixture(rank: int, ranks: int, watched: bool) -> list[str]:
    hf_distca.configure(settings())
    shares = share_documents((100, 20, 8, 64), 96, ranks)
    with logged() as said:
        trainer = make_trainer(
            "distca", shares, model=build_moe(), max_steps=2, train_sampling_strategy="sequential"
        )
        if not watched:
            trainer.remove_callback(hf_distca.DistCACallback)
        trainer.train()
    return [text for text in said if "router" in text]


@pytest.mark.parametrize("watched", [True, False])
def test_router_loss_on_several_ranks_warns_on_rank_0(rank_pool: RankPools, watched: bool) -> None:
    first, second = rank_pool(2)(train_a_mixture, 2, watched)
    (said,) = first
    assert "Each of 2 ranks computes this loss for its own tokens" in said
    assert "router_aux_loss_coef=0.5 counts 2 times. Divide it by 2" in said
    assert second == []
    assert train_a_mixture(0, 1, watched) == []


def test_each_trainer_runs_under_its_own_settings() -> None:
    hf_distca.configure(settings(tile=16))
    spans = settings(tile=32, documents_span_ranks=True)
    first = make_trainer("distca", rows(2), config=spans, max_steps=1)
    assert current_session().config == spans
    second = make_trainer(
        "distca", rows(2), distca=hf_distca.DistCACallback(record=False), max_steps=1
    )
    assert current_session().config == settings(tile=16), "the settings of configure"
    first.train()
    assert current_session().config == spans
    second.train()
    assert current_session().config == settings(tile=16)
    first.evaluate(rows(1))
    assert current_session().config == spans
    hf_distca.configure()
    make_trainer("distca", rows(2), distca=hf_distca.DistCACallback(record=False))
    assert current_session().config == hf_distca.DistCAConfig()
