"""`hf_distca.deal` with hybrid models: documents that are cut over ranks train as whole documents
on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from compare import Outcome, alone, difference, documents
from dealt_hybrids import BATCHES, Case, Run, run_a_share, train, train_on_other_documents
from tiny import build, with_long_memory

from ranks import RankPool
from turns import in_turn

THREE = ("qwen3_next", "olmo_hybrid", "nemotron_h")


def cases() -> list[Case]:
    found = [Case(name) for name in (*THREE, "kimi_linear", "lfm2")]
    for name in THREE:
        found += [
            Case(name, 3),
            Case(name, checkpointing=False),
            Case(name, checkpointing=True),
            Case(name, ping_pong=True),
        ]
    # Transformers 5.23 loads no OLMo-hybrid with a DistributedConfig.
    for name in ("qwen3_next", "nemotron_h", "bamba"):
        found += [
            Case(name, sharded=True),
            Case(name, 3, checkpointing=False, sharded=True, ping_pong=True),
        ]
    for name in ("qwen3_5_text", "nemotron_h"):
        found += [Case(name, ranks, steps=10) for ranks in (1, 2, 3, 4)]
    found += [
        Case("qwen3_5_text", sharded=True),
        Case("qwen3_5_text", lora=True, checkpointing=False),
    ]
    found.append(Case("nemotron_h", evaluation=True))
    found.append(Case("qwen3_5_text", 4, checkpointing=True, ping_pong=True))
    found.append(Case("nemotron_h", 4, lora=True, checkpointing=False))
    return found


FAST = (
    Case("qwen3_next", checkpointing=True),
    Case("nemotron_h", 3, checkpointing=False, sharded=True, ping_pong=True),
)


@cache
def one_process(
    model_type: str, lora: bool = False, evaluation: bool = False, steps: int = 3
) -> Run:
    """Each document alone, under transformers' own attention."""
    return train(0, Case(model_type, 1, lora=lora, evaluation=evaluation, steps=steps), "sdpa")


@pytest.mark.parametrize(
    "case",
    in_turn(
        [
            pytest.param(case, marks=[] if case in FAST else pytest.mark.slow, id=str(case))
            for case in cases()
        ],
        2,
    ),
)
def test_cut_documents_train_as_whole_ones_on_one_process(
    case: Case, rank_pool: Callable[[int], RankPool]
) -> None:
    want = one_process(case.model_type, case.lora, case.evaluation, case.steps)
    ranks: list[Run] = rank_pool(case.ranks)(train, case, timeout=300)
    assert len(want.losses) == 2 * case.steps + case.evaluation
    for run in ranks:
        assert run.losses == pytest.approx(want.losses, rel=1e-4)
        cut = bool(run.spanning), bool(run.state_exchanges), run.states_mb > 0
        assert cut == (case.ranks > 1,) * 3
        assert run.halves == case.ping_pong
    for name, weight in want.weights.items():
        difference = (ranks[0].weights[name] - weight).norm() / weight.norm().clamp_min(1e-3)
        assert difference < 1e-4, name


@pytest.mark.parametrize(
    "model_type", in_turn(["nemotron_h", "qwen3_next", "lfm2", "bamba"], 8, ["nemotron_h"])
)
def test_bfloat16_rounds_as_on_one_process(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """Both are equally far from float32: losses, as norms of gradients are a single number that may
    be right by chance.
    """
    exact = np.array(one_process(model_type).losses[::2])
    alone = np.array(train(0, Case(model_type, 1, bf16=True), "sdpa").losses[::2])
    together = np.array(
        rank_pool(2)(train, Case(model_type, bf16=True), timeout=300)[0].losses[::2]
    )
    assert 0 < np.linalg.norm(together / exact - 1) <= 2 * np.linalg.norm(alone / exact - 1)


@pytest.mark.parametrize("model_type", in_turn(["nemotron_h", "olmo_hybrid"], 4))
def test_recomputes_exchange_no_states(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """Two exchanges a recurrent layer, forward and backward, however it is checkpointed; none where
    no document is cut.
    """
    layers = sum("conv1d.weight" in name for name in one_process(model_type).weights)
    for checkpointing in (None, False, True):
        for run in rank_pool(2)(train, Case(model_type, checkpointing=checkpointing)):
            assert run.state_exchanges == 2 * 2 * layers * Case.steps
    for run in rank_pool(2)(train, Case(model_type, checkpointing=False), "distca", (96, 96) * 6):
        assert not run.spanning
        assert not run.state_exchanges


@pytest.mark.parametrize("model_type", in_turn(["nemotron_h", "olmo_hybrid", "lfm2"], 3))
def test_a_global_batch_equals_its_documents(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    lengths = (150, 3, 20, 9, 1, 3)
    model = with_long_memory(build(model_type, "sdpa", torch.float64))
    want = alone(model, documents(lengths))
    for loss, grads, exchanges in rank_pool(3)(run_a_share, model_type, lengths):
        assert exchanges
        value, what = difference(
            Outcome(loss, [], grads),
            Outcome(want.loss, [], {name: want.grads[name] for name in grads}),
        )
        assert value < 1e-4, f"{what} differs by {value:.1e}"


@pytest.mark.parametrize("what", BATCHES)
@pytest.mark.parametrize("model_type", in_turn(["nemotron_h", "lfm2"], 2))
def test_ranks_with_other_documents_say_so(
    model_type: str, what: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """Before states are under way: messages of unequal sizes would end a process."""
    pool = rank_pool(2)
    try:
        messages = pool(train_on_other_documents, model_type, what, timeout=60)
    finally:
        pool.close()
    if what == "parts of other documents":
        assert all(
            "different global batches in micro-batch 1" in message for message in messages
        ), messages
    else:
        parted = messages[1 if what == "whole documents" else 0]
        assert "different documents in recurrent layers (0: all whole," in parted, messages
        assert parted.endswith("use the same data set and collator on every rank."), messages
