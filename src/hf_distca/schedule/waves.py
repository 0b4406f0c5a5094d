"""Waves: the moved part of a plan in several exchanges, so that what travels fits a bound at every moment.

The tasks that need something from elsewhere are cut into *units* that fit the bound alone: slices of one document on one server
together, because they share one prefix of keys. A document that is more than fits is split by heads first: then each part needs
its part of the keys, and all together exchange no more than before. What is still too much is cut on tiles of rows, and each
part gets the keys it needs again. Servers take turns: each unit goes into the first wave in which no rank, as a server or as a
home, passes the bound.
Every rank computes the same waves from the same plan, so all take part in each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.heads import possible_groups
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import CATask, Plan

__all__ = ["TransientBytes", "Waves"]


# Waves that units still go into. Servers take turns, so earlier ones are full on nearly all ranks.
_OPEN = 64


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

        Raises:
            ConfigError: if one row and one key are more than the bound.
        """
        if bound is None:
            return cls(plan, np.zeros_like(plan.start))
        transient = TransientBytes.of(shape)
        least = transient.query + transient.key
        if bound < least:
            raise ConfigError(
                f"max_transient_bytes={bound} is less than the {least} bytes that one query row and one key take in a layer of "
                f"{shape}: give what many rows take, or None for no bound."
            )
        if not plan.moved:
            return cls(plan, np.zeros_like(plan.start))
        plan = _by_heads(plan, transient, possible_groups(shape.key_value_heads, head_groups), bound)
        fitting = Fitting(transient, transient.of_group(plan.layout.groups), plan.window, tile, bound)
        travels = _travels(plan)
        units = _Units.of(plan, travels, fitting)
        wave, loads = _first_fit(_Needs.of(plan, units, fitting), plan.layout.world_size, bound)
        columns = [np.concatenate([getattr(plan, name)[~travels], getattr(units, name)]) for name in CATask._fields]
        order = np.lexsort((columns[1], columns[0]))  # as a plan orders its tasks
        document, start, end, home, server = (column[order] for column in columns)
        cut = Plan(plan.layout, document, start, end, home, server, plan.window)
        number = np.concatenate([np.full(int((~travels).sum()), -1), wave[units.unit]])[order]
        # The rest of a task that was cut may see no further than its home's own tokens, if there is a window.
        return cls(cut, np.where(_travels(cut), number, -1), max(len(loads), 1), loads.max(axis=0, initial=0))


