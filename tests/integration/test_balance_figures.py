"""The figures of the balance in a loop of one's own, on two real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_parity import PAIRS, model_for
from test_trainer import FIGURES

import hf_distca
from hf_distca.integration.reports import Metrics
from ranks import RankPool
from tiny_runs import rows

SHARE = "distca/server_time_share"
OWN = {SHARE: 0.0, "distca/planning_ms": 0.0}  # each rank has its own


def readings(rank: int, implementation: str) -> list[Metrics]:
    """Before the first step, after two, right after that, after two more, and after two with new settings."""
    config = hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS)
    hf_distca.configure(config)
    seen = [hf_distca.metrics(), two_steps(rank, implementation), hf_distca.metrics(), two_steps(rank, implementation)]
    hf_distca.configure(config)
    return [*seen, two_steps(rank, implementation)]


def two_steps(rank: int, implementation: str) -> Metrics:
    model = model_for(2, implementation, torch.float32)
    for row in rows(4)[rank::2]:
        model(**hf_distca.PackingCollator()([row]), use_cache=False).loss.backward()
    return hf_distca.metrics()


def test_metrics_are_sums_that_reading_does_not_change(rank_pool: Callable[[int], RankPool]) -> None:
    ours = rank_pool(2)(readings, "distca")
    for before, trained, again, more, anew in ours:
        assert before.figures() == {}
        assert trained.balance == again.balance
        assert trained.figures().keys() == anew.figures().keys() == FIGURES
        assert (again - trained).figures() == {}
        counted = trained.balance.micro_batches, more.balance.micro_batches, anew.balance.micro_batches
        assert counted == (1, 3, 1), "the newest one is not measured yet"
        figures = (more - again).figures()
        assert figures.keys() == FIGURES
        assert figures["distca/imbalance_estimated_before"] > 1.5
        assert figures["distca/imbalance_estimated_after"] < 1.2
        assert figures["distca/exchanged_mb_per_layer"] > 0
        assert 0 < figures[SHARE] < 1
        assert more.elapsed_seconds > again.elapsed_seconds >= trained.elapsed_seconds > 0
        # The first two micro-batches and the last two are alike.
        for later in (figures, more.figures()):
            for name in ("before", "after"):
                key = f"distca/imbalance_estimated_{name}"
                assert later[key] == pytest.approx(trained.figures()[key])
    one, other = (trained.figures() for _, trained, *_ in ours)
    assert one | OWN == other | OWN, "what is of all ranks is the same on all"


def test_no_figures_under_another_attention(rank_pool: Callable[[int], RankPool]) -> None:
    for seen in rank_pool(2)(readings, "sdpa"):
        assert [reading.figures() for reading in seen] == [{}] * 5
