"""The moves of the greedy: the one loop of the scheduler that is compiled.

Ranks have a *level* that they should end at (`schedule.greedy`). The heaviest rank gives first, and gives until it is at its level:

1. Choose a server: the emptiest, or one that the surplus fills to its level.
2. Of every piece that the rank still computes, look at the tail that takes about what the server wants: rows [x, end).
3. Move the tail with the fewest bytes exchanged per second moved. Keys that a server needs anyway, for its own rows of the document
   or for a slice that it got before, cost nothing; so servers that have such keys are looked at beside the first.

Moving adds work, for a server reads keys that the home reads too: the levels of all rise with it.

All ranks make the same moves: IEEE double arithmetic in the order that is written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.compiled import compiled, entry

if TYPE_CHECKING:
    from hf_distca.schedule.cost import Price  # which counts with `task_counts`

__all__ = [
    "CAP",
    "FLOOR",
    "HIGH",
    "LOW",
    "MEAN",
    "Book",
    "Goal",
    "Loads",
    "Pieces",
    "Prices",
    "make_moves",
    "slice_seconds",
    "tail_start",
    "task_counts",
]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Places in `Goal.levels`: the edges of the tolerated band, and where ranks outside it should end.
FLOOR, LOW, MEAN, HIGH, CAP = range(5)
# Columns of moves: the piece, rows [start, end) of its document, and the server. And those of `Book.held`: a server that got rows of
# a document, how many keys it needs for them, and the row before of the same document.
PIECE, START, END, SERVER = range(4)
RANK, KEYS, BEFORE = range(3)
# Pieces of a rank that are looked at for a move, once one of them can be moved. The first are those deepest in their documents, of
# which a second of work exchanges the fewest bytes.
_LOOKED_AT = 64
# Servers with keys of a document that are looked at for each of its pieces.
_HOLDERS = 8


class Pieces(NamedTuple):
    """Rows of segments that their homes still compute, in order of ranks; a document that may be split has one for each group.

    Attributes:
        number: of the document or head group, from 0.
        start, end: rows of the document; moves take them from the end or from the start.
        home: rank that computes them.
        heads: part of the heads.
        after: the next piece of the same number, -1 after the last.
        offsets: ``ranks + 1`` numbers; the pieces of rank r are rows ``offsets[r]`` to ``offsets[r + 1]``.
        first: of each number, its first piece, or -1 if no other rank has any.
    """

    number: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    heads: FloatArray
    after: IntArray
    offsets: IntArray
    first: IntArray


class Loads(NamedTuple):
    """What ranks have to do.

    Attributes:
        seconds, speed: what each takes, and how fast it is.
        order: ranks, those that take longest first.
        per_node: ranks of a node; 0 where nodes make no difference.
    """

    seconds: FloatArray
    speed: FloatArray
    order: IntArray
    per_node: int


class Book(NamedTuple):
    """What was moved.

    Attributes:
        moves: rows of `PIECE` to `SERVER`, in order; and room for more.
        held: rows of `RANK` to `BEFORE`, of each server and document one; and as much room.
        last: of each document the last row of `held`, or -1.
    """

    moves: IntArray
    held: IntArray
    last: IntArray


class Prices(NamedTuple):
    """What slices cost their servers, and what their homes are rid of."""

    served: Price
    kept: Price


class Goal(NamedTuple):
    """Where the moves go.

    Attributes:
        begin, levels: seconds at places `FLOOR` to `CAP`, to begin with and now.
        surplus, work: seconds to be moved, and of all work.
        most_bytes: transient bytes of a tile of rows and their keys on a server, at most; infinite for no bound.
        row_bytes, key_bytes: transient bytes of a row and of a key.
    """

    begin: FloatArray
    levels: FloatArray
    surplus: float
    work: float
    most_bytes: float
    row_bytes: float
    key_bytes: float


class _Slice(NamedTuple):
    """Rows [start, end) of a piece for a server: what its home is rid of, what the server gets, bytes by what is shed.

    `piece` is -1 if there is none.
    """

    piece: int
    server: int
    start: int
    end: int
    shed: float
    added: float
    ratio: float


def task_counts(rows: Any, keys: Any, tile: int, window: int) -> tuple[Any, Any, Any]:
    """Query rows in whole kernel tiles, keys that are read, and query-key pairs in whole tiles, of tasks; numbers or arrays.

    Args:
        rows: query rows.
        keys: position after the last of them, which sees as many keys, or the last `window` of them.
        tile: rows of a kernel tile.
        window: keys that a row sees, its own included; 2**62 for all.
    """
    tiled = -(-rows // tile) * tile
    # Rows that see a whole window, and those before them, which see all there is.
    full = np.minimum(np.maximum(keys - window, 0), rows)
    rest = rows - full
    pairs = 1.0 * full * window + rest * (keys - full - (rest - 1) / 2)
    return tiled, np.minimum(keys, rows + (window - 1)), pairs * (tiled / np.maximum(rows, 1))


_task_counts = compiled(task_counts)


@compiled
def slice_seconds(price: Price, heads: float, start: int, end: int) -> float:
    """Seconds of query rows [start, end) of a document, 0 if there are none."""
    if start >= end:
        return 0.0
    tiled, read, pairs = _task_counts(end - start, end, price.kernel_tile, price.window)
    return price.task + heads * (price.row * tiled + price.key * read + price.pair * pairs)


@compiled
def tail_start(price: Price, heads: float, start: int, end: int, want: float, most: float) -> int:
    """Where the tail of rows [start, end) begins that comes nearest to `want` seconds; never above `most`, but for one tile."""
    tile = price.tile
    low, high = start // tile + 1, (end - 1) // tile  # of the tiles that may begin it, the first that takes no more than `want`
    if low > high:
        return start
    last = high
    while low < high:
        middle = (low + high) // 2
        if slice_seconds(price, heads, middle * tile, end) > want:
            low = middle + 1
        else:
            high = middle
    x, before = low * tile, max((low - 1) * tile, start)
    more = slice_seconds(price, heads, before, end)
    if more <= most and more - want < want - slice_seconds(price, heads, x, end):
        return before
    while x < last * tile and slice_seconds(price, heads, x, end) > most:
        x += tile
    return x


@compiled
def _server_for(loads: Loads, level: FloatArray, source: int, surplus: float) -> int:
    """The rank that the surplus fills best, or else the emptiest below the mean; -1 if there is none.

    A server in the node of the source is as good if it is below the floor, and has room for half as much.
    """
    work, speed = loads.seconds, loads.speed
    best, fits, near = -1, -1, -1
    for rank in range(len(work)):
        if work[rank] < level[MEAN] and (best < 0 or work[rank] < work[best]):
            best = rank
    if best < 0:
        return best
    if (level[LOW] - work[best]) * speed[best] > surplus:
        for rank in range(len(work)):
            after = work[rank] + surplus / speed[rank]
            if work[rank] < level[MEAN] and level[FLOOR] <= after <= level[CAP] and (fits < 0 or work[rank] < work[fits]):
                fits = rank
    if loads.per_node:
        first = source // loads.per_node * loads.per_node
        for rank in range(first, first + loads.per_node):
            if work[rank] < level[FLOOR] and (near < 0 or work[rank] < work[near]):
                near = rank
        if near >= 0:
            room = (level[LOW] - work[near]) * speed[near]
            if room >= 0.5 * min(surplus, (level[LOW] - work[best]) * speed[best]):
                return near
    return best if fits < 0 else fits


@compiled
def _held(pieces: Pieces, book: Book, number: int, server: int) -> int:
    """How many keys of a document a server needs anyway."""
    held, piece, row = 0, pieces.first[number], book.last[number]
    while row >= 0:
        if book.held[row, RANK] == server:
            held = book.held[row, KEYS]
        row = book.held[row, BEFORE]
    while piece >= 0:
        if pieces.home[piece] == server and pieces.start[piece] < pieces.end[piece]:
            held = max(held, pieces.end[piece])
        piece = pieces.after[piece]
    return held


@compiled
def _head_end(price: Price, heads: float, start: int, end: int, want: float) -> int:
    """Where the head of rows [start, end) ends that takes no more than `want` seconds, but for one tile."""
    tile = price.tile
    low, high = start // tile + 1, (end - 1) // tile
    if low > high:
        return end
    while low < high:
        middle = (low + high + 1) // 2
        if slice_seconds(price, heads, start, middle * tile) > want:
            high = middle - 1
        else:
            low = middle
    return low * tile


@compiled
def _nothing() -> _Slice:
    return _Slice(-1, -1, 0, 0, 0.0, 0.0, math.inf)


class _Room(NamedTuple):
    """What a piece may give to a server.

    Attributes:
        piece, server: which.
        held: keys of the document that the server needs anyway.
        want, most: seconds that the server wants, and may get at most.
        over: seconds that the source may be rid of at most.
        room: seconds that the server has room for.
        least: seconds from which on a head is worth a move. Heads can be as small as anyone likes, and so can what servers want.
    """

    piece: int
    server: int
    held: int
    want: float
    most: float
    over: float
    room: float
    least: float


@compiled
def _room_for(
    pieces: Pieces, prices: Prices, loads: Loads, level: FloatArray, wanted: tuple[int, int, int, float, float]
) -> _Room:
    """What a piece may give to a server; `wanted` is the two, the keys that the server has, a leeway, and an aim.

    The source is to end at the aim. With a leeway the server may come up to that part of what both have, and the source below the band.
    """
    piece, server, held, leeway, aim = wanted
    start, end, heads, source = pieces.start[piece], pieces.end[piece], pieces.heads[piece], pieces.home[piece]
    work, speed = loads.seconds, loads.speed
    room = (max(level[CAP], leeway * (work[source] + work[server])) - work[server]) * speed[server]
    over = (work[source] - level[FLOOR]) * speed[source]
    # What a server receives it does not compute meanwhile; its home sends it, and is rid of so much less.
    rid = slice_seconds(prices.kept, heads, start, end) - (prices.served.row - prices.kept.row) * heads * (end - start)
    scale = slice_seconds(prices.served, heads, start, end) / rid if rid > 0 else 0.0
    want = min((work[source] - aim) * speed[source] * scale, room)
    if work[server] < level[FLOOR]:
        want = min(want, (level[LOW] - work[server]) * speed[server])
    most, least = min(over * scale, room), level[CAP] - level[HIGH]
    if leeway > 0:
        most, over = room, room
    return _Room(piece, server, held, want, most, over, room, least)


@compiled
def _weighed(pieces: Pieces, prices: Prices, room: _Room, x: int, y: int) -> _Slice:
    """Rows [x, y) of a piece for a server, if there is room for them."""
    served, kept, piece = prices.served, prices.kept, room.piece
    start, end, heads = pieces.start[piece], pieces.end[piece], pieces.heads[piece]
    rest = slice_seconds(kept, heads, start, x) + slice_seconds(kept, heads, y, end) + (served.row - kept.row) * heads * (y - x)
    shed = slice_seconds(kept, heads, start, end) - rest
    first = room.held if served.window > y else x - (served.window - 1)
    needed = max(y - max(first, 0), 0)
    added = slice_seconds(served, heads, x, y) - (served.key - kept.key) * heads * (y - needed)
    if not 0 < shed <= room.over or added > room.room:
        return _nothing()
    ratio = heads * (served.query_bytes * (y - x) + served.key_bytes * needed) / shed
    return _Slice(piece, room.server, x, y, shed, added, ratio)


@compiled
def _slice(pieces: Pieces, prices: Prices, room: _Room, limit: int) -> _Slice:
    """The tail of a piece for a server; or its head, if the tail is too much or the server has the keys before it.

    None ends behind the limit.
    """
    start, end, heads = pieces.start[room.piece], pieces.end[room.piece], pieces.heads[room.piece]
    if room.want <= 0:
        return _nothing()
    whole, best = slice_seconds(prices.served, heads, start, end), _nothing()
    if end <= limit:
        if whole <= room.want or whole <= min(room.most, 1.1 * room.want):
            return _weighed(pieces, prices, room, start, end)
        best = _weighed(pieces, prices, room, tail_start(prices.served, heads, start, end, room.want, room.most), end)
    if room.want >= room.least and start < limit and (best.piece < 0 or room.held >= start > 0):
        stop = min(_head_end(prices.served, heads, start, end, room.want), limit)
        head = _weighed(pieces, prices, room, start, stop)
        if head.ratio < best.ratio:
            best = head
    return best


@compiled
def _last_end(price: Price, goal: Goal, heads: float) -> int:
    """Where rows end at most for a tile of them to fit the bound of transient bytes with its keys."""
    if goal.most_bytes == math.inf:
        return 2**62
    tile, most = price.tile, goal.most_bytes / heads
    if price.window < 2**61 and goal.row_bytes * tile + goal.key_bytes * (price.window + tile) <= most:
        return 2**62
    return int(max((most - goal.row_bytes * tile) / goal.key_bytes, 0.0)) // tile * tile


@compiled
def _best_of(
    pieces: Pieces, prices: Prices, loads: Loads, goal: Goal, book: Book, wanted: tuple[int, int, float, float]
) -> _Slice:
    """The tail with the fewest bytes per second of those that a source can give, with a leeway, to a server or to one with its keys.

    `goal` has the levels of now, and `wanted` is the source, the server, and the leeway and the aim of `_room_for`.
    """
    source, server, leeway, aim = wanted
    best, looked_at = _nothing(), 0
    work, level = loads.seconds, goal.levels
    for piece in range(pieces.offsets[source], pieces.offsets[source + 1]):
        start, end, number = pieces.start[piece], pieces.end[piece], pieces.number[piece]
        if start >= end:
            continue
        if looked_at >= _LOOKED_AT and best.piece >= 0:
            break
        looked_at += 1
        limit = _last_end(prices.served, goal, pieces.heads[piece])
        same = piece > pieces.offsets[source] and number == pieces.number[piece - 1] + 1 and pieces.heads[piece] < 1
        if (
            same
            and start == pieces.start[piece - 1]
            and end == pieces.end[piece - 1]
            and book.last[number] < 0
            and book.last[number - 1] < 0
        ):
            continue  # a group of heads that is as good as the one before
        held = _held(pieces, book, number, server)
        tail = _slice(pieces, prices, _room_for(pieces, prices, loads, level, (piece, server, held, leeway, aim)), limit)
        if tail.ratio < best.ratio:
            best = tail
        row, holder, tried = book.last[number], pieces.first[number], 0
        while (row >= 0 or holder >= 0) and tried < _HOLDERS:
            if row >= 0:
                rank, row = book.held[row, RANK], book.held[row, BEFORE]
            else:
                rank, holder = pieces.home[holder], pieces.after[holder]
            if rank in (server, source) or work[rank] >= level[FLOOR]:
                continue
            tried += 1
            held = _held(pieces, book, number, rank)
            tail = _slice(pieces, prices, _room_for(pieces, prices, loads, level, (piece, rank, held, leeway, aim)), limit)
            if tail.ratio < best.ratio:
                best = tail
    return best


@compiled
def _hold(book: Book, count: int, number: int, moved: _Slice) -> int:
    """Note that a server needs the keys of what was moved; how many rows there are then."""
    row = book.last[number]
    while row >= 0:
        if book.held[row, RANK] == moved.server:
            book.held[row, KEYS] = max(book.held[row, KEYS], moved.end)
            return count
        row = book.held[row, BEFORE]
    book.held[count, RANK], book.held[count, KEYS], book.held[count, BEFORE] = moved.server, moved.end, book.last[number]
    book.last[number] = count
    return count + 1


@compiled
def _next_move(pieces: Pieces, prices: Prices, loads: Loads, goal: Goal, book: Book, source: int, edge: int) -> _Slice:
    """What a source above an edge of `goal`, the levels of now, gives next; its piece is -1 if that is nothing."""
    work, level = loads.seconds, goal.levels
    aim = level[HIGH] if edge == CAP else level[FLOOR]
    surplus = (work[source] - aim) * loads.speed[source]
    best = _nothing()
    # A tile of rows may be more than the tolerated band is wide. Then a source below it, or a server above it, but lower than the
    # source was, is better than leaving the source as it is.
    for leeway in (0.0, 0.5):
        server = _server_for(loads, level, source, surplus if edge == CAP and leeway == 0 else math.inf)
        if server < 0 or (edge == LOW and (leeway > 0 or work[server] >= level[FLOOR])):
            break
        best = _best_of(pieces, prices, loads, goal, book, (source, server, leeway, aim))
        if best.piece >= 0:
            break
    return best


def _make_moves(pieces: Pieces, prices: Prices, loads: Loads, goal: Goal, book: Book) -> int:
    """Make all moves.

    Args:
        pieces: of the layout; they shrink.
        prices: of slices.
        loads: what ranks have to do; brought up to date.
        goal: what levels they start with.
        book: room for moves, and what is held: nothing.

    Returns:
        How many there are; -1 if there is no room for them.
    """
    work, speed, level = loads.seconds, loads.speed, goal.levels
    count, holders, shed, grown = 0, 0, 0.0, 0.0
    # First ranks above the band give, and then, while others are below it, those that have more than these should.
    for edge in (CAP, LOW):
        for source in loads.order:
            while work[source] > level[edge]:
                best = _next_move(pieces, prices, loads, goal, book, source, edge)
                if best.piece < 0:
                    break
                if count == len(book.moves):
                    return -1
                row = book.moves[count]
                row[PIECE], row[START], row[END], row[SERVER] = best.piece, best.start, best.end, best.server
                holders = _hold(book, holders, pieces.number[best.piece], best)
                if best.end < pieces.end[best.piece]:
                    pieces.start[best.piece] = best.end
                else:
                    pieces.end[best.piece] = best.start
                count += 1
                shed += best.shed
                grown += best.added - best.shed
                work[source] -= best.shed / speed[source]
                work[best.server] += best.added / speed[best.server]
                # Levels rise to where they will be when all surplus is moved at the same rate.
                rise = 1 + grown / shed * max(goal.surplus, shed) / goal.work
                for place in range(len(level)):
                    level[place] = goal.begin[place] * rise
    return count


make_moves = entry(_make_moves)
