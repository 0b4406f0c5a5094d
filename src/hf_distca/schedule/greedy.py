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

import numpy as np

from hf_distca.schedule.begin import Costs, Goal, Room
from hf_distca.schedule.compiled import array, column, room, space
from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import Levels
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.state import Fit
from hf_distca.schedule.tasks import MADE, moved_tasks

__all__ = ["Greedy"]

# Moves that there is room for at first: so many for each rank, and so many more. Most plans need one or two for each rank.
_MOVES = (4, 64)
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
        self.fit, self.ranks, self.heads = fit or _NO_BOUND, ranks, heads
        speeds, mean = ranks.each(len(seconds)), ranks.level(seconds)
        levels = Levels.of(seconds, speeds, mean, tolerance) if cap is None else Levels.below(cap)
        high = levels.high
        surplus = math.fsum((work - high) * speed for work, speed in zip(seconds, speeds, strict=True) if work > high)
        work, speed = (column(np.array(one, dtype=np.float64)) for one in (seconds, speeds))
        self.goal = Goal(work, speed, levels, surplus, ranks.work(seconds), cap is None)
        # Numbers of a document and its head groups: the d-th document becomes d * parts.
        self.parts = 1 if heads.groups == 1 else heads.groups + 1
        self.apart = np.zeros(len(layout.documents), dtype=np.bool_) if self.parts == 1 else heads.documents

    def plan(self) -> Plan:
        """Run and build the plan."""
        layout, groups, ranks = self.layout, self.heads.groups, self.layout.world_size
        # Of a document that may be split, each head group counts.
        segments = len(layout.place) + (groups - 1) * int(np.count_nonzero(self.apart[layout.place]))
        per_node = self.ranks.per_node or 0
        near = per_node if self.own.near < 1 and per_node < ranks else 0
        costs = Costs(self.price, self.own, self.fit, groups, self.price is not self.own, near)
        each, more = _MOVES
        moves, found = each * ranks + more, -1
        while found < 0:
            rows, numbers = 3 * moves + 2 * segments, len(layout.documents) * self.parts
            split, made = room(len(layout.documents), bool), space(5 * rows)
            found = moved_tasks(
                layout.columns,
                costs,
                self.goal,
                Room.of(moves, segments, numbers, ranks),
                (column(self.apart), split),
                (made, space(MADE * rows)),
            )
            moves *= 4
        apart = array(split, bool)
        if apart.any():
            layout = layout.split(apart, groups)
        document, start, end, home, server = array(made).reshape(5, -1)[:, :found]
        return Plan(layout, document, start, end, home, server, self.price.window or None)
