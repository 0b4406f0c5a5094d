"""The routes of a plan's ranks fit together and bring each task its queries and keys."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_relays import draw_relays
from test_core_attention import KEY_HEADS, draw_case, draw_head_groups

from hf_distca.kernels import TaskBatch
from hf_distca.runtime import messages as runtime
from hf_distca.runtime.messages import OWN, RowRun
from hf_distca.runtime.route import PooledTasks, Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan


def test_slices_of_one_document_share_one_copy_of_its_prefix() -> None:
    layout = Layout.from_lengths([[100], []])
    tasks = [
        CATask(0, a, b, 0, s)
        for a, b, s in ((0, 20, 0), (20, 40, 1), (40, 60, 0), (60, 80, 1), (80, 100, 0))
    ]
    pooled = Route.build(Plan.from_tasks(layout, tasks), 1).pooled
    assert pooled.key_pool.rows == sum(pooled.keys.receive.values()) == 80
    assert (pooled.tasks.key_start, pooled.tasks.key_length) == ((0, 0), (40, 80))
    assert pooled.is_single_message, "rows of one source are used without a copy"


@pytest.mark.parametrize("lengths", [[], [7], [5, 1, 7]])
@pytest.mark.parametrize("window", [None, 3])
def test_route_for_whole_documents_equals_that_of_a_local_plan(
    lengths: list[int], window: int | None
) -> None:
    alone = Route.for_whole_documents(lengths)
    planned = Route.build(Plan.make_local(Layout.from_lengths([lengths]), window), 0)
    columns = ("query_start", "query_length", "key_start", "key_length")
    for column in columns:
        assert list(getattr(alone.local_tasks, column)) == list(
            getattr(planned.local_tasks, column)
        )
        assert not getattr(alone.pooled.tasks, column)
    assert (alone.exchanges, alone.groups, alone.local_pooled) == (
        planned.exchanges,
        planned.groups,
        planned.local_pooled,
    )


def test_adjacent_tasks_of_a_server_become_one() -> None:
    layout = Layout.from_lengths([[100], []])
    tasks = [CATask(0, 0, 40, 0, 0), CATask(0, 40, 70, 0, 1), CATask(0, 70, 100, 0, 1)]
    route = Route.build(Plan.from_tasks(layout, tasks), 1)
    assert (route.pooled.tasks.query_length, route.pooled.tasks.key_length) == ((60,), (100,))


@pytest.mark.parametrize("rank", [0, 1])
def test_local_plan_is_one_batch_of_whole_documents_in_order(rank: int) -> None:
    route = Route.build(Plan.make_local(Layout.from_lengths([[5, 1, 7], [3]])), rank)
    assert not route.exchanges
    assert len(route.pooled.tasks) == 0
    assert list(route.local_tasks.query_length) == [[5, 1, 7], [3]][rank]
    assert list(route.local_tasks.query_start) == list(route.local_tasks.key_start)


Rows = npt.NDArray[np.int64]


def list_rows(layout: Layout, rank: int, context: bool) -> Rows:
    """List a rank's query rows, or with `context` key rows, as (document, position, head group)."""
    rows: list[tuple[int, int, int]] = []
    for at, segment in enumerate(layout.list_segments(rank)):
        document, group = (
            divmod(segment.document, layout.groups + 1)
            if layout.groups > 1
            else (segment.document, 0)
        )
        if group > 1 or (not context and at < layout.context[rank]):
            continue
        rows += [
            (document, p, g)
            for p in range(segment.start, segment.end)
            for g in range(layout.groups)
        ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def exchange_rows(rows: list[runtime.Rows], own: list[Rows]) -> list[list[Rows]]:
    """Return the rows that each rank receives, one section per sender."""
    sent = [
        {
            to: np.concatenate([take(own[a], *run[1:]) for run in runs])
            for to, runs in one.runs_by_rank.items()
        }
        for a, one in enumerate(rows)
    ]
    for rank, one in enumerate(rows):
        assert rank not in one.receive, "a rank sends itself nothing"
        assert one.receive == {a: len(sent[a][rank]) for a in range(len(rows)) if rank in sent[a]}
    return [[sent[a][rank] for a in one.receive] for rank, one in enumerate(rows)]


def take(rows: Rows, start: int, count: int, step: int = 1) -> Rows:
    return rows[start : start + count * step : step][:count]


def make_pool(pieces: Iterable[RowRun], own: Rows, sections: list[Rows]) -> Rows:
    parts = [
        take(own if piece.peer == OWN else sections[piece.peer], *piece[1:]) for piece in pieces
    ]
    return np.concatenate([own[:0], *parts])


def check_pooled_tasks(
    plan: Plan, of_ranks: list[PooledTasks], queries: list[Rows], keys: list[Rows]
) -> list[Rows]:
    """Check that each task finds its keys and no key comes twice; return the query rows that
    servers compute.
    """
    came = exchange_rows([w.queries for w in of_ranks], queries)
    got = exchange_rows([w.keys for w in of_ranks], keys)
    if of_ranks[0].relay is not None:
        passed = [
            make_pool(w.relay.forwarded.pieces, own, sections)
            for w, own, sections in zip(of_ranks, keys, got, strict=True)
        ]
        more = exchange_rows([w.relay.keys for w in of_ranks], passed)
        got = [first + second for first, second in zip(got, more, strict=True)]
    computed = []
    for rank, pooled in enumerate(of_ranks):
        query = make_pool(pooled.query_pool.pieces, queries[rank], came[rank])
        pool = make_pool(pooled.key_pool.pieces, keys[rank], got[rank])
        assert len({tuple(row) for row in pool.tolist()}) == len(pool) == pooled.key_pool.rows, (
            "no key comes twice"
        )
        computed.append(query)
        check_batch(plan, pooled.tasks, query, pool)
        back = [pool[run.start : run.start + run.rows] for run in pooled.key_pool.way_back.runs]
        back += (
            []
            if pooled.relay is None
            else [take(pool, *run[1:3]) for run in pooled.relay.way_back.runs]
        )
        assert (
            np.concatenate([pool[:0], *back]).tolist()
            == np.concatenate([pool[:0], *got[rank]]).tolist()
        )
        if pooled.relay is not None:
            parts = [take(pool, *copy[2:]) for copy in pooled.relay.places]
            assert np.concatenate([pool[:0], *parts]).tolist() == passed[rank].tolist()
    return computed


def check_batch(plan: Plan, tasks: TaskBatch, query: Rows, pool: Rows) -> None:
    for q, rows, k, count in zip(
        tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length, strict=True
    ):
        (document, last, group), first = query[q + rows - 1], query[q, 1]
        assert query[q : q + rows].tolist() == [
            [document, p, group] for p in range(first, last + 1)
        ]
        begin = 0 if plan.window is None else max(0, first - plan.window + 1)
        assert pool[k : k + count].tolist() == [
            [document, p, group] for p in range(begin, last + 1)
        ]


@settings(max_examples=150, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.sampled_from([None, None, None, 1, 9, 40, "relays", "relays", "groups", "groups"]),
)
def test_every_task_finds_its_keys_and_every_query_is_computed_once(
    random_: random.Random, world: int, kind: int | str | None
) -> None:
    """Rows travel as (document, position, head group)."""
    ranks, context, tasks = draw_case(random_, world)
    layout = Layout.from_segments(ranks, context if kind != "groups" else ())
    if kind == "groups":
        split, tasks = draw_head_groups(random_, ranks)
        layout = layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
    plan = Plan.from_tasks(layout, tasks, kind if isinstance(kind, int) else None)
    if isinstance(kind, str):
        plan = plan.with_relays(draw_relays(random_, plan))
    routes = [Route.build(plan, rank) for rank in range(world)]
    queries, keys = (
        [list_rows(layout, rank, context) for rank in range(world)] for context in (False, True)
    )
    received = check_pooled_tasks(plan, [route.pooled for route in routes], queries, keys)
    computed = [rows.tolist() for rows in received]
    for rank, route in enumerate(routes):
        if route.local_pooled is not None:
            kept = [take(queries[rank], *c[2:]) for c in route.local_pooled.query_pool.own_copies]
            computed[rank] += np.concatenate(kept).tolist()
            check_batch(
                plan,
                route.local_pooled.tasks,
                np.concatenate(kept),
                make_pool(route.local_pooled.key_pool.pieces, keys[rank], []),
            )
        for group in range(layout.groups):
            own = queries[rank][group :: layout.groups], keys[rank][group :: layout.groups]
            check_batch(plan, route.local_tasks, *own)
            for start, rows in zip(
                route.local_tasks.query_start, route.local_tasks.query_length, strict=True
            ):
                computed[rank] += own[0][start : start + rows].tolist()
    whole = [row for rows in queries for row in rows.tolist()]
    assert sorted(row for rows in computed for row in rows) == sorted(whole), (
        "every query is computed once"
    )
