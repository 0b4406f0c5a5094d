"""One rank's view of a plan: which rows it sends, which it receives, and the tasks it runs on them.

A server runs its tasks in two batches. Its *own* tasks are those that it is the home of, with their whole key prefix in one run
of its tokens: they read its tensors in place and run while the dispatch is under way. *Arrived* tasks need something from
elsewhere: they read pools made of received rows and, where a document spans ranks, of this rank's own. They come in one wave or,
where transient bytes are bounded, in several, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.exchange import Formats, Rows, Run
from hf_distca.runtime.keys import KeyPool, Keys, Passing, TokenIndex, starts_of
from hf_distca.schedule.layout import repeated
from hf_distca.schedule.plan import CATask, KeyTransfers, Plan
from hf_distca.schedule.relays import Hops
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
    passing: Passing | None = None
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

    @classmethod
    def build(cls, plan: Plan, token: TokenIndex, tasks: Sequence[CATask], hops: Sequence[KeyTransfers]) -> Wave:
        """Derive a wave from those of its `tasks` that a rank sends or serves on pools, and from the runs of keys they need.

        `hops` are those runs, in the hop in which they travel; none if nothing is exchanged.
        """
        rank = token.rank
        pooled = sorted(
            (task for task in tasks if task.server == rank),
            key=lambda task: (task.home != rank, task.home, task.document, task.start),
        )
        sent = [task for task in tasks if task.home == rank != task.server]
        sent.sort(key=lambda task: (task.server, task.document, task.start))
        queries = Rows.of(
            ((task.server, token.query_row(task), task.end - task.start) for task in sent),
            ((task.home, task.end - task.start) for task in pooled if task.home != rank),
            token.step,
        )
        at_home = ((rank, token.query_row(task), task.end - task.start) for task in pooled if task.home == rank)
        own = Rows.of(at_home, (), token.step)
        found = Keys.of(hops, {t.document for t in pooled}, token)
        arrived = _batch(plan, starts_of([t.end - t.start for t in pooled]), pooled, found.row)
        return cls(queries, found.sent(0), own.runs, found.pool, arrived, found.passing if len(hops) > 1 else None)


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. All of it is on the host.

    Attributes:
        own: tasks that this rank, which is their home, runs on its own tensors.
        waves: exchanges, at least one, and what is served in each; as many on every rank.
        exchanges: whether any rank moves anything; false means that no rank sends or receives.
        groups: head groups that the tokens of waves are split in, 1 if none.
        kept: tasks on head groups that this rank runs on pools of its own rows, for which it waits for nothing.
    """

    own: TaskBatch
    waves: tuple[Wave, ...]
    exchanges: bool
    groups: int = 1
    kept: Wave | None = None

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
        """Derive the route of `rank`. Reads only tasks and segments that concern this rank. `waves` are those of the plan."""
        if waves is not None:
            plan = waves.plan
        token = TokenIndex(plan.layout, rank)
        tasks = _tasks_of(plan, rank)
        here = [t for t in tasks if t.server == t.home == rank and token.run(t.document, _first_key(plan, t), t.end) is not None]
        others = set(tasks) - set(here)
        own, kept = here, list[CATask]()
        if token.step > 1:
            own, kept = ([task for task in here if token.layout.has_all_heads(task.document) is whole] for whole in (True, False))
        built = []
        for number in range(1 if waves is None else waves.count):
            among = None if waves is None else waves.number == number
            mine = others if among is None else others & set(_tasks_of(plan, rank, among))
            hops: Sequence[KeyTransfers] = ()
            if plan.relays is not None:
                hops = Hops.of(plan, rank)
            elif plan.moved:
                hops = [plan.key_transfers(rank, among)]
            built.append(Wave.build(plan, token, _in_groups(sorted(mine), token), [_rows_in_groups(hop, token) for hop in hops]))
        batch = _batch(plan, [token.query(t) for t in own], own, token.of)
        return cls(batch, tuple(built), plan.moved, token.step, _kept(plan, token, kept) if kept else None)


def _kept(plan: Plan, token: TokenIndex, tasks: Sequence[CATask]) -> Wave:
    """Tasks on a rank's own rows, as a wave in which nothing travels."""
    ends: dict[int, int] = {}
    for task in tasks:
        ends[task.document] = max(ends.get(task.document, 0), task.end)
    document, end = (np.array(list(column), dtype=np.int64) for column in (ends.keys(), ends.values()))
    here = np.full_like(document, token.rank)
    return Wave.build(plan, token, tasks, [KeyTransfers(document, np.zeros_like(document), end, here, here)])


def _in_groups(tasks: Sequence[CATask], token: TokenIndex) -> list[CATask]:
    """Tasks with those on all heads as one for each head group, if waves are made of these."""
    if token.step == 1:
        return list(tasks)
    return [task._replace(document=one) for task in tasks for one in token.layout.groups_of(task.document) or (task.document,)]


def _rows_in_groups(rows: KeyTransfers, token: TokenIndex) -> KeyTransfers:
    """The same for keys."""
    if token.step == 1:
        return rows
    row, part = repeated(token.layout.heads_of(rows.document) == 1, token.step)
    document, *others = (column[row] for column in rows)
    return KeyTransfers(document + part, *others)


def _first_key(plan: Plan, task: CATask) -> int:
    """The first document position whose key the task reads."""
    return 0 if plan.window is None else max(0, task.start - plan.window + 1)


def _tasks_of(plan: Plan, rank: int, among: npt.NDArray[np.bool_] | None = None) -> list[CATask]:
    concerned = (plan.home == rank) | (plan.server == rank)
    rows = np.flatnonzero(concerned if among is None else concerned & among)
    columns = (getattr(plan, name)[rows].tolist() for name in CATask._fields)
    return [CATask(*row) for row in zip(*columns, strict=True)]


def _batch(plan: Plan, query_starts: Sequence[int], tasks: Sequence[CATask], key_row: Callable[[int, int], int]) -> TaskBatch:
    """Tasks as a batch; neighbours that continue each other become one task."""
    merged: list[tuple[int, int, int, int]] = []
    last: tuple[CATask, int] | None = None
    for query, task in sorted(zip(query_starts, tasks, strict=True)):
        first = _first_key(plan, task)
        key, rows, keys = key_row(task.document, first), task.end - task.start, task.end - first
        origin = key - first  # the same for tasks of one document whose keys lie in one run
        if last is not None and merged[-1][0] + merged[-1][1] == query and last[1] == origin:
            before = last[0]
            if (before.document, before.end) == (task.document, task.start):
                query, rows, key, keys = _extended(merged.pop(), rows)
        merged.append((query, rows, key, keys))
        last = task, origin
    columns = tuple(zip(*merged, strict=True)) or ((), (), (), ())
    return TaskBatch(*columns)


def _extended(task: tuple[int, int, int, int], rows: int) -> tuple[int, int, int, int]:
    """A task of a batch with as many rows and keys more."""
    return task[0], task[1] + rows, task[2], task[3] + rows
