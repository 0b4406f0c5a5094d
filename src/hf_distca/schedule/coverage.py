"""Whether the tasks of a plan compute every query token exactly once: the loop behind `schedule.plan`. All of it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hf_distca.schedule.compiled import array, column, compiled, entry, room
from hf_distca.schedule.index import FINE, IntArray

if TYPE_CHECKING:
    from hf_distca.schedule.layout import Layout

__all__ = ["AGAIN", "EMPTY", "FINE", "OUTSIDE", "SERVER", "TOO_FEW", "TOO_LONG", "Wrong", "coverage"]

# What may be wrong with tasks; of several things that are, the first is said.
SERVER, EMPTY, TOO_LONG, OUTSIDE, AGAIN, TOO_FEW = range(FINE + 1, FINE + 7)


class Wrong(NamedTuple):
    """What is wrong with tasks, `FINE` to `TOO_FEW`, with which, and the position that is next or the tokens computed."""

    what: int
    row: int
    expected: int


class _Segments(NamedTuple):
    """Those of a layout whose queries are to be computed, in order of document and position."""

    order: Any
    queries: Any
    document: Any
    start: Any
    end: Any
    rank: Any
    place: Any


class _Tasks(NamedTuple):
    """The columns of a plan."""

    document: Any
    start: Any
    end: Any
    home: Any
    server: Any


def coverage(layout: Layout, tasks: tuple[IntArray, ...]) -> tuple[IntArray, Wrong]:
    """Of each task the place of its document among those of the layout, and what is wrong with them.

    Args:
        layout: what they are for.
        tasks: columns of document, start, end, home and server, in order of document and start.
    """
    parts = layout.by_document, layout.queries, layout.document, layout.start, layout.end, layout.rank, layout.place
    place = room(len(tasks[0]))
    wrong = _covered(_Segments(*map(column, parts)), _Tasks(*map(column, tasks)), layout.world_size, layout.longest, place)
    return array(place), Wrong(*wrong)


@entry
def _covered(segments: _Segments, tasks: _Tasks, ranks: int, longest: int, place: Any) -> tuple[int, int, int]:
    """Go through tasks and segments side by side; fills `place` in."""
    document, start, end = segments.document, segments.start, segments.end
    long, outside, again, expected, before, computed, held = -1, -1, -1, 0, -1, 0, 0
    for row in range(len(tasks.document)):
        if not 0 <= tasks.server[row] < ranks:
            return SERVER, row, 0
        if tasks.end[row] > longest and long < 0:
            long = row
    for segment in segments.order:
        held += (end[segment] - start[segment]) * segments.queries[segment]
    if held == 0 and len(tasks.document) > 0:
        return EMPTY, 0, 0
    if long >= 0:
        return TOO_LONG, long, 0
    following, at = _query_segment(segments, 0), -1
    for row in range(len(tasks.document)):
        # The segment of a task is the last one that starts at or before it.
        while following < len(segments.order):
            segment = segments.order[following]
            if (document[segment], start[segment]) > (tasks.document[row], tasks.start[row]):
                break
            at, following = segment, _query_segment(segments, following + 1)
        first, last = tasks.start[row], tasks.end[row]
        if at < 0 or document[at] != tasks.document[row] or not first < last <= end[at] or segments.rank[at] != tasks.home[row]:
            if outside < 0:
                outside = row
            continue
        place[row] = segments.place[at]
        wanted = tasks.end[row - 1] if at == before else start[at]
        if first != wanted and again < 0:
            again, expected = row, wanted
        before = at
        computed += last - first
    if outside >= 0:
        return OUTSIDE, outside, 0
    if again >= 0:
        return AGAIN, again, expected
    return (FINE, -1, 0) if computed == held else (TOO_FEW, -1, computed)


@compiled
def _query_segment(segments: _Segments, at: int) -> int:
    """The place in `order`, from one on, of a segment whose queries are to be computed."""
    while at < len(segments.order) and not segments.queries[segments.order[at]]:
        at += 1
    return at
