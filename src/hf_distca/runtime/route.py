"""One rank's view of a plan: which rows it sends, which it receives, and the tasks it runs on them.

A server runs its tasks in two batches. Its *own* tasks are those that it is the home of, with their whole key prefix in one run
of its tokens: they read its tensors in place and run while the dispatch is under way. *Arrived* tasks need something from
elsewhere: they read pools made of received rows and, where a document spans ranks, of this rank's own. They come in one wave or,
where transient bytes are bounded, in several, one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.exchange import Formats, Rows, Run, joined, part_of
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, KeyTransfers, Plan
from hf_distca.schedule.waves import Waves

__all__ = ["KeyPool", "Piece", "Route", "Wave"]


class Piece(NamedTuple):
    """Keys [start, start + rows) of a section of the message, or of this rank's own if `section` is None."""

    section: int | None
    start: int
    rows: int


@dataclass(frozen=True, eq=False)
class KeyPool:
    """How received keys and this rank's own make the pool in which every document's prefix is one run.

    Attributes:
        pieces: what the pool is made of, in its order.
        way_back: rows of the pool that came from other ranks, in the order they came, and how many copies come back from each.
    """

    pieces: tuple[Piece, ...]
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens of the pool."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def own(self) -> list[tuple[int, int, int]]:
        """Runs of this rank's own keys: (row of the pool, row of its own keys, rows)."""
        at = itertools.accumulate((piece.rows for piece in self.pieces), initial=0)
        rows = zip(at, self.pieces, strict=False)
        return [(first, piece.start, piece.rows) for first, piece in rows if piece.section is None]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from own rows and the message's sections."""
        sources = ((own_TKD if at is None else sections[at], start, rows) for at, start, rows in self.pieces)
        return joined([part_of(*source) for source in sources], own_TKD)


@dataclass(frozen=True, eq=False)
class Wave:
    """One dispatch and one return, and what this rank serves in between.

    Attributes:
        queries, keys: rows of this rank's q and of its k, v that go to other ranks, and of theirs that come.
        own_queries: rows of this rank's q that join the query pool in front of the received ones.
        pool: how the key pool is made.
        arrived: tasks on the pools.
        formats: formats of the messages, by what travels: made by the first layer.
    """

    queries: Rows
    keys: Rows
    own_queries: tuple[Run, ...]
    pool: KeyPool
    arrived: TaskBatch
    formats: Formats = field(default_factory=dict)

    @cached_property
    def own_rows(self) -> int:
        """Rows of `own_queries`."""
        return sum(run.rows for run in self.own_queries)

    @cached_property
    def as_received(self) -> bool:
        """Whether both pools are what one rank sent, as it is."""
        return not self.own_queries and len(self.queries.receive) == len(self.pool.pieces) == len(self.keys.receive) == 1

    @classmethod
    def build(cls, plan: Plan, token: _TokenIndex, tasks: Sequence[CATask], transfers: KeyTransfers | None) -> Wave:
        """Derive a wave from those of its `tasks` that a rank sends or serves on pools, and from the runs of keys they need."""
        rank = token.rank
        pooled = sorted(
            (task for task in tasks if task.server == rank),
            key=lambda task: (task.home != rank, task.home, task.document, task.start),
        )
        sent = [task for task in tasks if task.home == rank != task.server]
        sent.sort(key=lambda task: (task.server, task.document, task.start))
        queries = Rows.of(
            ((task.server, token.query(task), task.end - task.start) for task in sent),
            ((task.home, task.end - task.start) for task in pooled if task.home != rank),
        )
        own = Rows.of(((rank, token.query(task), task.end - task.start) for task in pooled if task.home == rank), ())
        keys, pool, place = _key_routes(transfers, {t.document for t in pooled}, token)
        arrived = _batch(plan, _starts([t.end - t.start for t in pooled]), pooled, place)
        return cls(queries, keys, own.runs, pool, arrived)


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. All of it is on the host.

    Attributes:
        own: tasks that this rank, which is their home, runs on its own tensors.
        waves: exchanges, at least one, and what is served in each; as many on every rank.
        exchanges: whether any rank moves anything; false means that no rank sends or receives.
    """

    own: TaskBatch
    waves: tuple[Wave, ...]
    exchanges: bool

    @classmethod
    def build(cls, plan: Plan, rank: int, waves: Waves | None = None) -> Route:
        """Derive the route of `rank`. Reads only tasks and segments that concern this rank. `waves` are those of the plan."""
        if waves is not None:
            plan = waves.plan
        token = _TokenIndex(plan.layout, rank)
        tasks = _tasks_of(plan, rank)
        own = [t for t in tasks if t.server == t.home == rank and token.run(t.document, _first_key(plan, t), t.end) is not None]
        others = set(tasks) - set(own)
        built = []
        for number in range(1 if waves is None else waves.count):
            among = None if waves is None else waves.number == number
            mine = others if among is None else others & set(_tasks_of(plan, rank, among))
            transfers = plan.key_transfers(rank, among) if plan.moved else None
            built.append(Wave.build(plan, token, sorted(mine), transfers))
        return cls(_batch(plan, [token.query(t) for t in own], own, token.of), tuple(built), plan.moved)


class _TokenIndex:
    """Where the tokens of documents lie on one rank."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self._segments: dict[int, list[tuple[int, int, int]]] = {}
        first = int(layout.offsets[rank])
        for row, segment in enumerate(layout.segments(rank)):
            place = (segment.start, segment.end, int(layout.token[first + row]))
            self._segments.setdefault(segment.document, []).append(place)
        for places in self._segments.values():
            places.sort()

    def query(self, task: CATask) -> int:
        """Index among the query rows of this rank of the first row of a task."""
        return self.of(task.document, task.start) - int(self.layout.context_tokens[self.rank])

    def of(self, document: int, position: int) -> int:
        """Token index of a document position that lies on this rank."""
        for start, end, token in self._segments[document]:
            if start <= position < end:
                return token + position - start
        raise KeyError((document, position))

    def run(self, document: int, start: int, end: int) -> int | None:
        """Token index of position `start`, if positions [start, end) lie here as one run of tokens; else None."""
        found, position = None, start
        for first, last, token in self._segments.get(document, []):
            if not first <= position < last:
                continue
            here = token + position - first
            if found is None:
                found = here
            elif here != found + position - start:
                return None
            if end <= last:
                return found
            position = last
        return None


