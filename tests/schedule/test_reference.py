"""The planner in plain Python: what it promises by itself, and the compiled one beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, MarginalCost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.reference import apply_formula, make_reference_plan

SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
MODELS = [
    CostModel.make_of_pairs(SHAPE),
    *(CostModel.make_analytic(SHAPE, device_type=device) for device in ("cpu", "cuda")),
]
# How much later the last rank of one planner may end than that of the other, and how many more
# bytes one may move. What the reference leaves out makes a few plans slower.
SLOWER, REFERENCE_SLOWER, MORE_BYTES = 1.02, 1.03, 1.10


def full_ranks(generator: np.random.Generator) -> Layout:
    """Up to 16 ranks of 64K tokens, filled with documents of all lengths; some go on on the next
    rank.
    """
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(int(generator.integers(2, 17)))]
    rank, room = 0, 65536
    for document in itertools.count():
        length, start, spans = int(generator.lognormal(8.5, 1.3)) + 1, 0, generator.random() < 0.3
        while length:
            part = min(length, room)
            ranks[rank].append((document, start, part))
            length, start, room = (length - part) * spans, start + part, room - part
            if not room:
                rank, room = rank + 1, 65536
            if rank == len(ranks):
                return Layout.from_segments(ranks)
            if not spans:
                break
    raise AssertionError("ranks fill up")


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("cost", MODELS[1:], ids=lambda cost: cost.name)
@pytest.mark.parametrize("seed", range(12))
def test_both_planners_are_about_as_good(seed: int, cost: CostModel, ping_pong: bool) -> None:
    layout, config = full_ranks(np.random.default_rng(seed)), DistCAConfig(ping_pong=ping_pong)
    plans = [planner(layout, cost, config) for planner in (balance, make_reference_plan)]
    loads = [PlanLoad(plan, cost, overlapped=ping_pong) for plan in plans]
    fast, plain = (load.slowest_seconds for load in loads)
    assert fast <= SLOWER * plain
    assert plain <= REFERENCE_SLOWER * fast
    fast_bytes, plain_bytes = (float(load.exchange_bytes[0].sum()) for load in loads)
    assert plain_bytes <= MORE_BYTES * fast_bytes
    assert [plan.layout.query_tokens.tolist() for plan in plans] == [
        layout.query_tokens.tolist()
    ] * 2


@settings(max_examples=40)
@given(
    layouts(),
    st.sampled_from(MODELS),
    st.sampled_from([0.0, 0.02, 0.2]),
    st.booleans(),
    st.sampled_from([1, 16, 128]),
)
def test_any_layout(
    layout: Layout, cost: CostModel, min_gain: float, ping_pong: bool, tile: int
) -> None:
    config = DistCAConfig(tolerance=0.01, min_gain=min_gain, ping_pong=ping_pong, tile=tile)
    plan, local = make_reference_plan(layout, cost, config), Plan.make_local(layout)
    segment_ends = set(zip(plan.layout.document.tolist(), plan.layout.end.tolist(), strict=True))
    for task, following in itertools.pairwise(plan.tasks):
        cut = (task.document, task.end) not in segment_ends
        assert not cut or task.end % tile == 0, "documents are cut on tiles"
        assert not cut or task.server != following.server, "neighbours on one server are one task"
    before, after = (
        PlanLoad(measured, cost, overlapped=ping_pong).slowest_seconds for measured in (local, plan)
    )
    assert plan.digest == local.digest or after < before
    assert plan.digest == local.digest or before - after >= min_gain * before


@pytest.mark.parametrize("ranks", [[[]], [[], []], [[1], []], [[100_000]], [[64], [64]]])
@pytest.mark.parametrize("cost", MODELS, ids=lambda cost: cost.name)
def test_small_worlds_stay(ranks: list[list[int]], cost: CostModel) -> None:
    plan = make_reference_plan(Layout.from_lengths(ranks), cost, DistCAConfig())
    assert plan.digest == Plan.make_local(plan.layout).digest


def test_the_formula_is_the_cost_model() -> None:
    for cost, (start, end) in itertools.product(MODELS, [(0, 1), (100, 700), (4096, 65536)]):
        for heads in (1.0, 0.25):
            seconds = float(cost.estimate_seconds(end - start, end, heads)[0])
            assert apply_formula(
                MarginalCost.from_cost_model(cost, cost.tile), heads, start, end
            ) == pytest.approx(seconds)


def test_windows_and_bounds_of_bytes_are_left_to_balance() -> None:
    cost = CostModel(SHAPE, MODELS[2].forward, MODELS[2].backward, 1e10, window=4096)
    for refused, config in (
        (cost, DistCAConfig()),
        (MODELS[2], DistCAConfig(max_transient_bytes=2**30)),
    ):
        with pytest.raises(ConfigError, match="the reference knows no windows"):
            make_reference_plan(Layout.from_lengths([[65536], [1024]]), refused, config)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_both_planners_know_of_nodes(ping_pong: bool) -> None:
    """Nodes are even among themselves, so both keep all work inside them."""
    layout = Layout.from_lengths([[65536], [4096] * 16, [8192] * 8, [32768] * 2] * 3)
    cost = CostModel.make_analytic(SHAPE, device_type="cuda")
    config, nodes = DistCAConfig(ping_pong=ping_pong), Ranks(per_node=4)
    plans = (
        make_reference_plan(layout, cost, config, per_node=4),
        balance(layout, cost, config, nodes),
    )
    loads = [PlanLoad(plan, cost, overlapped=ping_pong, ranks=nodes) for plan in plans]
    assert not any(load.node_bytes.inter_node.any() for load in loads)
    assert loads[0].slowest_seconds <= 1.03 * loads[1].slowest_seconds
