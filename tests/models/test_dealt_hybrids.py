"""`hf_distca.deal` with hybrid models: cut documents train like whole documents."""

from __future__ import annotations

from functools import cache

import pytest
from dealt_hybrids import BATCHES, Case, Run, train, train_on_other_documents

from ranks import RankPools
from turns import in_turn

THREE = ("qwen3_next", "olmo_hybrid", "nemotron_h")


def list_cases() -> list[Case]:
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
def train_alone(
    model_type: str, lora: bool = False, evaluation: bool = False, steps: int = 3
) -> Run:
    """Train on each document alone, under transformers' own attention."""
    return train(0, Case(model_type, 1, lora=lora, evaluation=evaluation, steps=steps), "sdpa")


@pytest.mark.parametrize(
    "case",
    in_turn(
        [
            pytest.param(case, marks=[] if case in FAST else pytest.mark.slow, id=str(case))
            for case in list_cases()
        ],
        2,
    ),
)
def test_cut_documents_train_like_whole_documents_on_one_process(
    case: Case, rank_pool: RankPools
) -> None:
    want = train_alone(case.model_type, case.lora, case.evaluation, case.steps)
    ranks: list[Run] = rank_pool(case.ranks)(train, case, timeout=300)
    assert len(want.losses) == 2 * case.steps + case.evaluation
    for run in ranks:
        assert run.losses == pytest.approx(want.losses, rel=1e-4)
        assert (bool(run.spanning), run.states_mb > 0) == (case.ranks > 1,) * 2
        # Convolutions and recurrences (those with A_log) each have an exchange in forward and in
        # backward, but not in recomputes. Evaluation has no backward.
        forward = sum(
            name.endswith(("conv1d.weight", "conv.conv.weight", "A_log")) for name in want.weights
        )
        assert run.state_exchanges == (2 * forward * case.steps if case.ranks > 1 else 0)
        assert bool(run.spanning_evaluations) == (case.evaluation and case.ranks > 1)
        assert run.evaluation_exchanges == forward * run.spanning_evaluations
        assert run.halves == case.ping_pong
    for name, weight in want.weights.items():
        difference = (ranks[0].weights[name] - weight).norm() / weight.norm().clamp_min(1e-3)
        assert difference < 1e-4, name


@pytest.mark.parametrize("what", BATCHES)
@pytest.mark.parametrize("model_type", in_turn(["nemotron_h", "lfm2"], 2))
def test_ranks_with_different_documents_raise_desync_errors(
    model_type: str, what: str, rank_pool: RankPools
) -> None:
    """The error comes before states are sent: messages of unequal sizes would end a process."""
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
        for message in messages:
            assert "different documents in recurrent layers (0: all whole," in message, messages
            assert message.endswith("use the same data set and collator on every rank."), messages
