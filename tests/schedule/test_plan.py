from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from layouts import CUDA, plans

from hf_distca.errors import PlanError
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, format_summary, summarize_plan
from hf_distca.schedule.plan import CATask, Plan

LAYOUT = Layout.from_segments([[(0, 0, 4), (0, 8, 2)], [(0, 4, 4), (1, 0, 3)]])
TASKS = [(0, 0, 4, 0, 0), (0, 4, 6, 1, 1), (0, 6, 8, 1, 0), (0, 8, 10, 0, 0), (1, 0, 3, 1, 1)]


def list_keys(plan: Plan) -> set[tuple[int, int, int, int]]:
    """List (document, position, source, server) of every key that a server needs."""
    holder = {
        (s.document, position): rank
        for rank in range(plan.layout.world_size)
        for s in plan.layout.list_segments(rank)
        for position in range(s.start, s.end)
    }
    window = plan.window or plan.layout.longest
    keys = [(t, p) for t in plan.tasks for p in range(max(0, t.start - window + 1), t.end)]
    return {(t.document, p, holder[t.document, p], t.server) for t, p in keys}


@given(plans())
def test_key_transfers_are_exactly_the_keys_that_tasks_need(plan: Plan) -> None:
    needed = list_keys(plan)
    rows = list(zip(*(column.tolist() for column in plan.list_key_transfers()), strict=True))
    found = [
        (d, position, source, to)
        for d, start, end, source, to in rows
        for position in range(start, end)
    ]
    assert len(found) == len(set(found)), "a key is sent once per server"
    assert rows == sorted(rows, key=lambda row: (row[4], *row[:2])), (
        "in order of server, document and start"
    )
    segments = {
        (s.document, s.start, s.end)
        for r in range(plan.layout.world_size)
        for s in plan.layout.list_segments(r)
    }
    borders = {(d, end) for d, _, end in segments}
    for one, two in itertools.pairwise(rows):
        meet = (one[4], one[0], one[2]) == (two[4], two[0], two[1])
        assert not meet or (one[0], one[2]) in borders, (
            "runs are cut where segments end, and nowhere else"
        )
    assert set(found) == needed


@given(plans())
def test_summary_counts_keys_and_queries_of_the_tasks(plan: Plan) -> None:
    summary = summarize_plan(plan, CUDA)
    sent = [key for key in list_keys(plan) if key[2] != key[3]]
    unplanned = [
        key for key in list_keys(Plan.make_local(plan.layout, plan.window)) if key[2] != key[3]
    ]
    moved = [task for task in plan.tasks if task.home != task.server]
    assert summary["key_tokens_sent"] == len(sent)
    assert summary["key_tokens_sent_unplanned"] == len(unplanned)
    assert summary["query_tokens_moved"] == sum(task.end - task.start for task in moved)
    assert summary["moved_tasks"] == len(moved)
    sources = [key[2] for key in sent]
    assert summary["max_sent_key_tokens"] == max(map(sources.count, range(summary["ranks"])))
    assert json.loads(json.dumps(summary)) == summary
    assert (
        len(
            {
                line.index(line[27:].split(" ")[0], 27)
                for line in format_summary(summary).splitlines()
            }
        )
        == 1
    )


@given(plans())
def test_plan_survives_a_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again.tasks == plan.tasks
    assert again.digest == plan.digest
    assert again.window == plan.window
    assert ("window" in json.loads(plan.to_json())) == (plan.window is not None)


def test_order_of_tasks_does_not_change_a_plan() -> None:
    plan = Plan.from_tasks(LAYOUT, TASKS)
    assert plan.tasks == [CATask(*row) for row in TASKS]
    assert Plan.from_tasks(LAYOUT, TASKS[::-1]).digest == plan.digest


def test_different_plans_and_layouts_have_different_digests() -> None:
    plan = Plan.from_tasks(LAYOUT, TASKS)
    other_server = Plan.from_tasks(LAYOUT, [*TASKS[:-1], (1, 0, 3, 1, 0)])
    other_layout = Layout.from_segments([[(0, 0, 4), (0, 8, 2)], [(1, 0, 3), (0, 4, 4)]])
    windows = [Plan.from_tasks(LAYOUT, TASKS, window) for window in (3, 4)]
    assert (
        len(
            {p.digest for p in (plan, other_server, Plan.from_tasks(other_layout, TASKS), *windows)}
        )
        == 5
    )


def test_keys_outside_the_window_are_not_transferred() -> None:
    def list_runs(window: int) -> list[tuple[int, ...]]:
        rows = zip(
            *(
                column.tolist()
                for column in Plan.from_tasks(LAYOUT, TASKS, window).list_key_transfers()
            ),
            strict=True,
        )
        return [row for row in rows if 0 in row[3:]]

    # On rank 0, task [6, 8) needs keys 4..7, and the local tasks need keys 0..3 and 6..9. The tasks
    # share keys 6 and 7, which lie in one run.
    assert list_runs(3) == [(0, 0, 4, 0, 0), (0, 4, 8, 1, 0), (0, 8, 10, 0, 0), (0, 2, 4, 0, 1)]
    assert list_runs(1) == [(0, 0, 4, 0, 0), (0, 6, 8, 1, 0), (0, 8, 10, 0, 0)]


