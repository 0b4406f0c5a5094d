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

from hf_distca.schedule.compiled import array, column, room
from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import Levels
from hf_distca.schedule.moves import make_moves
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.state import FREE, MOVES, PIECES, UNASKED, Fit, Holders, Pieces, Prices, Segments, Servers, State
from hf_distca.schedule.tasks import Tasks, Untouched, tasks_of

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
        self.apart = np.zeros(len(layout.place), dtype=np.bool_) if self.parts == 1 else heads.documents[layout.place]

    def plan(self) -> Plan:
        """Run and build the plan."""
        each, more = _MOVES
        moves = each * len(self.seconds) + more
        while not make_moves(state := self._start(moves), *self._all(), self.fills_all):
            moves *= 4
        return self._build(state)

    def _all(self) -> tuple[Any, Any, Any]:
        """Segments whose keys several ranks need anyway, all ranks, and room for as many."""
        spanning = self.layout.spans[self.layout.place] & (self.price.window == 0)
        return column(spanning), column(np.arange(len(self.seconds))), room(len(self.seconds))

    def _start(self, moves: int) -> State:
        """The state before the first of so many moves."""
        layout, ranks, heads = self.layout, len(self.seconds), self.heads
        # Of a document that may be split, each head group counts.
        extra = (heads.groups - 1) * int(self.apart.sum())
        per_node = self.ranks.per_node or 0
        free = np.lexsort((np.arange(ranks), self.seconds))
        count = np.zeros(5, dtype=np.int64)
        count[FREE] = np.searchsorted(self.seconds[free], self.levels.mean)
        return State(
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
            _pieces(ranks, len(layout.place) + extra + 2 * moves),
            _holders(len(layout.documents) * self.parts, len(layout.place) + extra + moves),
            (room(moves), room(moves), room(moves), room(moves), room(moves), room(moves)),
        )

    def _build(self, state: State) -> Plan:
        """Tasks: untouched segments, what is left of the others, and what was moved."""
        layout, groups = self.layout, self.heads.groups
        count = state.servers.counts
        made = np.array([part[: count[MOVES]] for part in state.moves], dtype=np.int64)
        order, apart = np.lexsort(made[[2, 1, 0]]), room(len(layout.documents), bool)
        rows = len(order) + int(count[PIECES]) + len(layout.place) + (groups - 1) * int(self.apart.sum())
        tasks = Tasks(*(room(rows) for _ in Tasks._fields))
        segments = Untouched(*map(column, (layout.documents, layout.rank, layout.queries)))
        found = tasks_of(state, segments, column(order), apart, tasks)
        split = array(apart, bool)
        if split.any():
            layout = layout.split(split, groups)
        document, start, end, home, server = (array(part)[:found] for part in tasks)
        return Plan(layout, document, start, end, home, server, self.price.window or None)


def _pieces(ranks: int, rows: int) -> Pieces:
    """Room for so many pieces of so many ranks."""
    return Pieces(
        first=column(np.full(ranks, UNASKED)),
        want=room(ranks, float),
        start=room(rows),
        end=room(rows),
        number=room(rows),
        segment=room(rows),
        after=room(rows),
        ratio=room(rows, float),
        looked=room(rows),
    )


def _holders(numbers: int, rows: int) -> Holders:
    """Room for so many holders of documents with so many numbers."""
    table = 2 ** (2 * rows + 1).bit_length()
    known = room(numbers, bool)
    return Holders(room(rows), room(rows), room(rows), room(rows), known, room(numbers), room(numbers), room(table))
