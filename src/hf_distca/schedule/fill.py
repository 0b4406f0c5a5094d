"""Short documents fill up ranks, to the token."""

from __future__ import annotations

import heapq
from collections.abc import MutableSequence, Sequence

__all__ = ["fill_up", "pour"]


def fill_up(
    places: Sequence[int], length: list[int], seconds: list[float], room: MutableSequence[int], left: list[float]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Put documents, longest first, each on the rank with room that lacks the most seconds a token.

    Args:
        places: the documents to put, as indices of `length` and `seconds`.
        length, seconds: tokens and seconds of documents.
        room, left: tokens and seconds that each rank may still get; changed to what is left in the end.

    Returns:
        (rank, document) for each one put, and the documents that fitted nowhere.
    """
    ready = [(-left[rank] / tokens, rank) for rank, tokens in enumerate(room) if tokens]
    heapq.heapify(ready)
    # Ranks without room for a document wait for a shorter one.
    waiting: list[tuple[int, int]] = []
    put, rest = [], []
    for place in places:
        tokens = length[place]
        while waiting and -waiting[0][0] >= tokens:
            rank = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-left[rank] / room[rank], rank))
        while ready and room[ready[0][1]] < tokens:
            rank = heapq.heappop(ready)[1]
            heapq.heappush(waiting, (-room[rank], rank))
        if not ready:
            rest.append(place)
            continue
        rank = ready[0][1]
        put.append((rank, place))
        room[rank] -= tokens
        left[rank] -= seconds[place]
        if room[rank]:
            heapq.heapreplace(ready, (-left[rank] / room[rank], rank))
        else:
            heapq.heappop(ready)
    return put, rest


def pour(places: Sequence[int], length: list[int], room: MutableSequence[int]) -> list[tuple[int, int, int, int]]:
    """Put documents one after another into what room there is, cut where it ends: (rank, document, start, length) of pieces."""
    pieces = []
    holes = (rank for rank, tokens in enumerate(room) if tokens)
    rank = -1
    for place in places:
        start = 0
        while start < length[place]:
            if rank < 0 or not room[rank]:
                rank = next(holes)
            size = min(length[place] - start, room[rank])
            pieces.append((rank, place, start, size))
            room[rank] -= size
            start += size
    return pieces
