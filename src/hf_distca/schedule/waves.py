"""Waves: the moved part of a plan in several exchanges, so that traffic fits a bound at every
moment.

The tasks that need something from elsewhere are cut into *units* that fit the bound alone: slices
of one document on one server together, because they share one prefix of keys. A document that does
not fit is split by heads first: then each part needs its part of the keys, and all together
exchange no more than before. A part that is still too large is cut on tiles of rows, and each piece
gets the keys it needs again. Servers take turns: each unit goes into the first wave in which no
rank, as a server or as a home, passes the bound. Every rank computes the same waves from the same
plan, so all take part in each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import ALL_KEYS, AttentionShape, MarginalCost
from hf_distca.schedule.heads import list_group_counts
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import Plan

# Waves that units still go into. Servers take turns, so earlier ones are full on nearly all ranks.
_OPEN_WAVES = 64


class TransientBytes(NamedTuple):
    """Bytes that live during a call for each token that travels, the larger of forward and
    backward.

    Backward decides, with do, q, o, log-sum-exp for each query row and k, v for each key. A server
    holds them as received and as pools first, then as pools and gradients; a home holds the rows
    that it sends, then the gradients that come back.

    Attributes:
        query, key: bytes of a query row and of a key in a server's pools.
        sent_query, sent_key: bytes of a query row and of a key that a home sends, once for every
            server.
    """

    query: int
    key: int
    sent_query: int
    sent_key: int

    @classmethod
    def from_shape(cls, shape: AttentionShape) -> TransientBytes:
        """Compute the bytes for an attention shape."""
        wide = max(4, shape.element_bytes)  # log-sum-exps and sums of key gradients
        row = shape.query_bytes + 2 * shape.output_bytes + shape.query_heads * wide
        key = shape.key_value_bytes
        wide_key = shape.key_value_bytes * wide // shape.element_bytes
        # Gradients of copies that are not wide yet become so when they are added up at home.
        return cls(
            2 * row, key + wide_key, row, key + (wide_key if wide > shape.element_bytes else 0)
        )

    def find_last_row(self, max_bytes: int | None, marginal: MarginalCost, groups: int) -> int:
        """Find the last row of a head group for which a grid cell of rows fits the bound with its
        keys.

        `max_bytes` bytes bound one of `groups` head groups; None for no bound.
        """
        if (
            max_bytes is None
            or self.query * marginal.grid + self.key * (marginal.window + marginal.grid)
            <= max_bytes * groups
        ):
            return ALL_KEYS
        return (
            max(max_bytes * groups - self.query * marginal.grid, 0)
            // self.key
            // marginal.grid
            * marginal.grid
        )


@dataclass(frozen=True, eq=False)
class Waves:
    """A plan and the wave in which each of its tasks travels.

    Attributes:
        plan: the plan, with documents split by heads and tasks cut where they go in different
            waves.
        number: wave of each task of `plan`; -1 for tasks that a home runs on its own tokens alone.
        count: waves, at least 1.
        bytes: estimated transient bytes of each rank in its largest wave. None if there is no
            bound.
    """

    plan: Plan
    number: IntArray
    count: int = 1
    bytes: IntArray | None = None

    @classmethod
    def split_plan(
        cls, plan: Plan, shape: AttentionShape, tile: int, bound: int | None, head_groups: int = 1
    ) -> Waves:
        """Split `plan`, cut on tiles, so that no rank has more than `bound` transient bytes in a
        wave; None for no bound.

        Documents are split by heads into at most `head_groups` groups, if the plan has not split
        some already. A tile of rows with the keys it needs is never split: if it is more than the
        bound alone, so is its wave.

        Raises:
            ConfigError: if one row and one key are more than the bound.
        """
        transient = TransientBytes.from_shape(shape)
        min_bytes = transient.query + transient.key
        if bound is not None and bound < min_bytes:
            raise ConfigError(
                f"max_transient_bytes={bound} is less than the {min_bytes} bytes that one query row"
                f" and one key take in a layer of {shape}: give what many rows take, or None for no"
                " bound."
            )
        if bound is None or not plan.moved:
            return cls(plan, np.zeros_like(plan.start))
        groups = plan.layout.groups
        group_counts = (
            [groups] if groups > 1 else list_group_counts(shape.key_value_heads, head_groups)
        )
        plan = _split_large_documents(plan, transient, group_counts, bound)
        # Tasks that do not travel are in no unit, which is number -1.
        local_tasks = np.flatnonzero(~plan.needs_exchange)
        rows = np.concatenate(
            [
                np.column_stack(
                    [
                        *(local_tasks, plan.start[local_tasks], plan.end[local_tasks]),
                        np.full(len(local_tasks), -1),
                    ]
                ),
                np.array(_cut_units(plan, transient, tile, bound), dtype=np.int64).reshape(-1, 4),
            ]
        )
        # As a plan orders its tasks.
        task, start, end, unit = rows[np.lexsort((rows[:, 1], plan.document[rows[:, 0]]))].T
        unit = np.unique(np.append(-1, unit), return_inverse=True)[1][1:] - 1
        cut = Plan(
            plan.layout,
            plan.document[task],
            start,
            end,
            plan.home[task],
            plan.server[task],
            plan.window,
        )
        wave, loads = _assign_waves(
            _compute_unit_bytes(cut, unit, transient), plan.layout.world_size, bound
        )
        return cls(
            cut,
            # The rest of a task that was cut may see no further than its home's own tokens, if
            # there is a window.
            np.where(cut.needs_exchange, np.append(wave, -1)[unit], -1),
            max(len(loads), 1),
            loads.max(axis=0, initial=0),
        )


def _split_large_documents(
    plan: Plan, transient: TransientBytes, group_counts: list[int], bound: int
) -> Plan:
    """Split documents by heads of which a server would need more than the bound."""
    layout = plan.layout
    if plan.window is not None or layout.context.any() or group_counts == [1]:
        return plan
    # Of a document, a server needs all keys before its last row.
    tasks = np.flatnonzero(plan.needs_exchange & (plan.heads == 1))
    unit, index = np.unique(
        plan.place[tasks] * layout.world_size + plan.server[tasks], return_inverse=True
    )
    last = np.zeros(len(unit), dtype=np.int64)
    np.maximum.at(last, index, plan.end[tasks])
    needed_bytes = transient.key * last + transient.query * np.bincount(
        index, weights=plan.end[tasks] - plan.start[tasks]
    )
    large = needed_bytes > bound
    if not large.any():
        return plan
    split_mask = np.zeros(len(layout.documents), dtype=np.bool_)
    split_mask[unit[large] // layout.world_size] = True
    fitting = (count for count in group_counts if needed_bytes.max() / count <= bound)
    return plan.split_heads(split_mask, next(fitting, group_counts[-1]))


def _cut_units(
    plan: Plan, transient: TransientBytes, tile: int, bound: int
) -> list[tuple[int, int, int, int]]:
    """Cut the tasks that travel into slices, each of which lies in one unit: the task, its start
    and end, the unit.

    Units are numbered in their order, with gaps: servers take turns, and each begins with the first
    of its own.
    """
    groups = plan.layout.groups
    ranks = plan.layout.world_size
    window = ALL_KEYS if plan.window is None else plan.window
    tasks = np.flatnonzero(plan.needs_exchange)
    tasks = tasks[np.argsort(plan.server[tasks], kind="stable")]
    columns = (plan.server, plan.place, plan.heads == 1, plan.start, plan.end)
    rows = zip(*(column[tasks].tolist() for column in columns), tasks.tolist(), strict=True)
    units = list[tuple[int, int, int, int]]()
    turns = Counter[int]()
    group_transient = TransientBytes(*(count // groups for count in transient))
    for (server, _, whole), slices in itertools.groupby(rows, key=itemgetter(0, 1, 2)):
        unit_slices = list(
            _fill_units(
                [row[3:] for row in slices],
                transient if whole else group_transient,
                window,
                tile,
                bound,
            )
        )
        units += [
            (task, start, end, (turns[server] + unit) * ranks + server)
            for task, start, end, unit in unit_slices
        ]
        turns[server] += unit_slices[-1][-1] + 1
    return units


def _fill_units(
    slices: Sequence[tuple[int, int, int]],
    transient: TransientBytes,
    window: int,
    tile: int,
    bound: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield slices of a document on a server, which fill one unit after another: task, start, end,
    number of the unit.

    Slices are given as start, end and task, in order.
    """
    last = slices[-1][1]
    query = transient.query
    key = transient.key
    keys = min(last, window + tile)
    if key * keys + query * min(tile, last) > bound:
        # A tile of rows with its keys is more than the bound: that many bytes again for rows, or
        # each tile would be a wave.
        bound = max(bound, 2 * key * keys)
    unit, used, keys_end = 0, 0, 0  # its number, its bytes, and where its keys end so far
    for start, end, task in slices:
        while start < end:
            # New keys are those after the last there are: for rows up to y, y - first.
            first = max(0, start - window + 1, keys_end)
            slice_end = min((bound - used + query * start + key * first) // (query + key), end)
            slice_end = slice_end if slice_end == end else slice_end // tile * tile
            if slice_end <= start and not used:
                slice_end = min(start // tile * tile + tile, end)
            if slice_end > start:
                yield task, start, slice_end, unit
                used += query * (slice_end - start) + key * (slice_end - first)
                start = keys_end = slice_end
            if start < end:
                unit += 1
                used = 0
                keys_end = 0


def _compute_unit_bytes(plan: Plan, unit: IntArray, transient: TransientBytes) -> IntArray:
    """Compute the transient bytes of units: unit, rank, bytes of each rank that holds
    or sends anything for it, in order of units.

    Servers hold rows and keys; homes hold the rows that they send, holders the keys.

    Args:
        plan: plan in which each task lies in one unit.
        unit: number of the unit of each task, -1 if the task does not travel.
        transient: bytes of a token, of all heads.
    """
    tasks = np.flatnonzero(unit >= 0)
    ranks = plan.layout.world_size
    groups = plan.layout.groups
    unit, rows, home, server = (
        column[tasks] for column in (unit, plan.end - plan.start, plan.home, plan.server)
    )
    keys = plan.list_key_transfers(tasks, unit)
    split, split_keys = (
        np.where(heads == 1, 1, groups)
        for heads in (plan.heads[tasks], plan.layout.compute_head_fractions(keys.document))
    )
    tokens = keys.end - keys.start
    held_by = np.zeros(int(unit.max(initial=-1)) + 1, dtype=np.int64)
    held_by[unit] = server
    receiver = held_by[keys.server]
    away = home != server
    sent = keys.source != receiver
    units = np.concatenate([unit, keys.server, unit[away], keys.server[sent]])
    rank = np.concatenate([server, receiver, home[away], keys.source[sent]])
    amount = [
        transient.query // split * rows,
        transient.key // split_keys * tokens,
        (transient.sent_query // split * rows)[away],
        (transient.sent_key // split_keys * tokens)[sent],
    ]
    index, inverse = np.unique(units * ranks + rank, return_inverse=True)
    total = np.bincount(inverse, weights=np.concatenate(amount)).astype(np.int64)
    return np.stack([index // ranks, index % ranks, total])


def _assign_waves(unit_bytes: IntArray, ranks: int, bound: int) -> tuple[IntArray, IntArray]:
    """Assign each unit to the first wave that fits.

    Return the waves, and bytes of each rank in each wave: (waves, ranks).
    """
    units, holder, bytes_ = unit_bytes
    # What a single unit needs cannot be avoided; a rank that passes the bound for one may use as
    # much for others.
    limit = np.full(ranks, bound)
    np.maximum.at(limit, holder, bytes_)
    bounds = np.flatnonzero(np.diff(units, prepend=-1, append=-1)).tolist()
    # Pages of waves that are not needed are never touched.
    loads = np.zeros((len(bounds), ranks), dtype=np.int64)
    wave = np.zeros(max(len(bounds) - 1, 0), dtype=np.int64)
    count = 0
    for unit, (first, last) in enumerate(itertools.pairwise(bounds)):
        rank, amount = holder[first:last], bytes_[first:last]
        low = max(count - _OPEN_WAVES, 0)
        # A wave in which nothing travels yet always fits.
        number = low + int(
            (loads[low : count + 1, rank] + amount <= limit[rank]).all(axis=1).argmax()
        )
        count = max(count, number + 1)
        loads[number, rank] += amount
        wave[unit] = number
    return wave, loads[:count]
