"""Which rank gets which document, or which part of one: the work behind `deal`.

1. Lay the documents whose attention is left to servers over ranks by their tokens (`served`).
2. Cut *wide* documents, which alone take longer than a rank should, head and tail over as few ranks as hold their tokens and their
   attention, longest first, on the ranks with the least to do.
3. Put the others whole, longest first, on the rank that lacks the most seconds and has room.
4. Fill ranks up with short ones, denser ones where more attention is missing; the last ones are cut to fit, to the token.

Every rank deals for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, Price
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.moves import slice_seconds

__all__ = ["Dealer", "Served", "pour"]

# Parts of the mean seconds of a rank: what documents take that only fill up ranks; so much more than a whole number of ranks a wide
# document may take.
_SHORT = 0.004
_SLACK = 0.05
# Part of the mean seconds of a rank that sending all its rows of a served document may take: more where it hides behind compute.
_SENDING = 0.25
_SENDING_OVERLAPPED = 0.3


class Piece(NamedTuple):
    """Tokens [start, start + length) of a document on a rank."""

    rank: int
    document: int
    start: int
    length: int


@dataclass
class Served:
    """Documents whose attention is left to servers: where they lie is decided by their tokens alone.

    Where a document is cut for its attention, every rank that has a piece needs the keys before it, which for the longest documents
    travel longer than a rank should compute. Such a document is laid over ranks by its tokens, few enough on each for their rows to
    be sent in time, and `balance` gives its attention to all ranks, split by heads.

    Attributes:
        rest: which documents are dealt by their attention.
        pieces: of the others.
        tokens: what each rank has left for the rest.
    """

    rest: npt.NDArray[np.bool_]
    pieces: list[Piece]
    tokens: list[int]

    @classmethod
    def of(cls, length: IntArray, tokens: list[int], cost: CostModel, tile: int, *, overlapped: bool) -> Served:
        """Choose them and lay them out.

        Args:
            length: tokens of the documents, whose numbers are their indices.
            tokens: of each rank.
            cost: cost model; nothing is served if its heads are one group, or if a window bounds the keys.
            tile: pieces are cut at multiples of it, as far as `tokens` allows.
            overlapped: whether exchanges are hidden behind compute.
        """
        served, ranks = cls(np.ones(len(length), dtype=np.bool_), [], list(tokens)), len(tokens)
        if ranks < 3 or cost.shape.key_value_heads == 1 or cost.window is not None:
            return served
        mean = math.fsum(cost.seconds(length, length).tolist()) / ranks
        row_seconds = float(cost.transfer_seconds(1, 0))
        late = np.flatnonzero(cost.transfer_seconds(0, length) > mean)
        for number, document in enumerate(late[np.argsort(-length[late], kind="stable")].tolist()):
            count = int(length[document])
            wanted = count * row_seconds / ((_SENDING_OVERLAPPED if overlapped else _SENDING) * mean)
            # At least one more than its tokens fill: other documents have to be cut to fit as well.
            over = min(max(math.ceil(wanted), count // max(tokens) + 2), ranks)
            some = sorted({(number + step * ranks // over) % ranks for step in range(over)})
            rooms = [served.tokens[rank] for rank in some]
            if sum(rooms) < count:
                continue
            served.rest[document] = False
            for piece in _head_and_tail(document, count, some, _divided(count, rooms, tile)):
                served.pieces.append(piece)
                served.tokens[piece.rank] -= piece.length
        return served


def _divided(length: int, rooms: list[int], tile: int) -> list[int]:
    """Tokens for each rank, in proportion to the rooms and in whole tiles where they allow."""
    tokens, scale, wanted = [], length / sum(rooms), 0.0
    for room in rooms:
        wanted += room * scale
        count = max(int(wanted / tile + 0.5) * tile - sum(tokens), 0)
        tokens.append(min(count, room, length - sum(tokens)))
    for index, room in enumerate(rooms):
        tokens[index] += min(length - sum(tokens), room - tokens[index])
    return tokens


def _head_and_tail(document: int, length: int, ranks: Sequence[int], parts: Sequence[int]) -> list[Piece]:
    """A piece from the front and one from the back of a document for each rank, with so many tokens together."""
    pieces, head, tail = [], 0, length
    for rank, part in zip(ranks, parts, strict=True):
        front, back = part // 2, part - part // 2
        pieces += [Piece(rank, document, head, front), Piece(rank, document, tail - back, back)]
        head, tail = head + front, tail - back
    return [piece for piece in pieces if piece.length]


class Dealer:
    """Deals documents to ranks with so many tokens each; see `deal` for the other arguments.

    Args:
        length: tokens of the documents, whose numbers are their indices.
        served: those that are laid out already.
        cost: seconds of tasks and of exchanges.
        tile: documents are cut at multiples of it where tokens allow.
        per_node: ranks of a node; as many as there are ranks, if nodes make no difference.
    """

    def __init__(self, length: IntArray, served: Served, cost: CostModel, tile: int, per_node: int) -> None:
        if not Price.of(cost, tile).pair:
            # Attention that costs nothing a pair is as long as its tokens are many: pairs decide then.
            cost = replace(CostModel.pairs(cost.shape), window=cost.window)
        self.length, self.price, self.tile, self.per_node = length.tolist(), Price.of(cost, tile), tile, per_node
        self.seconds = cost.seconds(length, length).tolist()
        self.pieces = list(served.pieces)
        self.room = np.array(served.tokens, dtype=np.int64)
        self.work = np.zeros(len(self.room))
        self.documents = sorted(np.flatnonzero(served.rest).tolist(), key=lambda document: (-self.length[document], document))
        self.mean = math.fsum(self.seconds[document] for document in self.documents) / len(self.room)

    def layout(self) -> Layout:
        """Deal them all."""
        tokens = max(int(self.room.max()), 1)
        rest = []
        for document in self.documents:
            parts = self._ranks_for(document, tokens)
            if parts > 1:
                self._spread(document, parts)
            else:
                rest.append(document)
        long = [document for document in rest if self.seconds[document] >= _SHORT * self.mean]
        short = rest[len(long) :]
        room, left = self.room.tolist(), (self.mean - self.work).tolist()
        over = self._put(long, room, left, dense=False)
        over += self._put(short, room, left, dense=True)
        self.pieces += pour(over, self.length, room)
        return _layout(self.pieces, len(room))

    def _ranks_for(self, document: int, tokens: int) -> int:
        """The least ranks that hold its tokens and its attention."""
        by_seconds = math.ceil(self.seconds[document] / self.mean - _SLACK) if self.mean else 1
        return min(max(math.ceil(self.length[document] / tokens), by_seconds, 1), len(self.room))

    def _spread(self, document: int, parts: int) -> None:
        """Cut a document head and tail over so many ranks."""
        length, tile = self.length[document], self.tile
        ranks = self._chosen(-(-length // parts), parts)
        cuts = [min(round(length * cut / (2 * parts) / tile) * tile, length) for cut in range(2 * parts)] + [length]
        left = []
        for index, rank in enumerate(ranks):
            for cut in (index, 2 * parts - 1 - index):
                start, end = cuts[cut], cuts[cut + 1]
                fits = min(end - start, int(self.room[rank]))
                self._add(Piece(rank, document, start, fits))
                if fits < end - start:
                    left.append((start + fits, end))
        for start, end in left:
            while start < end:
                rank = int(np.argmax(self.room))
                fits = min(end - start, int(self.room[rank]))
                self._add(Piece(rank, document, start, fits))
                start += fits

    def _chosen(self, tokens: int, parts: int) -> list[int]:
        """Ranks with room for so many tokens that have the least to do: of one node, or of as few as can be."""
        # Work that differs by what rounds off is equal: then the emptiest.
        order = np.lexsort((-self.room, np.round(self.work / max(self.mean, 1e-300), 3)))
        able = order[self.room[order] >= tokens]
        if len(able) < parts:
            able = np.argsort(-self.room, kind="stable")
        if self.per_node < len(self.room):
            node = able // self.per_node
            # Nodes by what the ranks that they would give have to do; those that can hold all of it first.
            count, place = np.bincount(node), np.zeros(len(able), dtype=np.int64)
            by_node = np.argsort(node, kind="stable")
            place[by_node] = np.arange(len(able)) - (np.cumsum(count) - count)[node[by_node]]
            given = place < parts
            load = np.bincount(node[given], weights=self.work[able[given]], minlength=len(count)) / np.maximum(
                np.bincount(node[given], minlength=len(count)), 1
            )
            rank_of_node = np.lexsort((load, -np.minimum(count, parts)))
            position = np.empty_like(rank_of_node)
            position[rank_of_node] = np.arange(len(rank_of_node))
            able = able[np.argsort(position[node], kind="stable")]
        return able[:parts].tolist()  # type: ignore[no-any-return]

    def _add(self, piece: Piece) -> None:
        if not piece.length:
            return
        self.pieces.append(piece)
        self.room[piece.rank] -= piece.length
        self.work[piece.rank] += slice_seconds(self.price, 1.0, piece.start, piece.start + piece.length)

    def _put(self, documents: list[int], room: list[int], left: list[float], *, dense: bool) -> list[int]:
        """Put whole documents, in this order, each on the rank with room that lacks the most seconds, or the most seconds a token.

        Args:
            documents: in order of falling length.
            room, left: tokens and seconds that each rank may still get; brought up to date.
            dense: whether seconds a token count.

        Returns:
            Those that fit nowhere.
        """

        def lacking(rank: int) -> tuple[float, int]:
            return -left[rank] / (room[rank] if dense else 1), rank

        ready = [lacking(rank) for rank, tokens in enumerate(room) if tokens]
        heapq.heapify(ready)
        # Ranks without room for a document wait for a shorter one.
        waiting: list[tuple[int, int]] = []
        over = []
        for document in documents:
            tokens = self.length[document]
            while waiting and -waiting[0][0] >= tokens:
                heapq.heappush(ready, lacking(heapq.heappop(waiting)[1]))
            while ready and room[ready[0][1]] < tokens:
                rank = heapq.heappop(ready)[1]
                heapq.heappush(waiting, (-room[rank], rank))
            if not ready:
                over.append(document)
                continue
            rank = ready[0][1]
            self.pieces.append(Piece(rank, document, 0, tokens))
            room[rank] -= tokens
            left[rank] -= self.seconds[document]
            if room[rank]:
                heapq.heapreplace(ready, lacking(rank))
            else:
                heapq.heappop(ready)
        return over


def pour(documents: Sequence[int], length: Sequence[int], room: Sequence[int]) -> list[Piece]:
    """Put documents one after another into what room there is, cut where it ends."""
    pieces, rank, left = [], -1, 0
    for document in documents:
        start = 0
        while start < length[document]:
            while not left:
                rank += 1
                left = room[rank]
            size = min(length[document] - start, left)
            pieces.append(Piece(rank, document, start, size))
            start, left = start + size, left - size
    return pieces


def _layout(pieces: list[Piece], ranks: int) -> Layout:
    """Pieces in order of ranks, documents and positions; those that follow each other are one."""
    rank, document, start, size = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    order = np.lexsort((start, document, rank))
    rank, document, start, size = (column[order] for column in (rank, document, start, size))
    joins = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1]) & (start[1:] == start[:-1] + size[:-1])
    begin = np.flatnonzero(np.append(True, ~joins)[: len(rank)])
    length = np.add.reduceat(size, begin) if len(begin) else size
    return Layout(document[begin], start[begin], length, np.searchsorted(rank[begin], np.arange(ranks + 1)))
