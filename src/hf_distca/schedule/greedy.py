"""The greedy behind `balance`: levels for ranks to end at, the moves that
bring them there, and the resulting plan.

Ranks above the tolerated band come down to their level, ranks below come up to it, ranks inside are left alone. The moves
themselves are in `schedule.moves`. Every rank computes the plan for itself, so sums are made in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from hf_distca.schedule.cost import FloatArray, Price
from hf_distca.schedule.heads import Heads
from hf_distca.schedule.layout import BoolArray, IntArray, Layout, changes, repeated
from hf_distca.schedule.moves import END, PIECE, SERVER, START, Ledger, Loads, Prices, QueryPieces, make_moves
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

__all__ = ["Greedy", "Levels", "PlanRows", "Step"]

# Levels are set inside the tolerated band, because slices end on a grid and seldom move exactly what was wanted.
_INNER_BAND = 0.7


class Levels(NamedTuple):
    """Seconds of a rank: the edges of the tolerated band around the mean,
    and the targets for ranks outside it.

    Ranks above `cap` come down to `high`, and those below `floor` come up to `low`. Slices go to ranks below `low`.
    """

    floor: float
    low: float
    high: float
    cap: float

    @classmethod
    def of(cls, seconds: FloatArray, speeds: FloatArray, serves: BoolArray, tolerance: float) -> Self:
        """Choose levels such that total excess equals total deficit: the side
        with more to do stops inside its edge.

        Ranks that neither serve nor exceed the mean stay as they are, and do not count.

        Args:
            seconds: seconds of each rank's work.
            speeds: speeds of ranks: one that ends so many seconds earlier sheds this times its
                speed in work.
            serves: whether each may get slices.
            tolerance: half the width of the band, as a part of the mean.
        """
        mean = Ranks.of(speeds).level(seconds)
        counts = serves | (seconds >= mean)
        if not counts.all():
            return cls.of(seconds[counts], speeds[counts], serves[counts], tolerance)
        low, high = mean * (1 - tolerance * _INNER_BAND), mean * (1 + tolerance * _INNER_BAND)
        surplus, deficit = (math.fsum((np.maximum(gap, 0) * speeds).tolist()) for gap in (seconds - high, low - seconds))
        if surplus >= deficit:
            low = min(_filled(seconds, speeds, surplus), mean)
        else:
            high = max(-_filled(-seconds, speeds, deficit), mean)
        return cls(mean * (1 - tolerance), low, high, mean * (1 + tolerance))


def _filled(taken: FloatArray, speed: FloatArray, amount: float) -> float:
    """The level that `amount` poured over the lowest ranks reaches."""
    order = np.lexsort((speed, taken))
    levels = (amount + np.cumsum((taken * speed)[order])) / np.cumsum(speed[order])
    return float(levels[np.argmax(levels <= np.append(taken[order][1:], np.inf))])


class Step(NamedTuple):
    """Moves of slices among the ranks of each group.

    Attributes:
        prices: of slices.
        tolerance: half the width of the band around the mean that ranks should end in, as a part of it.
        size: ranks of a group.
        per_node: ranks of a node, if work moves between the nodes of a group until these are even; else 1.
        near: ranks of a node, if servers in the node of a source are preferred; else 0.
        cap: seconds that ranks should take at most, if as few as can be are to serve; else 0.
    """

    prices: Prices
    tolerance: float
    size: int
    per_node: int = 1
    near: int = 0
    cap: float = 0.0


@dataclass(frozen=True)
class Greedy:
    """Makes plans for a layout.

    Attributes:
        layout: layout of all ranks.
        heads: documents that may be split by heads.
        price: of tasks.
        speeds: (ranks,) how fast each is.
        ends: where movable rows of a head group, and of all heads, end at most.
        window: of the plans.
        serves: (ranks,) whether each may get slices of others.
    """

    layout: Layout
    heads: Heads
    price: Price
    speeds: FloatArray
    ends: Sequence[int]
    window: int | None
    serves: BoolArray

    def even_out(self, steps: Sequence[Step], seconds: FloatArray) -> PlanRows:
        """Return the rows of the plan that evens out the seconds of ranks, in steps.

        Args:
            steps: the moves.
            seconds: seconds of each rank if nothing moves; shape (ranks,).
        """
        room = 16 * len(seconds) + 64
        while (rows := self._moved(steps, seconds.copy(), room)) is None:
            room *= 4
        return rows

    def _moved(self, steps: Sequence[Step], seconds: FloatArray, room: int) -> PlanRows | None:
        """Make the moves and return the rows; None if there are more moves than room for them."""
        segment, before = self._pieces
        movable = np.minimum(before.end, np.where(before.heads < 1, *self.ends))
        pieces = before._replace(start=before.start.copy(), end=movable.copy())
        ledger, count = _ledger(self.layout, segment, before, room), 0
        for step in steps:
            loads, order = self._loads(step, seconds)
            count = make_moves(pieces, step.prices, loads, ledger, (order, count))
            if count < 0:
                return None
        moves = ledger.moves[:count]
        left, stayed = np.flatnonzero(pieces.start < pieces.end), np.flatnonzero(movable < before.end)
        return PlanRows(
            np.concatenate([moves[:, PIECE], left, stayed]),
            np.concatenate([moves[:, START], pieces.start[left], np.maximum(movable, before.start)[stayed]]),
            np.concatenate([moves[:, END], pieces.end[left], before.end[stayed]]),
            np.concatenate([moves[:, SERVER], self.layout.rank[segment[left]], self.layout.rank[segment[stayed]]]),
        )

    def _loads(self, step: Step, seconds: FloatArray) -> tuple[Loads, IntArray]:
        """Return seconds of ranks before a step and the levels to end at; and the order in which they give."""
        speeds, size, node = self.speeds, step.size // step.per_node, np.arange(len(seconds)) // step.per_node
        speed = np.bincount(node, weights=speeds).astype(np.float64)
        taken, serves = np.bincount(node, weights=seconds * speeds) / speed, np.bincount(node, weights=self.serves) > 0
        groups = [slice(first, first + size) for first in range(0, len(taken), size)]
        capped = Levels(0.0, 0.95 * step.cap, 0.97 * step.cap, step.cap)
        levels = [capped if step.cap else Levels.of(taken[g], speed[g], serves[g], step.tolerance) for g in groups]
        high = np.repeat([of_group.high for of_group in levels], size)
        surplus, work = _sums(np.maximum(taken - high, 0.0) * speed, size), _sums(taken * speed, size)
        order = np.lexsort((-seconds, np.arange(len(seconds)) // step.size))
        group = step.size, np.array(levels), np.zeros(4), np.zeros(2, dtype=np.int64), surplus, work
        return Loads(seconds, speeds, self.serves, *group, step.per_node, taken, speed, step.near), order

    def mixed(self, several: Sequence[PlanRows], chosen: IntArray) -> PlanRows:
        """Combine rows: for the pieces of each rank, take one of
        several ways to move them inside groups.
        """
        of = chosen[self.layout.rank[self._pieces[0]]]
        parts = [np.flatnonzero(of[rows.piece] == number) for number, rows in enumerate(several)]
        columns = zip(*several, strict=True)
        return PlanRows(*(np.concatenate([c[p] for c, p in zip(column, parts, strict=True)]) for column in columns))

    @cached_property
    def _pieces(self) -> tuple[IntArray, QueryPieces]:
        """The segment of each piece, and the pieces that ranks compute
        before anything moves, deepest first.
        """
        layout, heads = self.layout, self.heads
        rows = layout.by_document[layout.queries[layout.by_document]]
        rows = rows[np.argsort(layout.rank[rows] * (layout.longest + 1) - layout.end[rows], kind="stable")]
        index, group = repeated(heads.documents[layout.place[rows]], heads.groups)
        segment = rows[index]
        offsets = np.searchsorted(layout.rank[segment], np.arange(layout.world_size + 1))
        part = np.where(group > 0, 1.0 / heads.groups, 1.0)
        number = layout.place[segment] * (heads.groups + 1) + group
        return segment, QueryPieces(number, layout.start[segment], layout.end[segment], part, offsets)

    def plan(self, rows: PlanRows) -> Plan:
        """Make a plan of rows of pieces, each on a segment.

        Neighbours on one server become one task.
        """
        layout, parts = self.layout, self.heads.groups + 1
        segment, pieces = self._pieces
        home, place, group = layout.rank[segment], layout.place[segment], pieces.number % parts
        # A document of which no group is moved is not split.
        apart = np.zeros(len(layout.documents), dtype=np.bool_)
        apart[place[rows.piece[(rows.server != home[rows.piece]) & (group[rows.piece] > 0)]]] = True
        taken = (apart[place] | (group <= 1))[rows.piece]
        piece, start, end, server = (column[taken] for column in rows)
        number = layout.documents[place[piece]]
        if apart.any():
            number = number * parts + np.where(apart[place[piece]], group[piece], 0)
        order = np.argsort(pieces.number[piece] * (layout.longest + 1) + start)
        piece, start, end, server, number = (column[order] for column in (piece, start, end, server, number))
        begin = changes(piece, server)
        last = np.append(begin, True)[1:]
        split = layout.split(apart, self.heads.groups) if apart.any() else layout
        return Plan(split, number[begin], start[begin], end[last], home[piece[begin]], server[begin], self.window)


class PlanRows(NamedTuple):
    """Rows [start, end) of pieces, none of them empty, and the server that computes them."""

    piece: IntArray
    start: IntArray
    end: IntArray
    server: IntArray


def _sums(values: FloatArray, size: int) -> FloatArray:
    """Sum each `size` consecutive values."""
    return np.array([math.fsum(some) for some in values.reshape(-1, size).tolist()], dtype=np.float64)


def _ledger(layout: Layout, segment: IntArray, pieces: QueryPieces, room: int) -> Ledger:
    """Make a ledger with room for so many moves.

    Homes of documents on several ranks hold their keys, the deepest first.
    """
    chained = np.flatnonzero(layout.spans[layout.place[segment]])
    chained = chained[np.lexsort((pieces.end[chained], pieces.number[chained]))]
    number, count = pieces.number[chained], len(chained)
    holders = np.empty((count + room, 3), dtype=np.int64)
    holders[:count] = np.column_stack(
        [layout.rank[segment[chained]], pieces.end[chained], np.where(changes(number), -1, np.arange(count) - 1)]
    )
    last = np.full(int(pieces.number.max(initial=0)) + 1, -1)
    last[number] = np.arange(count)
    return Ledger(np.empty((room, 4), dtype=np.int64), holders, last)
