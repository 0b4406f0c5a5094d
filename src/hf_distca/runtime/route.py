"""A rank's view of a plan: the rows that it sends and receives, and the tasks that it runs.

A server runs its tasks in two batches. An *own* task needs only tokens of this rank, and its keys
lie in one run. Own tasks read this rank's tensors in place, and run while the dispatch is under
way. *Arrived* tasks need rows of other ranks, and read pools of received rows. If a document spans
ranks, these pools also have some of this rank's own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, repeat

import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.messages import (
    OWN,
    MessageLayouts,
    RowCopy,
    RowRun,
    Rows,
    add_rows,
    concat_rows,
    view_rows,
)
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.share import Columns, ExchangeShare, RankMessage, RelayDuty, compute_share


@dataclass(frozen=True, eq=False)
class Pool:
    """Layout of a pool, which puts received rows and rows of this rank into one tensor.

    The rows are queries or keys. In a pool of keys, the keys of each document are contiguous.

    Attributes:
        pieces: the runs of rows that make up the pool, in order.
        way_back: rows of the pool to return to their senders, in the order of arrival, and the
            number of rows that each rank returns to this rank.
    """

    pieces: tuple[RowRun, ...]
    way_back: Rows

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def own_copies(self) -> list[RowCopy]:
        """Copies of this rank's own rows from the pool back to its tensor."""
        firsts = accumulate((piece.rows for piece in self.pieces), initial=0)
        return [
            RowCopy(0, first, *piece[1:])
            for first, piece in zip(firsts, self.pieces, strict=False)
            if piece.peer == OWN
        ]

    @cached_property
    def is_whole_message(self) -> bool:
        """True if the pool is one run of received rows."""
        return len(self.pieces) == 1 and self.pieces[0].peer != OWN

    def assemble(self, home: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Build the pool of one tensor from this rank's tensor and the sections of the message."""
        rows = []
        for section, start, size, step in self.pieces:
            tensor = home if section == OWN else sections[section]
            rows.append(view_rows(tensor, start, size, step))
        return concat_rows(rows, home)

    def add_own(self, grad_TKD: torch.Tensor, pool_TKD: torch.Tensor) -> torch.Tensor:
        """Add the gradients in the key pool to those of this rank's own keys, in float32 or
        float64.
        """
        return add_rows(grad_TKD, self.own_copies, [pool_TKD])


@dataclass(frozen=True, eq=False)
class KeyRelay:
    """The second hop of keys: this rank forwards rows as a relay, and receives rows from relays.

    Attributes:
        forwarded: the rows to forward, as runs in the sections of the first hop.
        places: where the forwarded rows lie in the key pool, as copies from `forwarded` to the
            pool.
        keys: the forwarded rows to send to each rank, and the number of rows to receive from each
            other relay.
        way_back: rows of the key pool whose gradients go back to relays, in the order of arrival,
            and the number of rows whose gradients each rank sends back to this relay.
    """

    forwarded: Pool
    places: tuple[RowCopy, ...]
    keys: Rows
    way_back: Rows

    def add_copies(self, pool_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add gradients of the forwarded copies to gradients of a pool.

        The copies are added in the order of ranks, so that sums are reproducible.
        """
        if not self.forwarded.rows:
            return pool_TKD
        passed = pool_TKD.new_zeros(
            (self.forwarded.rows, *pool_TKD.shape[1:]),
            dtype=torch.promote_types(pool_TKD.dtype, torch.float32),
        )
        add_rows(passed, self.keys.returned, sections)
        return add_rows(pool_TKD, self.places, [passed])


@dataclass(frozen=True, eq=False)
class PooledTasks:
    """Tasks on pools of rows, and the rows that travel for them.

    Attributes:
        queries: the rows of q that this rank sends, and the numbers of rows that it receives.
        keys: the rows of k and v that this rank sends, and the numbers of rows that it receives.
        query_pool, key_pool: layouts of the pools. Own queries lie in front of received queries.
        tasks: tasks on the pools.
        relay: the second hop of keys, if the plan has relays.
        layouts: cache of message layouts, filled by the first layer.
    """

    queries: Rows
    keys: Rows
    query_pool: Pool
    key_pool: Pool
    tasks: TaskBatch
    relay: KeyRelay | None = None
    layouts: MessageLayouts = field(default_factory=dict)

    @cached_property
    def own_rows(self) -> int:
        """Number of this rank's own queries in the pool."""
        return sum(copy.rows for copy in self.query_pool.own_copies)

    @cached_property
    def is_single_message(self) -> bool:
        """True if both pools together are exactly the message of one rank."""
        return (
            self.relay is None
            and self.query_pool.is_whole_message
            and self.key_pool.is_whole_message
            and len(self.keys.receive) == 1
        )

    def add_copies(self, grad_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add gradients of other ranks' copies to gradients of own keys.

        The copies are added in the order of ranks, so that sums are reproducible.
        """
        return add_rows(grad_TKD, self.keys.returned, sections)


@dataclass(frozen=True, eq=False)
class Route:
    """Instructions for one rank to carry out a plan. They are kept in host memory.

    Attributes:
        local_tasks: the own tasks of this rank, which run on its tensors in place.
        pooled: the exchange, and the tasks that run between dispatch and return.
        exchanges: whether any rank of the group sends rows.
        groups: number of head groups into which tokens are split in the exchange; 1 for no split.
        local_pooled: own tasks of single head groups. They read pools of this rank's own rows, and
            need no messages. None if there are no such tasks.
    """

    local_tasks: TaskBatch
    pooled: PooledTasks
    exchanges: bool
    groups: int = 1
    local_pooled: PooledTasks | None = None

    @classmethod
    def build(cls, plan: Plan, rank: int) -> Route:
        """Derive the route of `rank` from a plan."""
        local_tasks, share, local = compute_share(plan, rank)
        groups = plan.layout.groups
        return cls(
            _make_batch(local_tasks),
            NOTHING_POOLED if share is None else _make_pooled(share, groups),
            plan.moved,
            groups,
            None if local is None else _make_pooled(local, groups),
        )

    @classmethod
    def for_whole_documents(cls, lengths: Sequence[int]) -> Route:
        """Make the route of a rank that holds whole documents of these lengths and exchanges
        nothing.
        """
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        return cls(TaskBatch(starts, lengths, starts, lengths), NOTHING_POOLED, exchanges=False)


_NO_ROWS = Rows((), {})
_NO_POOL = Pool((), _NO_ROWS)
NOTHING_POOLED = PooledTasks(_NO_ROWS, _NO_ROWS, _NO_POOL, _NO_POOL, TaskBatch((), (), (), ()))


def _make_pooled(share: ExchangeShare, groups: int) -> PooledTasks:
    queries = _read_rows(share.queries, groups)
    _, own_starts, own_rows = share.own_queries
    query_runs = [
        *map(RowRun, repeat(OWN), own_starts, own_rows, repeat(groups)),
        *map(RowRun, count(), repeat(0), queries.receive.values()),
    ]
    sections, starts, rows = share.pool
    key_runs = map(
        RowRun,
        sections,
        starts,
        rows,
        (groups if section == OWN else 1 for section in sections),
    )
    return PooledTasks(
        queries,
        _read_rows(share.keys, groups),
        Pool(tuple(query_runs), queries.way_back),
        Pool(tuple(key_runs), _read_rows(share.gradients)),
        _make_batch(share.pool_tasks),
        None if share.relay_duty is None else _make_relay(share.relay_duty),
    )


def _make_relay(duty: RelayDuty) -> KeyRelay:
    sections, starts, rows, places = duty.pieces
    firsts = accumulate(rows, initial=0)
    return KeyRelay(
        Pool(tuple(map(RowRun, sections, starts, rows)), _NO_ROWS),
        tuple(map(RowCopy, repeat(0), firsts, places, rows)),
        _read_rows(duty.keys),
        _read_rows(duty.gradients),
    )


def _read_rows(message: RankMessage, step: int = 1) -> Rows:
    runs, receive = message
    return Rows(tuple(map(RowRun, *runs, repeat(step))), dict(zip(*receive, strict=True)))


def _make_batch(columns: Columns) -> TaskBatch:
    return TaskBatch(*map(tuple, columns))
