"""What homes still compute, and what slices of it cost when they were last looked at. All of it is compiled."""

from __future__ import annotations

from hf_distca.schedule.compiled import Ints, compiled
from hf_distca.schedule.slices import least_bytes, most_seconds
from hf_distca.schedule.state import GONE, PIECES, Pieces, Prices, Segments, State

__all__ = [
    "add_piece",
    "earlier",
    "find_pieces",
    "forget",
    "furthest_of",
    "least",
    "next_piece",
    "numbers_of",
    "take_out",
]


@compiled
def numbers_of(segments: Segments, segment: int, parts: int) -> range:
    """The numbers that the document of a segment has: its own, or those of its head groups."""
    first = segments.document[segment] * parts
    return range(first + 1, first + parts) if segments.apart[segment] else range(first, first + 1)


@compiled
def find_pieces(state: State, source: int) -> None:
    """The pieces of a rank that nobody has asked so far."""
    segments = state.segments
    state.pieces.first[source] = -1
    for segment in range(segments.offsets[source] + segments.context[source], segments.offsets[source + 1]):
        for number in numbers_of(segments, segment, state.prices.parts):
            add_piece(
                state.pieces, state.servers.counts, source, (segments.start[segment], segments.end[segment], number, segment)
            )
    forget(state.pieces, state.prices, source)


@compiled
def add_piece(p: Pieces, count: Ints, source: int, piece: tuple[int, int, int, int]) -> int:
    """A piece more: (start, end, number, segment)."""
    row = count[PIECES]
    count[PIECES] += 1
    p.start[row], p.end[row], p.number[row], p.segment[row] = piece
    p.after[row], p.looked[row] = p.first[source], 0
    p.first[source] = row
    return row


@compiled
def forget(p: Pieces, prices: Prices, source: int) -> None:
    """Forget what slices of the pieces of a rank cost when they were last looked at."""
    at = p.first[source]
    while at >= 0:
        p.ratio[at] = least(prices, p.number[at], p.end[at])
        at = p.after[at]


@compiled
def least(prices: Prices, number: int, end: int) -> float:
    """Bytes that are exchanged at least for a second moved with a slice of a piece."""
    price = prices.group_price if number % prices.parts else prices.price
    near = price.near if prices.per_node else 1.0
    return near * least_bytes(price) / most_seconds(price, end)


@compiled
def earlier(p: Pieces, one: int, other: int) -> bool:
    """Whether a piece comes before another that is as cheap: deeper rows first."""
    a = (-p.end[one], p.start[one], p.number[one], p.segment[one])
    return a < (-p.end[other], p.start[other], p.number[other], p.segment[other])


@compiled
def next_piece(p: Pieces, source: int, looks: int) -> int:
    """Of the pieces of a rank that were not looked at this time, the one that seems cheapest; -1 if there is none."""
    best, at = -1, p.first[source]
    while at >= 0:
        if p.looked[at] != looks and (
            best < 0 or p.ratio[at] < p.ratio[best] or (p.ratio[at] == p.ratio[best] and earlier(p, at, best))
        ):
            best = at
        at = p.after[at]
    return best


@compiled
def furthest_of(p: Pieces, source: int, number: int, but: int) -> int:
    """The last row of a document that a rank still computes, apart from one piece."""
    furthest, at = 0, p.first[source]
    while at >= 0:
        if p.number[at] == number and at != but:
            furthest = max(furthest, p.end[at])
        at = p.after[at]
    return furthest


@compiled
def take_out(p: Pieces, source: int, piece: int) -> None:
    """Take a piece from those of its rank."""
    before, at = -1, p.first[source]
    while at != piece:
        before, at = at, p.after[at]
    if before < 0:
        p.first[source] = p.after[piece]
    else:
        p.after[before] = p.after[piece]
    p.segment[piece] = GONE
