"""`deal` assigns documents of a global batch to ranks, before any work is moved.

The cost of exchanges depends on where documents lie. After a deal, all ranks have the same number
of tokens, and `balance` can even out attention at little cost. A document may have more tokens than
a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.bins import deal_to_ranks
from hf_distca.schedule.cost import ALL_KEYS, CostModel
from hf_distca.schedule.layout import IntArray, Layout, mark_changes, require_integers

# `_choose_half` first divides the long documents between two nano-batches. It then divides the
# short documents so that both nano-batches get equal tokens. The short documents are the shortest
# documents of the batch, at least `_MIN_SMALL_DOCUMENTS` and at most `_MOST_SMALL_DOCUMENTS`.
# Together they have about `_SMALL_TOKENS` tokens, if these limits allow.
_SMALL_TOKENS = 2**17
_MIN_SMALL_DOCUMENTS, _MOST_SMALL_DOCUMENTS = 16, 256
# The most tokens of a document. Cuts are computed from products of two lengths, which must fit in
# 64 bits.
_MAX_LENGTH = 2**32


def deal(
    lengths: npt.ArrayLike,
    ranks: int,
    tokens_per_rank: int | Sequence[int],
    cost: CostModel,
    *,
    tile: int = 128,
    ranks_per_node: int | None = None,
) -> Layout:
    """Deal the documents of a global batch to ranks, with equal tokens and with attention that
    `balance` can even out.

    Short documents stay whole if they fit. A long document is divided among a few ranks, each of
    which gets a part of its front and a part of its back (`schedule.bins`). Every machine finds the
    same layout.

    Args:
        lengths: number of tokens of each document, at least 1. In the layout, the number of a
            document is its index in `lengths`.
        ranks: number of ranks.
        tokens_per_rank: tokens of each rank: one number for all ranks, or one number for each rank
            if the tokens cannot be divided evenly.
        cost: cost model. It gives the window, and decides whether sending the keys of a document
            takes longer than computing the document in one node. Give a window only if all layers
            of the model have it. A window that no document exceeds is ignored.
        tile: documents are cut at multiples of this number if tokens allow.
        ranks_per_node: number n of ranks of a node; ranks [0, n), [n, 2n), ... are nodes. Documents
            with at most the attention of an average node lie in one node if a node has room. For
            other documents see `schedule.bins`.

    Raises:
        LayoutError: if lengths are not whole numbers from 1 to 2**32, or do not add up to the
            ranks' tokens.
        ConfigError: if another argument is out of its range.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, tile, ranks_per_node)
    return _deal_documents(length, np.arange(len(length)), tokens, ranks_per_node, cost, tile)


def deal_nano_batches(
    lengths: npt.ArrayLike,
    ranks: int,
    tokens_per_rank: int | Sequence[int],
    cost: CostModel,
    *,
    tile: int = 128,
    ranks_per_node: int | None = None,
) -> tuple[Layout, Layout]:
    """Deal the documents of a global batch for ping-pong. Return the layouts of both nano-batches,
    which share no document.

    In both layouts, the number of a document is its index in `lengths`. Each layout has half of the
    `tokens_per_rank` tokens of each rank. An odd token is in the second layout. Equal halves are
    nearly always possible if some documents are short. If they are impossible, the halves are as
    equal as the documents allow, and within a layout, ranks may differ by one token. If there is
    only one document, the second layout is empty.

    For arguments and errors see `deal`.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, tile, ranks_per_node)
    first = _choose_half(length, cost, ranks, int((tokens // 2).sum()))
    first_tokens = _divide_halves(tokens, int(length[first].sum()))
    halves = (first, first_tokens), (~first, tokens - first_tokens)
    early, late = (
        _deal_documents(length, np.flatnonzero(half), room, ranks_per_node, cost, tile)
        for half, room in halves
    )
    return early, late


def deal_in_order(
    lengths: npt.ArrayLike, ranks: int, tokens_per_rank: int | Sequence[int]
) -> Layout:
    """Put the documents of a global batch one after another, as a baseline for `deal`.

    A document is cut where a rank is full. For arguments and errors see `deal`.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, 1, None)
    # The tokens are cut wherever a document or a rank ends.
    ends = np.cumsum(length), np.cumsum(tokens)
    bounds = np.union1d(*ends)
    begin = np.append(0, bounds[:-1])
    document, rank = (np.searchsorted(of, begin, side="right") for of in ends)
    before = (ends[0] - length)[document]
    return _build_layout(
        np.column_stack([document, begin - before, bounds - before, rank]), len(tokens)
    )


def _deal_documents(
    length: IntArray,
    documents: IntArray,
    tokens: IntArray,
    per_node: int | None,
    cost: CostModel,
    tile: int,
) -> Layout:
    """Deal the documents that have these numbers to ranks."""
    chunks = np.column_stack([documents, np.zeros_like(documents), length[documents]])
    window = cost.window or ALL_KEYS
    keys = np.minimum(length, window) * cost.key_seconds
    stays = keys * (per_node or 1) > cost.estimate_seconds(length, length)
    rows = deal_to_ranks(chunks, tokens, per_node, window, tile, stays)
    return _build_layout(rows, len(tokens))


