"""Ranks of unequal speed: slower ranks get less work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CPU, CUDA, LONG, PAIRS, PING_PONG, layouts, make_load, make_local_load

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.ranks import Ranks

SAME = Layout.from_lengths([[8192] * 8] * 8)
MIXED = Layout.from_lengths(LONG)


@pytest.mark.parametrize("cost", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("layout", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("slow", [0, 1, 5])
def test_slower_rank_gets_less_work(layout: Layout, slow: int, cost: CostModel) -> None:
    """One of eight ranks takes 1.5 times as long, and all end within 2 % of the optimum."""
    speeds = np.ones(8)
    speeds[slow] = 1 / 1.5
    ranks = Ranks.from_speeds(speeds)
    work = make_local_load(layout, cost).compute_seconds.sum()
    load = make_load(layout, cost, PING_PONG, ranks)
    assert load.slowest_seconds <= 1.02 * work / speeds.sum()
    blind = PlanLoad(balance(layout, cost, PING_PONG), cost, overlapped=True, ranks=ranks)
    assert blind.slowest_seconds >= 1.35 * work / speeds.sum(), (
        "a plan that ignores speeds is 1.35 times as slow"
    )


@given(st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8))
@settings(max_examples=40)
def test_ranks_of_any_speeds_end_within_6_percent(speeds: list[float]) -> None:
    """With 3,000 random lists of speeds, the median was 1.010 and the worst 1.050."""
    load = make_load(MIXED, CUDA, PING_PONG, Ranks.from_speeds(speeds))
    work = make_local_load(MIXED, CUDA).compute_seconds.sum()
    assert load.compute_seconds.max() <= 1.06 * work / sum(speeds)


@given(layouts(), st.booleans(), st.sampled_from([CPU, CUDA, PAIRS]))
@settings(max_examples=40)
def test_equal_speeds_change_no_plan(layout: Layout, ping_pong: bool, cost: CostModel) -> None:
    config = DistCAConfig(ping_pong=ping_pong)
    ones = Ranks.from_speeds(np.ones(layout.world_size))
    assert balance(layout, cost, config, ones).digest == balance(layout, cost, config).digest


def test_fast_rank_with_the_most_work_keeps_its_work() -> None:
    layout = Layout.from_lengths([[16384], [11585]])
    assert not balance(layout, CUDA, PING_PONG, Ranks.from_speeds([2.0, 1.0])).moved
    assert balance(layout, CUDA, PING_PONG).moved


def test_plan_of_a_dealt_layout_relieves_a_slower_rank() -> None:
    """A layout is dealt before speeds are known; its plan then moves work away from slow ranks."""
    layout = deal([8192] * 64, 8, 65536, CUDA)
    assert not balance(layout, CUDA, PING_PONG).moved
    speeds = np.array([1, 1, 1, 1 / 1.5, 1, 1, 1, 1])
    load = make_load(layout, CUDA, PING_PONG, Ranks.from_speeds(speeds.tolist()))
    assert load.slowest_seconds <= 1.02 * (load.compute_seconds @ speeds) / speeds.sum()


def test_summary_states_seconds_at_the_speeds_of_ranks() -> None:
    ranks = Ranks.from_speeds([1, 1, 1, 1 / 1.5, 1, 1, 1, 1])
    summary = summarize_plan(balance(SAME, CPU, DistCAConfig(), ranks), CPU, ranks)
    assert summary["seconds_imbalance_before"] == pytest.approx(1.5 / (8.5 / 8))
    assert summary["seconds_imbalance_after"] <= 1.02
    assert summary["slowest_seconds_after"] < 0.75 * summary["slowest_seconds_before"]


def test_wrong_speeds_are_refused() -> None:
    for wrong in ([1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ConfigError, match="positive number"):
            Ranks.from_speeds(wrong)
    with pytest.raises(ConfigError, match="7 speeds were given for 8 ranks"):
        balance(SAME, CUDA, DistCAConfig(), Ranks.from_speeds(np.ones(7)))
