"""Routes of all ranks of a plan fit together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core_attention import random_case

from hf_distca.runtime.route import Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_what_is_sent_is_received(random_: random.Random, world: int) -> None:
    ranks, context, tasks = random_case(random_, world)
    plan = Plan.from_tasks(Layout.from_segments(ranks, context), tasks)
    routes = [Route.build(plan, rank) for rank in range(world)]
    for rows in ("queries", "keys"):
        for a, sender in enumerate(routes):
            assert a not in getattr(sender.waves[0], rows).send, "a rank sends itself nothing"
            for b, receiver in enumerate(routes):
                assert getattr(sender.waves[0], rows).send.get(b) == getattr(receiver.waves[0], rows).receive.get(a)
    held = int(plan.layout.query_tokens.sum())
    assert sum(sum(r.own.query_length) + sum(r.waves[0].arrived.query_length) for r in routes) == held
    for wave in (route.waves[0] for route in routes):
        tasks = wave.arrived
        assert all(k >= q >= 1 for q, k in zip(tasks.query_length, tasks.key_length, strict=True))
        assert all(a + n <= wave.pool.size for a, n in zip(tasks.key_start, tasks.key_length, strict=True))


def test_slices_of_one_document_share_one_copy_of_its_prefix() -> None:
    layout = Layout.from_lengths([[100], []])
    tasks = [CATask(0, a, b, 0, s) for a, b, s in ((0, 20, 0), (20, 40, 1), (40, 60, 0), (60, 80, 1), (80, 100, 0))]
    wave = Route.build(Plan.from_tasks(layout, tasks), 1).waves[0]
    assert (wave.pool.size, sum(wave.keys.receive.values())) == (80, 80)
    assert (wave.arrived.key_start, wave.arrived.key_length) == ((0, 0), (40, 80))
    assert wave.as_received, "rows of one source are used as they come"


def test_neighbouring_tasks_become_one() -> None:
    layout = Layout.from_lengths([[100], []])
    tasks = [CATask(0, 0, 40, 0, 0), CATask(0, 40, 70, 0, 1), CATask(0, 70, 100, 0, 1)]
    route = Route.build(Plan.from_tasks(layout, tasks), 1)
    assert (route.waves[0].arrived.query_length, route.waves[0].arrived.key_length) == ((60,), (100,))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_plan_is_one_batch_of_whole_documents_in_token_order(rank: int) -> None:
    route = Route.build(Plan.local(Layout.from_lengths([[5, 1, 7], [3]])), rank)
    assert not route.exchanges
    assert len(route.waves[0].arrived) == 0
    assert list(route.own.query_length) == [[5, 1, 7], [3]][rank]
    assert list(route.own.query_start) == list(route.own.key_start)
