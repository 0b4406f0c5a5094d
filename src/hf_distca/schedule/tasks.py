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
    scale, count = parts if split else 1, 0
    for at in range(len(order)):
        move = order[at]
        # Slices of one piece for one server that follow each other are one task.
        if at > 0 and _continues(state, order[at - 1], move):
            tasks.end[count - 1] = ends[move]
            continue
        tasks.document[count] = layout.documents[numbers[move] // parts] * scale + numbers[move] % parts
        tasks.start[count], tasks.end[count], tasks.home[count], tasks.server[count] = (
            starts[move],
            ends[move],
            homes[move],
            takers[move],
        )
        count += 1
    for piece in range(state.servers.counts[PIECES]):
        place, group = pieces.number[piece] // parts, pieces.number[piece] % parts
        if pieces.segment[piece] == GONE or (group > 1 and not apart[place]):
            continue
        tasks.document[count] = layout.documents[place] * scale + (group if apart[place] else 0)
        tasks.start[count], tasks.end[count] = pieces.start[piece], pieces.end[piece]
        tasks.home[count] = tasks.server[count] = layout.rank[pieces.segment[piece]]
        count += 1
    for segment in range(len(layout.rank)):
        rank, place = layout.rank[segment], segments.document[segment]
        if not layout.queries[segment] or pieces.first[rank] != UNASKED:
            continue
        for group in range(1 if apart[place] else 0, parts if apart[place] else 1):
            tasks.document[count] = layout.documents[place] * scale + group
            tasks.start[count], tasks.end[count] = segments.start[segment], segments.end[segment]
            tasks.home[count] = tasks.server[count] = rank
            count += 1
    return count


@compiled
def _continues(state: State, before: int, move: int) -> bool:
    """Whether a move hands the rows that follow those of another one to the same server."""
    segments, numbers, starts, ends, _, takers = state.moves
    same = segments[before] == segments[move] and numbers[before] == numbers[move] and takers[before] == takers[move]
    return same and ends[before] == starts[move]
