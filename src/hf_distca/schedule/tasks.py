"""What moves leave: the tasks of a plan. All of it is compiled; see `schedule.greedy`."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import Ints, compiled, entry
from hf_distca.schedule.state import GONE, PIECES, UNASKED, State

__all__ = ["Tasks", "Untouched", "tasks_of"]


class Tasks(NamedTuple):
    """Columns of a plan."""

    document: Any
    start: Any
    end: Any
    home: Any
    server: Any


class Untouched(NamedTuple):
    """What else is known of a layout: numbers of documents by place, and rank and queries of segments."""

    documents: Any
    rank: Any
    queries: Any


@entry
def tasks_of(state: State, layout: Untouched, order: Ints, apart: list[bool], tasks: Tasks) -> int:
    """What was moved, what is left of pieces, and segments that nobody asked for any.

    Args:
        state: after the moves.
        layout: the rest of the layout.
        order: moves in the order of segment, document and start.
        apart: false for each document. It becomes true for those of which a head group was moved; of others, whose groups all
            stayed together, the first stands for all.
        tasks: columns that are long enough. With any document apart, numbers are those of the layout that is split so.

    Returns:
        How many tasks there are.
    """
    numbers, starts, ends, homes, takers = state.moves[1:]
    segments, pieces, parts = state.segments, state.pieces, state.prices.parts
    split = False
    for move in order:
        if numbers[move] % parts:
            apart[numbers[move] // parts] = split = True
    scale, count, before = parts if split else 1, 0, -1
    for move in order:
        # Slices of one piece for one server that follow each other are one task.
        if before >= 0 and _continues(state, before, move):
            tasks.end[count - 1] = ends[move]
        else:
            place, group = numbers[move] // parts, numbers[move] % parts
            _put(tasks, count, layout.documents[place] * scale + group, starts[move], ends[move], homes[move], takers[move])
            count += 1
        before = move
    for piece in range(state.servers.counts[PIECES]):
        segment, number = pieces.segment[piece], pieces.number[piece]
        if segment == GONE:
            continue
        place, group, rank = number // parts, number % parts, layout.rank[segment]
        if apart[place] or group <= 1:
            group = group if apart[place] else 0
            _put(tasks, count, layout.documents[place] * scale + group, pieces.start[piece], pieces.end[piece], rank, rank)
            count += 1
    for segment in range(len(layout.rank)):
        rank, place = layout.rank[segment], segments.document[segment]
        if not layout.queries[segment] or pieces.first[rank] != UNASKED:
            continue
        first, last = (1, parts) if apart[place] else (0, 1)
        for group in range(first, last):
            number = layout.documents[place] * scale + group
            _put(tasks, count, number, segments.start[segment], segments.end[segment], rank, rank)
            count += 1
    return count


@compiled
def _continues(state: State, before: int, move: int) -> bool:
    """Whether a move hands the rows that follow those of another one to the same server."""
    segments, numbers, starts, ends, _, takers = state.moves
    same = segments[before] == segments[move] and numbers[before] == numbers[move] and takers[before] == takers[move]
    return same and ends[before] == starts[move]


@compiled
def _put(tasks: Tasks, row: int, document: int, start: int, end: int, home: int, server: int) -> None:
    tasks.document[row], tasks.start[row], tasks.end[row], tasks.home[row], tasks.server[row] = document, start, end, home, server