def _first_key(plan: Plan, task: CATask) -> int:
    """The first document position whose key the task reads."""
    return 0 if plan.window is None else max(0, task.start - plan.window + 1)


def _tasks_of(plan: Plan, rank: int, among: npt.NDArray[np.bool_] | None = None) -> list[CATask]:
    concerned = (plan.home == rank) | (plan.server == rank)
    rows = np.flatnonzero(concerned if among is None else concerned & among)
    columns = (getattr(plan, name)[rows].tolist() for name in CATask._fields)
    return [CATask(*row) for row in zip(*columns, strict=True)]


def _key_routes(
    transfers: KeyTransfers | None, pooled: set[int], token: _TokenIndex
) -> tuple[Rows, KeyPool, Callable[[int, int], int]]:
    """Rows of k and v to send and receive, the pool they make, and where in it a document position lies."""
    rank = token.rank
    rows = list(zip(*(column.tolist() for column in transfers), strict=True)) if transfers else []
    out = sorted((to, d, a, b) for d, a, b, source, to in rows if source == rank != to)
    # In the order of the message: by source, with this rank's own among them.
    arriving = sorted((source, d, a, b) for d, a, b, source, to in rows if to == rank and d in pooled)
    starts: dict[int, int] = {}  # of the next run in the section of a source
    found = []
    for source, document, start, end in arriving:
        at = token.of(document, start) if source == rank else starts.get(source, 0)
        starts[source] = starts.get(source, 0) + end - start
        found.append((document, start, end, source, at))
    found.sort()
    place = {row[:2]: first for row, first in zip(found, _starts([b - a for _, a, b, *_ in found]), strict=True)}
    sections = {source: number for number, source in enumerate(source for source in starts if source != rank)}
    sent = ((to, token.of(d, a), b - a) for to, d, a, b in out)
    keys = Rows.of(sent, ((source, rows) for source, rows in starts.items() if source != rank))
    back = ((source, place[d, a], b - a) for source, d, a, b in arriving if source != rank)
    pieces = _pieces((sections.get(source), at, b - a) for _, a, b, source, at in found)
    pool = KeyPool(pieces, Rows.of(back, keys.send.items()))
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for document, start, end, *_ in found:
        runs.setdefault(document, []).append((start, end, place[document, start]))

    def row(document: int, position: int) -> int:
        return next(first + position - start for start, end, first in runs[document] if start <= position < end)

    return keys, pool, row


def _pieces(rows: Iterable[tuple[int | None, int, int]]) -> tuple[Piece, ...]:
    """Pieces, neighbours joined that continue each other."""
    pieces: list[Piece] = []
    for section, start, length in rows:
        if pieces and pieces[-1].section == section and pieces[-1].start + pieces[-1].rows == start:
            before = pieces.pop()
            start, length = before.start, before.rows + length
        pieces.append(Piece(section, start, length))
    return tuple(pieces)


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


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of several runs starts when they lie one after another."""
    return tuple((np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths, dtype=np.int64)).tolist())
