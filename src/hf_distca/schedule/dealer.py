"""The work behind `deal`: it assigns each document, or parts of it, to ranks.

The steps for a group of ranks are:

1. Cut *wide* documents, which alone take longer than a rank should, head and tail over as few ranks
   as hold their tokens and their attention, longest first, on the ranks with the least to do; in
   one node, if one has room.
2. Put each of the others whole, longest first, on the rank that lacks the most seconds and has
   room.
3. Fill ranks up with short ones, denser ones where more attention is missing; the last ones are cut
   to fit, to the token.

The group is all ranks (`Dealer.deal_to_ranks`). Or documents go to nodes first
(`Dealer.deal_to_nodes`): step 1 with those that alone take longer than a node should, over all
ranks; steps 2 and 3 with nodes in place of ranks; then all steps inside each node.

Every rank deals for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hf_distca.schedule.cost import CostModel, MarginalCost
from hf_distca.schedule.layout import IntArray, Layout, mark_changes
from hf_distca.schedule.slice_cost import estimate_slice_seconds

# Parts of the mean seconds of a rank: what documents take that only fill up ranks; and how much
# more than a whole number of ranks a wide document may take.
_SHORT_PART = 0.004
_WIDE_SLACK = 0.3
# Part of the mean seconds of a rank that sending its rows of a document to servers may take.
_SENDING_PART = 0.3
# Part of all seconds that documents which take longer than a node may have, for the others to go to
# nodes first.
_MAX_WIDE_PART = 0.5


class DealtPiece(NamedTuple):
    """Tokens [start, start + length) of a document on a rank."""

    rank: int
    document: int
    start: int
    length: int


def _divide_tokens(length: int, rooms: list[int], tile: int) -> list[int]:
    """Divide tokens among ranks, in proportion to the rooms and in whole tiles where possible."""
    tokens: list[int] = []
    scale = length / sum(rooms)
    target = 0.0
    for room in rooms:
        target += room * scale
        count = max(int(target / tile + 0.5) * tile - sum(tokens), 0)
        tokens.append(min(count, room, length - sum(tokens)))
    for index, room in enumerate(rooms):
        tokens[index] += min(length - sum(tokens), room - tokens[index])
    return tokens


class _RankGroup(NamedTuple):
    """Ranks [first, last) in nodes of `per_node`, and the seconds that each takes to receive a
    key.
    """

    first: int
    last: int
    per_node: int
    key_seconds: float


class _Receivers(NamedTuple):
    """Ranks or nodes that get whole documents: the number of the first, and the tokens and seconds
    that each may still get.
    """

    first: int
    tokens: list[int]
    seconds: list[float]


class Dealer:
    """Deals documents to ranks with given numbers of tokens; see `deal` for the other arguments.

    Args:
        length: numbers of tokens of all documents, which are numbered by index.
        documents: numbers of those to deal.
        tokens: number of tokens of each rank.
        cost: seconds of tasks and of exchanges.
        tile: documents are cut at multiples of it where tokens allow.
        per_node: ranks of a node; as many as there are ranks, if nodes make no difference.
        overlapped: whether exchanges are hidden behind compute; else ranks that receive keys get
            less to compute.
    """

    def __init__(
        self,
        length: IntArray,
        documents: IntArray,
        tokens: list[int],
        cost: CostModel,
        tile: int,
        per_node: int,
        *,
        overlapped: bool,
    ) -> None:
        if not MarginalCost.from_cost_model(cost, tile).pair:
            # Attention that costs nothing a pair is as long as its tokens are many: pairs decide
            # then.
            cost = replace(CostModel.make_of_pairs(cost.shape), window=cost.window)
        self.length = length
        self.marginal = MarginalCost.from_cost_model(cost, tile)
        self.tile = tile
        self.seconds = cost.estimate_seconds(length, length)
        self.tokens, self._seconds = length.tolist(), self.seconds.tolist()
        self.documents = documents[np.argsort(-length[documents], kind="stable")]
        self.pieces: list[DealtPiece] = []
        self.room = np.array(tokens, dtype=np.int64)
        self.work = np.zeros(len(self.room))
        # Which rank has all of a document, or -1: so many tuples would make Python look for
        # garbage, in all there is.
        self.home = [-1] * len(length)
        ranks = len(self.room)
        key_seconds = 0.0 if overlapped else cost.key_seconds
        self.key_travel_seconds = cost.key_seconds
        self.all_ranks = _RankGroup(0, ranks, per_node, key_seconds)
        node_key_seconds = min(
            key_seconds,
            cost.shape.moved_key_bytes
            / (cost.node_bytes_per_second or cost.exchange_bytes_per_second),
        )
        self.nodes = [
            _RankGroup(first, first + per_node, per_node, node_key_seconds)
            for first in range(0, ranks, per_node)
        ]

    def deal_to_ranks(self) -> Layout:
        """Deal all documents to all ranks."""
        self._deal_to_group(self.all_ranks, self.documents)
        return self._build_layout()

    def deal_to_nodes(self) -> Layout | None:
        """Deal documents that take longer than a node should to all ranks, the others to nodes, and
        then inside each node.

        Returns None if such documents have most of the seconds: the others could not make nodes
        even.
        """
        nodes = len(self.nodes)
        size = self.all_ranks.per_node
        documents = self.documents
        fair_seconds = math.fsum(self.seconds[documents].tolist()) / nodes
        max_tokens = int(self._sum_by_node(self.room).max())
        is_wide = (self.seconds[documents] > fair_seconds) | (self.length[documents] > max_tokens)
        if (
            math.fsum(self.seconds[documents[is_wide]].tolist())
            > _MAX_WIDE_PART * nodes * fair_seconds
        ):
            return None
        self._spread_documents(self.all_ranks, documents[is_wide], fair_seconds / size)
        documents = documents[~is_wide]
        work = self._sum_by_node(self.work)
        level = (math.fsum(work.tolist()) + math.fsum(self.seconds[documents].tolist())) / nodes
        places = _Receivers(0, self._sum_by_node(self.room).tolist(), (level - work).tolist())
        home = [-1] * len(self.tokens)
        cut: list[list[DealtPiece]] = [[] for _ in self.nodes]
        for piece in fill_rooms(
            self._place_all_documents(documents, level, places, home), places.tokens
        ):
            cut[piece.rank].append(piece)
        node = np.array(home, dtype=np.int64)[documents]
        order = np.argsort(node, kind="stable")
        bounds = np.searchsorted(node[order], np.arange(nodes + 1)).tolist()
        for group, first, last, pieces in zip(self.nodes, bounds, bounds[1:], cut, strict=False):
            self._deal_to_group(group, documents[order[first:last]], pieces)
        return self._build_layout()

    def deal_to_servers(self, row_seconds: float) -> Layout | None:
        """Cut documents whose keys travel longer than a rank should compute by their tokens alone,
        and deal the others to all ranks. `balance` then gives the attention of the former to all
        ranks, split by heads.

        Args:
            row_seconds: seconds that a row takes to a server and back.

        Returns:
            The layout; None without such documents.
        """
        ranks = len(self.room)
        documents = self.documents
        most_tokens = int(self.room.max())
        mean = math.fsum(self.seconds[documents].tolist()) / ranks
        is_late = self.length[documents] * self.key_travel_seconds > mean
        if not is_late.any():
            return None
        served = np.zeros(len(documents), dtype=np.bool_)
        for place, document in enumerate(documents[is_late].tolist()):
            count = self.tokens[document]
            # As many ranks as send their rows in a part of the mean; more than its tokens fill, as
            # other documents have to be cut to fit as well.
            wanted = math.ceil(count * row_seconds / (_SENDING_PART * mean))
            over = min(max(wanted, count // most_tokens + 2), ranks)
            chosen = sorted({(place + step * ranks // over) % ranks for step in range(over)})
            rooms = self.room[chosen].tolist()
            if sum(rooms) >= count:
                self._cut_document(document, chosen, rooms, 0.0)
                served[place] = True
        self.work[:] = 0.0
        self._deal_to_group(self.all_ranks, documents[~served])
        return self._build_layout()

    def _sum_by_node(self, values: Any) -> Any:
        """Sum values of the ranks of each node."""
        return np.add.reduceat(values, np.arange(0, len(values), self.all_ranks.per_node))

    def _deal_to_group(
        self, group: _RankGroup, documents: IntArray, cut: Sequence[DealtPiece] = ()
    ) -> None:
        """Deal documents, the longest first, and then pieces of others, to the ranks of a group."""
        group_ranks = slice(group.first, group.last)
        size = group.last - group.first
        # The mean of ranks, with the documents that they are to get.
        level = max(
            math.fsum(self.work[group_ranks].tolist() + self.seconds[documents].tolist()) / size,
            1e-300,
        )
        is_wide = (self.length[documents] > int(self.room[group_ranks].max())) | (
            self.seconds[documents] > (1 + _WIDE_SLACK) * level
        )
        received = self._spread_documents(group, documents[is_wide], level) / size
        documents = documents[~is_wide]
        places = _Receivers(
            group.first,
            self.room[group_ranks].tolist(),
            (level + received - self.work[group_ranks]).tolist(),
        )
        pieces = fill_rooms(
            [*self._place_all_documents(documents, level, places, self.home), *cut], places.tokens
        )
        self.pieces += [piece._replace(rank=piece.rank + group.first) for piece in pieces]

    def _spread_documents(self, group: _RankGroup, documents: IntArray, level: float) -> float:
        """Cut documents, the longest first, each over as few ranks of a group as hold its tokens
        and its attention.

        Returns:
            Seconds that ranks take to receive keys.
        """
        tokens = max(int(self.room[group.first : group.last].max()), 1)
        keys = 0
        for document in documents.tolist():
            parts = max(
                -(-self.tokens[document] // tokens),
                math.ceil(self._seconds[document] / ((1 + _WIDE_SLACK) * level)),
            )
            ranks, rooms = self._choose_ranks(
                group, self.tokens[document], min(max(parts, 1), group.last - group.first), level
            )
            keys += self._cut_document(document, ranks, rooms, group.key_seconds)
        return group.key_seconds * keys

    def _cut_document(
        self, document: int, ranks: list[int], rooms: list[int], key_seconds: float
    ) -> int:
        """Cut a document head and tail over ranks with rooms for it: each gets a piece from the
        front and one from the back.

        Return the keys that these receive.
        """
        length = self.tokens[document]
        head, tail, received = 0, length, 0
        for rank, part in zip(ranks, _divide_tokens(length, rooms, self.tile), strict=True):
            front = part // 2
            back = part - part // 2
            tail -= back
            for start, size in ((head, front), (tail, back)):
                if size:
                    self.pieces.append(DealtPiece(rank, document, start, size))
                    self.work[rank] += estimate_slice_seconds(
                        self.marginal, 1.0, start, start + size
                    )
            # It receives the keys before its last piece, but for its own.
            keys = tail - front if part else 0
            self.work[rank] += key_seconds * keys
            self.room[rank] -= part
            received += keys
            head += front
        return received

    def _choose_ranks(
        self, group: _RankGroup, length: int, parts: int, level: float
    ) -> tuple[list[int], list[int]]:
        """Choose ranks with the least to do that have room for a document together,
        in one node if possible, and the division.
        """
        share = -(-length // parts)
        # Work that differs by what rounds off is equal: then the emptiest.
        group_ranks = slice(group.first, group.last)
        work = np.round(self.work[group_ranks] / level, 3)
        rooms = self.room[group_ranks]
        room, nodes = rooms.reshape(-1, group.per_node), work.reshape(-1, group.per_node)
        candidates = np.arange(len(work))
        # Nodes in which enough ranks have room for a part; if there is none, those with room for
        # the document.
        is_able = (room >= share).sum(axis=1) >= parts
        is_able = is_able if is_able.any() else room.sum(axis=1) >= length
        if is_able.any():
            mean_work = np.sort(np.where(room >= share, nodes, np.inf), axis=1)[:, :parts].mean(
                axis=1
            )
            node = int(
                np.argmin(
                    np.where(
                        is_able,
                        np.where(np.isfinite(mean_work), mean_work, nodes.mean(axis=1)),
                        np.inf,
                    )
                )
            )
            candidates = np.arange(node * group.per_node, (node + 1) * group.per_node)
        order = candidates[np.lexsort((-rooms[candidates], work[candidates]))]
        able_ranks = order[rooms[order] >= share]
        if len(able_ranks) >= parts:
            return (able_ranks[:parts] + group.first).tolist(), [share] * parts
        order = candidates[np.argsort(-rooms[candidates], kind="stable")]
        count = max(int(np.searchsorted(np.cumsum(rooms[order]), length)) + 1, parts)
        return (order[:count] + group.first).tolist(), rooms[order[:count]].tolist()

    def _place_all_documents(
        self, documents: IntArray, level: float, places: _Receivers, home: list[int]
    ) -> list[DealtPiece]:
        """Put whole documents on places: long ones by the seconds that these lack,
        short ones by the seconds they lack per token. Return those that fit nowhere.
        """
        long_count = int(
            np.searchsorted(-self.seconds[documents], -_SHORT_PART * level, side="right")
        )
        return [
            *self._place_documents(documents[:long_count].tolist(), places, home, per_token=False),
            *self._place_documents(documents[long_count:].tolist(), places, home, per_token=True),
        ]

    def _place_documents(
        self, documents: list[int], places: _Receivers, home: list[int], *, per_token: bool
    ) -> list[DealtPiece]:
        """Put whole documents, in this order, each on the place with room that lacks the most
        seconds, in all or per token.

        Args:
            documents: in order of falling length.
            places: places that get the documents; updated.
            home: for each document, the place that has all of it; updated.
            per_token: whether seconds per token count.

        Returns:
            Documents that fit nowhere, not yet on a rank.
        """
        first, room, deficit = places

        def rank_by_deficit(place: int) -> tuple[float, int]:
            return -deficit[place] / (room[place] if per_token else 1), place

        ready = [rank_by_deficit(place) for place, tokens in enumerate(room) if tokens]
        heapq.heapify(ready)
        # Places without room for a document wait for a shorter one.
        waiting: list[tuple[int, int]] = []
        unplaced, document_seconds = [], self._seconds
        for document in documents:
            tokens = self.tokens[document]
            while waiting and -waiting[0][0] >= tokens:
                heapq.heappush(ready, rank_by_deficit(heapq.heappop(waiting)[1]))
            while ready and room[ready[0][1]] < tokens:
                place = heapq.heappop(ready)[1]
                heapq.heappush(waiting, (-room[place], place))
            if not ready:
                unplaced.append(DealtPiece(-1, document, 0, tokens))
                continue
            place = ready[0][1]
            home[document] = first + place
            room[place] -= tokens
            deficit[place] -= document_seconds[document]
            if room[place]:
                heapq.heapreplace(ready, rank_by_deficit(place))
            else:
                heapq.heappop(ready)
        return unplaced

    def _build_layout(self) -> Layout:
        """Merge all pieces into a layout, in order of ranks, documents and positions."""
        home = np.array(self.home, dtype=np.int64)
        whole = np.flatnonzero(home >= 0)
        cut = np.array(self.pieces, dtype=np.int64).reshape(-1, 4)
        rows = np.concatenate(
            [np.column_stack([home[whole], whole, np.zeros_like(whole), self.length[whole]]), cut]
        )
        rank, document, start, size = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))].T
        # Pieces that join start where as many tokens of their document are on other ranks.
        begin = np.flatnonzero(mark_changes(rank, document, start - np.cumsum(size) + size))
        length = np.add.reduceat(size, begin) if len(begin) else size
        return Layout(
            document[begin],
            start[begin],
            length,
            np.searchsorted(rank[begin], np.arange(len(self.room) + 1)),
        )


def fill_rooms(documents: Sequence[DealtPiece], room: Sequence[int]) -> list[DealtPiece]:
    """Fill rooms with documents or pieces, one after another, cut where a room ends."""
    _, document, start, length = np.array(documents, dtype=np.int64).reshape(-1, 4).T
    ends, room_ends = np.cumsum(length), np.cumsum(room)
    # Counted over all tokens, a piece begins and stops where a document does, or a room.
    stop = np.union1d(ends, room_ends[(room_ends > 0) & (room_ends < length.sum())])
    begin = np.append(0, stop[:-1])[: len(stop)]
    row, rank = (
        np.searchsorted(ends, begin, side="right"),
        np.searchsorted(room_ends, begin, side="right"),
    )
    pieces = np.column_stack(
        [rank, document[row], start[row] + begin - (ends - length)[row], stop - begin]
    )
    return list(itertools.starmap(DealtPiece, pieces.tolist()))
