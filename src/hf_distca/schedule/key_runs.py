"""Which runs of keys servers need, and who holds them: the loop behind `Plan.key_transfers`. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.compiled import Ints, array, column, compiled, entry, room
from hf_distca.schedule.index import BoolArray, IntArray

__all__ = ["key_runs"]


class _Segments(NamedTuple):
    """Those of a layout, and `order` by document and position."""

    order: Ints
    place: Ints
    start: Ints
    end: Ints
    rank: Ints
    document: Ints


class _Tasks(NamedTuple):
    """Tasks in order of server, document and position."""

    server: Ints
    place: Ints
    start: Ints
    end: Ints


class _Runs(NamedTuple):
    """Columns of `KeyTransfers`."""

    document: Ints
    start: Ints
    end: Ints
    source: Ints
    server: Ints


def key_runs(
    segments: tuple[IntArray, ...], tasks: tuple[IntArray, ...], window: int, rank: int | None, kept: BoolArray
) -> tuple[IntArray, ...]:
    """Columns of document, start, end, source and server of runs of keys, in the order of tasks, cut where segments end.

    Args:
        segments: order by document and position, place, start, end, rank and document of all segments.
        tasks: server, place, start and end of tasks, in order of server, document and position.
        window: keys that a row sees; 0 if it sees all before it.
        rank: the one whose runs are wanted, which it sends or receives; None for all.
        kept: of each document, by place, whether all of its runs are wanted nevertheless.
    """
    columns = _Segments(*map(column, segments)), _Tasks(*map(column, tasks))
    begin, flags, size = room(len(kept)), column(kept), 2 * (len(tasks[0]) + len(segments[0]))
    while True:
        runs = _Runs(*(room(size) for _ in _Runs._fields))
        count = _fill(*columns, window, -1 if rank is None else rank, flags, begin, runs)
        if count <= size:
            return tuple(array(part)[:count] for part in runs)
        size = count


@entry
def _fill(segments: _Segments, tasks: _Tasks, window: int, rank: int, kept: list[bool], begin: Ints, runs: _Runs) -> int:
    """Fill runs in, as many as there is room for; how many there are. `begin` is room for a number of each document."""
    for at in range(len(segments.order) - 1, -1, -1):
        begin[segments.place[segments.order[at]]] = at
    count = row = 0
    while row < len(tasks.server):
        server, place, end = tasks.server[row], tasks.place[row], tasks.end[row]
        start = _first_key(tasks, row, window)
        row += 1
        while row < len(tasks.server) and tasks.server[row] == server and tasks.place[row] == place:
            if _first_key(tasks, row, window) > end:
                break
            end = tasks.end[row]
            row += 1
        at = begin[place]
        while at < len(segments.order):
            segment = segments.order[at]
            source, first, last = segments.rank[segment], max(segments.start[segment], start), min(segments.end[segment], end)
            if segments.place[segment] != place or segments.start[segment] >= end:
                break
            if first < last and (rank < 0 or source == rank or server == rank or kept[place]):
                if count < len(runs.start):
                    runs.document[count], runs.start[count], runs.end[count] = segments.document[segment], first, last
                    runs.source[count], runs.server[count] = source, server
                count += 1
            at += 1
    return count


@compiled
def _first_key(tasks: _Tasks, row: int, window: int) -> int:
    """The first key that a task needs."""
    return 0 if window == 0 else max(tasks.start[row] - (window - 1), 0)
