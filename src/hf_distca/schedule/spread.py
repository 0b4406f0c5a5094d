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
from hf_distca.schedule.target import exchanged

__all__ = ["Load", "Share", "spread"]

# Times that a document is cut: each time with the exchange of the last cuts, and with those ranks first that did not end in time.
_ROUNDS = 3
# Part of its share of the document by which a rank's end may differ from the mean to be in time.
_ALIKE = 0.03
# By which part of the mean the last rank may end later for the cuts to be good enough.
_EVEN = 0.002


class Share(NamedTuple):
    """What one rank gets of a document: (start, length) of pieces, seconds of computing them, key tokens sent and received."""

    pieces: list[tuple[int, int]]
    compute: float
    sent: int
    received: int


class Load(NamedTuple):
    """What a rank has beside the document: seconds that it computes, key tokens that it sends and receives."""

    compute: float
    sent: float
    received: float


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
        overlapped: whether ranks end after the longer of compute and exchange, not after both.
    """
    if price.window:
        return _in_order(tokens, price)
    return _Cutter(length, tokens, loads, price, key_seconds, tile, overlapped).shares()


class _Cutter:
    def __init__(
        self,
        length: int,
        tokens: list[int],
        loads: list[Load],
        price: Price,
        key_seconds: float,
        tile: int,
        overlapped: bool,
    ) -> None:
        self.length, self.tokens, self.loads, self.price, self.tile = length, tokens, loads, price, tile
        self.key_seconds, self.overlapped = key_seconds, overlapped
        # Before anything is cut, exchanges are taken to be alike.
        keys = exchanged(len(tokens)) * length if len(tokens) > 1 else 0.0
        wire = 0.0 if overlapped else key_seconds
        self.exchange = [wire * (max(load.sent, load.received) + keys) for load in loads]
        self.alike = _ALIKE * price.pair * length * length / len(tokens)

    def shares(self) -> list[Share]:
        """The best of a few ways to cut; in the order of the ranks."""
        ends = [
            load.compute + self.price.pair * self.length * count / 2 for load, count in zip(self.loads, self.tokens, strict=True)
        ]
        order = self._unlike_first(ends, list(range(len(ends))))
        best: tuple[float, list[int], list[int]] | None = None
        for _ in range(_ROUNDS):
            tails = self._tails(order)
            ends = self._ends(order, tails)
            if best is None or max(ends) < best[0]:
                best = max(ends), order, tails
            if max(ends) <= (1 + _EVEN) * math.fsum(ends) / len(ends):
                break
            previous, order = order, self._unlike_first(ends, order)
            if order == previous and best[1] is not previous:
                break
        return self._shares(*best[1:]) if best else []

    def _unlike_first(self, ends: list[float], order: list[int]) -> list[int]:
        """Ranks that should get much more or less attention than others first: at the ends of a document there is most choice."""
        mean = math.fsum(ends) / len(ends)
        if not self.alike:
            return order
        return sorted(order, key=lambda at: -int(abs(ends[at] - mean) / self.alike))

    def _tails(self, order: list[int]) -> list[int]:
        """Tokens of the tail of each rank, in this order, for which all end with the same seconds."""
        head, end, pair, last = 0, self.length, self.price.pair, len(order) - 1
        others = math.fsum(self.loads[at].compute + self.exchange[at] for at in order)
        tails = []
        for place, at in enumerate(order):
            count, load = self.tokens[at], self.loads[at]
            level = (others + pair * (end * (end + 1) - head * (head + 1)) / 2) / (len(order) - place)
            others -= load.compute + self.exchange[at]
            tail = count
            if place < last:
                wanted = self._tail(level, head, end, count, load, place, last)
                # The tail begins on a tile.
                tail = min(max(end - int((end - wanted) / self.tile + 0.5) * self.tile, 0), count)
            tails.append(tail)
            head, end = head + count - tail, end - tail
        return tails

    def _tail(self, level: float, head: int, end: int, count: int, load: Load, place: int, last: int) -> float:
        """The longest tail for which a rank ends by `level`, or the one with which it ends first."""
        pair, key = self.price.pair, self.key_seconds
        slope = pair * (end - head - count)
        least = load.compute + pair * count * (head + count / 2)
        received = key * (load.received + end - count)
        # What is sent falls with a longer tail: `first` if there is none.
        first, fall = key * (load.sent + count * last), key * (last - place)
        if self.overlapped:
            return max((level - least) / slope, (first - level) / fall if fall else 0.0)
        by_received = (level - least - received) / slope
        both = level - least - first
        if slope > fall:
            return min(by_received, both / (slope - fall))
        # Longer tails are less to send than they are more to compute, up to where more is received than sent.
        return max(by_received, (first - received) / fall) if fall else by_received

    def _ends(self, order: list[int], tails: list[int]) -> list[float]:
        """Seconds after which each rank ends, by rank; keeps those of the exchange."""
        ends = [0.0] * len(order)
        head, end, last, pair = 0, self.length, len(order) - 1, self.price.pair
        for place, (at, tail) in enumerate(zip(order, tails, strict=True)):
            count, load = self.tokens[at], self.loads[at]
            sent, received = _keys(count, tail, place, last, head, end)
            wire = self.key_seconds * max(load.sent + sent, load.received + received)
            compute = load.compute + pair * (tail * (end - head - count) + count * (head + count / 2))
            self.exchange[at] = 0.0 if self.overlapped else wire
            ends[at] = max(compute, wire) if self.overlapped else compute + wire
            head, end = head + count - tail, end - tail
        return ends

    def _shares(self, order: list[int], tails: list[int]) -> list[Share]:
        shares: dict[int, Share] = {}
        head, end, last = 0, self.length, len(order) - 1
        for place, (at, tail) in enumerate(zip(order, tails, strict=True)):
            count = self.tokens[at]
            rest = count - tail
            pieces = [piece for piece in ((head, rest), (end - tail, tail)) if piece[1]]
            if len(pieces) == 2 and head + rest == end - tail:
                pieces = [(head, count)]
            compute = 0.0
            for start, size in pieces:
                compute += self.price.seconds(start, start + size)
            shares[at] = Share(pieces, compute, *_keys(count, tail, place, last, head, end))
            head, end = head + rest, end - tail
        return [shares[at] for at in range(len(order))]


def _keys(count: int, tail: int, place: int, last: int, head: int, end: int) -> tuple[int, int]:
    """Key tokens that a rank sends and receives; without a tail it needs what is before its head."""
    return (count - tail) * last + tail * place, end - count if tail else head


def _in_order(tokens: list[int], price: Price) -> list[Share]:
    """One run of tokens after another: with a window, attention is as long as tokens are many wherever they lie."""
    shares, start = [], 0
    for count in tokens:
        keys = price.keys(start, start + count, 0) - count
        sent = min(price.window, count)
        shares.append(Share([(start, count)], price.seconds(start, start + count), sent, keys))
        start += count
    return shares
