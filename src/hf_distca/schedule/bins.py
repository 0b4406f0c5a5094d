"""Documents to bins with room for so many tokens each: `schedule.deal` deals to nodes, and then to
the ranks of each node.

The longest goes first, to the bin with the least attention that has room for it. A document that is
too much for a bin is cut over several into twice as many chunks, and each gets one from the front
and one from the back, so that tokens and attention are even. What fits nowhere is cut to fit.

Every rank deals for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import CostModel


class Chunk(NamedTuple):
    """Rows [start, end) of a document."""

    document: int
    start: int
    end: int


class Bins:
    """Bins that are being filled.

    Args:
        rooms: tokens that each has to get.
        cost: seconds of attention.
        tile: documents are cut at multiples of it where tokens allow.

    Attributes:
        rows: the chunks of each bin.
    """

    def __init__(self, rooms: list[int], cost: CostModel, tile: int) -> None:
        self.rows: list[list[Chunk]] = [[] for _ in rooms]
        self.rooms, self.seconds = list(rooms), [0.0] * len(rooms)
        self.cost, self.tile = cost, tile

    def fill(self, chunks: list[Chunk], most: float) -> list[list[Chunk]]:
        """Put all chunks into bins, and return those of each.

        Args:
            chunks: with as many tokens together as the bins have room for.
            most: part of the mean seconds of a bin above which a chunk is cut over several.
        """
        seconds = self._estimate(chunks)
        mean = math.fsum(seconds) / len(self.rooms)
        longest_first = sorted(range(len(chunks)), key=lambda index: (-seconds[index], index))
        whole = list[int]()
        most_room = max(self.rooms)
        for index in longest_first:
            chunk = chunks[index]
            count = math.ceil(max(seconds[index] / (most * mean), 1)) if mean else 1
            count = max(count, -(-(chunk.end - chunk.start) // max(most_room, 1)))
            if count > 1 and self._spread(chunk, min(count, len(self.rooms))):
                most_room = max(self.rooms)
            else:
                whole.append(index)
        whole.sort(key=lambda index: chunks[index].start - chunks[index].end)
        self._put_whole([chunks[index] for index in whole], [seconds[index] for index in whole])
        return self.rows

    def _estimate(self, chunks: list[Chunk]) -> list[float]:
        start, end = np.array([chunk[1:] for chunk in chunks], dtype=np.int64).reshape(-1, 2).T
        return self.cost.estimate_seconds(end - start, end).tolist()  # type: ignore[no-any-return]

    def _put(self, chunk: Chunk, bin_: int, seconds: float) -> None:
        self.rows[bin_].append(chunk)
        self.rooms[bin_] -= chunk.end - chunk.start
        self.seconds[bin_] += seconds

    def _spread(self, chunk: Chunk, count: int) -> bool:
        """Cut a chunk over `count` bins, or more if these have no room for equal parts; return
        whether there is room for it.
        """
        length = chunk.end - chunk.start
        share = -(-length // count)
        order = sorted(range(len(self.rooms)), key=lambda bin_: (self.seconds[bin_], bin_))
        chosen = [bin_ for bin_ in order if self.rooms[bin_] >= share][:count]
        weights = [share] * count
        if len(chosen) < count:
            order.sort(key=lambda bin_: -self.rooms[bin_])
            room = np.cumsum([self.rooms[bin_] for bin_ in order])
            chosen = order[: max(int(np.searchsorted(room, length)) + 1, count)]
            weights = [self.rooms[bin_] for bin_ in chosen]
        if sum(weights) < length:
            return False
        first, last = chunk.start, chunk.end
        halves = list[Chunk]()
        for tokens in _divide_tokens(length, weights, self.tile):
            front = tokens // 2
            back = tokens - front
            halves.append(Chunk(chunk.document, first, first + front))
            halves.append(Chunk(chunk.document, last - back, last))
            first, last = first + front, last - back
        for place, seconds in enumerate(self._estimate(halves)):
            if halves[place].start < halves[place].end:
                self._put(halves[place], chosen[place // 2], seconds)
        return True

    def _put_whole(self, chunks: list[Chunk], seconds: list[float]) -> None:
        """Put chunks, the longest first, each into the bin with the least attention that has room
        for it; at last, cut those that fit nowhere.
        """
        ready = [(load, bin_) for bin_, load in enumerate(self.seconds) if self.rooms[bin_]]
        heapq.heapify(ready)
        waiting, left = list[tuple[int, int]](), list[Chunk]()  # for shorter ones
        for chunk, chunk_seconds in zip(chunks, seconds, strict=True):
            length = chunk.end - chunk.start
            while waiting and -waiting[0][0] >= length:
                bin_ = heapq.heappop(waiting)[1]
                heapq.heappush(ready, (self.seconds[bin_], bin_))
            while ready and self.rooms[ready[0][1]] < length:
                bin_ = heapq.heappop(ready)[1]
                heapq.heappush(waiting, (-self.rooms[bin_], bin_))
            if not ready:
                left.append(chunk)
                continue
            bin_ = ready[0][1]
            self._put(chunk, bin_, chunk_seconds)
            heapq.heapreplace(ready, (self.seconds[bin_], bin_))
        self._cut_to_fit(left)

    def _cut_to_fit(self, chunks: list[Chunk]) -> None:
        """Cut chunks over the bins with the most room."""
        widest = [(-room, bin_) for bin_, room in enumerate(self.rooms)]
        heapq.heapify(widest)
        for chunk in chunks:
            start = chunk.start
            while start < chunk.end:
                bin_ = widest[0][1]
                end = min(start + self.rooms[bin_], chunk.end)
                self._put(Chunk(chunk.document, start, end), bin_, 0.0)
                heapq.heapreplace(widest, (-self.rooms[bin_], bin_))
                start = end


def _divide_tokens(length: int, rooms: list[int], tile: int) -> list[int]:
    """Divide tokens among bins, in proportion to the rooms and in whole tiles where possible."""
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


def deal_chunks(
    chunks: list[Chunk], tokens: list[int], per_node: int, bins: tuple[CostModel, int, float]
) -> list[list[Chunk]]:
    """Deal chunks to nodes and then to the ranks of each.

    Args:
        chunks: with as many tokens together as the ranks.
        tokens: tokens of each rank.
        per_node: ranks of a node.
        bins: the cost model, the tile, and the part of a bin above which a chunk is cut.

    Returns:
        The chunks of each rank.
    """
    cost, tile, most = bins
    nodes = [tokens[first : first + per_node] for first in range(0, len(tokens), per_node)]
    by_node = Bins([sum(node) for node in nodes], cost, tile).fill(chunks, most)
    if per_node == 1:
        return by_node
    return [
        rank
        for node, of_node in zip(nodes, by_node, strict=True)
        for rank in Bins(node, cost, tile).fill(of_node, most)
    ]
