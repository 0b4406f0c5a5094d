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
from itertools import accumulate, repeat

import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.messages import Formats, PoolRun, Rows, Run, add_rows, joined, pieces, rows_of
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.share import Columns, Passing, RankMessage, WaveShare, share_of
from hf_distca.schedule.waves import Waves

__all__ = ["KeyPool", "KeyRelay", "Route", "Wave"]


@dataclass(frozen=True, eq=False)
class KeyPool:
    """How received keys and this rank's own make the pool in which every document's prefix is one run.

    Attributes:
        pieces: what the pool is made of, in its order.
        way_back: rows of the pool that came from the ranks that hold them, in the order they came, and how many copies come back
            from each.
    """

    pieces: tuple[PoolRun, ...]
    way_back: Rows

    @cached_property
    def own(self) -> list[tuple[int, PoolRun]]:
        """Runs of this rank's own keys: row of the pool, and the run."""
        starts = accumulate((piece.rows for piece in self.pieces), initial=0)
        return [(first, piece) for first, piece in zip(starts, self.pieces, strict=False) if piece.section is None]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from own rows and the message's sections."""
        from_each = ((own_TKD if piece.section is None else sections[piece.section], piece) for piece in self.pieces)
        return joined([rows_of(tensor, *piece[1:]) for tensor, piece in from_each], own_TKD)

    def add_own(self, grad_TKD: torch.Tensor, pool_TKD: torch.Tensor) -> torch.Tensor:
        """Gradients of this rank's own keys, wide enough for sums, with those of the pool that was made of them added."""
        return add_rows(grad_TKD, [run for _, run in self.own], (pool_TKD.narrow(0, row, run.rows) for row, run in self.own))


@dataclass(frozen=True, eq=False)
class KeyRelay:
    """The second hop of keys: what this rank passes on as a relay, and what comes from other relays.

    Attributes:
        pieces: what is passed on, of sections of the first hop.
        rows: of the pool, where each piece lies.
        keys: rows of what is passed on that go to other ranks, and of theirs that come.
        way_back: rows of the pool that came from relays, in the order they came, and how many copies come back from each.
    """

    pieces: tuple[PoolRun, ...]
    rows: tuple[PoolRun, ...]
    keys: Rows
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens that are passed on."""
        return sum(piece.rows for piece in self.pieces)

    def pick(self, sections: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What is passed on, of the sections of k or of v; without rows, of the shape of those of `like`."""
        return joined([rows_of(sections[piece.section], *piece[1:]) for piece in self.pieces if piece.section is not None], like)

    def add_copies(self, pool_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of a pool with those of the copies that were passed on, rank after rank so that the sum has one order."""
        if not self.size:
            return pool_TKD
        passed = pool_TKD.new_zeros((self.size, *pool_TKD.shape[1:]), dtype=torch.promote_types(pool_TKD.dtype, torch.float32))
        add_rows(passed, self.keys.runs, pieces(self.keys.runs, sections))
        return add_rows(pool_TKD, self.rows, pieces(self.rows, [passed]))


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
        return add_rows(grad_TKD, self.keys.runs, pieces(self.keys.runs, sections))


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. All of it is on the host.

    Attributes:
        local_tasks: tasks that this rank, which is their home, runs on its own tensors.
        waves: exchanges, at least one, and what is served in each; as many on every rank.
        exchanges: whether any rank moves anything; false means that no rank sends or receives.
        groups: head groups that the tokens of waves are split in, 1 if none.
        local_wave: tasks on head groups that this rank runs on pools of its own rows, for which it waits for nothing.
    """

    local_tasks: TaskBatch
    waves: tuple[Wave, ...]
    exchanges: bool
    groups: int = 1
    local_wave: Wave | None = None

    @property
    def forward_exchanges(self) -> int:
        """Exchanges of forward, as many on every rank."""
        return 2 * len(self.waves) + (self.waves[0].passing is not None)

    @classmethod
    def build(cls, plan: Plan, rank: int, waves: Waves | None = None) -> Route:
        """Derive the route of `rank`. `waves` are those of the plan."""
        if waves is not None:
            plan = waves.plan
        number, count = (None, int(plan.moved)) if waves is None else (waves.number, waves.count * plan.moved)
        local_tasks, shares, local = share_of(plan, rank, number, count)
        groups = plan.layout.groups
        built, local_wave = (_wave(share, groups) for share in shares), None if local is None else _wave(local, groups)
        return cls(_batch(local_tasks), tuple(built) or (_empty_wave(),), plan.moved, groups, local_wave)

    @classmethod
    def alone(cls, lengths: Sequence[int]) -> Route:
        """The route of a rank that has so many tokens of each document, all of them, and no other rank to exchange with."""
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        return cls(TaskBatch(starts, lengths, starts, lengths), (_empty_wave(),), exchanges=False)


def _empty_wave() -> Wave:
    """A wave in which nothing travels and nothing is served."""
    nothing = Rows((), {})
    return Wave(nothing, nothing, (), KeyPool((), nothing), TaskBatch((), (), (), ()))


def _wave(share: WaveShare, groups: int) -> Wave:
    sections, starts, rows = share.pool
    pool = map(PoolRun, (None if s < 0 else s for s in sections), starts, rows, (groups if s < 0 else 1 for s in sections))
    return Wave(
        _rows(share.queries, groups),
        _rows(share.keys, groups),
        _runs(share.own_queries, groups),
        KeyPool(tuple(pool), _rows(share.way_back)),
        _batch(share.arrived),
        None if share.passing is None else _relay(share.passing),
    )


def _relay(passing: Passing) -> KeyRelay:
    sections, starts, rows, places = passing.pieces
    pieces, in_pool = map(PoolRun, sections, starts, rows), map(PoolRun, repeat(None), places, rows)
    return KeyRelay(tuple(pieces), tuple(in_pool), _rows(passing.keys), _rows(passing.way_back))


def _rows(message: RankMessage, step: int = 1) -> Rows:
    runs, receive = message
    return Rows(_runs(runs, step), dict(zip(*receive, strict=True)))


def _runs(columns: Columns, step: int) -> tuple[Run, ...]:
    return tuple(map(Run, *columns, repeat(step)))


def _batch(columns: Columns) -> TaskBatch:
    return TaskBatch(*map(tuple, columns))
