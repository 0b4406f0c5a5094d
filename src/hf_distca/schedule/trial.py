"""`try_moves`: tasks after the moves of the greedy, and when ranks end under them, in one call. All of it is compiled.

Of the plans that `balance` tries, one is kept. Among few ranks it takes longer to build a `Plan` than to find and to weigh its
tasks: so only the one that is kept becomes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hf_distca.schedule.begin import Costs, Goal, Room
from hf_distca.schedule.compiled import Flags, Floats, Ints, entry, space
from hf_distca.schedule.index import Tasks
from hf_distca.schedule.tasks import MADE, PLAN, moved_tasks
from hf_distca.schedule.weigh import Scale, room_to_weigh, weigh

if TYPE_CHECKING:
    from hf_distca.schedule.index import Segments

__all__ = ["Made", "try_moves"]


class Made(NamedTuple):
    """Room for what `try_moves` makes.

    Attributes:
        tasks: columns of a `Tasks` one after another.
        passed: columns of `Relays` one after another.
        scratch: room for other numbers, which are of no use afterwards.
        seconds: those that each rank computes and exchanges, and room for other numbers.
        segments: of the layout at most; each head group counts.
    """

    tasks: Any
    passed: Ints
    scratch: Ints
    seconds: Floats
    segments: int

    @classmethod
    def of(cls, moves: int, segments: int, ranks: int, scratch: Ints | None = None) -> Self:
        """Room for so many moves, of so many segments on so many ranks; with the scratch of another, if it is large enough."""
        rows = 3 * moves + 2 * segments
        runs, integers, floats = room_to_weigh(rows, segments, ranks)
        kept, needed = space(PLAN * rows + 4 * runs), max(MADE * rows, integers)
        if scratch is None or len(scratch) < needed:
            scratch = space(needed)
        return cls(kept[: PLAN * rows], kept[PLAN * rows :], scratch, space(floats, float), segments)


@entry
def try_moves(
    segments: Segments, costs: Costs, goal: Goal, room: Room, scale: Scale, apart: tuple[Flags, Flags], made: Made
) -> tuple[int, int, float, float]:
    """Make moves, and weigh what comes of them.

    Args:
        segments, costs, goal, room, apart: as for `moved_tasks`.
        scale: how tasks are weighed.
        made: room for the results.

    Returns:
        How many tasks there are, -1 if there was no room for all moves; how many runs of keys are passed on; when the slowest
        rank ends, and how long the one that computes most does it. If nothing is weighed, the last three are 0.
    """
    count = moved_tasks(segments, costs, goal, room, apart, (made.tasks, made.scratch))
    if count < 0 or not scale.weighs:
        return count, 0, 0.0, 0.0
    rows, groups = len(made.tasks) // PLAN, scale.groups
    tasks = Tasks(
        made.tasks[:count],
        made.tasks[rows : rows + count],
        made.tasks[2 * rows : 2 * rows + count],
        made.tasks[3 * rows : 3 * rows + count],
        made.tasks[4 * rows : 4 * rows + count],
        made.tasks[5 * rows : 5 * rows + count],
    )
    for split in apart[1]:
        groups = costs.groups if split else groups
    room_left = (made.scratch, made.seconds)
    runs, slowest, compute = weigh(segments, tasks, groups, goal.speed, scale, made.passed, room_left, made.segments)
    return count, runs, slowest, compute
