"""Waves change nothing but the order of the work."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_core_attention import (
    DIM,
    HEADS,
    KEY_HEADS,
    TILE,
    VALUE_DIM,
    WORLDS,
    random_case,
    run_plan,
    run_untagged,
)

from hf_distca.kernels import Scores
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan
from hf_distca.schedule.waves import TransientBytes, Waves
from ranks import RankPool

SHAPE = AttentionShape(HEADS, KEY_HEADS, DIM, VALUE_DIM, 8)
# From a tile of rows at a time to all at once: the least is what one row takes with one key.
LEAST = sum(TransientBytes.from_shape(SHAPE)[:2])
BOUNDS = [LEAST, 10_000, 60_000, 200_000, 10**9]


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_random_plans_in_waves_are_exact(rank_pool: Callable[[int], RankPool], world: int) -> None:
    pool = rank_pool(world)

    def check(
        random_: random.Random, window: int | None, with_sink: bool, bound: int, groups: int = 1
    ) -> int:
        ranks, context, tasks = random_case(random_, world)
        plan = Plan.from_tasks(Layout.from_segments(ranks, context), tasks, window)
        waves = Waves.split_plan(plan, SHAPE, TILE, bound, groups).count
        scores = Scores(DIM**-0.5, window)
        results = pool(
            run_plan,
            ranks,
            context,
            tasks,
            torch.float64,
            scores,
            with_sink,
            bound,
            None,
            None,
            groups,
        )
        assert max(error for error, *_ in results) < 1e-9, (ranks, context, tasks, bound)
        assert max(float(d_sink.abs().max()) for _, d_sink, _ in results) < 1e-9, (
            ranks,
            context,
            tasks,
            bound,
        )
        exchanges = 2 * waves if plan.moved else 0
        assert [counts for *_, counts in results] == [[exchanges, exchanges]] * world
        return waves

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.randoms(use_true_random=False),
        st.sampled_from([None, None, 1, 9, 40]),
        st.booleans(),
        st.sampled_from(BOUNDS),
        st.sampled_from([1, KEY_HEADS]),
    )
    def check_random(
        random_: random.Random, window: int | None, with_sink: bool, bound: int, groups: int
    ) -> None:
        check(random_, window, with_sink, bound, groups)

    check_random()
    waves = [
        check(random.Random(seed), None, True, LEAST, groups)
        for seed in range(5)
        for groups in (1, KEY_HEADS)
    ]
    assert max(waves) > 1, f"some plans take several waves, and these took {waves}"


def test_waves_are_exact_without_tags(rank_pool: Callable[[int], RankPool]) -> None:
    counts = []
    for seed in range(10):
        ranks, context, tasks = random_case(random.Random(seed), 2)
        counts.append(
            Waves.split_plan(
                Plan.from_tasks(Layout.from_segments(ranks, context), tasks), SHAPE, TILE, LEAST
            ).count
        )
        results = rank_pool(2)(
            run_untagged, ranks, context, tasks, torch.float64, Scores(DIM**-0.5), True, LEAST
        )
        assert max(error for error, *_ in results) < 1e-9, (ranks, context, tasks)
        assert max(float(d_sink.abs().max()) for _, d_sink, _ in results) < 1e-9, (
            ranks,
            context,
            tasks,
        )
    assert max(counts) > 2, f"some plans take several waves, and these took {counts}"


@settings(max_examples=30, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.sampled_from([None, None, 1, 9, 40]),
    st.sampled_from(BOUNDS),
)
def test_waves_cover_the_plan_and_keep_the_bound(
    random_: random.Random, world: int, window: int | None, bound: int
) -> None:
    ranks, context, tasks = random_case(random_, world)
    plan = Plan.from_tasks(Layout.from_segments(ranks, context), tasks, window)
    waves = Waves.split_plan(plan, SHAPE, TILE, bound)
    routes = [Route.build(waves.plan, rank, waves) for rank in range(world)]
    assert {len(route.waves) for route in routes} == {waves.count}
    whole = [Route.build(plan, rank) for rank in range(world)]
    each = TransientBytes.from_shape(SHAPE)
    for rank, (route, one) in enumerate(zip(routes, whole, strict=True)):
        rows = [
            sum(either.local_tasks.query_length)
            + sum(sum(wave.arrived.query_length) for wave in either.waves)
            for either in (route, one)
        ]
        assert rows[0] == rows[1]
        for wave in route.waves:
            used = each.query * sum(wave.arrived.query_length) + each.key * sum(
                piece.rows for piece in wave.pool.pieces
            )
            used += each.sent_query * sum(wave.queries.send.values()) + each.sent_key * sum(
                wave.keys.send.values()
            )
            if plan.moved:
                assert waves.bytes is not None
                assert used <= waves.bytes[rank]
    for index in range(waves.count):
        for a, sender in enumerate(routes):
            for b, receiver in enumerate(routes):
                for rows in ("queries", "keys"):
                    sent = getattr(sender.waves[index], rows).send.get(b)
                    assert sent == getattr(receiver.waves[index], rows).receive.get(a)
    if waves.bytes is not None and (waves.bytes > bound).any():
        # Only where a tile of rows with its keys, and what its homes send for it, is more than the
        # bound alone.
        assert (
            bound
            < (each.query + each.sent_query) * TILE
            + (each.key + each.sent_key) * plan.layout.longest
        )


def test_slices_of_one_document_travel_together_if_they_fit() -> None:
    layout = Layout.from_lengths([[100], []])
    tasks = [
        CATask(0, a, b, 0, s)
        for a, b, s in ((0, 20, 0), (20, 40, 1), (40, 60, 0), (60, 80, 1), (80, 100, 0))
    ]
    plan = Plan.from_tasks(layout, tasks)
    each = TransientBytes.from_shape(SHAPE)

    def moved(bound: int) -> dict[tuple[int, int], int]:
        waves = Waves.split_plan(plan, SHAPE, 10, bound)
        rows = zip(waves.plan.tasks, waves.number.tolist(), strict=True)
        return {(task.start, task.end): number for task, number in rows if number >= 0}

    # What rank 1 holds: two slices on one prefix.
    fits = 40 * each.query + 80 * each.key
    assert moved(fits) == {(20, 40): 0, (60, 80): 0}
    # A byte less, and the second slice is cut on a tile; the rest of it gets its keys again.
    assert moved(fits - 1) == {(20, 40): 0, (60, 70): 0, (70, 80): 1}


def test_no_bound_is_one_wave_of_the_same_plan() -> None:
    plan = Plan.from_tasks(
        Layout.from_lengths([[64], []]), [CATask(0, 0, 32, 0, 0), CATask(0, 32, 64, 0, 1)]
    )
    waves = Waves.split_plan(plan, SHAPE, TILE, None)
    assert (waves.count, waves.bytes) == (1, None)
    assert waves.plan is plan
