"""Strategies of the loader: which rank gets which documents, and nothing is exchanged in layers."""

from __future__ import annotations

import heapq

import numpy as np

from hf_distca.errors import LayoutError
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.simulate.layers import layer_seconds
from hf_distca.simulate.setting import Setting

__all__ = [
    "batch_rebalance",
    "cut_into_batches",
    "document_seconds",
    "filled_batches",
    "karmarkar_karp",
    "longest_first",
    "packed_rows",
]

# Documents, for each bin, that are differenced; shorter ones then fill up what is emptiest, which loses nothing.
_DIFFERENCED = 4
# Weight of a square in transformers' cost of a sample (BatchRebalanceSampler.QUADRATIC_COST_COEF).
_SQUARE = 0.001


def packed_rows(lengths: IntArray, ranks: int, tokens: int) -> Layout:
    """Documents one after another in rows of so many tokens. What follows the end of a row is a document of its own.

    Raises:
        LayoutError: if the documents do not fill the rows to the token.
    """
    total = int(lengths.sum())
    if total != ranks * tokens:
        raise LayoutError(f"documents of {total} tokens do not fill {ranks} rows of {tokens} tokens.")
    ends = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, ranks + 1) * tokens]))
    pieces = np.diff(ends, prepend=0)
    offsets = np.searchsorted(ends, np.arange(ranks + 1) * tokens, side="right")
    return Layout(np.arange(len(pieces)), np.zeros_like(pieces), pieces, offsets)


def cut_into_batches(lengths: IntArray, count: int, tokens: int) -> list[IntArray]:
    """Documents one after another in `count` batches of so many tokens. What follows the end of one is a document of its own."""
    rows = packed_rows(lengths, count, tokens)
    return np.split(rows.length, rows.offsets[1:-1])


def filled_batches(lengths: IntArray, count: int, tokens: int) -> list[IntArray]:
    """Documents in order, each in the first of `count` batches of so many tokens that has room. What fits nowhere is cut."""
    batches: list[list[int]] = [[] for _ in range(count)]
    rooms, left = np.full(count, tokens), []
    for length in lengths.tolist():
        at = int(np.argmax(rooms >= length))
        if rooms[at] < length:
            left.append(length)
            continue
        batches[at].append(length)
        rooms[at] -= length
    for whole in left:
        length = whole
        while length:
            at = int(rooms.argmax())
            part = min(length, int(rooms[at]))
            batches[at].append(part)
            rooms[at] -= part
            length -= part
    return [np.array(batch, dtype=np.int64) for batch in batches]


def document_seconds(setting: Setting, lengths: IntArray) -> FloatArray:
    """Seconds that each document adds to its rank, all layers, both directions."""
    tokens = lengths.astype(np.float64)
    # A long row's seconds a token: alone, a short document would read all weights by itself.
    row = layer_seconds(setting, np.full(1, float(max(setting.tokens_per_rank, 1))))
    each = float(row.forward[0] + row.backward[0]) / max(setting.tokens_per_rank, 1)
    seconds = setting.model.layers * each * tokens
    for window, layers in setting.model.kinds:
        seconds += layers * setting.cost(window).seconds(lengths, lengths)
    return seconds


