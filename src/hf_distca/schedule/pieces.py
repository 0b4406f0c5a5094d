"""What homes still compute, and what slices of it cost when they were last looked at. All of it is compiled."""

from __future__ import annotations

from hf_distca.schedule.compiled import Ints, compiled, inlined
from hf_distca.schedule.slices import least_bytes, most_seconds
from hf_distca.schedule.state import AFTER, END, GONE, LOOKED, NUMBER, PIECES, SEGMENT, START, Pieces, Prices, State, numbers_of

__all__ = [
    "add_piece",
    "earlier",
    "find_pieces",
    "forget",
    "furthest_of",
    "least",
    "next_pieces",
    "take_out",
]

# Compared at a time. Those behind them are shorter, and hardly cheaper to move.
_MOST_PIECES = 256


@compiled
def find_pieces(state: State, source: int) -> None:
    """The pieces of a rank that nobody has asked so far."""
    segments = state.segments
    state.pieces.first[source] = -1
    # The deepest come last and so are in front, where `next_pieces` begins.
    for place in range(segments.offsets[source] + segments.context[source], segments.offsets[source + 1]):
        segment = segments.by_end[place]
        for number in numbers_of(state, segment):
            add_piece(
                state.pieces, state.servers.counts, source, (segments.start[segment], segments.end[segment], number, segment)
            )
    forget(state.pieces, state.prices, source)


@compiled
def add_piece(p: Pieces, count: Ints, source: int, piece: tuple[int, int, int, int]) -> int:
    """A piece more: (start, end, number, segment)."""
    row = count[PIECES]
    count[PIECES] += 1
    p.rows[row, START], p.rows[row, END], p.rows[row, NUMBER], p.rows[row, SEGMENT] = piece
    p.rows[row, AFTER], p.rows[row, LOOKED] = p.first[source], 0
    p.first[source] = row
    return row


@compiled
def forget(p: Pieces, prices: Prices, source: int) -> None:
    """Forget what slices of the pieces of a rank cost when they were last looked at."""
    at = p.first[source]
    while at >= 0:
        p.ratio[at] = least(prices, p.rows[at, NUMBER], p.rows[at, END])
        at = p.rows[at, AFTER]


@compiled
def least(prices: Prices, number: int, end: int) -> float:
    """Bytes that are exchanged at least for a second moved with a slice of a piece."""
    price = prices.group_price if number % prices.parts else prices.price
    near = price.near if prices.per_node else 1.0
    return near * least_bytes(price) / most_seconds(price, end)


@compiled
def earlier(p: Pieces, one: int, other: int) -> bool:
    """Whether a piece comes before another that is as cheap: deeper rows first."""
    a = (-p.rows[one, END], p.rows[one, START], p.rows[one, NUMBER], p.rows[one, SEGMENT])
    return a < (-p.rows[other, END], p.rows[other, START], p.rows[other, NUMBER], p.rows[other, SEGMENT])


@inlined
def next_pieces(p: Pieces, source: int, looks: int) -> tuple[int, int]:
    """Of the first pieces of a rank that were not looked at this time, the two that seem cheapest; -1 if there is none."""
    best, second, at, left = -1, -1, p.first[source], _MOST_PIECES
    while at >= 0 and left > 0:
        if p.rows[at, LOOKED] != looks:
            left -= 1
            if best < 0 or _seems_cheaper(p, at, best):
                best, second = at, best
            elif second < 0 or _seems_cheaper(p, at, second):
                second = at
        at = p.rows[at, AFTER]
    return best, second


@inlined
def _seems_cheaper(p: Pieces, one: int, other: int) -> bool:
    return p.ratio[one] < p.ratio[other] or (p.ratio[one] == p.ratio[other] and earlier(p, one, other))


@compiled
def furthest_of(p: Pieces, source: int, number: int, but: int) -> int:
    """The last row of a document that a rank still computes, apart from one piece."""
    furthest, at = 0, p.first[source]
    while at >= 0:
        if p.rows[at, NUMBER] == number and at != but:
            furthest = max(furthest, p.rows[at, END])
        at = p.rows[at, AFTER]
    return furthest


@compiled
def take_out(p: Pieces, source: int, piece: int) -> None:
    """Take a piece from those of its rank."""
    before, at = -1, p.first[source]
    while at != piece:
        before, at = at, p.rows[at, AFTER]
    if before < 0:
        p.first[source] = p.rows[piece, AFTER]
    else:
        p.rows[before, AFTER] = p.rows[piece, AFTER]
    p.rows[piece, SEGMENT] = GONE
