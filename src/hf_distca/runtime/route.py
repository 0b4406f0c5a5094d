"""One rank's view of a plan: which rows it sends, which it receives, and the tasks it runs on them.

A server runs its tasks in two batches. *Local* tasks have their whole key prefix in one run of this rank's own tokens: they
read the home tensors in place and run while the dispatch is under way. *Arrived* tasks need something from elsewhere: they
read pools made of received rows and, where a document spans ranks, of home rows. They come in one wave or, where transient
bytes are bounded, in several, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.exchange import Rows
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import CATask, KeyTransfers, Plan
from hf_distca.schedule.waves import Waves

__all__ = ["KeyPool", "Route", "Wave"]


@dataclass(frozen=True, eq=False)
class KeyPool:
    """How received keys and home keys make the pool in which every document's prefix is one run.

    Attributes:
        size: tokens of the pool.
        received: int64 pool row of each received row; None if the pool is the received rows as they are.
        home, from_home: int64 pool rows that are filled from home, and the home rows they are filled with.
    """

    size: int
    received: torch.Tensor | None
    home: torch.Tensor
    from_home: torch.Tensor

    def assemble(self, home_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from home rows and the message's sections."""
        pool = home_TKD.new_empty((self.size, *home_TKD.shape[1:]))
        if self.received is None:
            return torch.cat(list(sections), out=pool) if sections else pool
        lengths = [len(section) for section in sections]
        for index, section in zip(torch.split(self.received, lengths), sections, strict=True):
            pool.index_copy_(0, index, section)
        return pool.index_copy_(0, self.home, home_TKD.index_select(0, self.from_home))

    def received_rows(self, pool_TKD: torch.Tensor) -> torch.Tensor:
        """The rows of a pool that came from other ranks, in the order they came."""
        return pool_TKD if self.received is None else pool_TKD.index_select(0, self.received)


