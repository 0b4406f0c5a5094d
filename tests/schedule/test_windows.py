"""Slices and plans for layers with a sliding window."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import layouts
from test_scheduler import (
    CONFIGS,
    LONG,
    MODELS,
    PAIRS,
    PLACEMENTS,
    SHAPE,
    check_plan,
    spanning_layout,
)

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel, KernelCost, MarginalCost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.slice_cost import estimate_slice_seconds

WINDOWS = st.one_of(st.integers(1, 300), st.sampled_from([512, 1000, 4096]), st.integers(1, 20_000))
# Kernel tiles of one row: seconds rise with every row, so that closed forms can be checked to the
# row.
SMOOTH = CostModel(SHAPE, KernelCost(1e-5, 1e12, 1e13), KernelCost(2e-5, 1e12, 1e13), 1e10, tile=1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(start=st.integers(0, 10**6), rows=st.integers(1, 10**5), window=st.integers(1, 10**5))
def test_scalar_prices_agree_with_the_model(
    model: CostModel, start: int, rows: int, window: int
) -> None:
    cost = replace(model, window=window)
    seconds = estimate_slice_seconds(MarginalCost.from_cost_model(cost), 1.0, start, start + rows)
    assert seconds == pytest.approx(cost.estimate_seconds(rows, start + rows)[0], rel=1e-12)


@settings(max_examples=75)
@given(layouts(), CONFIGS, st.sampled_from(MODELS), WINDOWS)
def test_any_layout(layout: Layout, config: DistCAConfig, model: CostModel, window: int) -> None:
    cost = replace(model, window=window)
    plan = balance(layout, cost, config)
    if window >= layout.longest:
        assert plan.digest == balance(layout, model, config).digest
        assert plan.window is None
        return
    local = Plan.make_local(layout, window)
    assert plan.window == window
    check_plan(plan, local, cost, config)


@example(  # two ranks give, and the first of them more than it has to
    Layout(
        np.array([0, 1, 2, 3, 4, 5, 7, 8, 6, 8]),
        np.array([0] * 9 + [99999]),
        np.array([1] * 6 + [36603, 99999, 32591, 100000]),
        np.array([0, 6, 8] + [10] * 7),
    ),
    0.01,
    8192,
)
@settings(max_examples=30)
@given(layouts(longest=200_000), st.sampled_from([0.01, 0.05]), st.sampled_from([100, 1024, 8192]))
def test_tolerance_holds_up_to_two_tiles(layout: Layout, tolerance: float, window: int) -> None:
    cost = replace(PAIRS, window=window)
    config = DistCAConfig(tolerance=tolerance, min_gain=0.0, tile=16)
    seconds = PlanLoad(balance(layout, cost, config), cost).compute_seconds
    tile = float(cost.estimate_seconds(16, max(layout.longest, 16))[0])
    assert seconds.max() <= seconds.mean() * (1 + tolerance) + 2 * tile


@pytest.mark.parametrize(
    "layout", [Layout.from_lengths(LONG), spanning_layout()], ids=["whole", "spanning"]
)
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
@pytest.mark.parametrize("window", [1024, 4096, 16384])
@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_no_rank_ends_after_the_tolerance(
    layout: Layout, model: CostModel, window: int, tolerance: float
) -> None:
    cost = replace(model, window=window)
    seconds = PlanLoad(
        balance(layout, cost, DistCAConfig(tolerance=tolerance)), cost
    ).compute_seconds
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
    cost = CostModel.make_analytic(SHAPE, device_type="cuda")
    for window, moves in ((4096, False), (32768, True)):
        plan = balance(layout, replace(cost, window=window), DistCAConfig())
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


@pytest.mark.parametrize("window", [1024, 4096])
def test_real_placements(window: int) -> None:
    cost = replace(PAIRS, window=window)
    for path in PLACEMENTS.rglob("*.json"):
        layout = read_placement(path)
        begin = time.perf_counter()
        plan = balance(layout, cost, DistCAConfig())
        assert time.perf_counter() - begin < 2, "about 0.05 s on a free core"
        load = PlanLoad(plan, cost)
        # Where less than the smallest gain is to be had, the plan moves nothing.
        assert load.pairs.max() <= np.mean(load.pairs) * (
            1.011 if plan.moved and (plan.home != plan.server).any() else 1.025
        )
