"""Which rank gets which document, or which part of one: the work behind `deal`.

1. Lay the documents whose attention is left to servers over ranks by their tokens (`Served`).
2. Cut *wide* documents, which alone take longer than a rank should, head and tail over as few ranks as hold their tokens and
   their attention, longest first, on the ranks with the least to do; in one node, if one has room.
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

# Parts of the mean seconds of a rank: what documents take that only fill up ranks; and how much more than a whole number of
# ranks a wide document may take.
_SHORT = 0.004
_SLACK = 0.3
# Part of the mean seconds of a rank that sending all its rows of a served document may take: more where it hides behind compute.
_SENDING = 0.25
_SENDING_OVERLAPPED = 0.3


class DealtPiece(NamedTuple):
    """Tokens [start, start + length) of a document on a rank."""

    rank: int
    document: int
    start: int
    length: int


@dataclass
class Served:
    """Documents whose attention is left to servers: where they lie is decided by their tokens alone.

    Where a document is cut for its attention, every rank that has a piece needs the keys before it, which for the longest
    documents travel longer than a rank should compute. Such a document is laid over ranks by its tokens, few enough on each for
    their rows to be sent in time, and `balance` gives its attention to all ranks, split by heads.

    Attributes:
        rest: which documents are dealt by their attention.
        pieces: of the others.
        tokens: what each rank has left for the rest.
    """

    rest: npt.NDArray[np.bool_]
    pieces: list[DealtPiece]
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
    tokens: list[int] = []
    scale, wanted = length / sum(rooms), 0.0
    for room in rooms:
        wanted += room * scale
        count = max(int(wanted / tile + 0.5) * tile - sum(tokens), 0)
        tokens.append(min(count, room, length - sum(tokens)))
    for index, room in enumerate(rooms):
        tokens[index] += min(length - sum(tokens), room - tokens[index])
    return tokens


def _head_and_tail(document: int, length: int, ranks: Sequence[int], parts: Sequence[int]) -> list[DealtPiece]:
    """A piece from the front and one from the back of a document for each rank, with so many tokens together."""
    pieces, head, tail = [], 0, length
    for rank, part in zip(ranks, parts, strict=True):
        front = part // 2
        back = part - front
        pieces += [DealtPiece(rank, document, head, front), DealtPiece(rank, document, tail - back, back)]
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
        overlapped: whether exchanges are hidden behind compute; else ranks that receive keys get less to compute.
    """

    def __init__(self, length: IntArray, served: Served, cost: CostModel, tile: int, per_node: int, *, overlapped: bool) -> None:
        if not Price.of(cost, tile).pair:
            # Attention that costs nothing a pair is as long as its tokens are many: pairs decide then.
            cost = replace(CostModel.pairs(cost.shape), window=cost.window)
        self.length, self.price, self.tile, self.per_node = length, Price.of(cost, tile), tile, per_node
        self.key_seconds = 0.0 if overlapped else float(cost.transfer_seconds(0, 1))
        # Which rank has all of a document, or -1: so many tuples would make Python look for garbage, in all there is.
        self.home = [-1] * len(length)
        self.pieces = list(served.pieces)
        self.room = np.array(served.tokens, dtype=np.int64)
        self.work = np.zeros(len(self.room))
        self.seconds = cost.seconds(length, length)
        self.documents = np.flatnonzero(served.rest)
        self.documents = self.documents[np.argsort(-length[self.documents], kind="stable")]
        self.mean = math.fsum(self.seconds[self.documents].tolist()) / len(self.room)

    def layout(self) -> Layout:
        """Deal them all."""
        ranks, tokens, mean = len(self.room), max(int(self.room.max()), 1), max(self.mean, 1e-300)
        length, seconds = self.length[self.documents], self.seconds[self.documents]
        # The least ranks that hold a document's tokens and its attention.
        parts = np.maximum(-(-length // tokens), np.ceil(seconds / ((1 + _SLACK) * mean)).astype(np.int64)).clip(1, ranks)
        wide = parts > 1
        received = math.fsum(map(self._spread, self.documents[wide].tolist(), parts[wide].tolist()))
        rest = self.documents[~wide]
        long = int(np.searchsorted(-self.seconds[rest], -_SHORT * mean, side="right"))
        room, left = self.room.tolist(), (self.mean + received / ranks - self.work).tolist()
        over = self._put(rest[:long].tolist(), room, left, dense=False)
        over += self._put(rest[long:].tolist(), room, left, dense=True)
        self.pieces += pour(over, self.length.tolist(), room)
        return self._layout()

    def _spread(self, document: int, parts: int) -> float:
        """Cut a document head and tail over so many ranks, more where their rooms ask for it; seconds that they receive keys."""
        length, received = int(self.length[document]), 0.0
        ranks, rooms = self._chosen(length, parts)
        # Of each rank its own tokens so far, and the keys that it receives: those before its last piece, but for its own.
        held, keys = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        for piece in _head_and_tail(document, length, ranks, _divided(length, rooms, self.tile)):
            self.pieces.append(piece)
            self.room[piece.rank] -= piece.length
            self.work[piece.rank] += slice_seconds(self.price, 1.0, piece.start, piece.start + piece.length)
            keys[piece.rank] = piece.start - held[piece.rank]
            held[piece.rank] += piece.length
        for rank in ranks:
            self.work[rank] += self.key_seconds * keys[rank]
            received += self.key_seconds * keys[rank]
        return received

    def _chosen(self, length: int, parts: int) -> tuple[list[int], list[int]]:
        """Ranks with the least to do that have room for a document together, in one node if one has, and how to divide it."""
        share = -(-length // parts)
        # Work that differs by what rounds off is equal: then the emptiest.
        work = np.round(self.work / max(self.mean, 1e-300), 3)
        room, nodes = self.room.reshape(-1, self.per_node), work.reshape(-1, self.per_node)
        candidates = np.arange(len(work))
        for able in ((room >= share).sum(axis=1) >= parts, room.sum(axis=1) >= length):
            if able.any():
                least = np.sort(np.where(room >= share, nodes, np.inf), axis=1)[:, :parts].mean(axis=1)
                node = int(np.argmin(np.where(able, np.where(np.isfinite(least), least, nodes.mean(axis=1)), np.inf)))
                candidates = np.arange(node * self.per_node, (node + 1) * self.per_node)
                break
        order = candidates[np.lexsort((-self.room[candidates], work[candidates]))]
        some = order[self.room[order] >= share]
        if len(some) >= parts:
            return some[:parts].tolist(), [share] * parts
        order = candidates[np.argsort(-self.room[candidates], kind="stable")]
        count = max(int(np.searchsorted(np.cumsum(self.room[order]), length)) + 1, parts)
        return order[:count].tolist(), self.room[order[:count]].tolist()

    def _put(self, documents: list[int], room: list[int], left: list[float], *, dense: bool) -> list[int]:
        """Put whole documents, in this order, each on the rank with room that lacks the most seconds, in all or for each token.

        Args:
            documents: in order of falling length.
            room, left: tokens and seconds that each rank may still get; brought up to date.
            dense: whether seconds a token count.

        Returns:
            Those that fit nowhere.
        """
        length, seconds = self.length.tolist(), self.seconds.tolist()

        def lacking(rank: int) -> tuple[float, int]:
            return -left[rank] / (room[rank] if dense else 1), rank

        ready = [lacking(rank) for rank, tokens in enumerate(room) if tokens]
        heapq.heapify(ready)
        # Ranks without room for a document wait for a shorter one.
        waiting: list[tuple[int, int]] = []
        over = []
        for document in documents:
            tokens = length[document]
            while waiting and -waiting[0][0] >= tokens:
                heapq.heappush(ready, lacking(heapq.heappop(waiting)[1]))
            while ready and room[ready[0][1]] < tokens:
                rank = heapq.heappop(ready)[1]
                heapq.heappush(waiting, (-room[rank], rank))
            if not ready:
                over.append(document)
                continue
            rank = ready[0][1]
            self.home[document] = rank
            room[rank] -= tokens
            left[rank] -= seconds[document]
            if room[rank]:
                heapq.heapreplace(ready, lacking(rank))
            else:
                heapq.heappop(ready)
        return over

    def _layout(self) -> Layout:
        """All pieces in order of ranks, documents and positions; those that follow each other are one."""
        home = np.array(self.home, dtype=np.int64)
        whole, cut = np.flatnonzero(home >= 0), np.array(self.pieces, dtype=np.int64).reshape(-1, 4)
        rows = np.concatenate([np.column_stack([home[whole], whole, np.zeros_like(whole), self.length[whole]]), cut])
        rank, document, start, size = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))].T
        joins = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1]) & (start[1:] == start[:-1] + size[:-1])
        begin = np.flatnonzero(np.append(True, ~joins)[: len(rank)])
        length = np.add.reduceat(size, begin) if len(begin) else size
        return Layout(document[begin], start[begin], length, np.searchsorted(rank[begin], np.arange(len(self.room) + 1)))


def pour(documents: Sequence[int], length: Sequence[int], room: Sequence[int]) -> list[DealtPiece]:
    """Put documents one after another into what room there is, cut where it ends."""
    pieces, rank, left = [], -1, 0
    for document in documents:
        start = 0
        while start < length[document]:
            while not left:
                rank += 1
                left = room[rank]
            size = min(length[document] - start, left)
            pieces.append(DealtPiece(rank, document, start, size))
            start, left = start + size, left - size
    return pieces
