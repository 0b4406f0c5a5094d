"""One rank's view of a plan: which rows it sends, which it receives, and the tasks it runs on them.

A server runs its tasks in two batches. Its *own* tasks are those that it is the home of, with their whole key prefix in one run
of its tokens: they read its tensors in place and run while the dispatch is under way. *Arrived* tasks need something from
elsewhere: they read pools made of received rows and, where a document spans ranks, of this rank's own. They come in one wave or,
where transient bytes are bounded, in several, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.exchange import part_of, pieces
from hf_distca.runtime.format import Formats, Rows, Run
from hf_distca.runtime.keys import KeyPool, KeyRelay, PoolRun, accumulator
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.share import share_of
from hf_distca.schedule.waves import Waves

__all__ = ["Route", "Wave"]


@dataclass(frozen=True, eq=False)
class Wave:
    """One dispatch and one return, and what this rank serves in between.

    Attributes:
        queries, keys: rows of this rank's q and of its k, v that go to other ranks, and of theirs that come.
        own_queries: rows of this rank's q that join the query pool in front of the received ones.
        pool: how the key pool is made.
        arrived: tasks on the pools.
        passing: the second hop of keys, if the plan has relays.
        formats: formats of the messages, by what travels: made by the first layer.
    """

    queries: Rows
    keys: Rows
    own_queries: tuple[Run, ...]
    pool: KeyPool
    arrived: TaskBatch
    passing: KeyRelay | None = None
    formats: Formats = field(default_factory=dict)

    @cached_property
    def own_rows(self) -> int:
        """Rows of `own_queries`."""
        return sum(run.rows for run in self.own_queries)

    @cached_property
    def as_received(self) -> bool:
        """Whether both pools are what one rank sent, as it is."""
        if self.passing is not None:
            return False
        return not self.own_queries and len(self.queries.receive) == len(self.pool.pieces) == len(self.keys.receive) == 1

    def add_copies(self, grad_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of own keys with those of the copies of other ranks, rank after rank so that the sum has one order."""
        if not sections:
            return grad_TKD
        total = accumulator(grad_TKD)
        for run, piece in zip(self.keys.runs, pieces(self.keys.runs, sections), strict=True):
            part_of(total, *run[1:]).add_(piece)
        return total


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. All of it is on the host.

    Attributes:
        own: tasks that this rank, which is their home, runs on its own tensors.
        waves: exchanges, at least one, and what is served in each; as many on every rank.
        exchanges: whether any rank moves anything; false means that no rank sends or receives.
        groups: head groups that the tokens of waves are split in, 1 if none.
        local_wave: tasks on head groups that this rank runs on pools of its own rows, for which it waits for nothing.
    """

    own: TaskBatch
    waves: tuple[Wave, ...]
    exchanges: bool
    groups: int = 1
    local_wave: Wave | None = None

    @property
    def passes_on(self) -> bool:
        """Whether keys travel in two hops, on any rank."""
        return self.waves[0].passing is not None

    @property
    def forward_exchanges(self) -> int:
        """Exchanges of forward, as many on every rank."""
        return 2 * len(self.waves) + self.passes_on

    @classmethod
    def build(cls, plan: Plan, rank: int, waves: Waves | None = None) -> Route:
        """Derive the route of `rank`. `waves` are those of the plan."""
        if waves is not None:
            plan = waves.plan
        groups, relayed = plan.layout.groups, plan.relays is not None
        number = None if waves is None else waves.number
        numbers = _Numbers(share_of(plan, rank, number), groups)
        own_tasks, built = numbers.batch(), [numbers.wave(relayed)]
        local_wave = None
        if numbers.left:
            numbers.batch()  # none
            local_wave = numbers.wave(relayed=False)
        for wave in range(1, 1 if waves is None else waves.count):
            numbers = _Numbers(share_of(plan, rank, number, wave), groups)
            numbers.batch()  # the same for every wave
            built.append(numbers.wave(relayed))
        return cls(own_tasks, tuple(built), plan.moved, groups, local_wave)


class _Numbers:
    """What `schedule.share` wrote down, read from its beginning."""

    def __init__(self, numbers: list[int], groups: int) -> None:
        self.numbers, self.groups, self.at = numbers, groups, 0

    @property
    def left(self) -> bool:
        """Whether there is more to read."""
        return self.at < len(self.numbers)

    def columns(self, width: int) -> list[list[int]]:
        """The columns of the next section."""
        first = self.at + 1
        self.at = last = first + width * self.numbers[self.at]
        return [self.numbers[column:last:width] for column in range(first, first + width)]

    def batch(self) -> TaskBatch:
        """A batch."""
        return TaskBatch(*map(tuple, self.columns(4)))

    def wave(self, relayed: bool) -> Wave:
        """A wave, with a second hop if the plan has relays."""
        queries, own_runs = self.rows(self.groups), self.runs(self.groups)
        keys, pool, back, arrived = self.rows(self.groups), self.pieces(), self.rows(), self.batch()
        passing = self.passing() if relayed else None
        return Wave(queries, keys, own_runs, KeyPool(pool, back), arrived, passing)

    def runs(self, step: int = 1) -> tuple[Run, ...]:
        """Runs with rows so far apart."""
        return tuple(map(Run._make, zip(*self.columns(3), repeat(step))))

    def rows(self, step: int = 1) -> Rows:
        """Runs, and how many rows come from whom."""
        return Rows(self.runs(step), dict(zip(*self.columns(2), strict=True)))

    def pieces(self) -> tuple[PoolRun, ...]:
        """Pieces of a pool: from a section of the message, or of this rank's own."""
        rows = zip(*self.columns(3), strict=True)
        return tuple(
            [
                PoolRun(None, start, rows, self.groups) if section < 0 else PoolRun(section, start, rows)
                for section, start, rows in rows
            ]
        )

    def passing(self) -> KeyRelay:
        """The second hop."""
        section, start, rows, place = self.columns(4)
        pieces = tuple(map(PoolRun._make, zip(section, start, rows, repeat(1))))
        return KeyRelay(pieces, tuple(zip(place, rows, strict=True)), self.rows(), self.rows())
