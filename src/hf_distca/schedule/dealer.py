"""Which rank gets which document, or which part of one: the work behind `deal`.

Documents go longest first. *Wide* ones, which alone take longer than a rank should, are cut over as few ranks as end in time;
others stay whole where a rank has room and seconds for them. Ranks that share a wide document may get more than their seconds:
in the end it is cut anew so that all of them end together. Short documents fill up ranks to the token, denser ones where more
attention is missing, and the shortest are cut to fit.

Every rank deals for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.compiled import column
from hf_distca.schedule.cost import ALL_KEYS, CostModel, FloatArray, Price
from hf_distca.schedule.fill import fill_up, pour
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.moves import slice_seconds
from hf_distca.schedule.spread import Loads, Scratch, Wide, spread
from hf_distca.schedule.takers import divide, first_found, takers
from hf_distca.schedule.target import Target, exchanged

__all__ = ["Dealer"]

# Parts of the target: documents of fewer seconds only fill up ranks; so much more than its target a rank may get unasked; so much
# all work may exceed what there is room for before the target rises.
_SHORT = 0.004
_SLACK = 0.005
_SLACK_OVERLAPPED = 0.002  # a cut costs next to nothing then
_LACK = 0.002
_RAISES = 4
# How often documents are dealt, each time for a later target, until the slowest rank is so close to it, as a part of it.
_TRIES = 3
_CLOSE = 0.1
# What ranks may end later than the target, tried in this order, for a document to be cut over no more than so many ranks.
_LATER = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_FEW = 32
# The same for a document to stay in a node.
_LATE_IN_NODE = 0.1
# Ranks that are asked whether they would take a whole document.
_ASKED = 4
# Part of its share of a wide document that a rank may be relieved of.
_ELASTIC = 0.7
# Part of the seconds of a node up to which a document is expected to lie in one.
_FITS = 0.5


class _Cut(NamedTuple):
    """A document on several ranks, whose cuts are still open. Of its keys, one counts as `weight` that travel between nodes."""

    place: int
    ranks: list[int]
    tokens: list[int]
    compute: list[float]
    keys: int
    weight: float


class Dealer:
    """Deals documents to ranks with so many tokens each; see `deal` for the other arguments.

    Key tokens that ranks send and receive are counted as if all travelled between nodes: one inside a node as `near` of one.
    """

    def __init__(
        self,
        document: IntArray,
        length: IntArray,
        tokens: Sequence[int],
        cost: CostModel,
        tile: int,
        ranks_per_node: int | None,
        *,
        overlapped: bool,
    ) -> None:
        if ranks_per_node is None:
            cost = replace(cost, node_bytes_per_second=None)
        self.near, self.per_node = cost.near, ranks_per_node or len(tokens)
        if not Price.of(cost, tile).pair:
            # Attention that costs nothing a pair is as long as its tokens are many: pairs decide then.
            cost = replace(CostModel.pairs(cost.shape), window=cost.window)
        order = np.lexsort((document, -length))
        length, seconds = length[order], cost.seconds(length[order], length[order])
        keys = length if cost.window is None else np.minimum(length, cost.window)
        between = cost.transfer_seconds(0, keys)
        # Those that need more than a node leave it.
        fits = seconds <= math.fsum(seconds.tolist()) * (_FITS * self.per_node / len(tokens))
        exchange = between * np.where(fits | (self.per_node >= len(tokens)), self.near, 1.0)
        self.key_seconds = float(cost.transfer_seconds(0, 1))
        self.target = Target(length, seconds, len(tokens), math.fsum(tokens) / len(tokens), exchange, overlapped=overlapped)
        self.document, self.length, self.seconds = document[order].tolist(), length.tolist(), seconds.tolist()
        self.exchange, self.between = exchange.tolist(), between.tolist()
        self.price = Price.of(cost, tile)
        self.tokens, self.tile, self.overlapped = tokens, tile, overlapped
        self.rows: list[tuple[int, int, int, int]] = []

    def layout(self, placed: Sequence[tuple[int, int, int, int]] = ()) -> Layout:
        """Deal, and build the layout, with pieces (rank, document, start, length) that were placed before."""
        limit, best, earliest = self.target.seconds, self.rows, math.inf
        for _ in range(_TRIES if self.length else 0):
            slowest = self._deal(limit)
            if slowest < earliest:
                best, earliest = self.rows, slowest
            if self.overlapped or slowest <= self.limit * (1 + _CLOSE):
                break
            # Cuts to be in time took longer than they were worth: with a later target, more documents stay whole.
            limit = (self.limit + earliest) / 2
        rows = np.array([*best, *placed], dtype=np.int64).reshape(-1, 4)
        rank, document, start, size = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))].T
        return Layout(document, start, size, np.searchsorted(rank, np.arange(len(self.tokens) + 1)))

    def _deal(self, limit: float) -> float:
        """Deal for a target; the seconds of the slowest rank."""
        at = self._deal_wide(limit)
        short = _SHORT * self.limit
        first_short = at
        while first_short < len(self.length) and self.seconds[first_short] >= short:
            first_short += 1
        self._fill_with(first_short)
        for place in range(at, first_short):
            self._deal_whole(place)
        self._fill_up(first_short)
        self._cut_wide()
        return max(self._end(rank) for rank in range(len(self.tokens)))

    def _end(self, rank: int) -> float:
        wire = self.key_seconds * max(self.sent[rank], self.received[rank])
        return max(self.compute[rank], wire) if self.overlapped else self.compute[rank] + wire

    def _begin(self, limit: float, filler: float) -> None:
        ranks = len(self.tokens)
        self.limit, self.filler = limit, filler
        self.room = array("q", self.tokens)
        # Seconds that a rank may still get beyond what filling up its room takes.
        self.spare = array("d", [limit - filler * tokens for tokens in self.tokens])
        self.compute, self.sent, self.received = (array("d", bytes(8 * ranks)) for _ in range(3))
        self.views = np.frombuffer(self.room, dtype=np.int64), *map(np.frombuffer, (self.spare, self.received))
        # Seconds that a rank can be relieved of by the others of its group, which share a wide document.
        self.elastic, self.group = [0.0] * ranks, [-1] * ranks
        self.wide: list[_Cut] = []
        # Of each wide document, spare seconds that its ranks had together when somebody last asked: they only become fewer.
        self.helps: list[float] = []
        self.rows = []
        self._sort_ranks()

    def _sort_ranks(self) -> None:
        # Entries of ranks that changed stay until they come up. Ranks without room for a document wait for a shorter one.
        self.ready = [(-spare, rank) for rank, spare in enumerate(self.spare) if self.room[rank]]
        heapq.heapify(self.ready)
        self.waiting: list[tuple[int, int]] = []

    def _deal_wide(self, limit: float) -> int:
        """Deal wide documents, with a later target as long as too little room is left for the others; how many those are."""
        filler = self.target.filler
        excess = [seconds - filler * length for seconds, length in zip(self.seconds, self.length, strict=True)]
        total = math.fsum(excess)
        wide = 0
        for _ in range(_RAISES):
            self._begin(limit, filler)
            wide, rest = 0, total
            most = limit - filler * max(self.tokens)
            while wide < len(excess) and excess[wide] > most:
                self._cut(wide, math.inf, few=False)
                rest -= excess[wide]
                wide += 1
            lack = (rest - math.fsum(self.spare)) / len(self.tokens)
            if lack <= _LACK * limit:
                break
            limit += lack
        return wide

    def _fill_with(self, first: int) -> None:
        """From now on, ranks are filled up with the documents from this one on."""
        count = sum(self.length[first:])
        filler = math.fsum(self.seconds[first:]) / count if count else self.filler
        for rank, room in enumerate(self.room):
            self.spare[rank] += (self.filler - filler) * room
        self.filler = filler
        self.helps = [math.inf] * len(self.wide)
        self._sort_ranks()

    def _excess(self, place: int) -> float:
        return float(self.seconds[place] - self.filler * self.length[place])

    def _deal_whole(self, place: int) -> None:
        """A document on one rank, if one has room and seconds for it, or else cut."""
        length, excess = self.length[place], self._excess(place)
        rank = self._readiest(length)
        if rank is None:
            self._cut(place, math.inf)
            return
        over = excess - self.spare[rank]
        if over > (_SLACK_OVERLAPPED if self.overlapped else _SLACK) * self.limit:
            helped = self._helped(length, excess)
            if helped is None and self._cut(place, over):
                return
            rank = rank if helped is None else helped
        self._put(place, rank, excess)

    def _put(self, place: int, rank: int, excess: float) -> None:
        self.rows.append((rank, self.document[place], 0, self.length[place]))
        self.compute[rank] += self.seconds[place]
        self._change(rank, self.length[place], excess)

    def _change(self, rank: int, tokens: int, excess: float) -> None:
        self.room[rank] -= tokens
        self.spare[rank] -= excess
        if self.room[rank]:
            heapq.heappush(self.ready, (-self.spare[rank], rank))

    def _readiest(self, length: int) -> int | None:
        """The rank with the most spare seconds among those with room."""
        ready, waiting = self.ready, self.waiting
        while waiting and -waiting[0][0] >= length:
            rank = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-self.spare[rank], rank))
        while ready:
            spare, rank = ready[0]
            if -spare == self.spare[rank]:
                if self.room[rank] >= length:
                    return rank
                if self.room[rank]:
                    heapq.heappush(waiting, (-self.room[rank], rank))
            heapq.heappop(ready)
        return None

    def _helped(self, length: int, excess: float) -> int | None:
        """The readiest rank that others of its group can relieve of what is too much."""
        asked: list[tuple[float, int]] = []
        found = None
        while found is None and len(asked) < _ASKED and (rank := self._readiest(length)) is not None:
            asked.append(heapq.heappop(self.ready))
            if self._relieve(rank, excess - self.spare[rank]):
                found = rank
        for entry in asked:
            heapq.heappush(self.ready, entry)
        return found

    def _relieve(self, rank: int, seconds: float) -> bool:
        """Leave more of the wide document that `rank` has a share of to the others that have one."""
        group = self.group[rank]
        if group < 0 or seconds > min(self.elastic[rank], self.helps[group]):
            return False
        others = [q for q in self.wide[group].ranks if q != rank and self.room[q] and self.spare[q] > 0]
        if (helps := math.fsum(self.spare[q] for q in others)) < seconds:
            self.helps[group] = helps + max(self.spare[rank], 0.0)
            return False
        self.elastic[rank] -= seconds
        others.sort(key=lambda q: (-self.spare[q], q))
        for other in others:
            part = min(seconds, self.spare[other])
            self._change(rank, 0, -part)
            self._change(other, 0, part)
            seconds -= part
            if seconds <= 0:
                break
        return True

    def _cut(self, place: int, whole: float, *, few: bool = True) -> bool:
        """Cut a document over ranks, unless they would end later than a single rank that is `whole` seconds late."""
        length = self.length[place]
        found = self._choose(place, whole, few=few)
        if found is None:
            return False
        ranks, parts = found
        tokens = divide(length, [self.room[rank] for rank in ranks], parts, self.tile)
        ranks, tokens = [r for r, n in zip(ranks, tokens, strict=True) if n], [n for n in tokens if n]
        # Where it is cut stays open: each part is taken to be as much attention as it is tokens.
        keys = int(exchanged(len(ranks)) * length) if len(ranks) > 1 and self.price.window == ALL_KEYS else 0
        weight = self._weight(ranks)
        wire = 0.0 if self.overlapped else self.key_seconds * keys * weight
        compute = [self.seconds[place] * (count / length) for count in tokens]
        self.wide.append(_Cut(place, ranks, tokens, compute, keys, weight))
        self.helps.append(math.inf)
        for rank, count, seconds in zip(ranks, tokens, compute, strict=True):
            self._add(rank, seconds, weight * keys, weight * keys)
            if self.group[rank] < 0:
                self.group[rank] = len(self.wide) - 1
                self.elastic[rank] = _ELASTIC * seconds * (1 - count / length)
            self._change(rank, count, seconds + wire - self.filler * count)
        return True

    def _choose(self, place: int, whole: float, *, few: bool) -> tuple[list[int], list[float]] | None:
        """Ranks for a document, and the part of it that each may have; None if a whole one is `whole` seconds late and better."""
        room, spare, _ = self.views
        excess, wire = max(self._excess(place), 1e-3 * self.seconds[place]), self.exchange[place]
        roomy = self._roomy(room / self.length[place], wire)
        keys = 0.0 if self.overlapped else self.between[place] * exchanged(max(excess / self.limit, 2.0))
        several = self.per_node < len(self.tokens)

        def ranks_for(later: float, *, alone: bool) -> tuple[list[int], list[float]] | None:
            cost = keys if several and not alone else keys * self.near
            part = np.minimum(roomy, (spare + (later * self.limit - cost)) / excess)
            return takers(part, self.per_node, most=_FEW if few else None, alone=alone)

        if several:
            in_node = [later for later in _LATER if later <= _LATE_IN_NODE and later * self.limit < whole]
            if found := first_found(in_node, lambda later: ranks_for(later, alone=True)):
                return found
        if found := first_found(
            [later for later in _LATER if later * self.limit < whole], lambda later: ranks_for(later, alone=False)
        ):
            return found
        return takers(roomy, self.per_node) if whole == math.inf else None

    def _roomy(self, part: FloatArray, wire: float) -> FloatArray:
        """The part of a document that each rank has room for, and time to exchange its keys if that is not counted."""
        if not self.overlapped or not wire:
            return part
        # Keys of several documents may take longer than what a rank computes.
        keys = self.views[2] * self.key_seconds
        fresh = np.where((keys > 0) & (keys + wire > self.limit), 0.0, part)
        return fresh if float(np.cumsum(fresh)[-1]) >= 1 else part

    def _weight(self, ranks: list[int]) -> float:
        """What an exchanged key of a document on these ranks counts as, with links inside and between that carry at once."""
        if self.near == 1:
            return 1
        nodes = len({rank // self.per_node for rank in ranks})
        return self.near if nodes == 1 else max(self.near / nodes, 1 - 1 / nodes)

    def _add(self, rank: int, compute: float, sent: float, received: float) -> None:
        self.compute[rank] += compute
        self.sent[rank] += sent
        self.received[rank] += received

    def _cut_wide(self) -> None:
        """Cut wide documents by what their ranks have got since; the largest, which can level out most, last."""
        counts = [len(cut.ranks) for cut in self.wide]
        rows, most = sum(counts), max(counts, default=0)
        share = [np.repeat(np.array([cut.keys for cut in self.wide], dtype=np.int64), counts) for _ in range(2)]
        wide = Wide(
            column(np.array([self.length[cut.place] for cut in self.wide], dtype=np.int64)),
            column(np.array([cut.weight for cut in self.wide], dtype=np.float64)),
            column(np.cumsum([0, *counts])),
            column(np.array([rank for cut in self.wide for rank in cut.ranks], dtype=np.int64)),
            column(np.array([count for cut in self.wide for count in cut.tokens], dtype=np.int64)),
            column(np.array([seconds for cut in self.wide for seconds in cut.compute], dtype=np.float64)),
            *map(column, share),
            *(column(np.zeros(rows, dtype=np.int64)) for _ in range(4)),
        )
        loads = Loads(*(column(np.array(load, dtype=np.float64)) for load in (self.compute, self.sent, self.received)))
        scratch = (column(np.zeros(most, dtype=kind)) for kind in (*[np.int64] * 4, np.float64, np.float64))
        spread(wide, loads, self.price, self.key_seconds, self.overlapped, Scratch(*scratch))
        self.compute, self.sent, self.received = (array("d", np.asarray(load).tobytes()) for load in loads)
        document = np.repeat([self.document[cut.place] for cut in self.wide], counts)
        for start, size in ((wide.head, wide.front), (wide.tail, wide.back)):
            pieces = np.array([wide.rank, document, start, size], dtype=np.int64).T
            self.rows += map(tuple, pieces[pieces[:, 3] > 0].tolist())

    def _fill_up(self, first: int) -> None:
        """Short documents fill up ranks; those that fit no room are cut."""
        left = [spare + self.filler * tokens for spare, tokens in zip(self.spare, self.room, strict=True)]
        put, rest = fill_up(range(first, len(self.length)), self.length, self.seconds, self.room, left)
        for rank, place in put:
            self.rows.append((rank, self.document[place], 0, self.length[place]))
            self.compute[rank] += self.seconds[place]
        for rank, place, start, size in pour(rest, self.length, self.room):
            self.rows.append((rank, self.document[place], start, size))
            sent = size if start + size < self.length[place] else 0
            weight = self._weight([rank])
            self._add(rank, slice_seconds(self.price, 1.0, start, start + size), weight * sent, weight * start)
