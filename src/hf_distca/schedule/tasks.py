"""From the tasks that move nothing to those after all moves. All of it is compiled; see `schedule.greedy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hf_distca.schedule.begin import Costs, Goal, Room, begin
from hf_distca.schedule.compiled import Flags, Ints, compiled
from hf_distca.schedule.moves import make_moves
from hf_distca.schedule.sorting import sort_in_groups
from hf_distca.schedule.state import END, GONE, MOVES, NUMBER, PIECES, SEGMENT, START, UNASKED, State

if TYPE_CHECKING:
    from hf_distca.schedule.index import IntArray, Segments

__all__ = ["MADE", "PLAN", "moved_tasks"]

# Columns of tasks: those of `coverage.Tasks`; and before they are sorted those of a task, the segment, which is -1 where a home
# keeps its rows, and two to sort them by.
PLAN, MADE = 6, 8


class _Tasks(NamedTuple):
    """Tasks before they are sorted, with numbers as in `Prices`."""

    number: Ints
    start: Ints
    end: Ints
    home: Ints
    server: Ints
    segment: Ints


@compiled
def moved_tasks(
    segments: Segments,
    costs: Costs,
    goal: Goal,
    room: Room,
    apart: tuple[Flags, Flags],
    made: tuple[Ints, Ints],
) -> int:
    """Make moves; what was moved, what is left of pieces, and segments that nobody asked for any.

    Args:
        segments, costs, goal, room: as for `begin`.
        apart: of each document, whether it may be split by heads, and false. The latter becomes true for those of which a head
            group was moved; of others, whose groups all stayed together, the first stands for all.
        made: columns of `coverage.Tasks` one after another, to be filled with tasks in order of document and start. And room for
            `MADE` times as many rows, or more.

    Returns:
        How many tasks there are; -1 if the columns were not long enough for all moves. If any document was split, numbers are
        those of the layout that is split so; places are those of this one.
    """
    ranks, (out, scratch) = len(goal.seconds), made
    state = begin(costs, segments, apart[0], goal, room)
    if not make_moves(state, room.ranks[2 * ranks : 3 * ranks], room.ranks[3 * ranks : 4 * ranks], goal.fills_all):
        return -1
    rows = len(out) // PLAN
    tasks = _Tasks(
        scratch[:rows],
        scratch[rows : 2 * rows],
        scratch[2 * rows : 3 * rows],
        scratch[3 * rows : 4 * rows],
        scratch[4 * rows : 5 * rows],
        scratch[5 * rows : 6 * rows],
    )
    count = _kept(state, segments, apart[1], tasks, _moved(state, apart[1], tasks))
    order = scratch[6 * rows : 6 * rows + count]
    # Dealt documents lie on ranks in no order. The result has room to count them in, until it is written.
    ends = out[: len(segments.documents)]
    sort_in_groups(order, scratch[7 * rows : 8 * rows], ends, tasks.number, tasks.start, state.prices.parts)
    return _written(state.prices.parts, segments.documents, apart[1], tasks, order, out)


@compiled
def _moved(state: State, split: Flags, tasks: _Tasks) -> int:
    """The tasks that were moved; how many there are."""
    moves, count, parts = state.moves, state.servers.counts[MOVES], state.prices.parts
    for row in range(count):
        number = moves[row, 1]
        if number % parts:
            split[number // parts] = True
        tasks.segment[row], tasks.number[row] = moves[row, 0], number
        tasks.start[row], tasks.end[row] = moves[row, 2], moves[row, 3]
        tasks.home[row], tasks.server[row] = moves[row, 4], moves[row, 5]
    return int(count)


@compiled
def _kept(state: State, segments: Segments, split: Flags, tasks: _Tasks, count: int) -> int:
    """The tasks that homes keep, from row `count` on; how many there are then."""
    pieces, parts = state.pieces, state.prices.parts
    for piece in range(state.servers.counts[PIECES]):
        number = pieces.rows[piece, NUMBER]
        place, group = number // parts, number % parts
        if pieces.rows[piece, SEGMENT] == GONE or (group > 1 and not split[place]):
            continue
        tasks.number[count] = number if split[place] else place * parts
        tasks.start[count], tasks.end[count] = pieces.rows[piece, START], pieces.rows[piece, END]
        tasks.home[count] = tasks.server[count] = segments.rank[pieces.rows[piece, SEGMENT]]
        tasks.segment[count] = -1
        count += 1
    for segment in range(len(segments.rank)):
        rank, place = segments.rank[segment], segments.place[segment]
        if not segments.queries[segment] or pieces.first[rank] != UNASKED:
            continue
        for group in range(1 if split[place] else 0, parts if split[place] else 1):
            tasks.number[count] = place * parts + group
            tasks.start[count], tasks.end[count] = segments.start[segment], segments.end[segment]
            tasks.home[count] = tasks.server[count] = rank
            tasks.segment[count] = -1
            count += 1
    return count


@compiled
def _written(parts: int, documents: IntArray, split: Flags, tasks: _Tasks, order: Ints, out: Ints) -> int:
    """Write tasks out in this order. Slices of a segment for one server that follow each other are one task."""
    rows, count = len(out) // PLAN, 0
    document, start, end, home, server, place = (
        out[:rows],
        out[rows : 2 * rows],
        out[2 * rows : 3 * rows],
        out[3 * rows : 4 * rows],
        out[4 * rows : 5 * rows],
        out[5 * rows :],
    )
    scale = 1
    for flag in split:
        if flag:
            scale = parts
    before = -1
    for row in order:
        if before >= 0 and tasks.segment[row] >= 0 and _continues(tasks, before, row):
            end[count - 1] = tasks.end[row]
        else:
            number = tasks.number[row]
            document[count] = documents[number // parts] * scale + (number % parts if scale > 1 else 0)
            start[count], end[count] = tasks.start[row], tasks.end[row]
            home[count], server[count], place[count] = tasks.home[row], tasks.server[row], number // parts
            count += 1
        before = row
    return count


@compiled
def _continues(tasks: _Tasks, before: int, row: int) -> bool:
    """Whether a moved task is of the rows that follow those of another one, of the same segment and for the same server."""
    same = tasks.segment[before] == tasks.segment[row] and tasks.number[before] == tasks.number[row]
    return same and tasks.server[before] == tasks.server[row] and tasks.end[before] == tasks.start[row]
