"""What the moves of the greedy read and change, in columns that compiled functions take."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import Flags, Floats, Ints, compiled
from hf_distca.schedule.prices import Price

__all__ = ["Fit", "Holders", "Move", "Pieces", "Placed", "Prices", "Servers", "State", "hold", "holder_of", "numbers_of"]

# Places in `Servers.level`.
FLOOR, LOW, MEAN, HIGH, CAP = range(5)
# Places in `Servers.total`: seconds to be moved, of all work, moved so far, and by which the work of all has grown.
SURPLUS, ALL, SHED, GROWN = range(4)
# Places in `Servers.counts`: ranks in `free`, pieces, holders, moves, and times that the cheapest slice was looked for.
FREE, PIECES, HOLDERS, MOVES, LOOKS = range(5)
# Places in `Pieces.rows`.
START, END, NUMBER, SEGMENT, AFTER, LOOKED = range(6)
# Places in `Holders.rows` and `Holders.numbers`.
DOCUMENT, RANK, KEYS, NEXT = range(4)
ABLE, LAST, KNOWN = range(3)
# The segment of a piece that is no more.
GONE = -1
# The first piece of a rank that nobody has asked for any.
UNASKED = -2


class Fit(NamedTuple):
    """What a slice may be for a server to hold its rows and the keys they need in so many bytes; no bound at 0."""

    bound: int
    query: int
    key: int


class Prices(NamedTuple):
    """What slices of documents, and of their head groups, cost; see `prices_of`.

    Attributes:
        price, own: what slices cost their servers, and what their homes are rid of.
        group_price, group_own: the same of a head group.
        exchanged: whether these are not the same.
        parts: numbers that a document has: its own and those of its head groups. The d-th document is number ``d * parts``, and
            group g of one that may be split ``d * parts + 1 + g``.
        fit, group_fit: slices, of all heads and of a head group, are only moved as far as they fit a server.
        per_node: ranks of a node, if it matters who is in one, or 0.
    """

    price: Price
    own: Price
    group_price: Price
    group_own: Price
    exchanged: bool
    parts: int
    fit: Fit
    group_fit: Fit
    per_node: int


class Servers(NamedTuple):
    """What ranks have to do.

    Attributes:
        work, speed: seconds of each rank now, and its speed.
        free: ranks that may take work, emptiest first; `counts[FREE]` of them.
        base, level: levels to begin with, and now: at places `FLOOR` to `CAP`.
        total: sums of seconds, at places `SURPLUS` to `GROWN`.
        counts: at places `FREE` to `LOOKS`.
    """

    work: Floats
    speed: Floats
    free: Ints
    base: Floats
    level: Floats
    total: Floats
    counts: Ints


class Pieces(NamedTuple):
    """Rows of segments that their homes still compute; a segment of a document that may be split has a piece for each group.

    Attributes:
        first: the first piece of each rank; -1 if it has none, or `UNASKED`.
        want: what the last server wanted that asked each rank.
        rows: of each piece, at places `START` to `LOOKED`: its rows of the document, the number of the document, the row of the
            layout, or `GONE`, the next piece of the same rank, -1 after the last, and `counts[LOOKS]` when it was looked at.
        ratio: bytes exchanged per second moved with a slice of it when it was last looked at, for a server that wanted about
            as much; infinite if there was none, or no more than it can be if nobody has looked.
    """

    first: Ints
    want: Floats
    rows: Any
    ratio: Floats


class Holders(NamedTuple):
    """Which ranks need keys [0, n) of which documents anyway: documents on several ranks, and moved ones.

    Empty for layers with a window: what a rank needs is no prefix then, and what two slices share is a window of keys at most.

    Attributes:
        rows: at places `DOCUMENT` to `NEXT`: number of the document, rank, n, and the next row of the same document whose rank
            may take work, -1 after the last.
        numbers: of each document, at places `ABLE` to `KNOWN`: the first and the last row whose rank may take work, counted from
            1, 0 if there is none, and whether it has any row.
        table: rows, counted from 1, by a hash of document and rank; its length is a power of two.
    """

    rows: Any
    numbers: Any
    table: Ints


class Placed(NamedTuple):
    """Segments of a layout: see `schedule.index.Segments`."""

    offsets: Any
    context: Any
    by_end: Any
    place: Any
    start: Any
    end: Any


class State(NamedTuple):
    """Everything that the moves read and change.

    Attributes:
        prices: of slices.
        segments: of the layout.
        apart: of each document of the layout, by place, whether it may be split by heads.
        servers, pieces, holders: see there.
        moves: rows of segment, document, start, end, home, server.
    """

    prices: Prices
    segments: Placed
    apart: Flags
    servers: Servers
    pieces: Pieces
    holders: Holders
    moves: Any


class Move(NamedTuple):
    """Rows [start, end) of a piece for a server, and what moving them does; `piece` is -1 if there is nothing to move."""

    bytes_per_second: float
    source: int
    server: int
    piece: int
    start: int
    end: int
    shed: float
    added: float


@compiled
def numbers_of(state: State, segment: int) -> range:
    """The numbers that the document of a segment has: its own, or those of its head groups."""
    place, parts = state.segments.place[segment], state.prices.parts
    first = place * parts
    return range(first + 1, first + parts) if state.apart[place] else range(first, first + 1)


@compiled
def holder_of(holders: Holders, number: int, rank: int) -> int:
    """The row of a document and a rank; -1 if there is none."""
    mask = len(holders.table) - 1
    at = (number * 40503 + rank * 30011) & mask
    while holders.table[at] != 0:
        row = holders.table[at] - 1
        if holders.rows[row, DOCUMENT] == number and holders.rows[row, RANK] == rank:
            return row
        at = (at + 1) & mask
    return -1


@compiled
def hold(holders: Holders, count: Ints, number: int, rank: int, needed: int) -> None:
    """Note that a rank needs the first `needed` keys of a document."""
    row = holder_of(holders, number, rank)
    if row >= 0:
        holders.rows[row, KEYS] = max(holders.rows[row, KEYS], needed)
        return
    row = count[HOLDERS]
    count[HOLDERS] += 1
    holders.rows[row, DOCUMENT], holders.rows[row, RANK] = number, rank
    holders.rows[row, KEYS], holders.rows[row, NEXT] = needed, -1
    if holders.numbers[number, ABLE] == 0:
        holders.numbers[number, ABLE] = row + 1
    else:
        holders.rows[holders.numbers[number, LAST] - 1, NEXT] = row
    holders.numbers[number, LAST] = row + 1
    holders.numbers[number, KNOWN] = 1
    mask = len(holders.table) - 1
    at = (number * 40503 + rank * 30011) & mask
    while holders.table[at] != 0:
        at = (at + 1) & mask
    holders.table[at] = row + 1