def longest_first(seconds: FloatArray, lengths: IntArray, bins: int, cap: int | None = None) -> IntArray:
    """Each document, longest first, to the bin with the least seconds, of those where its tokens fit under a cap.

    Returns:
        The bin of each document. Where nothing fits, it is the bin with the fewest tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    room = [cap if cap is not None else int(lengths.sum())] * bins
    loads, ready = [0.0] * bins, [(0.0, one) for one in range(bins)]
    waiting: list[tuple[int, int]] = []  # bins without room for a document wait for a shorter one
    chosen = []
    for tokens, taken in zip(lengths[order].tolist(), seconds[order].tolist(), strict=True):
        while waiting and -waiting[0][0] >= tokens:
            one = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (loads[one], one))
        while ready and room[ready[0][1]] < tokens:
            one = heapq.heappop(ready)[1]
            heapq.heappush(waiting, (-room[one], one))
        if not ready:
            heapq.heappush(ready, (0.0, heapq.heappop(waiting)[1]))
        one = ready[0][1]
        chosen.append(one)
        room[one] -= tokens
        loads[one] += taken
        heapq.heapreplace(ready, (loads[one], one))
    found = np.empty(len(lengths), dtype=np.int64)
    found[order] = chosen
    return found


def karmarkar_karp(seconds: FloatArray, bins: int) -> IntArray:
    """The bin of each document by largest differencing for any number of bins."""
    order = np.argsort(-seconds, kind="stable")
    large, small = order[: _DIFFERENCED * bins], order[_DIFFERENCED * bins :]
    # A part is the seconds of its bins that hold anything, falling, and the group of documents in each. A group is a document, by
    # its number, or two groups that were put together.
    parts = [(-value, place, np.array([value]), np.array([place])) for place, value in enumerate(seconds[large].tolist())]
    heapq.heapify(parts)
    groups: list[tuple[int, int]] = []
    while len(parts) > 1:
        (_, place, one, first), (_, _, two, second) = heapq.heappop(parts), heapq.heappop(parts)
        two, second = two[::-1], second[::-1]
        shared = max(len(one) + len(two) - bins, 0)  # the most of one with the fewest of the other
        alone, new = len(one) - shared, len(large) + len(groups)
        groups += zip(first[alone:].tolist(), second[:shared].tolist(), strict=True)
        sums = np.concatenate([one[:alone], one[alone:] + two[:shared], two[shared:]])
        fall = np.argsort(-sums, kind="stable")
        sums, members = sums[fall], np.concatenate([first[:alone], np.arange(new, new + shared), second[shared:]])[fall]
        least = float(sums[-1]) if len(sums) == bins else 0.0
        heapq.heappush(parts, (least - float(sums[0]), place, sums, members))
    of_group = np.zeros(len(large) + len(groups), dtype=np.int64)
    if parts:
        of_group[parts[0][3]] = np.arange(len(parts[0][3]))
    for number in range(len(groups) - 1, -1, -1):
        of_group[list(groups[number])] = of_group[len(large) + number]
    found = np.zeros(len(seconds), dtype=np.int64)
    found[large] = of_group[: len(large)]
    loads = np.bincount(found[large], weights=seconds[large], minlength=bins).tolist()
    ready = [(load, at) for at, load in enumerate(loads)]
    heapq.heapify(ready)
    for document, taken in zip(small.tolist(), seconds[small].tolist(), strict=True):
        load, emptiest = ready[0]
        found[document] = emptiest
        heapq.heapreplace(ready, (load + taken, emptiest))
    return found


def batch_rebalance(lengths: IntArray, bins: int) -> IntArray:
    """The bin of each document by transformers' rule: sorted by length, in runs of equal cost.

    A run of n documents costs n * (longest + 0.001 * longest ** 2). transformers climbs towards equal costs; here runs have the
    smallest largest cost that there is.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].astype(np.float64)
    each = falling + _SQUARE * falling**2

    def runs(cap: float) -> list[int]:
        """Where runs begin if none costs more than the cap."""
        starts: list[int] = []
        at = 0
        while at < len(each) and len(starts) <= bins:
            starts.append(at)
            at += max(int(cap // each[at]), 1)
        return starts

    dearest = float(each.max(initial=0))
    low, high = dearest, dearest * (len(each) + 1)  # a single run of all documents costs less, however that is rounded
    while high - low > 1e-3 * high:
        cap = (low + high) / 2
        low, high = (low, cap) if len(runs(cap)) <= bins else (cap, high)
    starts = runs(high)
    found = np.zeros(len(lengths), dtype=np.int64)
    found[order] = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    return found
