"""The figures of the balance in a loop of one's own, on two real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_parity import PAIRS, model_for
from test_trainer import FIGURES

import hf_distca
from ranks import RankPool
from tiny_runs import rows

SHARE = "distca/server_time_share"
OWN = {SHARE: 0.0, "distca/planning_ms": 0.0}  # each rank has its own


def loop(rank: int, implementation: str) -> list[dict[str, float]]:
    """What it returned before the first step, after two, right after that, and after two more with other settings."""
    config = hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS)
    hf_distca.configure(config)
    seen = [hf_distca.balance_figures(), two_steps(rank, implementation), hf_distca.balance_figures()]
    hf_distca.configure(config)
    return [*seen, two_steps(rank, implementation)]


def two_steps(rank: int, implementation: str) -> dict[str, float]:
    model = model_for(2, implementation, torch.float32)
    for row in rows(4)[rank::2]:
        model(**hf_distca.PackingCollator()([row]), use_cache=False).loss.backward()
    return hf_distca.balance_figures()


def test_figures_since_the_last_call(rank_pool: Callable[[int], RankPool]) -> None:
    ours = rank_pool(2)(loop, "distca")
    for before, trained, again, anew in ours:
        assert before == {}
        assert trained.keys() == FIGURES
        assert trained["distca/imbalance_estimated_before"] > 1.5
        assert trained["distca/imbalance_estimated_after"] < 1.2
        assert trained["distca/exchanged_mb_per_layer"] > 0
        assert 0 < trained[SHARE] < 1
        assert again == {}, "figures are given once"
        assert anew.keys() == FIGURES
    one, other = (trained for _, trained, _, _ in ours)
    assert one | OWN == other | OWN, "what is of all ranks is the same on all"


def test_no_figures_under_another_attention(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2)(loop, "sdpa") == [[{}] * 4] * 2


def readings(rank: int) -> list[hf_distca.Metrics]:
    """Before the first step, after two, right after that with another reader in between, and after two more."""
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS))
    seen = [hf_distca.metrics()]
    two_steps(rank, "distca")
    seen.append(hf_distca.metrics())
    hf_distca.balance_figures()
    seen.append(hf_distca.metrics())
    two_steps(rank, "distca")
    return [*seen, hf_distca.metrics()]


def test_metrics_are_sums_that_reading_does_not_change(rank_pool: Callable[[int], RankPool]) -> None:
    for before, trained, again, more in rank_pool(2)(readings):
        assert before.figures() == {}
        assert trained.balance == again.balance
        assert trained.figures().keys() == FIGURES
        assert (again - trained).figures() == {}
        assert (trained.balance.micro_batches, more.balance.micro_batches) == (1, 3), "the newest one is not measured yet"
        assert (more - again).figures().keys() == FIGURES
        assert 0 < (more - again).figures()[SHARE] < 1
        assert more.elapsed_seconds > again.elapsed_seconds >= trained.elapsed_seconds > 0
        # The first two micro-batches and the last two are alike.
        for figures in (more - again, more):
            for name in ("before", "after"):
                key = f"distca/imbalance_estimated_{name}"
                assert figures.figures()[key] == pytest.approx(trained.figures()[key])
