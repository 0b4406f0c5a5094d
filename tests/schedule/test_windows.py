"""Slices and plans for layers with a sliding window."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layouts import CPU, CUDA, LONG, PAIRS, load_of
from test_scheduler import spanning_layout

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.plan import Plan


@pytest.mark.parametrize(
    "layout", [Layout.from_lengths(LONG), spanning_layout()], ids=["whole", "spanning"]
)
@pytest.mark.parametrize("model", [PAIRS, CPU], ids=lambda model: model.name)
@pytest.mark.parametrize("window", [1024, 4096, 16384])
@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_no_rank_ends_after_the_tolerance(
    layout: Layout, model: CostModel, window: int, tolerance: float
) -> None:
    cost = replace(model, window=window)
    seconds = load_of(layout, cost, DistCAConfig(tolerance=tolerance)).compute_seconds
    assert seconds.max() <= seconds.mean() * (1 + tolerance) * 1.015


def test_long_documents_move_in_one_run() -> None:
    # Half of rank 0's work, in whole windows: one slice, for which a window of keys comes on top.
    layout = Layout.from_lengths([[65536], []])
    cost = replace(PAIRS, window=1024)
    plan = balance(layout, cost, DistCAConfig())
    sent = summarize_plan(plan, cost)
    assert len(plan.tasks) == 2
    assert sent["key_tokens_sent"] == sent["query_tokens_moved"] + 1023
    assert sent["pairs_imbalance_after"] <= 1.01


def test_rows_that_take_longer_to_send_than_to_compute_stay() -> None:
    layout = Layout.from_lengths([[65536], [512] * 128])
    for window, moves in ((4096, False), (32768, True)):
        plan = balance(layout, replace(CUDA, window=window), DistCAConfig())
        assert plan.moved == moves


def test_figures_are_those_of_the_plans_window() -> None:
    layout = Layout.from_lengths(LONG)
    for window in (None, 100):
        plan = Plan.make_local(layout, window)
        figures = [
            PlanLoad(plan, replace(PAIRS, window=other)).compute_seconds.tolist()
            for other in (None, 100, 4096)
        ]
        assert figures[0] == figures[1] == figures[2]
        assert (PlanLoad(plan, PAIRS).pairs / 2**30).tolist() == pytest.approx(figures[0])


def test_a_window_and_one_rank_or_balance_off() -> None:
    cost = replace(PAIRS, window=100)
    for ranks, config in (([[4000]], DistCAConfig()), ([[4000], []], DistCAConfig(balance=False))):
        plan = balance(Layout.from_lengths(ranks), cost, config)
        assert plan.digest == Plan.make_local(plan.layout, 100).digest
