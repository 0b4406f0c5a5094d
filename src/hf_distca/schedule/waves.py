"""Waves: the moved part of a plan in several exchanges, so that what travels fits a bound at every moment.

The tasks that need something from elsewhere are cut into *units* that fit the bound alone: slices of one document on one server
together, because they share one prefix of keys. A document that is more than fits is split by heads first: then each part needs
its part of the keys, and all together exchange no more than before. What is still too much is cut on tiles of rows, and each
part gets the keys it needs again. Units go into the first wave in which no rank, as a server or as a home, passes the bound.
Every rank computes the same waves from the same plan, so all take part in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.heads import possible_groups
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import CATask, Plan

__all__ = ["TransientBytes", "Waves"]


class TransientBytes(NamedTuple):
    """Bytes that live during a call for each token that travels, the larger of forward and backward.

    Backward decides, with do, q, o, log-sum-exp for each query row and k, v for each key. A server holds them as received and as
    pools first, then as pools and gradients; a home holds what it sends, then the gradients that come back.

    Attributes:
        query, key: of a query row and of a key in a server's pools.
        sent_query, sent_key: of a query row and of a key that a home sends, once for every server.
    """

    query: int
    key: int
    sent_query: int
    sent_key: int

    @classmethod
    def of(cls, shape: AttentionShape) -> TransientBytes:
        """The figures of an attention shape."""
        wide = max(4, shape.element_bytes)  # log-sum-exps and sums of key gradients
        row = shape.query_bytes + 2 * shape.output_bytes + shape.query_heads * wide
        key, wide_key = shape.key_value_bytes, shape.key_value_bytes * wide // shape.element_bytes
        # Gradients of copies that are not wide yet become so when they are added up at home.
        return cls(2 * row, key + wide_key, row, key + (wide_key if wide > shape.element_bytes else 0))

    def of_group(self, groups: int) -> TransientBytes:
        """Those of one of so many head groups, which divide the key/value heads."""
        return TransientBytes(*(count // groups for count in self))


@dataclass(frozen=True, eq=False)
class Waves:
    """A plan and the wave in which each of its tasks travels.

    Attributes:
        plan: the plan, with documents split by heads and tasks cut where they go in different waves.
        number: wave of each task of `plan`; -1 for tasks that a home runs on its own tokens alone.
        count: waves, at least 1.
        bytes: estimated transient bytes of each rank in its largest wave. None if there is no bound.
    """

    plan: Plan
    number: IntArray
    count: int = 1
    bytes: IntArray | None = None

    @classmethod
    def of(cls, plan: Plan, shape: AttentionShape, tile: int, bound: int | None, head_groups: int = 1) -> Waves:
        """Split `plan`, cut on tiles, so that no rank has more than `bound` transient bytes in a wave; None for no bound.

        Documents are split by heads in no more than so many groups, if the plan has not split some already.
        A tile of rows with the keys it needs is never split: if it is more than the bound alone, so is its wave.
        """
        if bound is None or not plan.moved:
            return cls(plan, np.zeros_like(plan.start))
        each = TransientBytes.of(shape)
        return _Splitter(
            _by_heads(plan, each, possible_groups(shape.key_value_heads, head_groups), bound), each, tile, bound
        ).split()


@dataclass(slots=True)
class _Unit:
    """Slices of one document for one server that travel together."""

    document: int
    server: int
    rows: int = 0
    # Runs of keys, apart from each other and in order.
    keys: list[tuple[int, int]] = field(default_factory=list)
    tasks: list[tuple[int, int, int]] = field(default_factory=list)  # (start, end, home)

    @property
    def key_tokens(self) -> int:
        return sum(end - start for start, end in self.keys)

    def add(self, start: int, end: int, home: int, first_key: int) -> None:
        self.tasks.append((start, end, home))
        self.rows += end - start
        if self.keys and first_key <= self.keys[-1][1]:
            first_key = self.keys.pop()[0]
        self.keys.append((first_key, end))


def _by_heads(plan: Plan, each: TransientBytes, possible: list[int], bound: int) -> Plan:
    """The plan with documents split by heads of which a server would need more than the bound."""
    layout = plan.layout
    tasks = np.flatnonzero(_travels(plan) & (plan.heads == 1))
    if plan.window is not None or layout.context.any() or not len(tasks):
        return plan
    # Of a document, a server needs all keys before its last row.
    key = plan.place[tasks] * layout.world_size + plan.server[tasks]
    unit, of = np.unique(key, return_inverse=True)
    last = np.zeros(len(unit), dtype=np.int64)
    np.maximum.at(last, of, plan.end[tasks])
    rows = np.bincount(of, weights=plan.end[tasks] - plan.start[tasks])
    most = each.query * rows + each.key * last
    large = most > bound
    if layout.groups > 1:
        possible = [layout.groups]
    if not large.any() or possible == [1]:
        return plan
    groups = next((count for count in possible if most.max() / count <= bound), possible[-1])
    apart = np.zeros(len(layout.documents), dtype=np.bool_)
    apart[unit[large] // layout.world_size] = True
    return plan.split(apart, groups)


class _Splitter:
    def __init__(self, plan: Plan, each: TransientBytes, tile: int, bound: int) -> None:
        self.plan, self.tile, self.bound = plan, tile, bound
        self.of_all, self.of_group = each, each.of_group(plan.layout.groups)
        self.travels = _travels(plan)
        self.segments = _segments_of(plan.layout, set(plan.document[self.travels].tolist()))

    def split(self) -> Waves:
        units = list(self._units())
        needs = [self._needs(unit) for unit in units]
        ranks = self.plan.layout.world_size
        # What a single unit needs cannot be avoided; a rank that passes the bound for one may use as much for others.
        limits = [self.bound] * ranks
        for need in needs:
            for rank, count in need.items():
                limits[rank] = max(limits[rank], count)
        loads: list[list[int]] = []
        rows: list[tuple[int, int, int, int, int]] = []
        number: list[int] = []
        for unit, need in zip(units, needs, strict=True):
            wave = next((w for w, load in enumerate(loads) if all(load[r] + n <= limits[r] for r, n in need.items())), len(loads))
            if wave == len(loads):
                loads.append([0] * ranks)
            for rank, count in need.items():
                loads[wave][rank] += count
            rows += [(unit.document, start, end, home, unit.server) for start, end, home in unit.tasks]
            number += [wave] * len(unit.tasks)
        return self._joined(rows, number, np.array(loads, dtype=np.int64).reshape(-1, ranks))

    def _joined(self, rows: list[tuple[int, int, int, int, int]], number: list[int], loads: IntArray) -> Waves:
        plan, stay = self.plan, ~self.travels
        extra = np.array(rows, dtype=np.int64).reshape(-1, len(CATask._fields))
        kept = [getattr(plan, name)[stay] for name in CATask._fields]
        c = [np.concatenate([column, extra[:, i]]) for i, column in enumerate(kept)]
        wave = np.concatenate([np.full(int(stay.sum()), -1), np.array(number, dtype=np.int64)])
        order = np.lexsort((c[1], c[0]))  # as a plan orders its tasks
        cut = Plan(plan.layout, c[0], c[1], c[2], c[3], c[4], plan.window)
        # The rest of a task that was cut may see no further than its home's own tokens, if there is a window.
        wave = np.where(_travels(cut), wave[order], -1)
        return Waves(cut, wave, max(len(loads), 1), loads.max(axis=0, initial=0))

    def _each(self, unit: _Unit) -> TransientBytes:
        return self.of_all if self.plan.layout.has_all_heads(unit.document) else self.of_group

    def _units(self) -> Iterator[_Unit]:
        plan = self.plan
        rows = np.flatnonzero(self.travels)
        rows = rows[np.lexsort((plan.start[rows], plan.document[rows], plan.server[rows]))]
        columns = (getattr(plan, name)[rows].tolist() for name in ("document", "start", "end", "home", "server"))
        tasks = list(zip(*columns, strict=True))
        last = {(document, server): end for document, _, end, _, server in tasks}
        unit: _Unit | None = None
        for document, start, end, home, server in tasks:
            if unit is not None and (unit.document, unit.server) != (document, server):
                yield unit
                unit = None
            while start < end:
                unit = unit or _Unit(document, server)
                stop = self._stop(unit, start, end, last[document, server])
                if stop > start:
                    unit.add(start, stop, home, self._first_key(start))
                    start = stop
                if start < end:
                    yield unit
                    unit = None
        if unit is not None:
            yield unit

    def _first_key(self, start: int) -> int:
        return 0 if self.plan.window is None else max(0, start - self.plan.window + 1)

    def _stop(self, unit: _Unit, start: int, end: int, last: int) -> int:
        """Where rows from `start` have to end for the unit to fit; `start` if none of them fits beside what is there.

        `last` is the last row of all units of the document on the server.
        """
        (query, key, *_), tile, bound = self._each(unit), self.tile, self.bound
        keys = last if self.plan.window is None else min(last, self.plan.window + tile)
        if key * keys + query * min(tile, last) > bound:
            # A tile of rows with its keys is more than the bound: that many bytes again for rows, or each tile would be a wave.
            bound = max(bound, 2 * key * keys)
        # New keys are those after the last there are: for rows up to y, y - first.
        first = max(self._first_key(start), unit.keys[-1][1] if unit.keys else 0)
        room = bound - query * unit.rows - key * unit.key_tokens
        stop = (room + query * start + key * first) // (query + key)
        if stop >= end:
            return end
        stop = stop // tile * tile
        if stop > start:
            return stop
        return start if unit.tasks else min(start // tile * tile + tile, end)

    def _needs(self, unit: _Unit) -> dict[int, int]:
        """Transient bytes by rank."""
        each = self._each(unit)
        need = {unit.server: each.query * unit.rows + each.key * unit.key_tokens}
        for start, end, home in unit.tasks:
            if home != unit.server:
                need[home] = need.get(home, 0) + each.sent_query * (end - start)
        for start, end, source in self.segments[unit.document]:
            tokens = sum(max(0, min(end, b) - max(start, a)) for a, b in unit.keys)
            if tokens and source != unit.server:
                need[source] = need.get(source, 0) + each.sent_key * tokens
        return need


def _travels(plan: Plan) -> npt.NDArray[np.bool_]:
    """Tasks that another rank than their home runs, or whose keys do not lie in one run of their home's tokens."""
    layout = plan.layout
    order = np.lexsort((layout.start, layout.document))
    document, start, rank, token, length = (
        c[order] for c in (layout.document, layout.start, layout.rank, layout.token, layout.length)
    )
    joined = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1]) & (token[1:] == token[:-1] + length[:-1])
    run = np.concatenate([[0], np.cumsum(~joined)])[: len(order)]
    place, documents = layout.longest + 1, np.unique(document)
    position = np.searchsorted(documents, document) * place + start
    base = np.searchsorted(documents, plan.document) * place
    first = np.zeros_like(plan.start) if plan.window is None else np.maximum(plan.start - plan.window + 1, 0)
    runs = [run[np.searchsorted(position, base + at, side="right") - 1] for at in (first, plan.start)]
    return np.asarray((plan.home != plan.server) | (runs[0] != runs[1]), dtype=np.bool_)


def _segments_of(layout: Layout, documents: set[int]) -> dict[int, list[tuple[int, int, int]]]:
    """(start, end, rank) of the segments of some documents."""
    rows = np.flatnonzero(np.isin(layout.document, np.array(sorted(documents), dtype=np.int64)))
    found: dict[int, list[tuple[int, int, int]]] = {}
    columns = (column[rows].tolist() for column in (layout.document, layout.start, layout.end, layout.rank))
    for document, start, end, rank in zip(*columns, strict=True):
        found.setdefault(document, []).append((start, end, rank))
    return found
