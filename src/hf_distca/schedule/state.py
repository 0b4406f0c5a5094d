"""What the moves of the greedy read and change, in columns that compiled functions take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hf_distca.schedule.compiled import Floats, Ints, compiled

if TYPE_CHECKING:
    from hf_distca.schedule.prices import Price

__all__ = ["Fit", "Holders", "Move", "Pieces", "Prices", "Segments", "Servers", "State", "hold", "holder_of"]

# Places in `Servers.level`.
FLOOR, LOW, MEAN, HIGH, CAP = range(5)
# Places in `Servers.total`: seconds to be moved, of all work, moved so far, and by which the work of all has grown.
SURPLUS, ALL, SHED, GROWN = range(4)
# Places in `Servers.counts`: ranks in `free`, pieces, holders, moves, and times that the cheapest slice was looked for.
FREE, PIECES, HOLDERS, MOVES, LOOKS = range(5)
# The segment of a piece that is no more.
GONE = -1
# The first piece of a rank that nobody has asked for any.
UNASKED = -2


class Fit(NamedTuple):
    """What a slice may be for a server to hold its rows and the keys they need in so many bytes; no bound at 0."""

    bound: int
    query: int
    key: int

    def of_group(self, groups: int) -> Fit:
        """That for one of so many head groups."""
        return self._replace(query=self.query // groups, key=self.key // groups)


class Prices(NamedTuple):
    """What slices of documents, and of their head groups, cost.

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


class Segments(NamedTuple):
    """Those of a layout, with documents by their place among all, and whether they may be split by heads."""

    offsets: Ints
    context: Ints
    document: Ints
    start: Ints
    end: Ints
    apart: list[bool]


class Servers(NamedTuple):
    """What ranks have to do.

    Attributes:
        work, speed: seconds of each rank, and its speed.
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
        start, end: rows of each piece.
        number, segment: of its document, and the row of the layout, or `GONE`.
        after: the next piece of the same rank; -1 after the last.
        ratio: bytes exchanged per second moved with a slice of it when it was last looked at, for a server that wanted about
            as much; infinite if there was none, or no more than it can be if nobody has looked.
        looked: `counts[LOOKS]` when it was.
    """

    first: Ints
    want: Floats
    start: Ints
    end: Ints
    number: Ints
    segment: Ints
    after: Ints
    ratio: Floats
    looked: Ints


class Holders(NamedTuple):
    """Which ranks need keys [0, n) of which documents anyway: documents on several ranks, and moved ones.

    Empty for layers with a window: what a rank needs is no prefix then, and what two slices share is a window of keys at most.

    Attributes:
        number, rank, keys: columns of (document, rank, n).
        after: the next row of the same document whose rank may take work; -1 after the last.
        known: of each document, whether it has any row.
        able, last: of each document, the first and the last row whose rank may take work, counted from 1; 0 if there is none.
        table: rows, counted from 1, by a hash of document and rank; its length is a power of two.
    """

    number: Ints
    rank: Ints
    keys: Ints
    after: Ints
    known: list[bool]
    able: Ints
    last: Ints
    table: Ints


class State(NamedTuple):
    """Everything that the moves read and change; `moves` has columns of segment, document, start, end, home, server."""

    prices: Prices
    segments: Segments
    servers: Servers
    pieces: Pieces
    holders: Holders
    moves: tuple[Ints, Ints, Ints, Ints, Ints, Ints]


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
def holder_of(holders: Holders, number: int, rank: int) -> int:
    """The row of a document and a rank; -1 if there is none."""
    mask = len(holders.table) - 1
    at = (number * 40503 + rank * 30011) & mask
    while holders.table[at] != 0:
        row = holders.table[at] - 1
        if holders.number[row] == number and holders.rank[row] == rank:
            return row
        at = (at + 1) & mask
    return -1


@compiled
def hold(holders: Holders, count: Ints, number: int, rank: int, needed: int) -> None:
    """Note that a rank needs the first `needed` keys of a document."""
    row = holder_of(holders, number, rank)
    if row >= 0:
        holders.keys[row] = max(holders.keys[row], needed)
        return
    row = count[HOLDERS]
    count[HOLDERS] += 1
    holders.number[row], holders.rank[row], holders.keys[row], holders.after[row] = number, rank, needed, -1
    if holders.able[number] == 0:
        holders.able[number] = row + 1
    else:
        holders.after[holders.last[number] - 1] = row
    holders.last[number] = row + 1
    holders.known[number] = True
    mask = len(holders.table) - 1
    at = (number * 40503 + rank * 30011) & mask
    while holders.table[at] != 0:
        at = (at + 1) & mask
    holders.table[at] = row + 1
