"""`deal`: assigns documents of a global batch to ranks, before any work is moved.

The place of documents decides the cost of exchanges. Dealt, every rank has the same number of
tokens and about the same seconds of attention and exchange, so that little is left for `balance` to
move; and a document may be longer than a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.bins import Chunk, deal_chunks
from hf_distca.schedule.cost import CostModel, MarginalCost
from hf_distca.schedule.layout import IntArray, Layout, mark_changes, require_integers
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks

# Tokens of the short documents that make the halves of a global batch equal, at most, and how many
# documents at least.
_SMALL_TOKENS = 2**19
_MIN_SMALL_DOCUMENTS = 16
# Whether bins are nodes first, and the part of a bin above which a document is cut: each is better
# for some batches. And how close to the mean a plan has to end for no other layout to be tried.
_WAYS = ((True, 1.0), (True, 1.5), (False, 1.5))
_CLOSE_PART = 0.02
# Ranks up to which layouts are planned to be compared: on 512 that takes 0.2 to 1 s a batch, and
# gained 0 to 1 % on all workloads but one (10 %).
_MOST_RANKS_TRIED = 128
# Tokens of a document. Cuts are found with products of such numbers, which must fit 64 bits.
_MAX_LENGTH = 2**32


def deal(
    lengths: npt.ArrayLike,
    ranks: int,
    tokens_per_rank: int | Sequence[int],
    cost: CostModel,
    *,
    tile: int = 128,
    ranks_per_node: int | None = None,
    overlapped: bool = False,
) -> Layout:
    """Deal the documents of a global batch to ranks: equal tokens, and the slowest rank as early as
    possible.

    Short documents stay whole where they fit. A long one is cut head and tail over as few ranks as
    hold its tokens and its attention. Every machine finds the same layout.

    Args:
        lengths: number of tokens of each document, at least 1. Documents keep their index as their
            number.
        ranks: number of ranks.
        tokens_per_rank: tokens of each rank; `ranks` times as many as this are dealt. Or a number
            for each rank, if the tokens cannot be divided evenly.
        cost: seconds of tasks and of exchanges. With a window, the deal is for a model whose layers
            all have it; for a model that mixes both kinds of layers, deal without. A window that no
            document exceeds is ignored.
        tile: documents are cut at multiples of it where tokens allow.
        ranks_per_node: ranks [0, n), [n, 2n), ... are nodes: a document lies on ranks of one node
            if one has enough left for it, and is exchanged there at the rate that `cost` has for
            nodes.
        overlapped: deal for ranks that end after the longer of compute and exchange, not after
            both. For nano-batches, see `deal_nano_batches`.

    Raises:
        LayoutError: if lengths are not whole numbers from 1 to 2**32, or do not add up to the
            ranks' tokens.
        ConfigError: if another argument is out of its range.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, tile, ranks_per_node)
    cost = cost.without_unused_window(int(length.max(initial=0)))
    return _deal_documents(
        length, np.arange(len(length)), tokens, cost, tile, ranks_per_node, overlapped=overlapped
    )


