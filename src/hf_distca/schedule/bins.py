"""Placement of documents in bins, each with room for a given number of tokens. The bins are first
the nodes, and then the ranks of each node.

Documents with the most attention are placed first. A document goes to the bin with the least
attention that has room for it. If a document is to lie in several bins, each bin gets rows from the
front and from the back of the document, so that tokens and attention are even. A document that is
too long for any bin is cut to fit.

A document with n times the attention of an average node lies in n nodes. But if sending its keys
between nodes would take longer than computing it in one node, the document lies in as few nodes as
have room for it. Inside a node, a document with n times the attention of an average rank lies on
sqrt(n / 2) ranks, or on more if it is too long for them. If it lay on n ranks, each of them would
need nearly all keys of the document. If it lay on one rank, most of its rows would have to move.
`balance` evens out the attention that remains uneven.

Every rank computes the placement itself, and all ranks must find the same result. So this module
uses IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.compiled import compile_function, compile_inner
from hf_distca.schedule.layout import BoolArray, FloatArray, IntArray


class Bins(NamedTuple):
    """Bins that are being filled.

    Attributes:
        rooms: (bins,) tokens that each bin still has room for.
        pairs: (bins,) query-key pairs in each bin.
        chosen: (bins,) indices of the bins chosen for a chunk, in the order of choice.
        is_chosen: (bins,) whether each bin is chosen for the chunk.
    """

    rooms: IntArray
    pairs: FloatArray
    chosen: IntArray
    is_chosen: BoolArray


@compile_inner
def _choose_bins(bins: Bins, length: int, count: int) -> tuple[int, int]:
    """Choose `count` bins for a chunk, or more bins if `count` bins have too little room.

    Bins with room for `length / count` tokens are chosen first, from the fewest to the most
    query-key pairs. The remaining bins follow, from the most to the least room. Return the number
    of chosen bins and the sum of their room.
    """
    chosen, room = 0, 0
    while chosen < count or room < length:
        best, lowest = -1, np.inf
        for bin_ in range(len(bins.rooms)):
            cost = bins.pairs[bin_]
            if bins.rooms[bin_] * count < length:
                cost = 1e200 / (bins.rooms[bin_] + 1)
            if cost < lowest and not bins.is_chosen[bin_]:
                best, lowest = bin_, cost
        bins.chosen[chosen], bins.is_chosen[best] = best, True
        room += bins.rooms[best]
        chosen += 1
    return chosen, room


def _fill_bins(
    chunks: IntArray, pairs: FloatArray, counts: IntArray, bins: Bins, tile: int, rows: IntArray
) -> int:
    """Put chunks into bins, one chunk after another. `counts` has the number of bins for each
    chunk. For the other arguments see `deal_to_bins`.

    Return the number of rows that were written to `rows`. A chunk for n bins takes at most 2 n
    rows, and two more for each bin that it fills up.
    """
    row = 0
    for chunk in range(len(chunks)):
        document, first, last = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        length, count = last - first, counts[chunk]
        chosen, room = _choose_bins(bins, length, count)
        left = length
        # Bins with too little room for an equal part were chosen last. Start with these bins: they
        # are filled, and the other bins take the rest.
        for place in range(chosen - 1, -1, -1):
            bin_ = bins.chosen[place]
            bins.is_chosen[bin_] = False
            room -= bins.rooms[bin_]
            tokens = max(left // (place + 1) // tile * tile, left - room)
            if bins.rooms[bin_] * count < length:
                tokens = left
            tokens = min(tokens, bins.rooms[bin_])
            front = tokens // 2 // tile * tile if count > 1 else tokens
            for start, end in ((first, first + front), (last - tokens + front, last)):
                if start < end:
                    rows[row, 0], rows[row, 1] = document, start
                    rows[row, 2], rows[row, 3] = end, bin_
                    row += 1
            first, last, left = first + front, last - tokens + front, left - tokens
            bins.rooms[bin_] -= tokens
            bins.pairs[bin_] += pairs[chunk] * (tokens / length)
    return row


_fill_compiled = compile_function(_fill_bins, keep=(__file__,))


def deal_to_bins(
    chunks: IntArray,
    rooms: IntArray,
    window: int,
    tile: int,
    spread: Callable[[FloatArray, IntArray], FloatArray],
) -> IntArray:
    """Put chunks of documents into bins. Fill the room of each bin, and make attention even.

    Args:
        chunks: (chunks, 3) document, start and end. Together they fill the rooms.
        rooms: (bins,) tokens that each bin must get.
        window: number of keys that a row sees.
        tile: chunks are cut at multiples of this number if rooms allow.
        spread: function that returns the number of bins for each chunk. Its arguments are the
            attention of each chunk, relative to that of an average bin, and the chunks.

    Returns:
        (rows, 4) document, start, end, bin.
    """
    bounds = chunks[:, 1:].astype(np.float64)
    seeing_all = np.minimum(bounds, window)
    pairs = np.diff(seeing_all * (seeing_all + 1) / 2 + (bounds - seeing_all) * window)[:, 0]
    order = np.argsort(-pairs, kind="stable")
    chunks, pairs, size = chunks.take(order, axis=0), pairs[order], len(rooms)
    length = chunks[:, 2] - chunks[:, 1]
    # Unlike `sum`, `cumsum` rounds the same on every machine.
    filled = spread(pairs * size / np.cumsum(pairs)[-1:], chunks)
    counts = np.clip(np.ceil(np.maximum(filled, length / rooms.max())), 1, size).astype(np.int64)
    numbers = np.zeros(size, dtype=np.int64)
    bins = Bins(rooms.copy(), np.zeros(size), numbers, numbers > 0)
    rows = np.empty((2 * (int(counts.sum()) + size), 4), dtype=np.int64)
    return rows[: _fill_compiled(chunks, pairs, counts, bins, tile, rows)]


def _spread_over_ranks(filled: FloatArray, _: IntArray) -> FloatArray:
    return np.sqrt(filled / 2)


def deal_to_ranks(
    chunks: IntArray,
    tokens: IntArray,
    per_node: int | None,
    window: int,
    tile: int,
    stays: BoolArray,
) -> IntArray:
    """Deal chunks to nodes, and then to the ranks of each node. Without nodes, deal them to all
    ranks.

    `stays[document]` is true for documents that must lie in as few nodes as their tokens allow. For
    the other arguments see `deal_to_bins`.
    """
    if per_node is None:
        return deal_to_bins(chunks, tokens, window, tile, _spread_over_ranks)
    nodes = tokens.reshape(-1, per_node)
    by_node = deal_to_bins(
        chunks, nodes.sum(axis=1), window, tile, lambda n, of: n * ~stays[of[:, 0]]
    )
    rows = list[IntArray]()
    for node, rooms in enumerate(nodes):
        some = by_node[by_node[:, 3] == node, :3]
        rows.append(deal_to_bins(some, rooms, window, tile, _spread_over_ranks))
        rows[-1][:, 3] += node * per_node
    return np.concatenate(rows)
