from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import (
    CPU,
    CUDA,
    LONG,
    PAIRS,
    PING_PONG,
    PLACEMENTS,
    SERIAL,
    SHAPE,
    layouts,
    make_load,
    make_local_load,
)

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan


def build_spanning_layout() -> Layout:
    """Build a layout: four ranks hold heads and tails of one document, three hold short ones."""
    part = 16384
    ranks = [[(0, r * part, part), (0, (7 - r) * part, part)] for r in range(4)]
    short = [[2048] * 16, [1000] * 32, [30000, 2768], []]
    number = itertools.count(1)
    return Layout.from_segments(
        [*ranks, *([(next(number), 0, n) for n in lengths] for lengths in short)]
    )


@example(  # two ranks give work, and the first gives more than necessary
    Layout(
        np.array([0, 1, 2, 3, 4, 5, 7, 8, 6, 8]),
        np.array([0] * 9 + [99999]),
        np.array([1] * 6 + [36603, 99999, 32591, 100000]),
        np.array([0, 6, 8] + [10] * 7),
    ),
    0.01,
    8192,
)
@settings(max_examples=60)
@given(
    layouts(longest=200_000),
    st.sampled_from([0.01, 0.05]),
    st.sampled_from([None, None, None, 100, 1024, 8192]),
)
def test_tolerance_holds_up_to_two_tiles(
    layout: Layout, tolerance: float, window: int | None
) -> None:
    config = DistCAConfig(tolerance=tolerance, min_gain=0.0, tile=16)
    cost = replace(PAIRS, window=window)
    seconds = make_load(layout, cost, config).compute_seconds
    # The smallest move is one tile of rows, which costs most at the end of the longest document.
    tile = float(cost.estimate_seconds(16, max(layout.longest, 16))[0])
    assert seconds.max() <= seconds.mean() * (1 + tolerance) + 2 * tile


def test_plan_moves_work_whose_exchange_ping_pong_hides() -> None:
    # With a window, sending a row takes longer than computing it, but the compute of all other rows
    # hides the exchange.
    cost = replace(CUDA, window=8192)
    layout = Layout.from_lengths([[65536], [2048] * 32, [2048] * 32, [2048] * 32])
    plain, load = balance(layout, cost, SERIAL), make_load(layout, cost, PING_PONG)
    assert load.plan.moved
    assert load.slowest_seconds < PlanLoad(plain, cost, overlapped=True).slowest_seconds
    assert load.slowest_seconds < 0.8 * make_local_load(layout, cost).slowest_seconds


def test_a_wider_tolerance_moves_less() -> None:
    moved = [
        summarize_plan(
            balance(Layout.from_lengths(LONG), PAIRS, DistCAConfig(tolerance=tolerance)), PAIRS
        )["query_tokens_moved"]
        for tolerance in (0.01, 0.3)
    ]
    assert moved[1] < moved[0]


@pytest.mark.parametrize(
    "ranks",
    [
        *([[]], [[], []], [[1]], [[1], []], [[5], [], []], [[100_000]], [[64], [64]]),
        [[4096, 1000], [1000, 4096], [4096, 1001]],
    ],
)
@pytest.mark.parametrize("cost", [PAIRS, CPU, CUDA], ids=lambda cost: cost.name)
def test_small_or_balanced_layouts_move_nothing(ranks: list[list[int]], cost: CostModel) -> None:
    plan = balance(Layout.from_lengths(ranks), cost, DistCAConfig())
    assert plan.digest == Plan.make_local(plan.layout).digest


def test_ranks_without_tokens_serve() -> None:
    plan = balance(Layout.from_lengths([[], [65536], [], []]), PAIRS, DistCAConfig())
    assert set(plan.server.tolist()) == {0, 1, 2, 3}
    assert summarize_plan(plan, PAIRS)["pairs_imbalance_after"] <= 1.02


def test_plan_moves_nothing_if_balance_is_off() -> None:
    plan = balance(Layout.from_lengths(LONG), PAIRS, DistCAConfig(balance=False))
    assert plan.digest == Plan.make_local(plan.layout).digest


def test_plan_moves_nothing_for_less_than_min_gain() -> None:
    layout = Layout.from_lengths([[4096], [4096], [4096], [3400]])
    free = make_load(layout, PAIRS, DistCAConfig(min_gain=0.0))
    gain = 1 - free.slowest_seconds / PAIRS.estimate_seconds(4096, 4096)[0]
    assert gain > 0
    assert balance(layout, PAIRS, DistCAConfig(min_gain=gain * 0.99)).moved
    assert not balance(layout, PAIRS, DistCAConfig(min_gain=gain * 1.01)).moved


def test_a_slow_link_keeps_work_at_home() -> None:
    layout = Layout.from_lengths(LONG)
    fast, slow = (
        CostModel(SHAPE, CUDA.forward, CUDA.backward, bytes_per_second)
        for bytes_per_second in (4e10, 1e7)
    )
    assert balance(layout, fast, DistCAConfig()).moved
    assert not balance(layout, slow, DistCAConfig()).moved


def test_plan_over_slow_links_is_no_slower_than_moving_nothing() -> None:
    # At 5 GB/s, the exchange costs about as much as it gains.
    layout = Layout.from_lengths(LONG)
    for bytes_per_second in (1e9, 3e9, 5e9, 1e10):
        cost = CostModel(SHAPE, CUDA.forward, CUDA.backward, bytes_per_second, 1e-4)
        summary = summarize_plan(balance(layout, cost, DistCAConfig()), cost)
        assert summary["slowest_seconds_after"] <= summary["slowest_seconds_before"]


def test_plan_moves_nothing_if_pairs_cost_nothing() -> None:
    free = CostModel.make_analytic(SHAPE)
    kernel = type(free.forward)(1e-6, 1e12, np.inf)
    layout = Layout.from_lengths(LONG)
    assert not balance(layout, CostModel(SHAPE, kernel, kernel, 1e10), DistCAConfig()).moved


@pytest.mark.parametrize("path", sorted(PLACEMENTS.rglob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("window", [None, 1024, 4096])
def test_recorded_placements_are_planned_fast_and_evenly(path: Path, window: int | None) -> None:
    cost, layout = replace(PAIRS, window=window), read_placement(path)
    begin = time.perf_counter()
    plan = balance(layout, cost, DistCAConfig())
    assert time.perf_counter() - begin < 2, "about 0.05 s on a free core"
    # A plan that would gain less than min_gain moves nothing.
    most = 1.011 if (plan.home != plan.server).any() else 1.025
    found = summarize_plan(plan, cost)["pairs_imbalance_after"]
    assert found <= (1.02 if window is None else most)


def test_six_placements_of_public_documents_exist() -> None:
    assert len(list((PLACEMENTS / "public").glob("*.json"))) == 6
