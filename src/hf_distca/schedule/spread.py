"""How a document is cut over several ranks: each gets one piece from its front and one from its back.

Rank by rank, from both ends of the document to its middle, tokens go in pairs of a *head* [h, h + a) and a *tail* [e - b, e).
With a + b = n tokens given, a longer tail is more attention and a longer head less, and the sum of both,

    pairs = b * (e - h - n) + n * (h + n / 2)    (about: n * n / 2 of n rows that begin at position h, b of them moved to e)

is linear in b: so many tokens a rank can have as much attention as it should. The last rank has what is left in the middle. A
rank needs all keys before the end of its tail, and its head is needed by all later ones: exchanges are about as long on each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hf_distca.schedule.compiled import Floats, Ints, compiled, entry
from hf_distca.schedule.moves import slice_seconds

if TYPE_CHECKING:
    from hf_distca.schedule.cost import Price

__all__ = ["Loads", "Scratch", "Wide", "spread"]

# Times that a document is cut: each time with the exchange of the last cuts, and with those ranks first that did not end in time.
_ROUNDS = 3
# Part of its share of the document by which a rank's end may differ from the mean to be in time.
_ALIKE = 0.03
# By which part of the mean the last rank may end later for the cuts to be good enough.
_EVEN = 0.002


class Loads(NamedTuple):
    """Seconds that each rank computes, and key tokens that it sends and receives, counted as if all had a weight of 1."""

    compute: Floats
    sent: Floats
    received: Floats


# More than any window.
_ALL_KEYS = 2**61


class Wide(NamedTuple):
    """Documents that are cut over several ranks.

    Attributes:
        length, weight: tokens of each document, and what one of its exchanged keys counts as.
        bounds: the rows of document d are those from `bounds[d]` to `bounds[d + 1]`.
        rank, tokens: ranks that have a share, and how many tokens that is, at least 1.
        compute, sent, received: what a share is taken to cost, as in `Loads` but for the weight; in the end, what it costs.
        head, front, tail, back: the pieces [head, head + front) and [tail, tail + back) of a share; one may be empty.
    """

    length: Ints
    weight: Floats
    bounds: Ints
    rank: Ints
    tokens: Ints
    compute: Floats
    sent: Ints
    received: Ints
    head: Ints
    front: Ints
    tail: Ints
    back: Ints


class Scratch(NamedTuple):
    """Room for the rows of a document: orders of its ranks and their tails; when each ends, and the exchange in that.

    `best` and `best_tails` are those with which the last rank ends first so far.
    """

    order: Ints
    tails: Ints
    best: Ints
    best_tails: Ints
    ends: Floats
    exchange: Floats


@entry
def spread(wide: Wide, loads: Loads, price: Price, key_seconds: float, overlapped: bool, scratch: Scratch) -> None:
    """Cut documents, the last one first, so that the ranks of each end at the same time, as far as their tokens allow.

    Args:
        wide: the documents; what their shares cost and their pieces are written.
        loads: of all ranks, with the shares of all documents; kept up to date.
        price: the cost model as scalars. Cuts lie at multiples of its tile, as far as tokens allow.
        key_seconds: seconds of exchanging one key token.
        overlapped: whether ranks end after the longer of compute and exchange, not after both.
        scratch: room to work in.
    """
    for document in range(len(wide.length) - 1, -1, -1):
        _add(wide, loads, document, -1.0)
        if price.window < _ALL_KEYS:
            _in_order(wide, price, document)
        else:
            _cut(wide, loads, price, key_seconds, overlapped, scratch, document)
            _write(wide, price, scratch, document)
        _add(wide, loads, document, 1.0)


@compiled
def _add(wide: Wide, loads: Loads, document: int, sign: float) -> None:
    weight = sign * wide.weight[document]
    for row in range(wide.bounds[document], wide.bounds[document + 1]):
        rank = wide.rank[row]
        loads.compute[rank] += sign * wide.compute[row]
        loads.sent[rank] += weight * wide.sent[row]
        loads.received[rank] += weight * wide.received[row]


@compiled
def _in_order(wide: Wide, price: Price, document: int) -> None:
    """One run of tokens after another: with a window, attention is as long as tokens are many wherever they lie."""
    start = 0
    for row in range(wide.bounds[document], wide.bounds[document + 1]):
        count = wide.tokens[row]
        wide.head[row], wide.front[row], wide.back[row] = start, count, 0
        wide.compute[row] = slice_seconds(price, 1.0, start, start + count)
        wide.sent[row] = min(price.window, count)
        wide.received[row] = min(start, price.window - 1)
        start += count


@compiled
def _cut(wide: Wide, loads: Loads, price: Price, key_seconds: float, overlapped: bool, scratch: Scratch, document: int) -> None:
    """Find the best of a few ways to cut a document."""
    begin, length, weight = wide.bounds[document], wide.length[document], wide.weight[document]
    count = wide.bounds[document + 1] - begin
    half = price.pair * length / 2
    for at in range(count):
        rank = wide.rank[begin + at]
        # Before anything is cut, exchanges are taken to be what they were.
        wire = key_seconds * (max(loads.sent[rank], loads.received[rank]) + weight * wide.sent[begin + at])
        scratch.exchange[at] = 0.0 if overlapped else wire
        scratch.order[at], scratch.ends[at] = at, loads.compute[rank] + half * wide.tokens[begin + at]
    alike = _ALIKE * 2 * half * length / count
    _unlike_first(scratch, count, alike)
    earliest = 0.0
    for turn in range(_ROUNDS):
        _set_tails(wide, loads, price, key_seconds, overlapped, scratch, document)
        _set_ends(wide, loads, price, key_seconds, overlapped, scratch, document)
        slowest, total = 0.0, 0.0
        for at in range(count):
            slowest, total = max(slowest, scratch.ends[at]), total + scratch.ends[at]
        if turn == 0 or slowest < earliest:
            earliest = slowest
            for place in range(count):
                scratch.best[place], scratch.best_tails[place] = scratch.order[place], scratch.tails[place]
        if slowest <= (1 + _EVEN) * total / count:
            return
        _unlike_first(scratch, count, alike)


@compiled
def _unlike_first(scratch: Scratch, count: int, alike: float) -> None:
    """Ranks that should get much more or less attention than others first: at the ends of a document there is most choice."""
    order, ends, mean = scratch.order, scratch.ends, 0.0
    if alike == 0:
        return
    for at in range(count):
        mean += ends[at] / count
    for place in range(1, count):
        at, free = order[place], place
        far = int(abs(ends[at] - mean) / alike)
        while free > 0 and int(abs(ends[order[free - 1]] - mean) / alike) < far:
            order[free] = order[free - 1]
            free -= 1
        order[free] = at


@compiled
def _set_tails(
    wide: Wide, loads: Loads, price: Price, key_seconds: float, overlapped: bool, scratch: Scratch, document: int
) -> None:
    """Tokens of the tail of each rank, in order, for which all end with the same seconds."""
    begin, head, end = wide.bounds[document], 0, wide.length[document]
    last = wide.bounds[document + 1] - begin - 1
    others = 0.0
    for at in range(last + 1):
        others += loads.compute[wide.rank[begin + at]] + scratch.exchange[at]
    for place in range(last + 1):
        at = scratch.order[place]
        count, compute = wide.tokens[begin + at], loads.compute[wide.rank[begin + at]]
        pairs = (float(end) * (end + 1) - float(head) * (head + 1)) / 2
        level = (others + price.pair * pairs) / (last + 1 - place)
        others -= compute + scratch.exchange[at]
        tail = count
        if place < last:
            least = level - compute - price.pair * count * (head + count / 2)
            slope = price.pair * (end - head - count)
            rank, key = wide.rank[begin + at], key_seconds * wide.weight[document]
            sent = key_seconds * loads.sent[rank] + key * count * last
            received = key_seconds * loads.received[rank] + key * (end - count)
            if overlapped:
                wanted = _tail_overlapped(level, least, slope, sent, key * (last - place))
            else:
                wanted = _tail(least, slope, sent, key * (last - place), received)
            # The tail begins on a tile.
            tail = min(max(end - int((end - wanted) / price.tile + 0.5) * price.tile, 0), count)
        scratch.tails[place] = tail
        head, end = head + count - tail, end - tail


@compiled
def _tail(left: float, slope: float, sent: float, fall: float, received: float) -> float:
    """The longest tail for which a rank ends in time, or the one with which it ends first.

    Args:
        left: seconds that it has beside what it computes without a tail.
        slope: seconds that it computes more with each token of a tail.
        sent, fall: seconds that it sends without a tail, and by which that falls with each token of one.
        received: seconds that it receives.
    """
    by_received = (left - received) / slope
    if slope > fall:
        return min(by_received, (left - sent) / (slope - fall))
    # Longer tails are less to send than they are more to compute, up to where more is received than sent.
    return max(by_received, (sent - received) / fall) if fall else by_received


@compiled
def _tail_overlapped(level: float, left: float, slope: float, sent: float, fall: float) -> float:
    """The same for ranks that end after the longer of compute and exchange, by `level`."""
    return max(left / slope, (sent - level) / fall if fall else 0.0)


@compiled
def _set_ends(
    wide: Wide, loads: Loads, price: Price, key_seconds: float, overlapped: bool, scratch: Scratch, document: int
) -> None:
    """Seconds after which each rank ends, and of its exchange in it."""
    begin, head, end = wide.bounds[document], 0, wide.length[document]
    last, key = wide.bounds[document + 1] - begin - 1, key_seconds * wide.weight[document]
    for place in range(last + 1):
        at, tail = scratch.order[place], scratch.tails[place]
        count, rank = wide.tokens[begin + at], wide.rank[begin + at]
        sent = key_seconds * loads.sent[rank] + key * _sent(count, tail, place, last)
        wire = max(sent, key_seconds * loads.received[rank] + key * _received(count, tail, head, end))
        compute = loads.compute[rank] + price.pair * (tail * (end - head - count) + count * (head + count / 2))
        scratch.exchange[at] = 0.0 if overlapped else wire
        scratch.ends[at] = max(compute, wire) if overlapped else compute + wire
        head, end = head + count - tail, end - tail


@compiled
def _sent(count: int, tail: int, place: int, last: int) -> int:
    """Key tokens that a rank sends: its head to all that come later in the order, its tail to all before it."""
    return (count - tail) * last + tail * place


@compiled
def _received(count: int, tail: int, head: int, end: int) -> int:
    """Key tokens that a rank receives; without a tail it needs what is before its head."""
    return end - count if tail else head


@compiled
def _write(wide: Wide, price: Price, scratch: Scratch, document: int) -> None:
    """What the best way to cut a document comes to."""
    begin, head, end = wide.bounds[document], 0, wide.length[document]
    last = wide.bounds[document + 1] - begin - 1
    for place in range(last + 1):
        row, tail = begin + scratch.best[place], scratch.best_tails[place]
        count = wide.tokens[row]
        front = count - tail
        wide.sent[row], wide.received[row] = _sent(count, tail, place, last), _received(count, tail, head, end)
        wide.head[row], wide.front[row], wide.tail[row], wide.back[row] = head, front, end - tail, tail
        head, end = head + front, end - tail
        if head == end:
            # Both pieces are one.
            wide.front[row], wide.back[row] = count, 0
            if front == 0:
                wide.head[row] = wide.tail[row]
        first, back = wide.head[row], wide.tail[row]
        wide.compute[row] = slice_seconds(price, 1.0, first, first + wide.front[row]) + slice_seconds(
            price, 1.0, back, back + wide.back[row]
        )
