from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan

PLACEMENTS = Path(__file__).parents[2] / "benchmarks" / "placements"
SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
PAIRS = CostModel.make_of_pairs(SHAPE)
MODELS = [
    PAIRS,
    CostModel.make_analytic(SHAPE, device_type="cpu"),
    CostModel.make_analytic(SHAPE, device_type="cuda"),
]
CONFIGS = st.builds(
    DistCAConfig,
    tolerance=st.sampled_from([0.0, 0.01, 0.1]),
    min_gain=st.sampled_from([0.0, 0.02, 0.2]),
    tile=st.sampled_from([1, 16, 128]),
    ping_pong=st.booleans(),
)
# What a micro-batch of long documents looks like, where tiles are fine against a fair share.
LONG = [
    [65536],
    [4096] * 16,
    [1024] * 64,
    [32768, 16384, 8192, 8192],
    [65536],
    [512] * 128,
    [65535, 1],
    [3, 65533],
]


def spanning_layout() -> Layout:
    """One document head and tail over four of eight ranks, the rest in pieces of all sizes."""
    part = 16384
    ranks = [[(0, r * part, part), (0, (7 - r) * part, part)] for r in range(4)]
    short = [[2048] * 16, [1000] * 32, [30000, 2768], []]
    number = itertools.count(1)
    return Layout.from_segments(
        [*ranks, *([(next(number), 0, n) for n in lengths] for lengths in short)]
    )


def check_plan(plan: Plan, local: Plan, cost: CostModel, config: DistCAConfig) -> None:
    """What holds for the plan of any layout; `local` is the one that moves nothing."""
    layout = plan.layout
    segment_ends = set(zip(layout.document.tolist(), layout.end.tolist(), strict=True))
    for task, following in itertools.pairwise(plan.tasks):
        cut = (task.document, task.end) not in segment_ends
        assert not cut or task.end % config.tile == 0, "documents are cut on tiles"
        assert not cut or task.server != following.server, "neighbours on one server are one task"

    before, after = (
        PlanLoad(p, cost, overlapped=config.ping_pong).slowest_seconds for p in (local, plan)
    )
    if plan.digest != local.digest:
        assert after < before
        assert before - after >= config.min_gain * before
    assert balance(local.layout, cost, config).digest == plan.digest


@settings(max_examples=75)
@given(layouts(), CONFIGS, st.sampled_from(MODELS))
def test_any_layout(layout: Layout, config: DistCAConfig, cost: CostModel) -> None:
    plan = balance(layout, cost, config)
    local = Plan.make_local(layout)

    check_plan(plan, local, cost, config)


@settings(max_examples=30)
@given(layouts(longest=200_000), st.sampled_from([0.01, 0.05]))
def test_tolerance_holds_up_to_two_tiles(layout: Layout, tolerance: float) -> None:
    config = DistCAConfig(tolerance=tolerance, min_gain=0.0, tile=16)
    seconds = PlanLoad(balance(layout, PAIRS, config), PAIRS).compute_seconds
    # What can move is at least a tile of rows, at most as deep as the longest document.
    tile = float(PAIRS.estimate_seconds(16, max(layout.longest, 16))[0])
    assert seconds.max() <= seconds.mean() * (1 + tolerance) + 2 * tile


def test_what_ping_pong_hides_is_moved_for_less() -> None:
    # With a window, a row takes longer to send than to compute, and still not longer than all the
    # compute beside it.
    cost = replace(CostModel.make_analytic(SHAPE, device_type="cuda"), window=8192)
    layout = Layout.from_lengths([[65536], [2048] * 32, [2048] * 32, [2048] * 32])
    plain, halves = (
        balance(layout, cost, DistCAConfig(ping_pong=ping_pong)) for ping_pong in (False, True)
    )
    load = PlanLoad(halves, cost, overlapped=True)
    assert halves.moved
    assert load.slowest_seconds < PlanLoad(plain, cost, overlapped=True).slowest_seconds
    assert (
        load.slowest_seconds < 0.8 * PlanLoad(Plan.make_local(layout, 8192), cost).slowest_seconds
    )


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
    [[[]], [[], []], [[1]], [[1], []], [[5], [], []], [[100_000]], [[64], [64]]],
)
@pytest.mark.parametrize("cost", MODELS, ids=lambda cost: cost.name)
def test_small_worlds(ranks: list[list[int]], cost: CostModel) -> None:
    plan = balance(Layout.from_lengths(ranks), cost, DistCAConfig())
    assert plan.digest == Plan.make_local(plan.layout).digest