def deal_nano_batches(
    lengths: npt.ArrayLike,
    ranks: int,
    tokens_per_rank: int | Sequence[int],
    cost: CostModel,
    *,
    tile: int = 128,
    ranks_per_node: int | None = None,
) -> tuple[Layout, Layout]:
    """Deal the documents of a global batch for ping-pong: the layouts of both nano-batches, which
    share no document.

    Both layouts number documents as `lengths` does. A rank has `tokens_per_rank` tokens in both
    together. Its two halves are equal (the second has one more token, if the number is odd)
    wherever documents can be divided so, which is nearly always possible if some are short. Else
    halves are as equal as documents allow, and ranks may differ by one token. A single document
    leaves the second layout empty.

    For arguments and errors see `deal`.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, tile, ranks_per_node)
    cost = cost.without_unused_window(int(length.max(initial=0)))
    first = _choose_half(length, cost, ranks, sum(count // 2 for count in tokens))
    first_tokens = _divide_halves(tokens, int(length[first].sum()))
    second_tokens = [total - half for total, half in zip(tokens, first_tokens, strict=True)]
    return (
        _deal_documents(
            length, np.flatnonzero(first), first_tokens, cost, tile, ranks_per_node, overlapped=True
        ),
        _deal_documents(
            length,
            np.flatnonzero(~first),
            second_tokens,
            cost,
            tile,
            ranks_per_node,
            overlapped=True,
        ),
    )


def deal_in_order(
    lengths: npt.ArrayLike, ranks: int, tokens_per_rank: int | Sequence[int]
) -> Layout:
    """Put the documents of a global batch one after another, cut where a rank is full, as a
    baseline for `deal`.

    For arguments and errors see `deal`.
    """
    length, tokens = _check_arguments(lengths, ranks, tokens_per_rank, 1, None)
    rows = list[list[Chunk]]()
    rest = [Chunk(document, 0, count) for document, count in enumerate(length.tolist())][::-1]
    for room in tokens:
        rows.append([])
        while room:
            chunk = rest.pop()
            end = min(chunk.start + room, chunk.end)
            rows[-1].append(chunk._replace(end=end))
            room -= end - chunk.start
            if end < chunk.end:
                rest.append(chunk._replace(start=end))
    return _build_layout(rows)


def _deal_documents(
    length: IntArray,
    documents: IntArray,
    tokens: list[int],
    cost: CostModel,
    tile: int,
    ranks_per_node: int | None,
    *,
    overlapped: bool,
) -> Layout:
    """Deal some documents: to few ranks in several of `_WAYS`, of which the layout whose plan ends
    first is returned; to many ranks in one way, which is not planned.
    """
    ranks = Ranks(per_node=ranks_per_node).without_irrelevant_nodes(cost)
    config = DistCAConfig(tile=tile, ping_pong=overlapped)
    attention = cost
    if not MarginalCost.from_cost_model(cost).pair:
        # Attention that costs nothing a pair is as long as its tokens are many: pairs decide then.
        attention = replace(CostModel.make_of_pairs(cost.shape), window=cost.window)
    chunks = [Chunk(document, 0, int(length[document])) for document in documents.tolist()]
    best, earliest = _build_layout([[] for _ in tokens]), math.inf
    ways: Sequence[tuple[bool, float]] = _WAYS if ranks_per_node else _WAYS[:2]
    if len(tokens) > _MOST_RANKS_TRIED:
        ways = _WAYS[:1] if overlapped else _WAYS[1:2]
    for by_nodes, most in ways:
        per_node = ranks_per_node if by_nodes else None
        layout = _build_layout(
            deal_chunks(chunks, tokens, per_node or len(tokens), (attention, tile, most))
        )
        if len(ways) == 1:  # nothing to compare it with
            return layout
        plan = balance(layout, cost, config, ranks)
        load = PlanLoad(plan, cost, overlapped=overlapped, ranks=ranks)
        if load.slowest_seconds < earliest:
            best, earliest = layout, load.slowest_seconds
        if earliest <= (1 + _CLOSE_PART) * load.compute_seconds.mean():
            break
    return best


def _build_layout(rows: list[list[Chunk]]) -> Layout:
    """Make a layout of the chunks of each rank, in order of documents and positions; those that
    follow each other are joined.
    """
    rank = np.repeat(np.arange(len(rows)), [len(chunks) for chunks in rows])
    chunks = np.array([chunk for row in rows for chunk in row], dtype=np.int64).reshape(-1, 3)
    order = np.lexsort((chunks[:, 1], chunks[:, 0], rank))
    rank, (document, start, end) = rank[order], chunks[order].T
    begins = mark_changes(rank, document)
    begins[1:] |= start[1:] != end[:-1]
    last = np.append(begins, True)[1:]
    start, end = start[begins], end[last]
    offsets = np.searchsorted(rank[begins], np.arange(len(rows) + 1))
    return Layout(document[begins], start, end - start, offsets)


def _divide_halves(tokens: list[int], total: int) -> list[int]:
    """Divide `total` tokens of the first half among ranks: half of each rank's own, and its part of
    the difference.
    """
    halves = np.array(tokens) // 2
    difference = total - int(halves.sum())
    room = np.array(tokens) - halves if difference > 0 else halves
    parts = [
        abs(difference) * count // max(int(room.sum()), 1)
        for count in np.cumsum([0, *room]).tolist()
    ]
    return (halves + np.sign(difference) * np.diff(parts)).tolist()  # type: ignore[no-any-return]


def _choose_half(
    length: IntArray, cost: CostModel, ranks: int, tokens: int
) -> npt.NDArray[np.bool_]:
    """Choose documents with `tokens` tokens together, or as close as possible, and about half of
    the seconds.

    Documents whose keys travel longer than ranks compute are all in one half, on different ranks,
    so that only this half is late.
    """
    seconds = cost.estimate_seconds(length, length).tolist()
    keys = length if cost.window is None else np.minimum(length, cost.window)
    is_late = (keys * cost.key_seconds > math.fsum(seconds) / (2 * ranks)).tolist()
    order = np.argsort(-length, kind="stable")
    shortest_first = np.cumsum(length[order][::-1])
    small_count = min(
        max(int(np.searchsorted(shortest_first, _SMALL_TOKENS)), _MIN_SMALL_DOCUMENTS),
        256,
        len(length),
    )
    first = np.zeros(len(length), dtype=np.bool_)
    rooms = [tokens, int(length.sum()) - tokens]
    loads = [0.0, 0.0]
    large = order[: len(order) - small_count]
    small = order[len(order) - small_count :]
    reserve = int(length[small].sum()) // 3
    for document in large.tolist():
        count = int(length[document])
        half = 0 if is_late[document] or loads[0] <= loads[1] else 1
        # With a part of the short documents to come, many more sums can be made than with hardly
        # any or nearly all of them.
        if rooms[half] - count < reserve and rooms[1 - half] > rooms[half]:
            half = 1 - half
        rooms[half] -= count
        loads[half] += seconds[document]
        first[document] = half == 0
    first[small[_find_closest_subset(length[small].tolist(), rooms[0])]] = True
    return first if first.any() else ~first


def _find_closest_subset(lengths: list[int], target: int) -> list[int]:
    """Find the indices of the lengths whose sum is closest to a target; the lower sum of two."""
    # Bit n of a number: whether some of the lengths so far add up to n.
    sums = list(
        accumulate(lengths, lambda reachable, length: reachable | reachable << length, initial=1)
    )
    digits = f"{sums[-1]:b}"[::-1]
    target = max(target, 0)
    below = digits.rfind("1", 0, target + 1)
    above = digits.find("1", target)
    total = below if above < 0 or target - below <= above - target else above
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
) -> tuple[IntArray, list[int]]:
    """Check the arguments, and return the lengths and the tokens of each rank."""
    given: Any = tokens_per_rank
    by_rank = list(given) if isinstance(given, list | tuple) else [given]
    per_node = 1 if ranks_per_node is None else ranks_per_node
    numbers = {
        "ranks": ranks,
        "tokens_per_rank": min(by_rank, default=0),
        "tile": tile,
        "ranks_per_node": per_node,
    }
    for name, value in numbers.items():
        # Not `isinstance`: True is no number of ranks.
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    if ranks % per_node:
        raise ConfigError(f"ranks_per_node={per_node} must divide ranks={ranks}.")
    length = require_integers(lengths, "document lengths")
    wrong = (length < 1) | (length > _MAX_LENGTH)
    if wrong.any():
        document = int(wrong.argmax())
        raise LayoutError(
            f"document {document} has length {length[document]}: at least 1 token is needed, the"
            " limit is 2**32."
        )
    tokens = [given] * ranks if type(given) is int else by_rank
    total = sum(length.tolist())
    expected = sum(tokens)
    if total != expected or len(tokens) != ranks:
        raise LayoutError(
            f"{len(length)} documents have {total} tokens, {ranks} ranks with {tokens_per_rank}"
            f" tokens each have {expected}: every token must have its place, so the numbers must be"
            " equal."
        )
    return length, tokens
