"""Strategies of the loader: which rank gets which documents, and nothing is exchanged in layers."""

from __future__ import annotations

import heapq

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.deal import in_order
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.simulate.layers import layer_seconds
from hf_distca.simulate.setting import Setting

__all__ = ["batch_rebalance", "document_seconds", "karmarkar_karp", "longest_first", "packed_rows"]

# Documents, for each bin, that are differenced; shorter ones then fill up what is emptiest, which loses nothing.
_DIFFERENCED = 4
# Weight of a square in transformers' cost of a sample (BatchRebalanceSampler.QUADRATIC_COST_COEF).
_SQUARE = 0.001


def packed_rows(lengths: IntArray, ranks: int, tokens: int) -> Layout:
    """Documents one after another in rows of so many tokens. What follows the end of a row is a document of its own."""
    given = in_order(lengths, ranks, tokens)
    number = np.arange(len(given.length))
    return Layout(number, np.zeros_like(given.start), given.length, given.offsets)


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
    found = np.zeros(len(lengths), dtype=np.int64)
    room = [cap if cap is not None else int(lengths.sum())] * bins
    loads, ready = [0.0] * bins, [(0.0, one) for one in range(bins)]
    waiting: list[tuple[int, int]] = []  # bins without room for a document wait for a shorter one
    for document in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[document])
        while waiting and -waiting[0][0] >= tokens:
            one = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (loads[one], one))
        while ready and room[ready[0][1]] < tokens:
            one = heapq.heappop(ready)[1]
            heapq.heappush(waiting, (-room[one], one))
        one = heapq.heappop(ready)[1] if ready else heapq.heappop(waiting)[1]
        found[document] = one
        room[one] -= tokens
        loads[one] += float(seconds[document])
        heapq.heappush(ready, (loads[one], one))
    return found


def karmarkar_karp(seconds: FloatArray, bins: int) -> IntArray:
    """The bin of each document by largest differencing for any number of bins."""
    order = np.argsort(-seconds, kind="stable")
    large, small = order[: _DIFFERENCED * bins], order[_DIFFERENCED * bins :]
    # A part is its bins' seconds, falling, and the documents in each.
    parts = []
    for place, document in enumerate(large.tolist()):
        sums = np.zeros(bins)
        sums[0] = seconds[document]
        parts.append((-float(seconds[document]), place, sums, [[document]]))
    heapq.heapify(parts)
    while len(parts) > 1:
        (_, place, one, first), (_, _, two, second) = heapq.heappop(parts), heapq.heappop(parts)
        sums = one + two[::-1]
        members = first + [[] for _ in range(bins - len(first))]
        for at, documents in enumerate(second):
            members[bins - 1 - at] = members[bins - 1 - at] + documents
        fall = np.argsort(-sums, kind="stable")
        merged = [members[at] for at in fall.tolist()]
        while merged and not merged[-1]:
            merged.pop()
        heapq.heappush(parts, (-float(sums[fall[0]] - sums[fall[-1]]), place, sums[fall], merged))
    found = np.zeros(len(seconds), dtype=np.int64)
    loads = [0.0] * bins
    for at, documents in enumerate(parts[0][3] if parts else []):
        found[documents] = at
        loads[at] = float(seconds[documents].sum())
    ready = [(load, at) for at, load in enumerate(loads)]
    heapq.heapify(ready)
    for document in small.tolist():
        load, emptiest = ready[0]
        found[document] = emptiest
        heapq.heapreplace(ready, (load + float(seconds[document]), emptiest))
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

    low, high = float(each.max(initial=0)), float(each.sum())
    while high - low > 1e-3 * high:
        cap = (low + high) / 2
        low, high = (low, cap) if len(runs(cap)) <= bins else (cap, high)
    starts = runs(high)
    found = np.zeros(len(lengths), dtype=np.int64)
    found[order] = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    return found
