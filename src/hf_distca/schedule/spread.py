"""How a document is cut over several ranks: each gets one piece from its front and one from its back.

Rank by rank, from both ends of the document to its middle, tokens go in pairs of a *head* [h, h + a) and a *tail* [e - b, e).
With a + b = n tokens given, a longer tail is more attention and a longer head less, and the sum of both,

    pairs = b * (e - h - n) + n * (h + n / 2)    (about: n * n / 2 of n rows that begin at position h, b of them moved to e)

is linear in b: so many tokens a rank can have as much attention as it should. The last rank has what is left in the middle. A
rank needs all keys before the end of its tail, and its head is needed by all later ones: exchanges are about as long on each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_distca.schedule.prices import Price

__all__ = ["Share", "spread"]

# Times that the exchange of each rank, which depends on the cuts, is put back into them.
_ROUNDS = 2
# Part of its share of the document by which what a rank should get may differ from the mean to be like it.
_ALIKE = 0.03


class Share(NamedTuple):
    """What one rank gets of a document: (start, length) of pieces, seconds of computing them, key tokens sent and received."""

    pieces: list[tuple[int, int]]
    compute: float
    sent: int
    received: int


class Load(NamedTuple):
    """What a rank has beside the document: seconds that it computes, key tokens that it sends and receives."""

    compute: float
    sent: int
    received: int


def spread(
    length: int, tokens: list[int], loads: list[Load], price: Price, key_seconds: float, tile: int, *, overlapped: bool
) -> list[Share]:
    """Cut a document so that the ranks that get it end at the same time, as far as their tokens allow.

    Args:
        length: tokens of the document.
        tokens: tokens that each rank gets, at least 1; their sum is `length`.
        loads: what each rank has beside it.
        price: the cost model as scalars.
        key_seconds: seconds of exchanging one key token.
        tile: cuts lie at multiples of it, as far as `tokens` allows.
        overlapped: whether the exchange counts for nothing.
    """
    if price.window is not None:
        return _in_order(tokens, price)
    order = _unlike_first(length, tokens, loads, price)
    shares = _head_and_tail(
        length, [tokens[at] for at in order], [loads[at] for at in order], price, 0.0 if overlapped else key_seconds, tile
    )
    place = dict(zip(order, shares, strict=True))
    return [place[at] for at in range(len(tokens))]


def _unlike_first(length: int, tokens: list[int], loads: list[Load], price: Price) -> list[int]:
    """Ranks that should get much more or less attention than others first: at the ends of a document there is the most choice."""
    ends = [load.compute + price.pair * length * count / 2 for load, count in zip(loads, tokens, strict=True)]
    mean, alike = math.fsum(ends) / len(ends), _ALIKE * price.pair * length * length / len(ends)
    return sorted(range(len(ends)), key=lambda at: (-int(abs(ends[at] - mean) / alike) if alike else 0, at))


def _head_and_tail(length: int, tokens: list[int], loads: list[Load], price: Price, key_seconds: float, tile: int) -> list[Share]:
    tails = [count // 2 for count in tokens]
    for _ in range(_ROUNDS):
        ends = [
            load.compute + key_seconds * max(load.sent + sent, load.received + received)
            for load, (sent, received) in zip(loads, _keys(length, tokens, tails), strict=True)
        ]
        tails = _tails(length, tokens, ends, price, tile)
    return _shares(length, tokens, tails, price)


def _tails(length: int, tokens: list[int], ends: list[float], price: Price, tile: int) -> list[int]:
    """Tokens of each tail for which all ranks end with the same seconds."""
    head, end, pair = 0, length, price.pair
    others = math.fsum(ends)
    tails = []
    for left, (count, other) in zip(range(len(tokens), 0, -1), zip(tokens, ends, strict=True), strict=True):
        level = (others + pair * (end * (end + 1) - head * (head + 1)) / 2) / left
        others -= other
        slope = end - head - count
        if slope <= 0:
            tails.append(count)
            break
        wanted = ((level - other) / pair - count * (head + count / 2)) / slope
        cut = int((end - wanted) / tile + 0.5) * tile  # where the tail begins
        tail = min(max(end - cut, 0), count)
        tails.append(tail)
        head, end = head + count - tail, end - tail
    return tails


def _keys(length: int, tokens: list[int], tails: list[int]) -> list[tuple[int, int]]:
    """Key tokens that each rank sends and receives."""
    last, end, head = len(tokens) - 1, length, 0
    keys = []
    for place, (count, tail) in enumerate(zip(tokens, tails, strict=True)):
        # Without a tail it needs what is before its head.
        keys.append(((count - tail) * last + tail * place, end - count if tail else head))
        head, end = head + count - tail, end - tail
    return keys


def _shares(length: int, tokens: list[int], tails: list[int], price: Price) -> list[Share]:
    head, end = 0, length
    shares = []
    for count, tail, keys in zip(tokens, tails, _keys(length, tokens, tails), strict=True):
        rest = count - tail
        pieces = [piece for piece in ((head, rest), (end - tail, tail)) if piece[1]]
        if len(pieces) == 2 and head + rest == end - tail:
            pieces = [(head, count)]
        shares.append(Share(pieces, sum(price.seconds(start, start + size) for start, size in pieces), *keys))
        head, end = head + rest, end - tail
    return shares


def _in_order(tokens: list[int], price: Price) -> list[Share]:
    """One run of tokens after another: with a window, attention is as long as tokens are many wherever they lie."""
    shares, start = [], 0
    for count in tokens:
        keys = price.keys(start, start + count, 0) - count
        shares.append(Share([(start, count)], price.seconds(start, start + count), min(price.window or 0, count), keys))
        start += count
    return shares
