"""One rank's view of a plan: which rows it sends, which it receives, and the tasks it runs on them.

A server runs its tasks in two batches. *Local* tasks have their whole key prefix in one run of this rank's own tokens: they
read the home tensors in place and run while the dispatch is under way. *Arrived* tasks need something from elsewhere: they
read pools made of received rows and, where a document spans ranks, of home rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.runtime.exchange import Rows
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import CATask, KeyTransfers, Plan

__all__ = ["KeyPool", "Route", "local_batch"]


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

    def assemble(self, home_TKD: torch.Tensor, received_TKD: torch.Tensor) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width)."""
        if self.received is None:
            return received_TKD
        pool = home_TKD.new_empty((self.size, *home_TKD.shape[1:]))
        pool.index_copy_(0, self.received, received_TKD)
        return pool.index_copy_(0, self.home, home_TKD.index_select(0, self.from_home))

    def received_rows(self, pool_TKD: torch.Tensor) -> torch.Tensor:
        """The rows of a pool that came from other ranks, in the order they came."""
        return pool_TKD if self.received is None else pool_TKD.index_select(0, self.received)


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank does to carry out a plan. Index tensors are int64, on the device of q, k and v.

    Attributes:
        queries, keys: rows of home q and of home k, v that go to other ranks and come from them.
        local: tasks on home tensors.
        home_queries: home rows of q that join the query pool in front of the received ones.
        pool: how the key pool is made.
        arrived: tasks on the pools.
        exchanges: whether any rank moves anything; false means that the call is local on every rank.
    """

    queries: Rows
    keys: Rows
    local: TaskBatch
    home_queries: torch.Tensor
    pool: KeyPool
    arrived: TaskBatch
    exchanges: bool

    @classmethod
    def build(cls, plan: Plan, rank: int, device: torch.device) -> Route:
        """Derive the route of `rank`. Reads only tasks and segments that concern this rank."""
        layout = plan.layout
        token = _TokenIndex(layout, rank)
        mine = [task for task in _tasks_of(plan, rank) if task.server == rank]
        local = [task for task in mine if task.home == rank and task.end <= token.prefix(task.document)]
        pooled = sorted(set(mine) - set(local), key=lambda task: (task.home != rank, task.home, task.document, task.start))
        sent = [task for task in _tasks_of(plan, rank) if task.home == rank != task.server]
        sent.sort(key=lambda task: (task.server, task.document, task.start))
        transfers = plan.key_transfers(rank) if plan.moved else None
        at_home = [task for task in pooled if task.home == rank]
        queries = Rows(
            _on(device, _ranges([token.of(t.document, t.start) for t in sent], [t.end - t.start for t in sent])),
            _counts(layout, [t.server for t in sent], [t.end - t.start for t in sent]),
            _counts(layout, *_home_lengths([t for t in pooled if t.home != rank])),
        )
        keys, pool, base = _key_routes(transfers, {t.document for t in pooled}, token, device)
        return cls(
            queries=queries,
            keys=keys,
            local=_batch([token.of(t.document, t.start) for t in local], local, [token.of(t.document, 0) for t in local]),
            home_queries=_on(
                device, _ranges([token.of(t.document, t.start) for t in at_home], [t.end - t.start for t in at_home])
            ),
            pool=pool,
            arrived=_batch(_starts([t.end - t.start for t in pooled]), pooled, [base[t.document] for t in pooled]),
            exchanges=plan.moved,
        )


def local_batch(lengths: Sequence[int]) -> TaskBatch:
    """Whole documents, one after another: the batch of a rank that works alone."""
    starts = _starts(lengths)
    return TaskBatch(starts, tuple(lengths), starts, tuple(lengths))


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

    def of(self, document: int, position: int) -> int:
        """Token index of a document position that lies on this rank."""
        for start, end, token in self._segments[document]:
            if start <= position < end:
                return token + position - start
        raise KeyError((document, position))

    def prefix(self, document: int) -> int:
        """Length of the document's prefix that lies here as one run of tokens."""
        length, expected = 0, None
        for start, end, token in self._segments.get(document, []):
            if start != length or expected not in (None, token):
                break
            length, expected = end, token + end - start
        return length


def _tasks_of(plan: Plan, rank: int) -> list[CATask]:
    rows = np.flatnonzero((plan.home == rank) | (plan.server == rank))
    columns = (getattr(plan, name)[rows].tolist() for name in CATask._fields)
    return [CATask(*row) for row in zip(*columns, strict=True)]


def _key_routes(
    transfers: KeyTransfers | None, pooled: set[int], token: _TokenIndex, device: torch.device
) -> tuple[Rows, KeyPool, dict[int, int]]:
    """Rows of k and v to send and receive, the pool they make, and the pool row of each document's first key."""
    rank, layout = token.rank, token.layout
    rows = list(zip(*(column.tolist() for column in transfers), strict=True)) if transfers else []
    out = sorted((to, d, a, b) for d, a, b, source, to in rows if source == rank != to)
    arriving = sorted((source, d, a, b) for d, a, b, source, to in rows if to == rank and d in pooled)
    base: dict[int, int] = {}
    place: dict[tuple[int, int], int] = {}
    size = 0
    for _, document, start, end in sorted(arriving, key=lambda row: row[1:]):
        base.setdefault(document, size)
        place[document, start] = size
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
    return keys, pool, base


def _batch(query_starts: Sequence[int], tasks: Sequence[CATask], key_starts: Sequence[int]) -> TaskBatch:
    """Tasks as a batch; neighbours that continue each other become one task."""
    merged: list[list[int]] = []
    for query, task, key in sorted(zip(query_starts, tasks, key_starts, strict=True)):
        length = task.end - task.start
        if merged:
            last = merged[-1]
            if last[2] == key and last[0] + last[1] == query and last[3] == task.start:
                last[1] += length
                last[3] = task.end
                continue
        merged.append([query, length, key, task.end])
    columns = tuple(tuple(column) for column in zip(*merged, strict=True)) or ((), (), (), ())
    return TaskBatch(*columns)


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