@pytest.mark.parametrize("window", [0, -4])
def test_plan_with_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(PlanError, match=f"window={window}"):
        Plan.make_local(LAYOUT, window)


@pytest.mark.parametrize("window", ["4", 4.5, True, [4]])
def test_invalid_windows_in_json_are_refused(window: object) -> None:
    data = json.loads(Plan.from_tasks(LAYOUT, TASKS, 4).to_json())
    with pytest.raises(PlanError, match="must be a whole number of at least 1"):
        Plan.from_json(json.dumps({**data, "window": window}))


@pytest.mark.parametrize(
    ("row", "task", "message"),
    [
        (
            0,
            (0, 0, 4, 0, 2),
            (
                r"CATask\(document=0, start=0, end=4, home=0, server=2\) names a server outside the"
                r" 2 ranks"
            ),
        ),
        (0, (0, 0, 4, 0, -1), r"server=-1\) names a server outside"),
        (
            0,
            (0, 0, 4, 1, 0),
            r"start=0, end=4, home=1, server=0\) does not lie in one segment of its home rank",
        ),
        (0, (0, 0, 5, 0, 0), r"start=0, end=5, home=0, server=0\) does not lie in one segment"),
        (0, (0, -1, 4, 0, 0), r"start=-1, .*does not lie in one segment"),
        (0, (0, 4, 4, 0, 0), r"start=4, end=4, .*does not lie in one segment"),
        (4, (2, 0, 3, 1, 1), r"CATask\(document=2, .*does not lie in one segment"),
        (1, (0, 5, 6, 1, 1), r"start=5, end=6, .*does not start at position 4"),
        (2, (0, 5, 8, 1, 0), r"start=5, end=8, .*does not start at position 6"),
        (4, (1, 1, 3, 1, 1), r"document=1, start=1, .*does not start at position 0"),
        (4, (1, 0, 2, 1, 1), "the tasks compute 12 query tokens, but the layout has 13"),
        (3, (0, 8, 9, 0, 0), "the tasks compute 12 query tokens, but the layout has 13"),
    ],
)
def test_plans_with_invalid_tasks_are_refused(
    row: int, task: tuple[int, int, int, int, int], message: str
) -> None:
    tasks = list(TASKS)
    tasks[row] = task
    with pytest.raises(PlanError, match=message):
        Plan.from_tasks(LAYOUT, tasks)


def test_repeated_or_missing_tasks_are_refused() -> None:
    with pytest.raises(PlanError, match="does not start at position"):
        Plan.from_tasks(LAYOUT, [*TASKS, TASKS[0]])
    with pytest.raises(PlanError, match="compute 10 query tokens, but the layout has 13"):
        Plan.from_tasks(LAYOUT, TASKS[:-1])


def test_tasks_in_a_layout_without_tokens_are_refused() -> None:
    empty = Layout.from_lengths([[], []])
    assert Plan.from_tasks(empty, []).tasks == []
    assert not Plan.make_local(empty).moved
    with pytest.raises(PlanError, match="layout without tokens"):
        Plan.from_tasks(empty, [(0, 0, 1, 0, 0)])


def test_document_ids_may_be_any_integers() -> None:
    layout = Layout.from_segments([[(2**62, 0, 10**6)], [(-5, 0, 3), (2**62 - 1, 0, 2)]])
    plan = Plan.make_local(layout)
    assert [task.document for task in plan.tasks] == [-5, 2**62 - 1, 2**62]


def test_moved_is_true_if_ranks_need_each_other() -> None:
    whole = Layout.from_lengths([[4], [4]])
    assert not Plan.make_local(whole).moved
    assert Plan.make_local(LAYOUT).moved
    assert Plan.from_tasks(whole, [(0, 0, 4, 0, 0), (1, 0, 4, 1, 0)]).moved


def test_plan_in_json_without_segments_is_refused() -> None:
    with pytest.raises(PlanError, match="rank_segments"):
        Plan.from_json('{"tasks": []}')


def test_plan_without_exchange_has_no_exchange_seconds() -> None:
    whole = Layout.from_lengths([[400], [400]])
    assert PlanLoad(Plan.make_local(whole), CUDA).exchange_seconds.tolist() == [0.0, 0.0]
    spanning = PlanLoad(Plan.make_local(LAYOUT), CUDA).exchange_seconds
    assert (spanning >= 4 * CUDA.exchange_seconds).all()
    assert np.isfinite(spanning).all()


@pytest.mark.parametrize(("text", "named"), [("[1]", "found: list"), ("{", "not JSON")])
def test_json_that_is_no_plan_is_refused(text: str, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        Plan.from_json(text)