def _by_heads(plan: Plan, transient: TransientBytes, possible: list[int], bound: int) -> Plan:
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
    most = transient.query * rows + transient.key * last
    large = most > bound
    if layout.groups > 1:
        possible = [layout.groups]
    if not large.any() or possible == [1]:
        return plan
    groups = next((count for count in possible if most.max() / count <= bound), possible[-1])
    apart = np.zeros(len(layout.documents), dtype=np.bool_)
    apart[unit[large] // layout.world_size] = True
    return plan.split(apart, groups)


class _Units(NamedTuple):
    """Tasks that travel, cut so that each lies in one unit: rows as in a plan, with the unit of each."""

    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    unit: IntArray

    @classmethod
    def of(cls, plan: Plan, travels: npt.NDArray[np.bool_], fitting: Fitting) -> Self:
        """Slices of a document on a server follow each other in a unit until it is full."""
        order = np.flatnonzero(travels)
        order = order[np.lexsort((plan.start[order], plan.document[order], plan.server[order]))]
        columns = [getattr(plan, name)[order] for name in CATask._fields]
        document, *_, server = columns
        fresh = np.append(True, (document[1:] != document[:-1]) | (server[1:] != server[:-1]))[: len(order)]
        # Of each task, the end of the last one of its document on its server.
        last = columns[2][np.append(np.flatnonzero(fresh)[1:], len(order))[: len(order)] - 1][np.cumsum(fresh) - 1].tolist()
        heads = plan.layout.heads_of(document).tolist()
        rows: list[tuple[int, int, int, int]] = []  # index in `order`, start, end, unit
        unit, filled = -1, Filled()
        for row, (start, end) in enumerate(zip(columns[1].tolist(), columns[2].tolist(), strict=True)):
            if fresh[row]:
                unit, filled = unit + 1, Filled()
            while start < end:
                stop = fitting.stop(filled, (start, end, last[row]), heads[row])
                if stop > start:
                    rows.append((row, start, stop, unit))
                    filled = filled.with_rows(start, stop, fitting.first_key(start))
                    start = stop
                if start < end:
                    unit, filled = unit + 1, Filled()
        index, start_, end_, units = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        # In turns: the first unit of every server, then the second ones.
        first = np.flatnonzero(np.append(True, units[1:] != units[:-1])[: len(units)])
        server_of_unit = server[index[first]]
        place = np.arange(len(first)) - np.searchsorted(server_of_unit, server_of_unit)
        turn = np.empty_like(place)
        turn[np.lexsort((server_of_unit, place))] = np.arange(len(first))
        return cls(document[index], start_, end_, columns[3][index], server[index], turn[units])


class Filled(NamedTuple):
    """Rows and keys that a unit has so far, and the end of those keys."""

    rows: int = 0
    keys: int = 0
    end: int = 0

    def with_rows(self, start: int, end: int, first_key: int) -> Filled:
        """After rows [start, end), which need keys from `first_key` on."""
        return Filled(self.rows + end - start, self.keys + end - max(first_key, self.end), end)


class Fitting(NamedTuple):
    """What fits a unit: bytes of all heads and of a head group, the window, the tile of cuts, and the bound."""

    all_heads: TransientBytes
    group: TransientBytes
    window: int | None
    tile: int
    bound: int

    def first_key(self, start: int) -> int:
        """The first key that a row at `start` sees."""
        return 0 if self.window is None else max(0, start - self.window + 1)

    def stop(self, filled: Filled, rows: tuple[int, int, int], heads: float) -> int:
        """Where rows have to end for a unit to fit; at their start if none of them fits beside what is there.

        Args:
            filled: the unit so far.
            rows: start and end of the rows, and the last row of the document on the server.
            heads: part of the heads.
        """
        start, end, last = rows
        (query, key, *_), tile, bound = self.all_heads if heads == 1 else self.group, self.tile, self.bound
        keys = last if self.window is None else min(last, self.window + tile)
        if key * keys + query * min(tile, last) > bound:
            # A tile of rows with its keys is more than the bound: that many bytes again for rows, or each tile would be a wave.
            bound = max(bound, 2 * key * keys)
        # New keys are those after the last there are: for rows up to y, y - first.
        first = max(self.first_key(start), filled.end)
        room = bound - query * filled.rows - key * filled.keys
        stop = (room + query * start + key * first) // (query + key)
        if stop >= end:
            return end
        stop = stop // tile * tile
        if stop > start:
            return stop
        return start if filled.rows else min(start // tile * tile + tile, end)


class _Needs(NamedTuple):
    """Transient bytes of units: one row for each unit and rank that holds or sends anything for it, in order of units."""

    unit: IntArray
    rank: IntArray
    bytes: IntArray

    @classmethod
    def of(cls, plan: Plan, units: _Units, fitting: Fitting) -> Self:
        """Servers hold rows and keys; homes hold the rows that they send, holders the keys."""
        ranks = plan.layout.world_size
        transient = np.array([fitting.group, fitting.all_heads])
        rows = units.end - units.start
        query, _, sent_query, _ = transient[(plan.layout.heads_of(units.document) == 1).astype(np.int64)].T
        keys = plan.layout.needed_keys(units.unit, units.document, units.start, units.end, plan.window)
        _, key, _, sent_key = transient[(plan.layout.heads_of(keys.document) == 1).astype(np.int64)].T
        tokens = keys.end - keys.start
        server = np.zeros(int(units.unit.max(initial=-1)) + 1, dtype=np.int64)
        server[units.unit] = units.server
        held_by, away = server[keys.server], units.home != units.server
        sent = keys.source != held_by
        unit = np.concatenate([units.unit, keys.server, units.unit[away], keys.server[sent]])
        rank = np.concatenate([units.server, held_by, units.home[away], keys.source[sent]])
        amount = np.concatenate([query * rows, key * tokens, (sent_query * rows)[away], (sent_key * tokens)[sent]])
        index, inverse = np.unique(unit * ranks + rank, return_inverse=True)
        total = np.zeros(len(index), dtype=np.int64)
        np.add.at(total, inverse, amount)
        return cls(index // ranks, index % ranks, total)


def _first_fit(needs: _Needs, ranks: int, bound: int) -> tuple[IntArray, IntArray]:
    """The wave of each unit, and bytes of each rank in each wave: shape (waves, ranks)."""
    # What a single unit needs cannot be avoided; a rank that passes the bound for one may use as much for others.
    limit, least = np.full(ranks, bound), np.full(ranks, np.iinfo(np.int64).max)
    np.maximum.at(limit, needs.rank, needs.bytes)
    np.minimum.at(least, needs.rank, needs.bytes)
    loads = np.zeros((16, ranks), dtype=np.int64)
    # Waves before this have no room for anything on a rank.
    begin = [0] * ranks
    bounds = np.flatnonzero(np.diff(needs.unit, prepend=-1, append=-1)).tolist()
    wave, count = np.zeros(max(len(bounds) - 1, 0), dtype=np.int64), 0
    for unit, (first, last) in enumerate(itertools.pairwise(bounds)):
        rank, amount = needs.rank[first:last], needs.bytes[first:last]
        low = max(count - _OPEN, *[begin[r] for r in rank.tolist()])
        fits = (loads[low:count, rank] + amount <= limit[rank]).all(axis=1)
        number = low + int(fits.argmax()) if fits.any() else count
        if number == len(loads):
            loads = np.concatenate([loads, np.zeros_like(loads)])
        count = max(count, number + 1)
        loads[number, rank] += amount
        wave[unit] = number
        for r in rank.tolist():
            while begin[r] < count and loads[begin[r], r] + least[r] > limit[r]:
                begin[r] += 1
    return wave, loads[:count]


def _travels(plan: Plan) -> npt.NDArray[np.bool_]:
    """Tasks that another rank than their home runs, or whose keys do not lie in one run of their home's tokens."""
    layout = plan.layout
    segment = layout.by_document[layout.segment_of(plan.place, plan.start)]
    first = np.zeros_like(plan.start) if plan.window is None else np.maximum(plan.start - plan.window + 1, 0)
    return np.asarray((plan.home != plan.server) | (first < layout.run[segment]))
