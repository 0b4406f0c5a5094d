"""Relays change only the path of keys: results and received bytes stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_relays import draw_relays
from test_core_attention import (
    KEY_HEADS,
    SCORES,
    Result,
    Segments,
    Tasks,
    check_exact,
    draw_case,
    draw_head_groups,
    run_plan,
    run_untagged,
)

from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.relays import with_sending_ranks
from ranks import RankPools

COST = CostModel.make_analytic(AttentionShape(32, 8, 128, 128, 2))


def draw_relay_case(random_: random.Random, world: int) -> tuple[Segments, list[int], Tasks, Plan]:
    ranks, context, tasks = draw_case(random_, world)
    plan = Plan.from_tasks(Layout.from_segments(ranks, context), tasks)
    return ranks, context, tasks, replace(plan, relays=draw_relays(random_, plan))


@pytest.mark.parametrize(
    ("world", "run"),
    [
        (2, run_plan),
        pytest.param(3, run_plan, marks=pytest.mark.slow),
        pytest.param(4, run_plan, marks=pytest.mark.slow),
        (5, run_plan),
        (3, run_untagged),
    ],
)
def test_random_relays_are_exact(
    rank_pool: RankPools, world: int, run: Callable[..., Result]
) -> None:
    pool = rank_pool(world)
    relayed = 0
    for seed in range(12 if world > 2 else 4):
        ranks, context, tasks, plan = draw_relay_case(random.Random(seed), world)
        results = pool(run, ranks, context, tasks, SCORES, True, plan.relays)
        check_exact(results, (seed, plan.relays))
        more = plan.relays is not None
        relayed += more
        expected = [2 + 2 * more, 2 + more] if plan.moved else [0, 0]
        assert [counts for *_, counts in results] == [expected] * world
    assert relayed


@pytest.mark.parametrize("world", [3, 4])
def test_relays_of_head_groups_are_exact(rank_pool: RankPools, world: int) -> None:
    pool, relayed = rank_pool(world), 0
    for seed in range(12):
        random_ = random.Random(seed)
        ranks, _, _ = draw_case(random_, world)
        split, tasks = draw_head_groups(random_, ranks)
        layout = Layout.from_segments(ranks)
        layout = layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
        relays = draw_relays(random_, Plan.from_tasks(layout, tasks))
        results = pool(run_plan, ranks, [0] * world, tasks, SCORES, False, relays, split)
        check_exact(results, (seed, relays))
        relayed += relays is not None
    assert relayed


@settings(max_examples=75, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 6))
def test_relayed_routes_send_the_planned_load(random_: random.Random, world: int) -> None:
    *_, plan = draw_relay_case(random_, world)
    if plan.relays is None:
        return
    of_ranks = [Route.build(plan, rank).pooled for rank in range(world)]
    sent = [sum(w.keys.send.values()) + sum(w.relay.keys.send.values()) for w in of_ranks]
    received = [sum(w.keys.receive.values()) + sum(w.relay.keys.receive.values()) for w in of_ranks]
    load = PlanLoad(plan, COST).key_tokens
    assert [sent, received] == [side.tolist() for side in load]
    whom = with_sending_ranks(plan.layout, plan.list_key_transfers(), plan.relays)
    sent_to = np.zeros((world, world), dtype=int)
    np.add.at(sent_to, (whom.source, whom.server), whom.end - whom.start)
    for rank, pooled in enumerate(of_ranks):
        assert sent_to[rank].tolist() == [
            pooled.keys.send.get(r, 0) + pooled.relay.keys.send.get(r, 0) for r in range(world)
        ]
    plain = PlanLoad(replace(plan, relays=None), COST).key_tokens
    assert received == plain[1].tolist(), "no rank receives more"
