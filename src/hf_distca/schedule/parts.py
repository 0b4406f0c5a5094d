"""The pieces of a batch as arrays: what `schedule.balance` moves, and the state of a trial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import MarginalCost, TransientBytes
from hf_distca.schedule.layout import (
    BoolArray,
    FloatArray,
    IntArray,
    enumerate_ranges,
    mark_changes,
    repeat_split_rows,
)
from hf_distca.schedule.load import PlanLoad, count_transient_bytes
from hf_distca.schedule.plan import Plan

# Places in `State.traffic` and `Batch.wire`: what a rank sends and receives; links in a node and
# between nodes.
SENT, RECEIVED = range(2)
INSIDE, BETWEEN = range(2)
# Columns of `State.moves`: a piece, rows [start, end) of its document, and the rank that gets them.
PIECE, START, END, SERVER = range(4)
# Columns of `State.holders`: a rank that needs the first keys of a part anyway, how many, the row
# of the part's holder before, and the node whose ranks pass the keys on to each other; -1 for all
# nodes where no tokens of the part lie.
RANK, KEYS, PREVIOUS, UNIT = range(4)


# Head groups that documents are split in; more gain nothing. And the part of the mean that a server
# typically takes: documents are long if slices of it would have more bytes of keys than of rows.
_MOST_GROUPS, _TYPICAL_SLICE = 4, 0.25
_LARGEST_NUMBER = 2**56  # of documents: numbers are multiplied by those of groups


class Batch(NamedTuple):
    """Pieces and ranks, which no trial changes.

    A *part* is a document, or a head group of one. A *piece* is the rows of a part on a rank, a
    *segment* its keys on a rank.

    Attributes:
        cost: of slices.
        grid: documents are cut at its multiples.
        heads: (parts,) the part of the heads that each has.
        offsets: (ranks + 1,) pieces of rank r are [offsets[r], offsets[r + 1]), deepest first.
        part, start: (pieces,) the part and the first row of each.
        segments: (parts + 1,) segments of part p are [segments[p], segments[p + 1]).
        first, last, home: (segments,) keys [first, last) lie on rank `home`.
        speeds, can_serve: (ranks,) the relative speed of each, and whether it may get tails.
        wire: (2, ranks) seconds a byte, inside a node and between nodes.
        link: (2, ranks) the first rank that shares the link.
        per_node: ranks of a node; all ranks if nodes are not told apart.
        hidden: whether exchanges are hidden behind compute.
        has_relays: whether servers pass keys on.
        transient: bytes that a rank holds for a row and a key that it gets, and sends.
        most_bytes: bytes that a rank may hold.
    """

    cost: MarginalCost
    grid: int
    heads: FloatArray
    offsets: IntArray
    part: IntArray
    start: IntArray
    segments: IntArray
    first: IntArray
    last: IntArray
    home: IntArray
    speeds: FloatArray
    can_serve: BoolArray
    wire: FloatArray
    link: IntArray
    per_node: int
    hidden: bool
    has_relays: bool
    transient: TransientBytes
    most_bytes: float


class State(NamedTuple):
    """State of a trial.

    Attributes:
        compute: (ranks,) seconds.
        traffic: (2, 2, ranks) seconds that are sent and received, inside nodes and between them;
            those of a shared link at its first rank.
        held: (ranks,) transient bytes.
        ends, node_ends: (ranks,), (nodes,) when each ends; sum of the ranks of each node.
        end: (pieces,) where the rows end that are left.
        last_holder: (parts,) the last row of `holders`, or -1.
        counts: (2,) rows of `holders` and of `moves`.
        holders, moves: room for rows.
    """

    compute: FloatArray
    traffic: FloatArray
    held: FloatArray
    ends: FloatArray
    node_ends: FloatArray
    end: IntArray
    last_holder: IntArray
    counts: IntArray
    holders: IntArray
    moves: IntArray


@dataclass(frozen=True)
class Pieces:
    """The pieces of a layout, with some documents in head groups.

    Attributes:
        load: load of the plan that moves nothing.
        groups: head groups of documents that are split.
        number: (parts,) place of the document times ``groups + 1``, plus the head group from 1.
        segment: (pieces,) the row of the layout that each is.
        stop: (pieces,) where the rows of each end. Those that may move may end before, where they
            need more keys than a bound of transient bytes allows.
        batch, start, state: what trials read, begin with, and change.
    """

    load: PlanLoad
    groups: int
    number: IntArray
    segment: IntArray
    stop: IntArray
    batch: Batch
    start: State
    state: State

    @classmethod
    def cut(
        cls,
        load: PlanLoad,
        config: DistCAConfig,
        groups: int,
        split_mask: BoolArray,
        has_relays: bool,
    ) -> Self:
        """Cut a layout into pieces.

        Args:
            load: load of the plan that moves nothing.
            config: the settings.
            groups: head groups.
            split_mask: for each document, whether it is split by heads.
            has_relays: whether servers pass keys on.
        """
        layout, cost = load.plan.layout, load.cost
        rows, group = repeat_split_rows(split_mask[layout.place[layout.by_document]], groups)
        rows = layout.by_document[rows]
        number = layout.place[rows] * (groups + 1) + group
        order = np.argsort(number, kind="stable")
        rows = rows[order]
        starts_part = mark_changes(number[order])
        part = np.cumsum(starts_part) - 1
        number = number[order][starts_part]
        first, last, home = layout.start[rows], layout.end[rows], layout.rank[rows]
        moved = np.flatnonzero(layout.has_queries[rows])
        moved = moved[np.lexsort((-last[moved], home[moved]))]
        per_node = load.ranks.per_node or layout.world_size
        link, rate = load.ranks.list_links(cost, layout.world_size)
        bound, transient = config.max_transient_bytes, TransientBytes.from_shape(cost.shape)
        batch = Batch(
            MarginalCost.from_cost_model(cost),
            config.tile,
            np.where(number % (groups + 1) > 0, 1.0 / groups, 1.0),
            np.searchsorted(home[moved], np.arange(layout.world_size + 1)),
            part[moved],
            first[moved],
            np.append(np.flatnonzero(starts_part), len(part)),
            first,
            last,
            home,
            np.array(load.ranks.list_speeds(layout.world_size)),
            (layout.query_tokens == 0) | config.serve_in_place,
            1 / rate,
            link,
            per_node,
            load.overlapped,
            has_relays,
            transient,
            math.inf if bound is None else float(bound),
        )
        limits = [
            transient.find_last_row(bound, batch.cost.window, count) // config.tile * config.tile
            for count in (1, groups)
        ]
        stop = last[moved]
        movable = np.minimum(stop, np.where(batch.heads[batch.part] < 1, limits[1], limits[0]))
        start = _make_start(batch, load, stop)._replace(end=movable)
        state = State._make(column.copy() for column in start)
        return cls(load, groups, number, rows[moved], stop, batch, start, state)

    def restore(self) -> State:
        """Return the state before any move."""
        for begin, column in zip(self.start[:-2], self.state[:-2], strict=True):
            column[...] = begin
        return self.state

    def make_plan(self, moves: IntArray) -> Plan:
        """Make the plan of some moves. Neighbours on one server become one task."""
        layout, batch, groups = self.load.plan.layout, self.batch, self.groups
        end = self.start.end.copy()
        np.minimum.at(end, moves[:, PIECE], moves[:, START])
        left = np.flatnonzero(batch.start < end)
        stayed = np.flatnonzero(self.start.end < self.stop)
        piece = np.concatenate([moves[:, PIECE], left, stayed])
        start = np.concatenate(
            [
                moves[:, START],
                batch.start[left],
                np.maximum(self.start.end, batch.start)[stayed],
            ]
        )
        stop = np.concatenate([moves[:, END], end[left], self.stop[stayed]])
        home = layout.rank[self.segment[piece]]
        server = np.append(moves[:, SERVER], home[len(moves) :])
        number = self.number[batch.part[piece]]
        place, group = number // (groups + 1), number % (groups + 1)
        # A document of which no group is moved is not split.
        split_mask = np.zeros(len(layout.documents), dtype=np.bool_)
        split_mask[place[(server != home) & (group > 0)]] = True
        document = layout.documents[place]
        if split_mask.any():
            document = document * (groups + 1) + np.where(split_mask[place], group, 0)
        order = np.flatnonzero(split_mask[place] | (group <= 1))
        order = order[np.lexsort((start[order], number[order]))]
        begins = mark_changes(piece[order], server[order])
        task, last = order[begins], order[np.append(begins, True)[1:]]
        return Plan(
            layout.split_heads(split_mask, groups) if split_mask.any() else layout,
            document[task],
            start[task],
            stop[last],
            home[task],
            server[task],
            self.load.plan.window,
        )


def _make_start(batch: Batch, load: PlanLoad, end: IntArray) -> State:
    """Make the state before any move; `end` is that of each piece."""
    ranks, per_node = len(batch.speeds), batch.per_node
    part, holders, last_holder = _list_holders(batch, end)
    traffic = _weigh_key_traffic(batch, part, holders)
    links = np.maximum(traffic[:, INSIDE], traffic[:, BETWEEN, batch.link[BETWEEN]]).max(axis=0)
    compute = load.compute_seconds.copy()
    ends = np.maximum(compute, links) if batch.hidden else compute + links
    capacity = 8 * ranks + 2 * len(end) + 64
    room = np.zeros((2, capacity, 4), dtype=np.int64)
    return State(
        compute,
        traffic,
        count_transient_bytes(load.plan, batch.transient).astype(np.float64),
        ends,
        np.bincount(np.arange(ranks) // per_node, weights=ends).astype(np.float64),
        end,
        last_holder,
        np.array([len(holders), 0]),
        np.append(holders, room[0], axis=0),
        room[1],
    )


def _list_holders(batch: Batch, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """List ranks with rows of each part, which hold its keys up to the last of them: the parts of
    rows of `State.holders`, these rows, and the last row of each part.
    """
    rank = np.repeat(np.arange(len(batch.speeds)), np.diff(batch.offsets))
    order = np.lexsort((end, rank, batch.part))
    last = np.append(mark_changes(batch.part[order], rank[order]), True)[1:]
    part, rank, end = (column[order[last]] for column in (batch.part, rank, end))
    row = np.arange(len(part))
    previous = np.where(mark_changes(part), -1, row - 1)
    last_holder = np.full(len(batch.heads), -1)
    last_holder[part] = row
    return part, np.column_stack([rank, end, previous, rank // batch.per_node]), last_holder


def _weigh_key_traffic(batch: Batch, part: IntArray, holders: IntArray) -> FloatArray:
    """Weigh the keys that holders need from other ranks: `State.traffic` before any move."""
    row, segment = enumerate_ranges(batch.segments[part], batch.segments[part + 1])
    keys = np.minimum(batch.last[segment], holders[row, KEYS]) - batch.first[segment]
    server, home, unit = holders[row, RANK], batch.home[segment], holders[row, UNIT]
    needed = np.flatnonzero((keys > 0) & (home != server))
    keys, server, home, unit, segment, part = (
        column[needed] for column in (keys, server, home, unit, segment, part[row])
    )
    # Homes send each key once to ranks that pass it on: as many as that needs which needs most.
    order = np.lexsort((-keys, unit, segment))
    is_sent = np.full(len(keys), not batch.has_relays)
    is_sent[order] |= mark_changes(segment[order], unit[order])
    amount = keys * batch.heads[part] * batch.cost.key_bytes
    is_near = home // batch.per_node == unit
    traffic = np.zeros((2, 2, len(batch.speeds)))
    for level, mask in ((INSIDE, is_near), (BETWEEN, ~is_near)):
        for role, rank, rows in ((SENT, home, mask & is_sent), (RECEIVED, server, mask)):
            link, wire = batch.link[level][rank[rows]], batch.wire[level][rank[rows]]
            traffic[role, level] = np.bincount(
                link, weights=amount[rows] * wire, minlength=traffic.shape[2]
            )
    return traffic


def list_splits(
    load: PlanLoad, config: DistCAConfig, marginal: MarginalCost, mean_seconds: float
) -> list[tuple[int, BoolArray]]:
    """List numbers of head groups with the documents to split: long ones, on ranks with work to
    give away.
    """
    layout, cost = load.plan.layout, load.cost
    long, on_busy_rank, none = np.zeros((3, len(layout.documents)), dtype=np.bool_)
    heads = cost.shape.key_value_heads
    most = min(config.head_groups, heads, _MOST_GROUPS)
    groups = max(count for count in range(1, most + 1) if heads % count == 0)
    if (
        groups == 1
        or cost.window is not None
        or math.isinf(cost.exchange_bytes_per_second)
        or layout.groups > 1
        or layout.context.any()
        or np.abs(layout.documents).max(initial=0) > _LARGEST_NUMBER
    ):
        return [(1, none)]
    # A slice of F seconds at position y has F / (p * y) rows. Its bytes of queries are as many as
    # those of keys if q * F / (p * y) = kv * y.
    slice_bytes = _TYPICAL_SLICE * mean_seconds * marginal.query_bytes
    length = math.sqrt(slice_bytes / (marginal.key_bytes * marginal.pair))
    long[layout.place[layout.end >= length]] = True
    busy = load.compute_seconds > mean_seconds
    on_busy_rank[layout.place[busy[layout.rank]]] = True
    split_mask = long & on_busy_rank
    return [(groups, split_mask), (1, none)] if split_mask.any() else [(1, none)]