def test_ranks_without_tokens_serve() -> None:
    plan = balance(Layout.from_lengths([[], [65536], [], []]), PAIRS, DistCAConfig())
    assert set(plan.server.tolist()) == {0, 1, 2, 3}
    assert summarize_plan(plan, PAIRS)["pairs_imbalance_after"] <= 1.02


def test_balanced_layouts_stay() -> None:
    layout = Layout.from_lengths([[4096, 1000], [1000, 4096], [4096, 1001]])
    assert balance(layout, PAIRS, DistCAConfig()).digest == Plan.make_local(layout).digest


def test_balance_off_stays() -> None:
    layout = Layout.from_lengths(LONG)
    assert (
        balance(layout, PAIRS, DistCAConfig(balance=False)).digest == Plan.make_local(layout).digest
    )


def load_of(layout: Layout, min_gain: float) -> PlanLoad:
    return PlanLoad(balance(layout, PAIRS, DistCAConfig(min_gain=min_gain)), PAIRS)


def test_min_gain() -> None:
    layout = Layout.from_lengths([[4096], [4096], [4096], [3400]])
    gain = 1 - load_of(layout, 0.0).slowest_seconds / PAIRS.estimate_seconds(4096, 4096)[0]
    assert gain > 0
    assert load_of(layout, gain * 0.99).plan.moved
    assert not load_of(layout, gain * 1.01).plan.moved


def test_a_slow_link_keeps_work_at_home() -> None:
    layout = Layout.from_lengths(LONG)
    fast, slow = (
        CostModel(SHAPE, MODELS[2].forward, MODELS[2].backward, bytes_per_second)
        for bytes_per_second in (4e10, 1e7)
    )
    assert balance(layout, fast, DistCAConfig()).moved
    assert not balance(layout, slow, DistCAConfig()).moved


def test_a_coarser_plan_where_the_fine_one_does_not_pay() -> None:
    # At 5 GB/s the exchange costs about what it gains: fewer bytes for half the gain may still win,
    # and never lose.
    layout = Layout.from_lengths(LONG)
    for bytes_per_second in (1e9, 3e9, 5e9, 1e10):
        cost = CostModel(SHAPE, MODELS[2].forward, MODELS[2].backward, bytes_per_second, 1e-4)
        summary = summarize_plan(balance(layout, cost, DistCAConfig()), cost)
        assert summary["slowest_seconds_after"] <= summary["slowest_seconds_before"]


def test_no_cost_per_pair_is_nothing_to_balance() -> None:
    free = CostModel.make_analytic(SHAPE)
    kernel = type(free.forward)(1e-6, 1e12, np.inf)
    layout = Layout.from_lengths(LONG)
    assert not balance(layout, CostModel(SHAPE, kernel, kernel, 1e10), DistCAConfig()).moved


@pytest.mark.parametrize("path", sorted(PLACEMENTS.rglob("*.json")), ids=lambda path: path.stem)
def test_real_placements(path: Path) -> None:
    layout = read_placement(path)
    begin = time.perf_counter()
    plan = balance(layout, PAIRS, DistCAConfig())
    seconds = time.perf_counter() - begin
    summary = summarize_plan(plan, PAIRS)
    assert summary["pairs_imbalance_after"] <= 1.02
    assert seconds < 2, "about 0.05 s on a free core"


def test_six_placements_of_real_documents_are_there() -> None:
    assert len(list((PLACEMENTS / "public").glob("*.json"))) == 6
