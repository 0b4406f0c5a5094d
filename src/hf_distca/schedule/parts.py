"""Pieces of a batch as arrays for trials (`schedule.trial`), and plans made from the moves of
trials. A piece is the rows of a document, or of a head group of a document, on one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import MarginalCost, TransientBytes
from hf_distca.schedule.layout import BoolArray, IntArray, mark_changes, repeat_split_rows
from hf_distca.schedule.load import PlanLoad, count_transient_bytes
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.tails import (
    COMPUTE,
    FIRST,
    HELD,
    LAST,
    PART,
    PIECE,
    ROWS,
    SERVER,
    SERVES,
    SPEED,
    START,
    STOP,
    UNITS,
    WIRE,
    Batch,
)
from hf_distca.schedule.trial import make_moves

# A typical slice takes this fraction of the mean compute seconds of a rank. A document is long if
# the keys of a typical slice have more bytes than its rows.
_TYPICAL_SLICE = 0.25
# Documents are split by heads only if no document number is larger than this. Splitting multiplies
# numbers by `groups + 1`, and the products must fit in 64 bits.
_LARGEST_NUMBER = 2**56
# Fields of `Batch` that are restored before a trial. Rows of `holders` and `moves` beyond `counts`
# may keep old values.
_STATE = ("parts", "segments", "pieces", "ranks", "counts")


@dataclass(frozen=True)
class Pieces:
    """The pieces of a layout: the rows of each part on each rank. A part is a document, or a head
    group of a document.

    Attributes:
        load: load of the plan that moves nothing.
        groups: number of head groups of a document that is split.
        number: (parts,) ``place * (groups + 1) + group`` for each part: the place of its document
            in `Layout.documents`, and its head group (1 for the first group; 0 for all heads).
        home: (pieces,) the rank of each piece.
        stop: (pieces,) document position where the rows of each piece end. The last rows of a piece
            cannot move if they need more keys than `max_transient_bytes` allows.
        batch: arrays that trials read and change.
        start: the same arrays before any move.
    """

    load: PlanLoad
    groups: int
    number: IntArray
    home: IntArray
    stop: IntArray
    batch: Batch
    start: Batch

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
            groups: number of head groups.
            split_mask: for each document, whether it is split by heads.
            has_relays: whether servers forward keys.
        """
        layout, cost, ranks = load.plan.layout, load.cost, load.plan.layout.world_size
        rows, group = repeat_split_rows(split_mask[layout.place[layout.by_document]], groups)
        rows = layout.by_document[rows]
        number = layout.place[rows] * (groups + 1) + group
        order = np.argsort(number, kind="stable")
        rows, number = rows[order], number[order]
        starts_part = mark_changes(number)
        first, last, home = layout.start[rows], layout.end[rows], layout.rank[rows]
        moved = np.flatnonzero(layout.has_queries[rows])
        moved = moved[np.lexsort((-last[moved], home[moved]))]
        part, number = (np.cumsum(starts_part) - 1)[moved], number[starts_part]
        _, rate = load.ranks.list_links(cost, ranks)
        bound, transient = config.max_transient_bytes, TransientBytes.from_shape(cost.shape)
        marginal = MarginalCost.from_cost_model(cost)
        heads = np.where(number % (groups + 1) > 0, 1.0 / groups, 1.0)
        whole, split = (
            transient.find_last_row(bound, marginal.window, count) // config.tile * config.tile
            for count in (1, groups)
        )
        per_node, capacity = load.ranks.per_node or ranks, 8 * ranks + 2 * len(moved) + 64
        keys = np.column_stack([first, last, home, np.zeros((len(rows), UNITS), dtype=np.int64)])
        batch = Batch(
            cost=marginal,
            transient=transient,
            most_bytes=math.inf if bound is None else float(bound),
            grid=config.tile,
            per_node=per_node,
            shared=min(cost.ranks_per_link, per_node),
            hidden=load.overlapped,
            has_relays=has_relays,
            heads=heads,
            offsets=np.searchsorted(home[moved], np.arange(ranks + 1)),
            parts=np.stack(
                [
                    np.append(np.flatnonzero(starts_part), len(rows)),
                    np.full(len(number) + 1, -1),
                ],
                axis=1,
            ),
            segments=keys,
            pieces=np.column_stack([part, first[moved], last[moved]]),
            ranks=np.zeros((ROWS, ranks)),
            holders=np.zeros((capacity + len(moved), 3), dtype=np.int64),
            moves=np.zeros((capacity, 4), dtype=np.int64),
            counts=np.zeros(2, dtype=np.int64),
        )
        batch.ranks[COMPUTE] = load.compute_seconds
        batch.ranks[SPEED] = load.ranks.list_speeds(ranks)
        batch.ranks[WIRE : WIRE + 2] = 1 / rate
        batch.ranks[SERVES] = (layout.query_tokens == 0) | config.serve_in_place
        make_moves(batch, np.arange(0), False)
        batch.ranks[HELD] = count_transient_bytes(load.plan, transient) if bound else 0.0
        end = batch.pieces[:, LAST]
        np.minimum(end, np.where(heads[part] < 1, split, whole), out=end)
        start = batch._replace(**{name: getattr(batch, name).copy() for name in _STATE})
        return cls(load, groups, number, home[moved], last[moved], batch, start)

    def restore(self) -> Batch:
        """Restore the batch to its state before any move, and return it."""
        for name in _STATE:
            getattr(self.batch, name)[...] = getattr(self.start, name)
        return self.batch

    def make_plan(self, moves: IntArray) -> Plan:
        """Make a plan from moves. Neighbouring rows on one server become one task."""
        layout, groups = self.load.plan.layout, self.groups
        movable, first = self.start.pieces[:, LAST], self.start.pieces[:, FIRST]
        end = movable.copy()
        np.minimum.at(end, moves[:, PIECE], moves[:, START])
        left, stayed = np.flatnonzero(first < end), np.flatnonzero(movable < self.stop)
        piece = np.concatenate([moves[:, PIECE], left, stayed])
        begin = np.concatenate([moves[:, START], first[left], np.maximum(movable, first)[stayed]])
        stop = np.concatenate([moves[:, STOP], end[left], self.stop[stayed]])
        home = self.home[piece]
        server = np.append(moves[:, SERVER], home[len(moves) :])
        number = self.number[self.start.pieces[piece, PART]]
        place, group = number // (groups + 1), number % (groups + 1)
        # The plan splits a document only if it moves one of the document's head groups.
        split_mask = np.zeros(len(layout.documents), dtype=np.bool_)
        split_mask[place[(server != home) & (group > 0)]] = True
        document = layout.documents[place]
        if split_mask.any():
            document = document * (groups + 1) + np.where(split_mask[place], group, 0)
        order = np.flatnonzero(split_mask[place] | (group <= 1))
        order = order[np.lexsort((begin[order], number[order]))]
        begins = mark_changes(piece[order], server[order])
        task, last = order[begins], order[np.append(begins, True)[1:]]
        return Plan(
            layout.split_heads(split_mask, groups) if split_mask.any() else layout,
            document[task],
            begin[task],
            stop[last],
            home[task],
            server[task],
            self.load.plan.window,
        )


