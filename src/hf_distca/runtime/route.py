"""A rank's view of a plan: rows that it sends and receives, and tasks that it runs on them.

A server runs its tasks in two batches. Its *own* tasks are of documents at home on it, with the
whole key prefix in one run of its tokens: they read its tensors in place and run while the dispatch
is under way. *Arrived* tasks need something from elsewhere: they read pools made of received rows
and, where a document spans ranks, of this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat

import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.messages import (
    MessageLayouts,
    PoolRun,
    RowRun,
    Rows,
    add_rows,
    concat_rows,
    split_runs,
    view_rows,
)
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.share import Columns, ExchangeShare, RankMessage, RelayDuty, compute_share


@dataclass(frozen=True, eq=False)
class KeyPool:
    """Layout of the pool of received and own keys, in which every document's prefix is contiguous.

    Attributes:
        pieces: runs that the pool is made of, in order.
        way_back: rows of the pool to return to the ranks that they came from, in the order of
            arrival, and numbers of copies that come back from each.
    """

    pieces: tuple[PoolRun, ...]
    way_back: Rows

    @cached_property
    def own_runs(self) -> list[tuple[int, PoolRun]]:
        """Runs of this rank's own keys, each with its first row in the pool."""
        starts = accumulate((piece.rows for piece in self.pieces), initial=0)
        return [
            (first, piece)
            for first, piece in zip(starts, self.pieces, strict=False)
            if piece.section is None
        ]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Build the pool of keys or of values, (size, key/value heads, width), from own rows and
        the message's sections.
        """
        from_each = (
            (own_TKD if piece.section is None else sections[piece.section], piece)
            for piece in self.pieces
        )
        return concat_rows([view_rows(tensor, *piece[1:]) for tensor, piece in from_each], own_TKD)

    def add_own(self, grad_TKD: torch.Tensor, pool_TKD: torch.Tensor) -> torch.Tensor:
        """Add gradients of the pool to gradients of this rank's own keys; the sums are wide
        enough.
        """
        return add_rows(
            grad_TKD,
            [run for _, run in self.own_runs],
            (pool_TKD.narrow(0, row, run.rows) for row, run in self.own_runs),
        )


@dataclass(frozen=True, eq=False)
class KeyRelay:
    """The second hop of keys: rows that this rank forwards as a relay, and rows that come from
    other relays.

    Attributes:
        pieces: forwarded runs, in sections of the first hop.
        rows: place of each piece in the pool.
        keys: rows of the forwarded runs that go to other ranks, and numbers of rows that come from
            theirs.
        way_back: rows of the pool to return to relays, in the order of arrival, and numbers of
            copies that come back from each.
    """

    pieces: tuple[PoolRun, ...]
    rows: tuple[PoolRun, ...]
    keys: Rows
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Number of tokens that are forwarded."""
        return sum(piece.rows for piece in self.pieces)

    def copy_forwarded(self, sections: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Copy the forwarded rows out of the sections of k or of v; without any, return zero rows
        of the shape of `like`.
        """
        return concat_rows(
            [
                view_rows(sections[piece.section], *piece[1:])
                for piece in self.pieces
                if piece.section is not None
            ],
            like,
        )

    def add_copies(self, pool_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add gradients of the forwarded copies to gradients of a pool, rank after rank so that the
        sum has one order.
        """
        if not self.size:
            return pool_TKD
        passed = pool_TKD.new_zeros(
            (self.size, *pool_TKD.shape[1:]),
            dtype=torch.promote_types(pool_TKD.dtype, torch.float32),
        )
        add_rows(passed, self.keys.runs, split_runs(self.keys.runs, sections))
        return add_rows(pool_TKD, self.rows, split_runs(self.rows, [passed]))


@dataclass(frozen=True, eq=False)
class Wave:
    """A dispatch and a return, and the tasks served in between.

    Attributes:
        queries, keys: rows of this rank's q and of its k, v that go to other ranks, and of theirs
            that come.
        own_queries: rows of this rank's q that join the query pool in front of the received ones.
        pool: layout of the key pool.
        arrived: tasks on the pools.
        passing: the second hop of keys, if the plan has relays.
        formats: layouts of the messages by their contents; made by the first layer.
    """

    queries: Rows
    keys: Rows
    own_queries: tuple[RowRun, ...]
    pool: KeyPool
    arrived: TaskBatch
    passing: KeyRelay | None = None
    formats: MessageLayouts = field(default_factory=dict)

    @cached_property
    def own_rows(self) -> int:
        """Number of rows of `own_queries`."""
        return sum(run.rows for run in self.own_queries)

    @cached_property
    def is_single_message(self) -> bool:
        """True if both pools are exactly what one rank sent."""
        return (
            self.passing is None
            and not self.own_queries
            and len(self.queries.receive) == len(self.pool.pieces) == len(self.keys.receive) == 1
        )

    def add_copies(self, grad_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add gradients of other ranks' copies to gradients of own keys, rank after rank so that
        the sum has one order.
        """
        return add_rows(grad_TKD, self.keys.runs, split_runs(self.keys.runs, sections))


@dataclass(frozen=True, eq=False)
class Route:
    """Instructions for one rank to carry out a plan. All of them are on the host.

    Attributes:
        local_tasks: tasks that this rank, which is their home, runs on its own tensors.
        wave: the exchange, and the tasks served in it.
        exchanges: whether any rank moves anything; false means that no rank sends or receives.
        groups: number of head groups into which tokens are split in the exchange, 1 if none.
        local_wave: tasks on head groups that this rank runs on pools of its own rows, for which it
            waits for nothing.
    """

    local_tasks: TaskBatch
    wave: Wave
    exchanges: bool
    groups: int = 1
    local_wave: Wave | None = None

    @property
    def forward_exchanges(self) -> int:
        """Number of exchanges of forward, the same on every rank."""
        return 2 + (self.wave.passing is not None)

    @classmethod
    def build(cls, plan: Plan, rank: int) -> Route:
        """Derive the route of `rank`."""
        local_tasks, share, local = compute_share(plan, rank)
        groups = plan.layout.groups
        return cls(
            _make_batch(local_tasks),
            make_empty_wave() if share is None else _make_wave(share, groups),
            plan.moved,
            groups,
            None if local is None else _make_wave(local, groups),
        )

    @classmethod
    def for_whole_documents(cls, lengths: Sequence[int]) -> Route:
        """Make the route of a rank that holds all tokens of documents of these lengths, with no
        other rank to exchange with.
        """
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        return cls(TaskBatch(starts, lengths, starts, lengths), make_empty_wave(), exchanges=False)


def make_empty_wave() -> Wave:
    """Make a wave in which nothing travels and nothing is served."""
    nothing = Rows((), {})
    return Wave(nothing, nothing, (), KeyPool((), nothing), TaskBatch((), (), (), ()))


def _make_wave(share: ExchangeShare, groups: int) -> Wave:
    sections, starts, rows = share.pool
    pool = map(
        PoolRun,
        (None if s < 0 else s for s in sections),
        starts,
        rows,
        (groups if s < 0 else 1 for s in sections),
    )
    return Wave(
        _read_rows(share.queries, groups),
        _read_rows(share.keys, groups),
        _read_runs(share.own_queries, groups),
        KeyPool(tuple(pool), _read_rows(share.gradients)),
        _make_batch(share.pool_tasks),
        None if share.relay_duty is None else _relay(share.relay_duty),
    )


def _relay(duty: RelayDuty) -> KeyRelay:
    sections, starts, rows, places = duty.pieces
    pieces = map(PoolRun, sections, starts, rows)
    in_pool = map(PoolRun, repeat(None), places, rows)
    return KeyRelay(
        tuple(pieces), tuple(in_pool), _read_rows(duty.keys), _read_rows(duty.gradients)
    )


def _read_rows(message: RankMessage, step: int = 1) -> Rows:
    runs, receive = message
    return Rows(_read_runs(runs, step), dict(zip(*receive, strict=True)))


def _read_runs(columns: Columns, step: int) -> tuple[RowRun, ...]:
    return tuple(map(RowRun, *columns, repeat(step)))


def _make_batch(columns: Columns) -> TaskBatch:
    return TaskBatch(*map(tuple, columns))
