"""Plans for layers with a sliding window."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layouts import CPU, CUDA, LONG, PAIRS, make_load
from test_scheduler import build_spanning_layout

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.plan import Plan


@pytest.mark.parametrize(
    "layout", [Layout.from_lengths(LONG), build_spanning_layout()], ids=["whole", "spanning"]
)
@pytest.mark.parametrize("model", [PAIRS, CPU], ids=lambda model: model.name)
@pytest.mark.parametrize("window", [1024, 4096, 16384])
@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_every_rank_ends_within_tolerance_of_the_mean(
    layout: Layout, model: CostModel, window: int, tolerance: float
) -> None:
    cost = replace(model, window=window)
    seconds = make_load(layout, cost, DistCAConfig(tolerance=tolerance)).compute_seconds
    assert seconds.max() <= seconds.mean() * (1 + tolerance) * 1.015


def test_half_of_a_long_document_moves_as_one_slice() -> None:
    # Half of the work of rank 0 moves as one slice, which needs one more window of keys.
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


def test_load_uses_the_window_of_the_plan() -> None:
    layout = Layout.from_lengths(LONG)
    for window in (None, 100):
        plan = Plan.make_local(layout, window)
        figures = [
            PlanLoad(plan, replace(PAIRS, window=other)).compute_seconds.tolist()
            for other in (None, 100, 4096)
        ]
        assert figures[0] == figures[1] == figures[2]
        assert (PlanLoad(plan, PAIRS).pairs / 2**30).tolist() == pytest.approx(figures[0])


def test_plan_that_moves_nothing_keeps_the_window() -> None:
    cost = replace(PAIRS, window=100)
    for ranks, config in (([[4000]], DistCAConfig()), ([[4000], []], DistCAConfig(balance=False))):
        plan = balance(Layout.from_lengths(ranks), cost, config)
        assert plan.digest == Plan.make_local(plan.layout, 100).digest
