"""The greedy behind `balance`.

Every rank has a *level* that it should end at: ranks above the tolerated band come down to it, ranks below come up to it,
ranks inside are left alone. The heaviest rank gives first, to the emptiest server, always the slice with the fewest bytes
exchanged per second of work moved. Since the emptiest servers take the largest slices, the heaviest rank, which is the
busiest sender, sends its keys to as few servers as can be.

Every rank computes the plan for itself, so everything here is plain IEEE double arithmetic in a fixed order. This module says
where the moves start from, and makes a plan of them; the moves themselves are in `schedule.moves`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hf_distca.schedule.compiled import column
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import Levels
from hf_distca.schedule.moves import hold_all, lift, unload
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.state import FREE, GONE, MOVES, PIECES, UNASKED, Fit, Holders, Pieces, Prices, Segments, Servers, State

__all__ = ["Greedy"]

# Moves that there is room for at first: so many for each rank, and so many more. Most plans need one or two for each rank.
_MOVES = (4, 256)
_NO_BOUND = Fit(0, 0, 0)


class Greedy:
    """One run of the greedy for one tolerance. With `fit`, slices are only moved as far as they fit a server.

    With `cap`, ranks above that many seconds come down to it, and `tolerance` is not read. With `exchanged`, prices that have
    what a server receives in them, `seconds` are those of compute and exchange, and that is what is evened out. Documents of
    `heads` are split if a slice of some of their heads is moved.

    Seconds of ranks and levels are what a rank takes; those of slices and of what is still to move are of a rank of speed 1.
    """

    def __init__(
        self,
        layout: Layout,
        price: Price,
        seconds: list[float],
        tolerance: float,
        fit: Fit | None = None,
        cap: float | None = None,
        ranks: Ranks = ALIKE,
        exchanged: Price | None = None,
        heads: Heads = WHOLE,
    ) -> None:
        self.layout, self.own, self.price = layout, price, exchanged or price
        self.fit, self.fills_all, self.ranks, self.heads = fit or _NO_BOUND, cap is None, ranks, heads
        self.seconds = np.array(seconds, dtype=np.float64)
        self.speeds = ranks.each(len(seconds))
        mean = ranks.level(seconds)
        self.levels = Levels.of(seconds, self.speeds, mean, tolerance) if cap is None else Levels.below(cap)
        high = self.levels.high
        surplus = math.fsum((work - high) * speed for work, speed in zip(seconds, self.speeds, strict=True) if work > high)
        self.total = np.array([surplus, ranks.work(seconds), 0.0, 0.0])
        # Numbers of a document and its head groups: the d-th document becomes d * parts.
        self.parts = 1 if heads.groups == 1 else heads.groups + 1
        self.apart = (
            np.isin(layout.document, sorted(heads.documents))
            if heads.documents
            else np.zeros(len(layout.document), dtype=np.bool_)
        )

    def plan(self) -> Plan:
        """Run and build the plan."""
        each, more = _MOVES
        room = each * len(self.seconds) + more
        while not self._moved(state := self._start(room)):
            room *= 4
        return self._build(state)

    def _moved(self, state: State) -> bool:
        """Make all moves; false if there is no room for them."""
        if not unload(state, _heaviest(self.seconds)):
            return False
        return not self.fills_all or lift(state, _heaviest(np.asarray(state.servers.work)))

    def _start(self, room: int) -> State:
        """The state before the first of so many moves."""
        layout, ranks, heads = self.layout, len(self.seconds), self.heads
        spanning = np.flatnonzero(layout.spans[layout.place] & (self.price.window == 0))
        # Of a document that may be split, each head group counts.
        extra = (heads.groups - 1) * int(self.apart.sum())
        per_node = self.ranks.per_node or 0
        free = np.lexsort((np.arange(ranks), self.seconds))
        count = np.zeros(5, dtype=np.int64)
        count[FREE] = np.searchsorted(self.seconds[free], self.levels.mean)
        state = State(
            Prices(
                price=self.price,
                own=self.own,
                group_price=self.price.of_group(heads.groups),
                group_own=self.own.of_group(heads.groups),
                exchanged=self.price is not self.own,
                parts=self.parts,
                fit=self.fit,
                group_fit=self.fit.of_group(heads.groups),
                per_node=per_node if self.own.near < 1 and per_node < ranks else 0,
            ),
            Segments(*map(column, (layout.offsets, layout.context, layout.place, layout.start, layout.end, self.apart))),
            Servers(
                work=column(self.seconds.copy()),
                speed=column(np.array(self.speeds)),
                free=column(free),
                base=column(np.array(self.levels)),
                level=column(np.array(self.levels)),
                total=column(self.total.copy()),
                counts=column(count),
            ),
            _pieces(ranks, len(layout.place) + extra + 2 * room),
            _holders(len(layout.documents) * self.parts, len(spanning) + extra + room),
            (_zeros(room), _zeros(room), _zeros(room), _zeros(room), _zeros(room), _zeros(room)),
        )
        hold_all(state, column(spanning))
        return state

    def _build(self, state: State) -> Plan:
        """Tasks: untouched segments, what is left of the others, and what was moved."""
        layout, parts = self.layout, self.parts
        count, pieces = state.servers.counts, state.pieces
        moves = np.array([part[: count[MOVES]] for part in state.moves], dtype=np.int64)
        segment, number, start, end, home, server = moves[:, np.lexsort(moves[[2, 1, 0]])]
        # Slices of one piece for one server that follow each other are one task.
        joined = (
            (number[1:] == number[:-1]) & (segment[1:] == segment[:-1]) & (server[1:] == server[:-1]) & (start[1:] == end[:-1])
        )
        first = np.flatnonzero(np.append(True, ~joined)[: len(number)])
        last = np.append(first, len(number))[1:] - 1
        rest = (pieces.number, pieces.start, pieces.end, pieces.segment)
        left = np.array([part[: count[PIECES]] for part in rest], dtype=np.int64)
        left = left[:, left[3] != GONE]
        rank = layout.rank[left[3]]
        rows = [
            (number[first], left[0]),
            (start[first], left[1]),
            (end[last], left[2]),
            (home[first], rank),
            (server[first], rank),
        ]
        number, *others = (np.concatenate(pair) for pair in rows)

        document, group = layout.documents[number // parts], number % parts
        split = np.unique(document[: len(first)][group[: len(first)] > 0])
        # Of a document that stays whole, the first group stands for all.
        apart = np.isin(document, split)
        counts = (group <= 1) | apart
        if len(split):
            layout, document = layout.split(split, self.heads.groups), document * parts + np.where(apart, group, 0)
        untouched = layout.queries & (np.asarray(pieces.first) == UNASKED)[layout.rank]
        segments = (layout.document, layout.start, layout.end, layout.rank, layout.rank)
        c = [np.append(one[untouched], other[counts]) for one, other in zip(segments, [document, *others], strict=True)]
        return Plan(layout, c[0], c[1], c[2], c[3], c[4], self.price.window or None)


def _heaviest(work: FloatArray) -> Any:
    """Ranks, those with most work first."""
    return column(np.lexsort((np.arange(len(work)), -work)))


def _zeros(rows: int) -> Any:
    return column(np.zeros(rows, dtype=np.int64))


def _pieces(ranks: int, rows: int) -> Pieces:
    """Room for so many pieces of so many ranks."""
    return Pieces(
        first=column(np.full(ranks, UNASKED)),
        want=column(np.zeros(ranks)),
        start=_zeros(rows),
        end=_zeros(rows),
        number=_zeros(rows),
        segment=_zeros(rows),
        after=_zeros(rows),
        ratio=column(np.zeros(rows)),
        looked=_zeros(rows),
    )


def _holders(numbers: int, rows: int) -> Holders:
    """Room for so many holders of documents with so many numbers."""
    table = 2 ** (2 * rows + 1).bit_length()
    known = column(np.zeros(numbers, dtype=np.bool_))
    return Holders(_zeros(rows), _zeros(rows), _zeros(rows), _zeros(rows), known, _zeros(numbers), _zeros(numbers), _zeros(table))
