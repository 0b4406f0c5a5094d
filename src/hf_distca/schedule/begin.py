"""Where the moves of the greedy start from; see `schedule.greedy`. All of it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hf_distca.schedule.compiled import Flags, Floats, Ints, compiled, space
from hf_distca.schedule.prices import Price
from hf_distca.schedule.sorting import UP, sort
from hf_distca.schedule.state import (
    ALL,
    CAP,
    FLOOR,
    FREE,
    GROWN,
    HIGH,
    KNOWN,
    LOW,
    MEAN,
    SHED,
    SURPLUS,
    UNASKED,
    Fit,
    Holders,
    Pieces,
    Placed,
    Prices,
    Servers,
    State,
    hold,
    numbers_of,
)

if TYPE_CHECKING:
    from hf_distca.schedule.index import Segments
    from hf_distca.schedule.levels import Levels

__all__ = ["Costs", "Goal", "Room", "begin"]


class Costs(NamedTuple):
    """What slices of documents cost, which may be split in so many head groups; 1 if they are not. The rest as in `Prices`."""

    price: Price
    own: Price
    fit: Fit
    groups: int
    exchanged: bool
    per_node: int


class Goal(NamedTuple):
    """What ranks have to do, and what moves are to make of it.

    Attributes:
        seconds, speed: of each rank.
        levels: where ranks are to end.
        surplus, work: seconds that are to be moved, and of all work, on ranks of speed 1.
        fills_all: whether ranks that are too low take from others, after those that are too high have given.
    """

    seconds: Floats
    speed: Floats
    levels: Levels
    surplus: float
    work: float
    fills_all: bool


class Room(NamedTuple):
    """Rows of a `State` that are yet to be filled in, whatever is in them.

    Attributes:
        pieces, holders, numbers, table: see `Pieces` and `Holders`.
        ratio: of each piece.
        moves: rows of `State.moves`.
        ranks, seconds: four and two numbers of each rank; `ranks` has five more, and `seconds` fourteen.
    """

    pieces: Any
    ratio: Floats
    holders: Any
    numbers: Any
    table: Ints
    moves: Any
    ranks: Ints
    seconds: Floats

    @classmethod
    def of(cls, moves: int, segments: int, numbers: int, ranks: int) -> Self:
        """Room for so many moves, of so many segments and numbers of documents on so many ranks.

        Each head group of segments that may be split counts.
        """
        pieces, holders = segments + 2 * moves, segments + moves
        return cls(
            pieces=space((pieces, 6)),
            ratio=space(pieces, float),
            holders=space((holders, 4)),
            numbers=space((numbers, 3)),
            table=space(2 ** (2 * holders + 1).bit_length()),
            moves=space((moves, 6)),
            ranks=space(4 * ranks + 5),
            seconds=space(2 * ranks + 14, float),
        )


@compiled
def prices_of(costs: Costs) -> Prices:
    """Those of documents and of their head groups."""
    price, own, fit, groups, exchanged, per_node = costs
    parts = groups + 1 if groups > 1 else 1
    group_fit = Fit(fit.bound, fit.query // groups, fit.key // groups)
    return Prices(price, own, _of_group(price, groups), _of_group(own, groups), exchanged, parts, fit, group_fit, per_node)


@compiled
def _of_group(price: Price, groups: int) -> Price:
    """The prices of one of so many head groups: a part of all but the task itself."""
    row, key, pair = price.row / groups, price.key / groups, price.pair / groups
    query_bytes, key_bytes = price.query_bytes / groups, price.key_bytes / groups
    return Price(price.task, row, key, pair, price.kernel_tile, price.tile, query_bytes, key_bytes, price.window, price.near)


@compiled
def begin(costs: Costs, segments: Segments, apart: Flags, goal: Goal, room: Room) -> State:
    """The state before the first move. `apart` is of each document, by place, whether it may be split by heads."""
    ranks, levels, parts = len(goal.seconds), goal.levels, room.seconds[2 * len(goal.seconds) :]
    free, first, order = room.ranks[:ranks], room.ranks[ranks : 2 * ranks], room.ranks[2 * ranks : 3 * ranks]
    counts, scratch = room.ranks[4 * ranks :], room.ranks[3 * ranks : 4 * ranks]
    work, want = room.seconds[:ranks], room.seconds[ranks : 2 * ranks]
    base, level, total = parts[:5], parts[5:10], parts[10:]
    base[FLOOR], base[LOW], base[MEAN], base[HIGH], base[CAP] = levels.floor, levels.low, levels.mean, levels.high, levels.cap
    for place in range(5):
        level[place], counts[place] = base[place], 0
    total[SURPLUS], total[ALL], total[SHED], total[GROWN] = goal.surplus, goal.work, 0.0, 0.0
    for rank in range(ranks):
        work[rank], want[rank], first[rank] = goal.seconds[rank], 0.0, UNASKED
    sort(order, scratch, work, work, UP)
    for rank in order:
        if work[rank] < levels.mean:
            free[counts[FREE]] = rank
            counts[FREE] += 1
    for number in range(len(room.numbers)):
        for place in range(KNOWN + 1):
            room.numbers[number, place] = 0
    for place in range(len(room.table)):
        room.table[place] = 0
    state = State(
        prices_of(costs),
        Placed(segments.offsets, segments.context, segments.by_end, segments.place, segments.start, segments.end),
        apart,
        Servers(work, goal.speed, free, base, level, total, counts),
        Pieces(first, want, room.pieces, room.ratio),
        Holders(room.holders, room.numbers, room.table),
        room.moves,
    )
    _hold_all(state, segments)
    return state


@compiled
def _hold_all(state: State, segments: Segments) -> None:
    """Note which keys the homes of segments need anyway, whose document lies on several ranks."""
    if state.prices.price.window:
        return
    for segment in range(len(segments.place)):
        if segments.spans[segments.place[segment]]:
            for number in numbers_of(state, segment):
                hold(state.holders, state.servers.counts, number, segments.rank[segment], segments.end[segment])
