"""Which runs of keys servers need, and who holds them: the loop behind `Plan.key_transfers`. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.compiled import Ints, array, column, compiled, entry, room, space
from hf_distca.schedule.coverage import Tasks
from hf_distca.schedule.index import IntArray, Segments

__all__ = ["first_key", "key_runs"]


class _Runs(NamedTuple):
    """Columns of `KeyTransfers`."""

    document: Ints
    start: Ints
    end: Ints
    source: Ints
    server: Ints


def key_runs(segments: Segments, tasks: Tasks, order: IntArray, window: int) -> list[IntArray]:
    """Columns of document, start, end, source and server of runs of keys, in the order of tasks, cut where segments end.

    Args:
        segments, tasks: of a plan.
        order: tasks in order of server, document and position.
        window: keys that a row sees; 0 if it sees all before it.
    """
    begin, size = room(len(segments.documents)), 2 * (len(order) + len(segments.order))
    while True:
        runs = _Runs(space(size), space(size), space(size), space(size), space(size))
        count = _fill(segments, tasks, column(order), window, begin, runs)
        if count <= size:
            return [array(part)[:count] for part in runs]
        size = count


@entry
def _fill(segments: Segments, tasks: Tasks, order: Ints, window: int, begin: Ints, runs: _Runs) -> int:
    """Fill runs in, as many as there is room for; how many there are. `begin` is room for a number of each document."""
    for at in range(len(segments.order) - 1, -1, -1):
        begin[segments.place[segments.order[at]]] = at
    count = next_ = 0
    while next_ < len(order):
        row = order[next_]
        server, place, end = tasks.server[row], tasks.place[row], tasks.end[row]
        start = first_key(tasks.start[row], window)
        next_ += 1
        while next_ < len(order) and tasks.server[order[next_]] == server and tasks.place[order[next_]] == place:
            if first_key(tasks.start[order[next_]], window) > end:
                break
            end = tasks.end[order[next_]]
            next_ += 1
        at = begin[place]
        while at < len(segments.order):
            segment = segments.order[at]
            first, last = max(segments.start[segment], start), min(segments.end[segment], end)
            if segments.place[segment] != place or segments.start[segment] >= end:
                break
            if first < last:
                if count < len(runs.start):
                    runs.document[count], runs.start[count], runs.end[count] = segments.document[segment], first, last
                    runs.source[count], runs.server[count] = segments.rank[segment], server
                count += 1
            at += 1
    return count


@compiled
def first_key(start: int, window: int) -> int:
    """The first key that a task from `start` on needs; `window` is 0 for none."""
    return 0 if window == 0 else max(start - (window - 1), 0)
