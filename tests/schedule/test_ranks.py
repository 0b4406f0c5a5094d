"""Ranks that are not alike: slower ones get less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
CUDA, CPU = (CostModel.make_analytic(SHAPE, device_type=kind) for kind in ("cuda", "cpu"))
ALIKE = Layout.from_segments([[(8 * rank + i, 0, 8192) for i in range(8)] for rank in range(8)])
LONG_AND_SHORT = [
    [65536],
    [4096] * 16,
    [1024] * 64,
    [32768, 16384, 8192, 8192],
    [65536],
    [512] * 128,
    [65535, 1],
    [3, 65533],
]


def mixed() -> Layout:
    numbers = iter(range(1000))
    return Layout.from_segments(
        [[(next(numbers), 0, length) for length in lengths] for lengths in LONG_AND_SHORT]
    )


@pytest.mark.parametrize("cost", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("layout", [ALIKE, mixed()], ids=["alike", "mixed"])
@pytest.mark.parametrize("slow", [0, 1, 5])
def test_a_slower_rank_gets_less(layout: Layout, slow: int, cost: CostModel) -> None:
    """One of eight ranks takes 1.5 times as long: all end within 2 % of what the speeds together
    allow.
    """
    speeds = np.ones(8)
    speeds[slow] = 1 / 1.5
    ranks = Ranks.from_speeds(speeds)
    plan = balance(layout, cost, DistCAConfig(ping_pong=True), ranks)
    load = PlanLoad(plan, cost, overlapped=True, ranks=ranks)
    work = PlanLoad(Plan.make_local(layout), cost).compute_seconds.sum()
    assert load.slowest_seconds <= 1.02 * work / speeds.sum()
    blind = PlanLoad(
        balance(layout, cost, DistCAConfig(ping_pong=True)), cost, overlapped=True, ranks=ranks
    )
    assert blind.slowest_seconds >= 1.35 * work / speeds.sum(), (
        "the plan that knows no speeds is that much slower"
    )


@given(st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8))
@settings(max_examples=40)
def test_ranks_of_any_speeds(speeds: list[float]) -> None:
    """Of 3,000 random speeds the median is 1.010, and the worst 1.050."""
    ranks = Ranks.from_speeds(speeds)
    load = PlanLoad(balance(mixed(), CUDA, DistCAConfig(ping_pong=True), ranks), CUDA, ranks=ranks)
    work = PlanLoad(Plan.make_local(mixed()), CUDA).compute_seconds.sum()
    assert load.compute_seconds.max() <= 1.06 * work / sum(speeds)


@given(layouts(), st.booleans(), st.sampled_from([CPU, CUDA, CostModel.make_of_pairs(SHAPE)]))
@settings(max_examples=40)
def test_equal_speeds_are_none(layout: Layout, ping_pong: bool, cost: CostModel) -> None:
    config = DistCAConfig(ping_pong=ping_pong)
    ones = Ranks.from_speeds(np.ones(layout.world_size))
    assert balance(layout, cost, config, ones).digest == balance(layout, cost, config).digest


def test_a_fast_rank_that_has_most_to_do_keeps_it() -> None:
    layout = Layout.from_segments([[(0, 0, 16384)], [(1, 0, 11585)]])
    ranks = Ranks.from_speeds([2.0, 1.0])
    config = DistCAConfig(ping_pong=True)
    assert not balance(layout, CUDA, config, ranks).moved
    assert balance(layout, CUDA, config).moved


def test_a_dealt_layout_on_a_slower_rank_is_balanced_again() -> None:
    """A layout is dealt before anyone knows who is slow; its plan then moves work away from that
    rank.
    """
    layout = deal([8192] * 64, 8, 65536, CUDA)
    assert not balance(layout, CUDA, DistCAConfig(ping_pong=True)).moved
    speeds = np.array([1, 1, 1, 1 / 1.5, 1, 1, 1, 1])
    ranks = Ranks.from_speeds(speeds.tolist())
    load = PlanLoad(
        balance(layout, CUDA, DistCAConfig(ping_pong=True), ranks),
        CUDA,
        overlapped=True,
        ranks=ranks,
    )
    assert load.slowest_seconds <= 1.02 * (load.compute_seconds @ speeds) / speeds.sum()


def test_the_summary_speaks_of_what_ranks_take() -> None:
    ranks = Ranks.from_speeds([1, 1, 1, 1 / 1.5, 1, 1, 1, 1])
    summary = summarize_plan(balance(ALIKE, CPU, DistCAConfig(), ranks), CPU, ranks)
    assert summary["seconds_imbalance_before"] == pytest.approx(1.5 / (8.5 / 8))
    assert summary["seconds_imbalance_after"] <= 1.02
    assert summary["slowest_seconds_after"] < 0.75 * summary["slowest_seconds_before"]


def test_wrong_speeds_are_refused() -> None:
    for wrong in ([1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ConfigError, match="positive number"):
            Ranks.from_speeds(wrong)
    with pytest.raises(ConfigError, match="7 speeds were given for 8 ranks"):
        balance(ALIKE, CUDA, DistCAConfig(), Ranks.from_speeds(np.ones(7)))
