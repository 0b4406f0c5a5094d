"""The greedy behind `balance`: levels for ranks to end at, the moves that bring them there, and the
resulting plan.

Ranks above the tolerated band come down to their level, ranks below come up to it, ranks inside are
left alone. The moves themselves are in `schedule.moves`. Every rank computes the plan for itself,
so sums are made in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from hf_distca.schedule.heads import HeadSplit
from hf_distca.schedule.layout import (
    BoolArray,
    FloatArray,
    IntArray,
    Layout,
    mark_changes,
    repeat_split_rows,
)
from hf_distca.schedule.moves import (
    END,
    PIECE,
    SERVER,
    START,
    Ledger,
    MarginalCosts,
    QueryPieces,
    RankLoads,
    make_moves,
)
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

# Levels are set inside the tolerated band, because slices end on a grid and seldom move exactly
# what was wanted.
_INNER_BAND = 0.7


class Levels(NamedTuple):
    """Seconds of a rank: the edges of the tolerated band around the mean, and the targets for ranks
    outside it.

    On the axis of seconds::

        -------- floor ------ low ------ mean ------ high ------ cap -------->
        rise to low  |              left as they are              |  fall to high

    Ranks above `cap` come down to `high`, and those below `floor` come up to `low`. Slices go to
    ranks below `low`.
    """

    floor: float
    low: float
    high: float
    cap: float

    @classmethod
    def choose(
        cls, seconds: FloatArray, speeds: FloatArray, can_serve: BoolArray, tolerance: float
    ) -> Self:
        """Choose levels such that total excess equals total deficit: the side with more to do stops
        inside its edge.

        Ranks that neither serve nor exceed the mean stay as they are, and do not count.

        Args:
            seconds: seconds of each rank's work.
            speeds: speeds of ranks: one that ends so many seconds earlier gives away this times its
                speed in work.
            can_serve: whether each may get slices.
            tolerance: half the width of the band, as a part of the mean.
        """
        mean = Ranks.from_speeds(speeds).compute_even_seconds(seconds)
        counts = can_serve | (seconds >= mean)
        if not counts.all():
            return cls.choose(seconds[counts], speeds[counts], can_serve[counts], tolerance)
        low, high = mean * (1 - tolerance * _INNER_BAND), mean * (1 + tolerance * _INNER_BAND)
        excess, deficit = (
            math.fsum((np.maximum(gap, 0) * speeds).tolist())
            for gap in (seconds - high, low - seconds)
        )
        if excess >= deficit:
            low = min(_find_fill_level(seconds, speeds, excess), mean)
        else:
            high = max(-_find_fill_level(-seconds, speeds, deficit), mean)
        return cls(mean * (1 - tolerance), low, high, mean * (1 + tolerance))


def _find_fill_level(seconds: FloatArray, speed: FloatArray, amount: float) -> float:
    """Find the level that `amount` reaches, spread over the lowest ranks."""
    order = np.lexsort((speed, seconds))
    levels = (amount + np.cumsum((seconds * speed)[order])) / np.cumsum(speed[order])
    return float(levels[np.argmax(levels <= np.append(seconds[order][1:], np.inf))])


class BalanceStep(NamedTuple):
    """Moves of slices among the ranks of each group.

    Attributes:
        marginals: of slices.
        tolerance: half the width of the band around the mean that ranks should end in, as a part of
            it.
        size: ranks of a group.
        per_node: ranks of a node, if work moves between the nodes of a group until these are even;
            else 1.
        preferred_node_size: ranks of a node, if servers in the node of a source are preferred; else
            0.
        cap: seconds that ranks should take at most, if as few as can be are to serve; else 0.
    """

    marginals: MarginalCosts
    tolerance: float
    size: int
    per_node: int = 1
    preferred_node_size: int = 0
    cap: float = 0.0


@dataclass(frozen=True)
class GreedyPlanner:
    """Makes plans for a layout.

    Attributes:
        layout: layout of all ranks.
        heads: documents that may be split by heads.
        speeds: (ranks,) how fast each is.
        movable_ends: where movable rows of a head group, and of all heads, end at most.
        window: of the plans.
        can_serve: (ranks,) whether each may get slices of others.
    """

    layout: Layout
    heads: HeadSplit
    speeds: FloatArray
    movable_ends: Sequence[int]
    window: int | None
    can_serve: BoolArray

    def even_out(self, steps: Sequence[BalanceStep], seconds: FloatArray) -> PlanRows:
        """Return the rows of the plan that evens out the seconds of ranks, in steps.

        Args:
            steps: the moves.
            seconds: seconds of each rank if nothing moves; shape (ranks,).
        """
        capacity = 16 * len(seconds) + 64
        while (rows := self._try_moves(steps, seconds.copy(), capacity)) is None:
            capacity *= 4
        return rows

    def _try_moves(
        self, steps: Sequence[BalanceStep], seconds: FloatArray, capacity: int
    ) -> PlanRows | None:
        """Make the moves and return the rows; None if there are more moves than room for them."""
        segment, unmoved_pieces = self.pieces
        movable = np.minimum(
            unmoved_pieces.end, np.where(unmoved_pieces.heads < 1, *self.movable_ends)
        )
        pieces = unmoved_pieces._replace(start=unmoved_pieces.start.copy(), end=movable.copy())
        ledger = _make_ledger(self.layout, segment, unmoved_pieces, capacity)
        count = 0
        for step in steps:
            loads, order = self._prepare_loads(step, seconds)
            count = make_moves(pieces, step.marginals, loads, ledger, (order, count))
            if count < 0:
                return None
        moves = ledger.moves[:count]
        left = np.flatnonzero(pieces.start < pieces.end)
        stayed = np.flatnonzero(movable < unmoved_pieces.end)
        return PlanRows(
            np.concatenate([moves[:, PIECE], left, stayed]),
            np.concatenate(
                [
                    moves[:, START],
                    pieces.start[left],
                    np.maximum(movable, unmoved_pieces.start)[stayed],
                ]
            ),
            np.concatenate([moves[:, END], pieces.end[left], unmoved_pieces.end[stayed]]),
            np.concatenate(
                [
                    moves[:, SERVER],
                    self.layout.rank[segment[left]],
                    self.layout.rank[segment[stayed]],
                ]
            ),
        )

    def _prepare_loads(self, step: BalanceStep, seconds: FloatArray) -> tuple[RankLoads, IntArray]:
        """Return seconds of ranks before a step and the levels to end at; and the order in which
        they give.
        """
        speeds = self.speeds
        size = step.size // step.per_node
        node = np.arange(len(seconds)) // step.per_node
        node_speed = np.bincount(node, weights=speeds).astype(np.float64)
        node_seconds = np.bincount(node, weights=seconds * speeds) / node_speed
        can_serve = np.bincount(node, weights=self.can_serve) > 0
        groups = (slice(first, first + size) for first in range(0, len(node_seconds), size))
        levels = [
            Levels(0.0, 0.95 * step.cap, 0.97 * step.cap, step.cap)
            if step.cap
            else Levels.choose(node_seconds[g], node_speed[g], can_serve[g], step.tolerance)
            for g in groups
        ]
        high = np.repeat([of_group.high for of_group in levels], size)
        excess = _sum_groups(np.maximum(node_seconds - high, 0.0) * node_speed, size)
        total_work = _sum_groups(node_seconds * node_speed, size)
        loads = RankLoads(
            seconds,
            speeds,
            self.can_serve,
            step.size,
            start_levels=np.array(levels),
            levels=np.zeros(4),
            group_span=np.zeros(2, dtype=np.int64),
            excess=excess,
            total_work=total_work + (total_work == 0),
            per_node=step.per_node,
            node_seconds=node_seconds,
            node_speed=node_speed,
            preferred_node_size=step.preferred_node_size,
        )
        return loads, np.lexsort((-seconds, np.arange(len(seconds)) // step.size))

    def combine_rows(self, alternatives: Sequence[PlanRows], choice: IntArray) -> PlanRows:
        """Combine rows: for the pieces of each rank, take one of several alternatives of moving
        them inside groups.
        """
        piece_choice = choice[self.layout.rank[self.pieces[0]]]
        parts = [
            np.flatnonzero(piece_choice[rows.piece] == number)
            for number, rows in enumerate(alternatives)
        ]
        columns = zip(*alternatives, strict=True)
        return PlanRows(
            *(
                np.concatenate([c[p] for c, p in zip(column, parts, strict=True)])
                for column in columns
            )
        )

    @cached_property
    def pieces(self) -> tuple[IntArray, QueryPieces]:
        """The segment of each piece, and the pieces that ranks compute before anything moves,
        deepest first.
        """
        layout, heads = self.layout, self.heads
        rows = layout.by_document[layout.has_queries[layout.by_document]]
        rows = rows[
            np.argsort(layout.rank[rows] * (layout.longest + 1) - layout.end[rows], kind="stable")
        ]
        index, group = repeat_split_rows(heads.documents[layout.place[rows]], heads.groups)
        segment = rows[index]
        offsets = np.searchsorted(layout.rank[segment], np.arange(layout.world_size + 1))
        return segment, QueryPieces(
            layout.place[segment] * (heads.groups + 1) + group,
            layout.start[segment],
            layout.end[segment],
            np.where(group > 0, 1.0 / heads.groups, 1.0),
            offsets,
        )

    def make_plan(self, rows: PlanRows) -> Plan:
        """Make a plan of rows of pieces, each on a segment.

        Neighbours on one server become one task.
        """
        layout = self.layout
        parts = self.heads.groups + 1
        segment, pieces = self.pieces
        home = layout.rank[segment]
        place = layout.place[segment]
        group = pieces.number % parts
        # A document of which no group is moved is not split.
        split_mask = np.zeros(len(layout.documents), dtype=np.bool_)
        split_mask[
            place[rows.piece[(rows.server != home[rows.piece]) & (group[rows.piece] > 0)]]
        ] = True
        is_used = (split_mask[place] | (group <= 1))[rows.piece]
        piece, start, end, server = (column[is_used] for column in rows)
        number = layout.documents[place[piece]]
        if split_mask.any():
            number = number * parts + np.where(split_mask[place[piece]], group[piece], 0)
        order = np.argsort(pieces.number[piece] * (layout.longest + 1) + start)
        piece, start, end, server, number = (
            column[order] for column in (piece, start, end, server, number)
        )
        begin = mark_changes(piece, server)
        last = np.append(begin, True)[1:]
        return Plan(
            layout.split_heads(split_mask, self.heads.groups) if split_mask.any() else layout,
            number[begin],
            start[begin],
            end[last],
            home[piece[begin]],
            server[begin],
            self.window,
        )


class PlanRows(NamedTuple):
    """Rows [start, end) of pieces, none of them empty, and the server that computes them."""

    piece: IntArray
    start: IntArray
    end: IntArray
    server: IntArray


def _sum_groups(values: FloatArray, size: int) -> FloatArray:
    """Sum each `size` consecutive values."""
    return np.array(
        [math.fsum(some) for some in values.reshape(-1, size).tolist()], dtype=np.float64
    )


def _make_ledger(layout: Layout, segment: IntArray, pieces: QueryPieces, capacity: int) -> Ledger:
    """Make a ledger with room for so many moves.

    Homes of documents on several ranks hold their keys, the deepest first.
    """
    shared_pieces = np.flatnonzero(layout.has_many_ranks[layout.place[segment]])
    shared_pieces = shared_pieces[
        np.lexsort((pieces.end[shared_pieces], pieces.number[shared_pieces]))
    ]
    number = pieces.number[shared_pieces]
    count = len(shared_pieces)
    holders = np.empty((count + capacity, 3), dtype=np.int64)
    holders[:count] = np.column_stack(
        [
            layout.rank[segment[shared_pieces]],
            pieces.end[shared_pieces],
            np.where(mark_changes(number), -1, np.arange(count) - 1),
        ]
    )
    last = np.full(int(pieces.number.max(initial=0)) + 1, -1)
    last[number] = np.arange(count)
    return Ledger(np.empty((capacity, 4), dtype=np.int64), holders, last)