def _build_layout(rows: IntArray, ranks: int) -> Layout:
    """Make a layout from rows (document, start, end, rank). On each rank, segments are in order of
    document and position.

    Rows of a document that follow each other on a rank are joined.
    """
    document, start, end, rank = rows[np.lexsort(rows.T[[1, 0, 3]])].T
    begins = mark_changes(rank, document)
    begins[1:] |= start[1:] != end[:-1]
    last = np.append(begins, True)[1:]
    offsets = np.searchsorted(rank[begins], np.arange(ranks + 1))
    return Layout(document[begins], start[begins], end[last] - start[begins], offsets)


def _divide_halves(tokens: IntArray, total: int) -> IntArray:
    """Return the number of tokens that each rank gets in the first of two nano-batches.

    Each number is about half of the rank's tokens. The difference between `total` and the sum of
    these halves is divided among the ranks.
    """
    halves = tokens // 2
    difference = total - int(halves.sum())
    room = np.append(0, tokens - halves if difference > 0 else halves).cumsum().tolist()
    return halves + np.diff([difference * count // max(room[-1], 1) for count in room])


def _choose_half(
    length: IntArray, cost: CostModel, ranks: int, tokens: int
) -> npt.NDArray[np.bool_]:
    """Choose the documents of the first nano-batch. Together they have `tokens` tokens, or nearly
    as many, and take about half of the compute seconds.

    If the keys of a document travel for longer than ranks compute, its nano-batch ends late. All
    such documents are put into one nano-batch, where their keys travel at the same time, from
    different ranks.
    """
    seconds = cost.estimate_seconds(length, length)
    keys = length if cost.window is None else np.minimum(length, cost.window)
    is_late = keys * cost.key_seconds > math.fsum(seconds.tolist()) / (2 * ranks)
    longest_first = np.argsort(-length, kind="stable")
    tokens_up_to = np.cumsum(length[longest_first][::-1])
    small_count = int(np.searchsorted(tokens_up_to, _SMALL_TOKENS))
    small_count = min(max(small_count, _MIN_SMALL_DOCUMENTS), _MOST_SMALL_DOCUMENTS)
    large, small = np.split(longest_first, [max(len(length) - small_count, 0)])
    first = np.zeros(len(length), dtype=np.bool_)
    rooms, loads = [tokens, int(length.sum()) - tokens], [0.0, 0.0]
    # The long documents leave room in each half for a third of the short documents' tokens. Then
    # some short documents can fill the first half almost exactly: subsets of them have many more
    # sums between one and two thirds of these tokens than near 0 or near the total.
    reserve = int(length[small].sum()) // 3
    for document in large.tolist():
        half = int(loads[0] > loads[1] and not is_late[document])
        if rooms[half] - length[document] < reserve and rooms[1 - half] > rooms[half]:
            half = 1 - half
        rooms[half] -= int(length[document])
        loads[half] += float(seconds[document])
        first[document] = half == 0
    first[small[_find_closest_subset(length[small].tolist(), rooms[0])]] = True
    return first if first.any() else ~first


def _find_closest_subset(lengths: list[int], target: int) -> list[int]:
    """Find the indices of lengths whose sum is closest to a target. If two sums are equally close,
    choose the lower one.
    """
    # Bit n of `sums[i]` says whether some of the first i lengths add up to n.
    sums = list(
        accumulate(lengths, lambda reachable, length: reachable | reachable << length, initial=1)
    )
    digits = np.frombuffer(f"{sums[-1]:b}"[::-1].encode(), dtype=np.uint8)
    reachable = np.flatnonzero(digits == ord("1"))
    total = int(reachable[np.abs(reachable - target).argmin()])
    chosen = []
    for index in range(len(lengths) - 1, -1, -1):
        if not sums[index] >> total & 1:
            chosen.append(index)
            total -= lengths[index]
    return chosen


def _check_arguments(
    lengths: npt.ArrayLike,
    ranks: int,
    tokens_per_rank: int | Sequence[int],
    tile: int,
    ranks_per_node: int | None,
) -> tuple[IntArray, IntArray]:
    """Check the arguments, and return the lengths and the tokens of each rank."""
    given: Any = tokens_per_rank
    tokens = list(given) if isinstance(given, list | tuple) else [given]
    per_node = 1 if ranks_per_node is None else ranks_per_node
    numbers = {
        "ranks": ranks,
        "tokens_per_rank": min(tokens, default=0),
        "tile": tile,
        "ranks_per_node": per_node,
    }
    for name, value in numbers.items():
        # `isinstance` would accept True.
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    if ranks % per_node:
        raise ConfigError(f"ranks_per_node={per_node} must divide ranks={ranks}.")
    length = require_integers(lengths, "document lengths")
    for document in np.flatnonzero((length < 1) | (length > _MAX_LENGTH)):
        raise LayoutError(
            f"document {document} has length {length[document]}: lengths must be at least 1, and"
            " the limit is 2**32."
        )
    tokens = tokens * ranks if tokens == [given] else tokens
    total, expected = sum(length.tolist()), sum(tokens)
    if total != expected or len(tokens) != ranks:
        raise LayoutError(
            f"{len(length)} documents have {total} tokens, but {ranks} ranks have room for"
            f" {expected} (tokens_per_rank={tokens_per_rank}). Both numbers must be equal. Give one"
            " tokens_per_rank for all ranks, or one for each rank."
        )
    return length, np.array(tokens)
