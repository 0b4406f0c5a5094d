"""Messages about a run: why nothing moved, the summary, and slow preparation."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

import hf_distca
from hf_distca.agreement.batch_plan import BalanceTotals, RateSample
from hf_distca.agreement.rates import LearnedCosts
from hf_distca.integration import processes
from hf_distca.integration.reports import (
    fewer_moves_reason,
    nothing_moved_reason,
    summarize_balance,
)
from hf_distca.integration.session import Session
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPools
from tiny_runs import documents, logged, make_trainer, rows, settings

SHAPE = AttentionShape(4, 2, 16, 16, 2)
EVEN = [{"documents": documents(48, 48, seed=at)} for at in range(12)]


def make_session(**changes: Any) -> Session:
    made = Session(hf_distca.DistCAConfig(**changes))
    made.planner.costs[SHAPE, "cpu"] = CostModel.make_analytic(SHAPE, device_type="cpu")
    return made


@pytest.mark.parametrize(
    ("before", "changes", "facts"),
    [
        (1.004, {}, ["documents are even", "has 1.004 times the mean", "tolerance=0.01"]),
        (1.5, {"balance": False}, ["off (balance=False)", "has 1.500 times the mean"]),
        (1.05, {"min_gain": 0.1}, ["saves 4.8% at most, less than min_gain=0.1"]),
        (
            1.5,
            {},
            [
                "evening that out saves 0.1 ms a layer at most",
                "leave less than min_gain=0.02 (cost model 'analytic cpu': 1 GB/s and 0.3 ms an",
                "DistCAConfig(cost_model=...)",
            ],
        ),
    ],
    ids=["even", "off", "min_gain", "exchange"],
)
def test_nothing_moved_reason_names_its_cause_and_figures(
    before: float, changes: dict[str, Any], facts: list[str]
) -> None:
    mean = 20 * 2e-4
    done = BalanceTotals(
        micro_batches=20,
        estimated_before=before * mean,
        estimated_after=before * mean,
        estimated_mean=mean,
    )
    said = nothing_moved_reason(done, make_session(**changes))
    assert said is not None
    assert all(fact in said for fact in ["moved nothing in 20 micro-batches", *facts]), said
    assert nothing_moved_reason(done + BalanceTotals(moved=1), make_session(**changes)) is None
    assert nothing_moved_reason(BalanceTotals(), make_session(**changes)) is None


def test_fewer_moves_reason_names_the_slowdown_by_exchanges() -> None:
    made, none = make_session(), np.zeros(2)
    assert fewer_moves_reason(made) is None
    kernel, waiting = np.array([2.0, 2.0]), np.array([3.0, 3.0])
    slow = RateSample(
        np.full(2, 3.0), kernel, waiting, np.array([0.5, 0.5]), np.array([4.0, 0.0]), none
    )
    for _ in range(8):
        made.planner.costs.learn_from_sample((SHAPE, "cpu"), slow)
    said = fewer_moves_reason(made)
    assert said is not None
    assert "attention took 25% longer with exchanges than without" in said


def test_callback_warns_once_that_exchanges_were_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LearnedCosts, "exchange_slowdown", 0.5)
    trainer = make_trainer("distca", EVEN, config=settings(), max_steps=3)
    with caplog.at_level(logging.WARNING, "hf_distca"):
        trainer.train()
    said = [
        record.getMessage()
        for record in caplog.records
        if "moves less, or nothing" in record.getMessage()
    ]
    assert len(said) == 1
    assert "50% longer" in said[0]


def test_summary_lists_imbalance_exchange_planning_and_attention() -> None:
    made = make_session()
    made.kernel_names["cpu"] = None
    done = BalanceTotals(
        6, 3, 1200.0, 1000.0, 7.2, 1.575, 1.006, 1.0, 3.138, 2.016, 2.0, 9.9e6, 12, 1.0, 8.0
    )
    assert (
        summarize_balance(done, made) == "distca: 6 micro-batches on 1 ranks, work moved in 3\n"
        "  imbalance (slowest rank / mean)     before   after\n"
        "    tokens                             1.200   1.200\n"
        "    estimated                          1.575   1.006\n"
        "    measured                           1.569   1.008\n"
        "  exchanged   0.825 MB per layer and micro-batch by the busiest rank, for moved work"
        " and for documents on several ranks\n"
        "  planning    1.2 ms per micro-batch\n"
        "  attention   12% of this rank's time, in kernel cpu"
    )
    several = summarize_balance(replace(done, between_bytes=1.2e6, node_layers=12), made)
    assert several is not None
    assert (
        "\n  nodes       0.100 MB of that to other nodes, by the rank that sends most there\n"
        in several
    )
    dealt = summarize_balance(replace(done, estimated_in_order=3.2, dealt_mean=2.0), made, 1.9)
    assert dealt is not None
    assert "(slowest rank / mean)      dealt   moved\n" in dealt
    assert "\n    estimated, batches replaced        1.900\n" in dealt
    assert "\n    estimated, documents in order      1.600\n" in dealt
    assert summarize_balance(BalanceTotals(), made) is None


def train(rank: int, case: str) -> tuple[list[str], str]:
    """Train; return the log lines on moves, and the text on standard error."""
    config = {"off": settings(balance=False), "exchange": hf_distca.DistCAConfig()}.get(
        case, settings()
    )
    trainer = make_trainer(
        "distca",
        EVEN if case == "even" else rows(12),
        config=config,
        max_steps=6,
        train_sampling_strategy="sequential",
    )
    if case == "quiet":
        trainer.remove_callback(hf_distca.DistCACallback)
        trainer.add_callback(hf_distca.DistCACallback(config, summary=False, record=False))
    with logged() as said, contextlib.redirect_stderr(io.StringIO()) as written:
        trainer.train()
    return [line for line in said if "moved nothing" in line], written.getvalue()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("even", "documents are even"),
        ("off", "balance=False"),
        ("exchange", "GB/s"),
        ("moving", None),
    ],
)
def test_rank_0_logs_once_why_nothing_moved_and_prints_the_summary(
    rank_pool: RankPools, case: str, reason: str | None
) -> None:
    (said, written), (said_by_other, written_by_other) = rank_pool(2)(train, case)
    assert said_by_other == []
    assert "distca" not in written_by_other
    assert len(said) == (reason is not None)
    assert all("in 6 micro-batches" in line and str(reason) in line for line in said)
    assert f"distca: 6 micro-batches on 2 ranks, work moved in {0 if reason else 6}" in written
    assert "in kernel cpu" in written


def test_the_summary_can_be_switched_off(rank_pool: RankPools) -> None:
    for _, written in rank_pool(2)(train, "quiet"):
        assert "micro-batches" not in written


@pytest.mark.parametrize(
    ("seconds", "enabled", "lines"), [(0.0, True, 0), (0.3, True, 2), (0.3, False, 0)]
)
def test_slow_preparation_is_printed_unless_progress_bars_are_off(
    seconds: float, enabled: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(processes, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(processes, "print_lines", said.append)
    if not enabled:
        disable_progress_bar()
    try:
        with processes.print_if_slow("timing the attention kernel"):
            time.sleep(seconds)
    finally:
        enable_progress_bar()
    time.sleep(0.15)
    assert len(said) == lines
    if said:
        assert said[0] == "distca: timing the attention kernel ..."
        assert said[1].startswith("distca: timing the attention kernel took 0.3")


def train_with_slow_preparation(rank: int) -> str:
    """Train one step with every wait counted as slow; return the text on standard error."""
    trainer = make_trainer("distca", rows(2), config=settings(), max_steps=1)
    with (
        patch.object(processes, "_SLOW_SECONDS", 1e-6),
        contextlib.redirect_stderr(io.StringIO()) as written,
    ):
        trainer.train()
    return written.getvalue()


def test_rank_0_prints_the_time_of_a_slow_first_plan(rank_pool: RankPools) -> None:
    first, other = rank_pool(2)(train_with_slow_preparation)
    assert "distca: making the first plan took" in first
    assert "distca" not in other
