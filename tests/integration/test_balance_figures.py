"""`hf_distca.metrics` in a training loop without a Trainer, on two real ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from test_parity import build_model
from test_trainer import FIGURES

import hf_distca
from hf_distca.agreement.batch_plan import MicroBatchPlan
from hf_distca.integration import reports
from hf_distca.integration.current_session import current_session
from hf_distca.integration.reports import Metrics
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from ranks import RankPools
from tiny_runs import PAIRS, pack, rows, settings

SHARE = "distca/server_time_share"
OWN = {SHARE: 0.0, "distca/planning_ms": 0.0}  # these two differ between ranks


def read_metrics(rank: int, implementation: str, gather: bool) -> list[Metrics]:
    """Read metrics before the first step, twice after two steps, after four, and after two with new
    settings.
    """
    config = settings()

    def two_steps() -> Metrics:
        model = build_model(2, implementation, torch.float32)
        for row in rows(4)[rank::2]:
            model(**hf_distca.PackingCollator()([row]), use_cache=False).loss.backward()
        return hf_distca.metrics(gather=gather)

    hf_distca.configure(config)
    seen = [
        hf_distca.metrics(gather=gather),
        two_steps(),
        hf_distca.metrics(gather=gather),
        two_steps(),
    ]
    hf_distca.configure(config)
    return [*seen, two_steps()]


@pytest.mark.parametrize("gather", [True, False])
def test_reading_metrics_does_not_change_their_sums(rank_pool: RankPools, gather: bool) -> None:
    ours = rank_pool(2)(read_metrics, "distca", gather)
    for before, trained, again, more, reset in ours:
        assert before.figures() == {}
        assert trained.balance == again.balance
        assert trained.figures().keys() == reset.figures().keys() == FIGURES
        assert (again - trained).figures() == {}
        counted = (
            trained.balance.micro_batches,
            more.balance.micro_batches,
            reset.balance.micro_batches,
        )
        assert counted == ((2, 4, 2) if gather else (1, 3, 1)), (
            "without gather=True, the newest micro-batch is not measured yet"
        )
        assert (reset - more) == reset, "configure starts new sums, so nothing is subtracted"
        figures = (more - again).figures()
        assert figures.keys() == FIGURES
        assert figures["distca/imbalance_estimated_before"] > 1.5
        assert figures["distca/imbalance_estimated_after"] < 1.2
        assert figures["distca/exchanged_mb_per_layer"] > 0
        assert 0 < figures[SHARE] < 1
        assert more.elapsed_seconds > again.elapsed_seconds >= trained.elapsed_seconds > 0
        # The last two micro-batches have the same lengths as the first two.
        for later in (figures, more.figures()):
            for name in ("before", "after"):
                key = f"distca/imbalance_estimated_{name}"
                assert later[key] == pytest.approx(trained.figures()[key])
    one, other = (trained.figures() for _, trained, *_ in ours)
    assert one | OWN == other | OWN, "figures over all ranks are the same on each rank"


def test_metrics_under_another_attention_have_no_figures(rank_pool: RankPools) -> None:
    for seen in rank_pool(2)(read_metrics, "sdpa", True):
        assert [reading.figures() for reading in seen] == [{}] * 5


def read_alone(rank: int) -> list[int]:
    """Read metrics after each step on rank 0 alone, and at the end on all ranks together."""
    hf_distca.configure(settings(timeout_seconds=20.0))
    model, seen = build_model(2, "distca", torch.float32), []
    for row in rows(6)[rank::2]:
        model(**hf_distca.PackingCollator()([row]), use_cache=False).loss.backward()
        if rank == 0:
            seen.append(hf_distca.metrics().balance.micro_batches)
    return [*seen, hf_distca.metrics(gather=True).balance.micro_batches]


def test_metrics_can_be_read_on_one_rank_alone(rank_pool: RankPools) -> None:
    assert rank_pool(2)(read_alone, timeout=60) == [[0, 1, 2, 3], [3]]


def measure_on_two_nodes(rank: int) -> tuple[dict[str, float], list[int], float]:
    """Return the figures, the bytes that each rank sent to other nodes, and the planned bytes of
    all ranks.
    """
    lengths = ([96], [32] * 3, [48, 48], [16] * 6)[rank]
    plans: list[MicroBatchPlan] = []
    with patch.dict(os.environ, GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2"):
        hf_distca.configure(settings(timeout_seconds=61.0))
        history = current_session().planner.history
        history.observer = lambda micro_batch, tally: plans.extend(micro_batch.plans)
        model = build_model(2, "distca", torch.float32)
        model(**pack(*lengths), use_cache=False).loss.backward()
        figures = hf_distca.metrics(gather=True).figures()
    (measured,) = plans
    load = PlanLoad(
        measured.plan, replace(PAIRS, shape=measured.key.shape), ranks=Ranks(per_node=2)
    )
    return figures, measured.between_bytes.tolist(), float(load.node_bytes.inter_node[0].sum())


def test_metrics_report_the_bytes_sent_between_nodes(rank_pool: RankPools) -> None:
    for figures, sent, planned in rank_pool(4)(measure_on_two_nodes):
        assert sum(sent) == 2 * planned > 0, "two layers, forward and backward"
        assert figures["distca/between_nodes_mb_per_layer"] == max(sent) / 2 / 1e6
        assert (
            figures["distca/exchanged_mb_per_layer"] > figures["distca/between_nodes_mb_per_layer"]
        )


def test_late_compiles_are_reported_only_if_any_occurred(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_distca.configure()
    before = hf_distca.metrics()
    ran = replace(before, balance=replace(before.balance, micro_batches=1))
    assert "distca/late_compiles" not in (ran - before).figures()
    monkeypatch.setattr(reports, "count_late_compiles", lambda: before.late_compiles + 2)
    later = replace(hf_distca.metrics(), balance=ran.balance)
    assert (later - before).figures()["distca/late_compiles"] == 2