def list_splits(
    load: PlanLoad, config: DistCAConfig, mean_seconds: float
) -> list[tuple[int, BoolArray]]:
    """List the ways of splitting documents by heads. A way is a number of head groups, and a mask
    of the documents to split.

    A document is split only if it is long and lies on a rank that has work to give away.
    """
    layout, cost, marginal = load.plan.layout, load.cost, MarginalCost.from_cost_model(load.cost)
    long, on_busy_rank, none = np.zeros((3, len(layout.documents)), dtype=np.bool_)
    heads = cost.shape.key_value_heads
    groups = max(
        count for count in range(1, min(config.head_groups, heads) + 1) if heads % count == 0
    )
    if (
        groups == 1
        or cost.window is not None
        or math.isinf(cost.exchange_bytes_per_second)
        or layout.groups > 1
        or layout.context.any()
        or np.abs(layout.documents).max(initial=0) > _LARGEST_NUMBER
    ):
        return [(1, none)]
    # At p seconds per pair, a slice of F seconds at position y has F / (p * y) rows. With q bytes
    # per query and kv bytes per key, its queries and its keys have equally many bytes if
    # q * F / (p * y) = kv * y.
    slice_bytes = _TYPICAL_SLICE * mean_seconds * marginal.query_bytes
    length = math.sqrt(slice_bytes / (marginal.key_bytes * marginal.pair))
    long[layout.place[layout.end >= length]] = True
    busy = load.compute_seconds > mean_seconds
    on_busy_rank[layout.place[busy[layout.rank]]] = True
    split_mask = long & on_busy_rank
    return [(groups, split_mask), (1, none)] if split_mask.any() else [(1, none)]