@dataclass(frozen=True, eq=False)
class Wave:
    """One dispatch and one return, and what this rank serves in between. Index tensors as in `Route`.

    Attributes:
        queries, keys: rows of home q and of home k, v that go to other ranks and come from them.
        home_queries: home rows of q that join the query pool in front of the received ones.
        pool: how the key pool is made.
        arrived: tasks on the pools.
    """

    queries: Rows
    keys: Rows
    home_queries: torch.Tensor
    pool: KeyPool
    arrived: TaskBatch

    @classmethod
    def build(
        cls, plan: Plan, token: _TokenIndex, tasks: Sequence[CATask], transfers: KeyTransfers | None, device: torch.device
    ) -> Wave:
        """Derive a wave from those of its `tasks` that a rank sends or serves on pools, and from the runs of keys they need."""
        layout, rank = plan.layout, token.rank
        pooled = sorted(
            (task for task in tasks if task.server == rank),
            key=lambda task: (task.home != rank, task.home, task.document, task.start),
        )
        sent = [task for task in tasks if task.home == rank != task.server]
        sent.sort(key=lambda task: (task.server, task.document, task.start))
        at_home = [task for task in pooled if task.home == rank]
        queries = Rows(
            _on(device, _ranges([token.query(t) for t in sent], [t.end - t.start for t in sent])),
            _counts(layout, [t.server for t in sent], [t.end - t.start for t in sent]),
            _counts(layout, *_home_lengths([t for t in pooled if t.home != rank])),
        )
        keys, pool, place = _key_routes(transfers, {t.document for t in pooled}, token, device)
        return cls(
            queries=queries,
            keys=keys,
            home_queries=_on(device, _ranges([token.query(t) for t in at_home], [t.end - t.start for t in at_home])),
            pool=pool,
            arrived=_batch(plan, _starts([t.end - t.start for t in pooled]), pooled, place),
        )


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. Index tensors are int64, on the device of q, k and v.

    Attributes:
        local: tasks on home tensors.
        waves: exchanges, at least one, and what is served in each; as many on every rank.
        exchanges: whether any rank moves anything; false means that the call is local on every rank.
    """

    local: TaskBatch
    waves: tuple[Wave, ...]
    exchanges: bool

    @classmethod
    def build(cls, plan: Plan, rank: int, device: torch.device, waves: Waves | None = None) -> Route:
        """Derive the route of `rank`. Reads only tasks and segments that concern this rank. `waves` are those of the plan."""
        if waves is not None:
            plan = waves.plan
        token = _TokenIndex(plan.layout, rank)
        tasks = _tasks_of(plan, rank)
        local = [t for t in tasks if t.server == t.home == rank and token.run(t.document, _first_key(plan, t), t.end) is not None]
        others = set(tasks) - set(local)
        built = []
        for number in range(1 if waves is None else waves.count):
            among = None if waves is None else waves.number == number
            mine = others if among is None else others & set(_tasks_of(plan, rank, among))
            transfers = plan.key_transfers(rank, among) if plan.moved else None
            built.append(Wave.build(plan, token, sorted(mine), transfers, device))
        return cls(_batch(plan, [token.query(t) for t in local], local, token.of), tuple(built), plan.moved)


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
    transfers: KeyTransfers | None, pooled: set[int], token: _TokenIndex, device: torch.device
) -> tuple[Rows, KeyPool, Callable[[int, int], int]]:
    """Rows of k and v to send and receive, the pool they make, and where in it a document position lies."""
    rank, layout = token.rank, token.layout
    rows = list(zip(*(column.tolist() for column in transfers), strict=True)) if transfers else []
    out = sorted((to, d, a, b) for d, a, b, source, to in rows if source == rank != to)
    arriving = sorted((source, d, a, b) for d, a, b, source, to in rows if to == rank and d in pooled)
    place: dict[tuple[int, int], int] = {}
    runs: dict[int, list[tuple[int, int, int]]] = {}
    size = 0
    for _, document, start, end in sorted(arriving, key=lambda row: row[1:]):
        place[document, start] = size
        runs.setdefault(document, []).append((start, end, size))
        size += end - start
    incoming = [row for row in arriving if row[0] != rank]
    own = [row for row in arriving if row[0] == rank]
    received = _ranges([place[d, a] for _, d, a, _ in incoming], [b - a for _, _, a, b in incoming])
    keys = Rows(
        _on(device, _ranges([token.of(d, a) for _, d, a, _ in out], [b - a for _, _, a, b in out])),
        _counts(layout, [to for to, *_ in out], [b - a for _, _, a, b in out]),
        _counts(layout, [source for source, *_ in incoming], [b - a for _, _, a, b in incoming]),
    )
    identity = not own and bool((received == np.arange(len(received))).all())
    pool = KeyPool(
        size,
        None if identity else _on(device, received),
        _on(device, _ranges([place[d, a] for _, d, a, _ in own], [b - a for _, _, a, b in own])),
        _on(device, _ranges([token.of(d, a) for _, d, a, _ in own], [b - a for _, _, a, b in own])),
    )

    def row(document: int, position: int) -> int:
        return next(at + position - start for start, end, at in runs[document] if start <= position < end)

    return keys, pool, row


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
                query, rows, key, keys = _joined(merged.pop(), rows)
        merged.append((query, rows, key, keys))
        last = task, origin
    columns = tuple(zip(*merged, strict=True)) or ((), (), (), ())
    return TaskBatch(*columns)


def _joined(task: tuple[int, int, int, int], rows: int) -> tuple[int, int, int, int]:
    """A task of a batch with as many rows and keys more."""
    return task[0], task[1] + rows, task[2], task[3] + rows


def _home_lengths(tasks: Sequence[CATask]) -> tuple[list[int], list[int]]:
    return [task.home for task in tasks], [task.end - task.start for task in tasks]


def _counts(layout: Layout, ranks: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    counts = [0] * layout.world_size
    for rank, length in zip(ranks, lengths, strict=True):
        counts[rank] += length
    return tuple(counts)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of several runs starts when they lie one after another."""
    return tuple((np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths, dtype=np.int64)).tolist())


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> IntArray:
    """The runs [start, start + length) one after another."""
    length = np.asarray(lengths, dtype=np.int64)
    shift = np.asarray(starts, dtype=np.int64) - (np.cumsum(length) - length)
    return np.asarray(np.repeat(shift, length) + np.arange(length.sum()), dtype=np.int64)


def _on(device: torch.device, index: IntArray) -> torch.Tensor:
    tensor = torch.from_numpy(index)
    if device.type == "cuda":  # pinned, so that the copy does not stop the host
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
