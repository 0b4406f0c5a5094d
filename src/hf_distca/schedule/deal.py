"""`deal`: assigns documents of a global batch to ranks, before any work is moved.

The place of documents decides the cost of exchanges. Dealt, every rank has the same number of
tokens and about the same seconds of attention and exchange, so that little is left for `balance` to
move; and a document may be longer than a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.dealer import Dealer, DealtPiece, fill_rooms
from hf_distca.schedule.layout import IntArray, Layout, require_integers
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

# Tokens of the short documents that make the halves of a global batch equal, at most, and how many
# documents at least.
_SMALL_TOKENS = 2**19
_MIN_SMALL_DOCUMENTS = 16
# Part by which a layout by nodes may be slower than one over all ranks; and than the mean, for no
# other to be made.
_TIE_PART = 0.002
_CLOSE_PART = 0.05
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
    pieces = fill_rooms(
        [DealtPiece(-1, document, 0, count) for document, count in enumerate(length.tolist())],
        tokens,
    )
    rank, document, start, size = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return Layout(document, start, size, np.searchsorted(rank, np.arange(ranks + 1)))


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
    """Deal some documents: to nodes first, or to all ranks if the plan of that layout ends
    earlier.
    """
    ranks = Ranks(per_node=ranks_per_node).without_irrelevant_nodes(cost)
    config = DistCAConfig(tile=tile, ping_pong=overlapped)
    per_node = len(tokens) if ranks_per_node is None else ranks_per_node

    def make_dealer() -> Dealer:
        return Dealer(length, documents, tokens, cost, tile, per_node, overlapped=overlapped)

    def find_slowest_seconds(layout: Layout) -> float:
        plan = balance(layout, cost, config, ranks)
        return PlanLoad(plan, cost, overlapped=overlapped, ranks=ranks).slowest_seconds

    def deal_to_all() -> Layout:
        layout = make_dealer().deal_to_ranks()
        served = None
        if (
            overlapped
            and len(tokens) > 2
            and cost.shape.key_value_heads > 1
            and cost.window is None
        ):
            served = make_dealer().deal_to_servers(
                cost.shape.moved_query_bytes / cost.exchange_bytes_per_second
            )
        return layout if served is None else min(layout, served, key=find_slowest_seconds)

    has_nodes = ranks.per_node is not None and per_node < len(tokens)
    by_nodes = make_dealer().deal_to_nodes() if has_nodes else None
    if by_nodes is None:
        return deal_to_all()

    end = find_slowest_seconds(by_nodes)
    unmoved = PlanLoad(
        Plan.make_local(by_nodes, cost.window), cost, overlapped=overlapped, ranks=ranks
    )
    ends = unmoved.compute_seconds if overlapped else unmoved.end_seconds
    # No other layout ends much before what ranks take on average.
    if end <= (1 + _CLOSE_PART) * math.fsum(ends.tolist()) / len(ends):
        return by_nodes
    over_all_ranks = deal_to_all()
    return (
        by_nodes
        if end <= (1 + _TIE_PART) * find_slowest_seconds(over_all_ranks)
        else over_all_ranks
    )


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
