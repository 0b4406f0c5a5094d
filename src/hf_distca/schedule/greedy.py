"""The greedy behind `balance`.

Every rank has a *level* that it should end at: ranks above the tolerated band come down to it, ranks below come up to it,
ranks inside are left alone. The heaviest rank gives first, to the emptiest server, always the slice with the fewest bytes
exchanged per second of work moved. Since the emptiest servers take the largest slices, the heaviest rank, which is the
busiest sender, sends its keys to as few servers as can be.

Every rank computes the plan for itself, so everything here is plain IEEE double arithmetic in a fixed order. This module says
where the moves start from, and makes a plan of those that are kept; the moves themselves are in `schedule.moves`, and what comes
of them is weighed in the same call (`schedule.trial`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hf_distca.schedule.begin import Costs, Goal, Room
from hf_distca.schedule.compiled import Ints, array, column, room
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import Levels
from hf_distca.schedule.plan import Plan, Relays
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.state import Fit
from hf_distca.schedule.tasks import PLAN
from hf_distca.schedule.trial import Made, try_moves
from hf_distca.schedule.weigh import Scale

__all__ = ["Greedy", "Tried"]

# Moves that there is room for at first: so many for each rank, and so many more. Most plans need one or two for each rank.
_MOVES = (4, 64)
_NO_BOUND = Fit(0, 0, 0)


@dataclass(eq=False)
class Tried:
    """Tasks that the greedy made, before they are a plan, and what they weigh; all 0 if they were not weighed.

    Attributes:
        layout: the layout of the run.
        split: of each of its documents, whether it is split by heads, and in how many groups.
        window: of the plan.
        made: columns of tasks and of runs that are passed on, and seconds of ranks.
        tasks, runs: how many there are.
        slowest_seconds: when the slowest rank ends.
        longest_compute: seconds of the rank that computes longest.
    """

    layout: Layout
    split: tuple[Any, int]
    window: int | None
    made: Made
    tasks: int
    runs: int
    slowest_seconds: float
    longest_compute: float

    @cached_property
    def plan(self) -> Plan:
        """These tasks as a plan, which is checked like any other."""
        apart, groups = array(self.split[0], bool), self.split[1]
        layout = self.layout.split(apart, groups) if apart.any() else self.layout
        # Copies: what they were made in is much larger.
        document, start, end, home, server = array(self.made.tasks).reshape(PLAN, -1)[:5, : self.tasks].copy()
        plan = Plan(layout, document, start, end, home, server, self.window)
        if not self.runs:
            return plan
        return plan.with_relays(Relays(*array(self.made.passed).reshape(4, -1)[:, : self.runs].copy()))

    @property
    def compute_seconds(self) -> FloatArray:
        """Seconds that each rank computes."""
        return array(self.made.seconds, float)[: self.layout.world_size]

    @property
    def exchange_seconds(self) -> FloatArray:
        """Seconds that each rank exchanges: see `PlanLoad.exchange_seconds`."""
        return array(self.made.seconds, float)[self.layout.world_size : 2 * self.layout.world_size]


class Greedy:
    """Runs of the greedy for one layout. With `fit`, slices are only moved as far as they fit a server.

    Documents of `heads` are split if a slice of some of their heads is moved. What comes of a run is weighed by `scale`.
    """

    def __init__(
        self, layout: Layout, price: Price, ranks: Ranks, scale: Scale, fit: Fit | None = None, heads: Heads = WHOLE
    ) -> None:
        self.layout, self.price, self.ranks, self.scale, self.fit = layout, price, ranks, scale, fit or _NO_BOUND
        self._speeds = ranks.each(layout.world_size)
        self._speed = column(np.array(self._speeds, dtype=np.float64))
        # Numbers of a document and its head groups: the d-th document becomes d * parts.
        self._groups, documents = heads.groups, len(layout.documents)
        self._parts = 1 if heads.groups == 1 else heads.groups + 1
        apart = np.zeros(documents, dtype=np.bool_) if self._parts == 1 else heads.documents
        self._apart = column(apart)
        # Of a document that may be split, each head group counts.
        self._segments = len(layout.place) + (heads.groups - 1) * int(np.count_nonzero(apart[layout.place]))
        self._moves = 0
        self._room: Room | None = None
        self._scratch: Ints | None = None

    def splitting(self, heads: Heads) -> Greedy:
        """The same greedy, which may split these documents by heads."""
        return Greedy(self.layout, self.price, self.ranks, self.scale, self.fit, heads)

    def still(self, least: float) -> Tried:
        """Nothing moves, but keys are passed on if that gains this part of the seconds of the slowest rank."""
        seconds = np.zeros(self.layout.world_size)
        goal = Goal(column(seconds), self._speed, Levels.still(), 0.0, 0.0, False)
        return self._tried(goal, self.price, self.scale._replace(least=float(least)), 0)

    def run(self, seconds: list[float], tolerance: float, cap: float | None = None, exchanged: Price | None = None) -> Tried:
        """Even out seconds of ranks to a tolerance.

        Seconds of ranks and levels are what a rank takes; those of slices and of what is still to move are of a rank of speed 1.

        Args:
            seconds: what each rank takes; of compute, or with `exchanged` of compute and exchange.
            tolerance: half the width of the tolerated band, as a part of the mean.
            cap: if given, ranks above that many seconds come down to it, and `tolerance` is not read.
            exchanged: prices that have what a server receives in them.
        """
        speeds, mean = self._speeds, self.ranks.level(seconds)
        levels = Levels.of(seconds, speeds, mean, tolerance) if cap is None else Levels.below(cap)
        high = levels.high
        surplus = math.fsum((work - high) * speed for work, speed in zip(seconds, speeds, strict=True) if work > high)
        goal = Goal(column(np.array(seconds)), self._speed, levels, surplus, self.ranks.work(seconds), cap is None)
        each, more = _MOVES
        return self._tried(goal, exchanged or self.price, self.scale, each * len(seconds) + more)

    def _tried(self, goal: Goal, price: Price, scale: Scale, moves: int) -> Tried:
        layout, ranks, per_node = self.layout, self.layout.world_size, self.ranks.per_node or 0
        near = per_node if self.price.near < 1 and per_node < ranks else 0
        costs = Costs(price, self.price, self.fit, self._groups, price is not self.price, near)
        found = -1
        while found < 0:
            if self._moves < moves or self._room is None:
                documents = len(layout.documents) * self._parts
                self._room, self._moves = Room.of(moves, self._segments, documents, ranks), moves
            made = Made.of(self._moves, self._segments, ranks, self._scratch)
            self._scratch, split = made.scratch, room(len(layout.documents), bool)
            apart = (self._apart, split)
            found, runs, slowest, compute = try_moves(layout.columns, costs, goal, self._room, scale, apart, made)
            moves = 4 * self._moves
        window = self.price.window or None
        return Tried(layout, (split, self._groups), window, made, found, runs, slowest, compute)
