"""Whether the tasks of a plan compute every query token exactly once: the loop behind `schedule.plan`. All of it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hf_distca.schedule.compiled import compiled, entry, handed
from hf_distca.schedule.index import FINE, IntArray, Segments

if TYPE_CHECKING:
    from hf_distca.schedule.layout import Layout

__all__ = ["AGAIN", "EMPTY", "FINE", "ORDER", "OUTSIDE", "SERVER", "TOO_FEW", "TOO_LONG", "Tasks", "Wrong", "coverage"]

# What may be wrong with tasks; of several things that are, the first is said.
ORDER, SERVER, EMPTY, TOO_LONG, OUTSIDE, AGAIN, TOO_FEW = range(FINE + 1, FINE + 8)


class Wrong(NamedTuple):
    """What is wrong with tasks, `FINE` to `TOO_FEW`, with which, and the position that is next or the tokens computed.

    If nothing is, `row` is the first task that is moved, and -1 if none is.
    """

    what: int
    row: int
    expected: int


class Tasks(NamedTuple):
    """The columns of a plan as compiled functions take them, and of each task the place of its document in the layout."""

    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    place: IntArray


def coverage(layout: Layout, columns: tuple[IntArray, ...]) -> tuple[Tasks, Wrong]:
    """Tasks as arrays, and what is wrong with them.

    Args:
        layout: what they are for.
        columns: document, start, end, home and server, contiguous. If they are not in order of document and start, that is what
            is wrong.
    """
    document, start, end, home, server = columns
    tasks = Tasks(document, start, end, home, server, np.zeros_like(document))
    return tasks, Wrong(*_covered(layout.columns, handed(tasks), layout.world_size, layout.longest))


@entry
def _covered(segments: Segments, tasks: Tasks, ranks: int, longest: int) -> tuple[int, int, int]:
    """Go through tasks and segments side by side; fills `Tasks.place` in."""
    document, start, end = segments.document, segments.start, segments.end
    for row in range(1, len(tasks.document)):
        if (tasks.document[row], tasks.start[row]) < (tasks.document[row - 1], tasks.start[row - 1]):
            return ORDER, row, 0
    long, outside, again, expected, before, computed, held, moved = -1, -1, -1, 0, -1, 0, 0, -1
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
        tasks.place[row] = segments.place[at]
        wanted = tasks.end[row - 1] if at == before else start[at]
        if first != wanted and again < 0:
            again, expected = row, wanted
        before = at
        computed += last - first
        if moved < 0 and tasks.home[row] != tasks.server[row]:
            moved = row
    if outside >= 0:
        return OUTSIDE, outside, 0
    if again >= 0:
        return AGAIN, again, expected
    return (FINE, moved, 0) if computed == held else (TOO_FEW, -1, computed)


@compiled
def _query_segment(segments: Segments, at: int) -> int:
    """The place in `order`, from one on, of a segment whose queries are to be computed."""
    while at < len(segments.order) and not segments.queries[segments.order[at]]:
        at += 1
    return at
