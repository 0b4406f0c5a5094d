"""Two levels of links: inside a node and between nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CUDA, PING_PONG, SERIAL, layouts, make_load

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, format_summary, summarize_plan
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

ONE_RATE = replace(CUDA, node_bytes_per_second=None)
# A query has 38 bytes and a key 12. Links carry 10 bytes a second between nodes, 100 inside.
SMALL = AttentionShape(1, 1, 1, 1, 2)
FREE = KernelCost(0.0, np.inf, np.inf)
SLOW = CostModel(SMALL, FREE, FREE, 10.0, node_bytes_per_second=100.0)
QUERY, KEY = SMALL.moved_query_bytes, SMALL.moved_key_bytes


def plan_two_moves() -> Plan:
    """Plan two nodes of two ranks: rank 0 gives 4 rows with 16 keys to rank 1 in its node, and 2
    rows with 12 keys to rank 2.
    """
    layout = Layout.from_segments([[(0, 0, 16)], [], [(1, 0, 4)], []])
    return Plan.from_tasks(
        layout, [(0, 0, 10, 0, 0), (0, 10, 12, 0, 2), (0, 12, 16, 0, 1), (1, 0, 4, 2, 2)]
    )


def load_two_moves(per_node: int | None = 2, **changes: float) -> PlanLoad:
    """Compute the load of `plan_two_moves` on nodes of this size; `changes` are of `SLOW`."""
    return PlanLoad(plan_two_moves(), replace(SLOW, **changes), ranks=Ranks(per_node=per_node))


def mix_lengths(nodes: int, per_node: int) -> Layout:
    """Build a layout with a long document on half of the ranks of every node, so all nodes have
    equal work.
    """
    ranks = range(nodes * per_node)
    return Layout.from_lengths(
        [[65536] if rank % per_node < per_node / 2 else [2048] * 32 for rank in ranks]
    )


def test_every_peer_adds_to_the_fixed_seconds_of_an_exchange() -> None:
    load = load_two_moves(exchange_seconds=1.0, peer_seconds=0.25)
    assert load.peer_counts.tolist() == [2, 1, 1, 0], "rank 0 sends to rank 1 and to rank 2"
    assert (load.exchange_seconds - load.wire_seconds.max(axis=0)).tolist() == pytest.approx(
        [6.0, 5.0, 5.0, 4.0]
    )
    assert not load_two_moves(per_node=None).peer_counts.any(), "peers cost nothing here"


def test_bytes_inside_and_between_nodes_are_counted_separately() -> None:
    load = load_two_moves()
    inside, between = 4 * QUERY + 16 * KEY, 2 * QUERY + 12 * KEY
    assert load.node_bytes.intra_node.tolist() == [[inside, 0, 0, 0], [0, inside, 0, 0]]
    assert load.node_bytes.inter_node.tolist() == [[between, 0, 0, 0], [0, 0, between, 0]]
    assert sum(load.node_bytes).tolist() == load.exchange_bytes.tolist()


def test_links_inside_and_between_nodes_work_at_the_same_time() -> None:
    load = load_two_moves()
    inside, between = (4 * QUERY + 16 * KEY) / 100, (2 * QUERY + 12 * KEY) / 10
    assert between > inside
    assert load.exchange_seconds.tolist() == [between, inside, between, 0]
    slow_inside = load_two_moves(node_bytes_per_second=10.0)
    assert slow_inside.exchange_seconds[0] == pytest.approx(10 * inside)
    one_level = load_two_moves(per_node=None)
    assert one_level.exchange_seconds[0] == pytest.approx(10 * inside + between)


def test_ranks_that_share_a_link_wait_for_its_total_traffic() -> None:
    """Rank 0 sends alone, so it has the whole link; rank 1 waits for the shared link."""
    load = load_two_moves(ranks_per_link=2)
    between = (2 * QUERY + 12 * KEY) / 10
    assert load.exchange_seconds.tolist() == [between / 2] * 4
    # Ranks of different nodes share no link, and the last link of a node may have fewer ranks.
    wide = load_two_moves(ranks_per_link=3)
    assert wide.exchange_seconds.tolist() == [between / 2] * 4
    layout = Layout.from_segments([[(0, 0, 16)], [], [], [(1, 0, 4)], [], []])
    plan = Plan.from_tasks(layout, [(0, 0, 10, 0, 0), (0, 10, 16, 0, 5), (1, 0, 4, 3, 3)])
    load = PlanLoad(plan, replace(SLOW, ranks_per_link=2), ranks=Ranks(per_node=3))
    once = (6 * QUERY + 16 * KEY) / 10
    assert load.exchange_seconds.tolist() == [once / 2, once / 2, 0, 0, 0, once]


@pytest.mark.parametrize("config", [SERIAL, PING_PONG], ids=["serial", "ping-pong"])
def test_work_stays_in_nodes_that_have_equal_work(config: DistCAConfig) -> None:
    layout, ranks = mix_lengths(nodes=8, per_node=8), Ranks(per_node=8)
    blind = balance(layout, CUDA, config)
    before = PlanLoad(blind, CUDA, overlapped=config.ping_pong, ranks=ranks)
    after = make_load(layout, CUDA, config, ranks)
    assert after.node_bytes.inter_node[0].sum() <= 0.02 * before.node_bytes.inter_node[0].sum()
    assert after.slowest_seconds <= max(
        before.slowest_seconds, (1 + config.tolerance) * after.compute_seconds.mean()
    )
    assert after.compute_seconds.max() <= 1.02 * after.compute_seconds.mean()


def test_nodes_that_have_unequal_work_share_it() -> None:
    layout = Layout.from_lengths([[65536]] * 4 + [[8192]] * 12)
    load = make_load(layout, CUDA, PING_PONG, Ranks(per_node=4))
    assert load.compute_seconds.max() <= 1.02 * load.compute_seconds.mean()
    assert load.node_bytes.inter_node[0].sum() > 0


@given(layouts(), st.sampled_from([SERIAL, PING_PONG]), st.sampled_from([1, 2, 3]))
@settings(max_examples=30)
def test_nodes_do_not_change_a_plan_if_all_links_have_one_rate(
    layout: Layout, config: DistCAConfig, per_node: int
) -> None:
    if layout.world_size % per_node == 0:
        nodes = balance(layout, ONE_RATE, config, Ranks(per_node=per_node))
        assert nodes.digest == balance(layout, CUDA, config).digest


def test_ranks_of_one_node_use_only_fast_links() -> None:
    inside = make_load(mix_lengths(1, 8), CUDA, SERIAL, Ranks(per_node=8))
    between = PlanLoad(inside.plan, CUDA)
    ratio = between.wire_seconds.max(axis=0) / inside.wire_seconds.max(axis=0)
    assert ratio == pytest.approx(np.full(8, 300 / 40))


def test_summary_separates_bytes_inside_and_between_nodes() -> None:
    layout, ranks = mix_lengths(2, 4), Ranks(per_node=4)
    one, two = (
        summarize_plan(balance(layout, CUDA, DistCAConfig(), on), CUDA, on)
        for on in (Ranks(), ranks)
    )
    assert one["bytes_inside_nodes"] == 0 < one["bytes_between_nodes"]
    assert two["bytes_inside_nodes"] > 0
    assert two["max_bytes_between_nodes"] <= two["bytes_between_nodes"] < one["bytes_between_nodes"]
    assert "between nodes" in format_summary(two)
    assert "between nodes" not in format_summary(one)


def test_cost_model_with_two_rates_survives_a_json_round_trip() -> None:
    model = replace(CUDA, ranks_per_link=2)
    assert CostModel.from_json(model.to_json()) == model
    assert CostModel.from_json(ONE_RATE.to_json()) == ONE_RATE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"node_bytes_per_second": 0.0}, "node_bytes_per_second=0.0"),
        ({"node_bytes_per_second": float("inf")}, "one rate everywhere"),
        ({"ranks_per_link": 0}, "ranks_per_link=0"),
        ({"ranks_per_link": 1.5}, "ranks_per_link=1.5"),
    ],
)
def test_wrong_links_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CUDA, **wrong)


def test_wrong_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Ranks(per_node=0)
    with pytest.raises(ConfigError, match="6 ranks cannot be divided into nodes of 4"):
        balance(Layout.from_segments([[]] * 6), CUDA, DistCAConfig(), Ranks(per_node=4))


@pytest.mark.parametrize("config", [SERIAL, PING_PONG], ids=["serial", "ping-pong"])
def test_dealt_documents_are_exchanged_inside_nodes(config: DistCAConfig) -> None:
    lengths = [131072] * 4 + [65536] * 4 + [4096] * 64
    loads = []
    for per_node in (None, 8):
        layout = deal(lengths, 32, sum(lengths) // 32, CUDA, ranks_per_node=per_node)
        plan = balance(layout, CUDA, config, Ranks(per_node=per_node))
        loads.append(PlanLoad(plan, CUDA, overlapped=config.ping_pong, ranks=Ranks(per_node=8)))
    blind, dealt = loads
    assert dealt.node_bytes.inter_node[0].sum() <= 0.1 * blind.node_bytes.inter_node[0].sum()
    # With ping-pong, both exchanges are hidden.
    assert dealt.slowest_seconds <= (1.005 if config.ping_pong else 1.0) * blind.slowest_seconds


def test_deal_inside_one_node_uses_the_rate_of_its_links() -> None:
    lengths = [131072] + [4096] * 32
    one, fast = (
        deal(lengths, 8, sum(lengths) // 8, CUDA, ranks_per_node=per_node) for per_node in (None, 8)
    )
    assert one.world_size == fast.world_size == 8
    slowest = [
        make_load(layout, CUDA, SERIAL, Ranks(per_node=8)).slowest_seconds for layout in (one, fast)
    ]
    assert slowest[1] <= slowest[0]
    same = deal(lengths, 8, sum(lengths) // 8, ONE_RATE, ranks_per_node=8)
    assert same.rank.tolist() == one.rank.tolist()
    assert same.start.tolist() == one.start.tolist()
