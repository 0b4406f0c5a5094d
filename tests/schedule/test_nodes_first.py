"""Deals and plans with nodes: most work stays in its node, and no plan becomes slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import CUDA, PING_PONG, SERIAL, make_load

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import CATask, Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.advise.document_lengths import find_distribution

NODES = Ranks(per_node=8)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw the lengths of whole documents on each rank, and the ranks of a node, for two to four
    nodes.
    """
    size, count = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    length = st.one_of(st.integers(1, 300), st.integers(1000, 60_000))
    ranks = draw(
        st.lists(st.lists(length, max_size=6), min_size=size * count, max_size=size * count)
    )
    return ranks, size


def find_end(plan: Plan, cost: CostModel, config: DistCAConfig, size: int) -> float:
    return PlanLoad(
        plan, cost, overlapped=config.ping_pong, ranks=Ranks(per_node=size)
    ).slowest_seconds


def plan_by_node(ranks: list[list[int]], size: int, cost: CostModel, config: DistCAConfig) -> Plan:
    """Plan each node alone, and join the plans."""
    tasks, first = [], 0
    for node in range(0, len(ranks), size):
        plan = balance(
            Layout.from_lengths(ranks[node : node + size]),
            cost,
            config,
            Ranks(per_node=size),
            allow_relays=False,
        )
        tasks += [
            CATask(t.document + first, t.start, t.end, t.home + node, t.server + node)
            for t in plan.tasks
        ]
        first += sum(map(len, ranks[node : node + size]))
    return Plan.from_tasks(Layout.from_lengths(ranks), tasks)


@given(
    nodes(), st.booleans(), st.sampled_from([1e9, 4e9, 4e10, 3e11]), st.sampled_from([1, 10, 100])
)
@example(([[], [], [1, 14151], [], [], [15890]], 3), False, 1e9, 100)  # the best T differs by node
@settings(max_examples=60)
def test_plan_is_never_later_than_nodes_planned_alone(
    case: tuple[list[list[int]], int], ping_pong: bool, rate: float, times: int
) -> None:
    ranks, size = case
    cost = replace(CUDA, exchange_bytes_per_second=rate, node_bytes_per_second=rate * times)
    config = DistCAConfig(ping_pong=ping_pong, head_groups=1, min_gain=0.0, tolerance=0.0)
    layout = Layout.from_lengths(ranks)
    plan = balance(layout, cost, config, Ranks(per_node=size), allow_relays=False)
    alone = plan_by_node(ranks, size, cost, config)
    assert find_end(plan, cost, config, size) <= find_end(alone, cost, config, size) * (1 + 1e-12)


def draw(name: str, longest: int, ranks: int, tokens: int) -> np.ndarray:
    return next(find_distribution(name, longest).draw_batches(ranks * tokens, 1))


@pytest.mark.parametrize("name", ["pretrain", "prolong"])
@pytest.mark.parametrize(("tokens", "most"), [(65536, 1.035), (32768, 1.085)])
def test_documents_that_fit_nodes_exchange_little_between_nodes(
    name: str, tokens: int, most: float
) -> None:
    lengths = draw(name, 65536, 64, tokens)
    layout = deal(lengths, 64, tokens, CUDA, ranks_per_node=8)
    assert layout.query_tokens.tolist() == [tokens] * 64
    load = make_load(layout, CUDA, SERIAL, NODES)
    assert load.slowest_seconds <= most * load.compute_seconds.mean()
    assert load.node_bytes.inter_node[0].sum() <= 0.12 * load.node_bytes.intra_node[0].sum()


@pytest.mark.parametrize("longest", [65536, 131072, 262144])
@pytest.mark.parametrize("config", [SERIAL, PING_PONG], ids=["serial", "ping-pong"])
def test_deal_that_knows_the_nodes_is_no_slower(longest: int, config: DistCAConfig) -> None:
    # Ends that differ by less than the tolerance are equal.
    within = 1 + config.tolerance + 1e-4
    for name in ("pretrain", "prolong"):
        lengths = draw(name, longest, 64, 32768)
        blind, known = (deal(lengths, 64, 32768, CUDA, ranks_per_node=size) for size in (None, 8))
        ends = [make_load(layout, CUDA, config, NODES).slowest_seconds for layout in (blind, known)]
        assert ends[1] <= within * ends[0]


def test_nano_batches_exchange_little_between_nodes() -> None:
    lengths = draw("prolong", 65536, 64, 65536)
    halves = deal_nano_batches(lengths, 64, 65536, CUDA, ranks_per_node=8)
    assert (halves[0].query_tokens + halves[1].query_tokens == 65536).all()
    for half in halves:
        load = make_load(half, CUDA, PING_PONG, NODES)
        assert load.slowest_seconds <= 1.021 * load.compute_seconds.mean()
        assert load.node_bytes.inter_node[0].sum() <= 0.1 * load.node_bytes.intra_node[0].sum()


def test_only_a_node_with_too_much_work_gives_to_other_nodes() -> None:
    layout = Layout.from_lengths([[65536]] * 2 + [[4096] * 16] * 14)
    ranks = Ranks(per_node=4)
    load = make_load(layout, CUDA, SERIAL, ranks)
    plan = load.plan
    one_group = PlanLoad(balance(layout, CUDA, DistCAConfig()), CUDA, ranks=ranks)
    assert load.slowest_seconds <= one_group.slowest_seconds
    assert load.node_bytes.inter_node[0].sum() < one_group.node_bytes.inter_node[0].sum()
    away = plan.home // 4 != plan.server // 4
    assert set((plan.home // 4)[away].tolist()) == {0}, "only the heavy node gives"
