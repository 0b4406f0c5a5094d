"""The moves of the greedy: the one loop of the scheduler that is compiled.

Ranks have a *level* that they should end at (`schedule.greedy`). The heaviest rank gives first,
until it is below the cap. A move follows steps 4.1 to 4.3 of docs/scheduler.md:

1. Choose a server: the emptiest, or one of the same node with half as much room.
2. For every piece that the rank still computes, find the tail, rows [x, end), that takes about what the server wants; or the
   first rows, where no tail fits.
3. Move the slice that exchanges the fewest bytes per second moved. Keys that a server needs anyway, for its own rows of the
   document or for a slice that it got before, cost nothing; so servers that have such keys are looked at too.

Moving adds work, because a server reads keys that the home reads too: the levels of all ranks rise
with it.

All ranks make the same moves: this is IEEE double arithmetic in the order in which it is written.
numba compiles the loop when it is first called, and keeps the machine code beside the source or in
the user's cache, under a name with a hash of this file. If numba cannot be imported, or is told to
compile nothing, the loop runs in Python, and makes the same moves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.compiled import compiled, inner

if TYPE_CHECKING:
    from hf_distca.schedule.cost import Price  # which counts with `task_counts`

__all__ = [
    "END",
    "PIECE",
    "SERVER",
    "START",
    "FloatArray",
    "Ledger",
    "Loads",
    "Prices",
    "QueryPieces",
    "make_moves",
    "slice_seconds",
    "tail_start",
    "task_counts",
]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Places in `Loads.levels`: the edges of the tolerated band, and where ranks outside it should end.
FLOOR, LOW, HIGH, CAP = range(4)
# Columns of `Ledger.moves`: a piece, rows [start, end) of its document, and the server that gets them.
PIECE, START, END, SERVER = range(4)
# Columns of `Ledger.holders`: a rank that needs the first keys of a document anyway, how many, and the row of the holder before.
RANK, KEYS, BEFORE = range(3)
# Pieces of a rank that are looked at for a move, and more only if none of them can be moved. The first are those deepest in their
# documents, which exchange the fewest bytes for a second of work.
_LOOKED_AT = 64
# Holders of a document's keys that are looked at for each of its pieces.
_HOLDERS = 8
# What they have to lack at least, as a part of what the server that was asked should get.
_LEAST_LACK = 0.25


class QueryPieces(NamedTuple):
    """Rows that their homes still compute, in order of ranks; a document that
    may be split has a piece for each head group.

    Attributes:
        number: number of the document or head group, from 0.
        start, end: rows that may be moved, from either end; a bound of transient bytes may end them
            early.
        heads: part of the heads.
        offsets: ``ranks + 1`` numbers; the pieces of rank r are rows ``offsets[r]`` to ``offsets[r
            + 1]``.
    """

    number: IntArray
    start: IntArray
    end: IntArray
    heads: FloatArray
    offsets: IntArray


class Loads(NamedTuple):
    """Work of the ranks, and levels for those of each group, [0, size), [size, 2 * size), ....

    Attributes:
        seconds, speed: seconds and speed of each rank.
        serves: whether each may get slices.
        size: ranks of a group.
        begin: seconds at places `FLOOR` to `CAP` before the first move, a row for each group.
        levels, span: current levels of the current group, and its first rank and the rank after its
            last.
        surplus, work: seconds of work to be moved, and of all work, of each group.
        per_node: ranks of a node, where nodes are evened out; else 1, and each rank is a node.
        node_seconds, node_speed: those of the nodes.
        near: ranks of a node, where a server in the node of the source is preferred; else 0.
    """

    seconds: FloatArray
    speed: FloatArray
    serves: npt.NDArray[np.bool_]
    size: int
    begin: FloatArray
    levels: FloatArray
    span: IntArray
    surplus: FloatArray
    work: FloatArray
    per_node: int
    node_seconds: FloatArray
    node_speed: FloatArray
    near: int


class Ledger(NamedTuple):
    """Record of the moves, and of the ranks that have keys of documents.

    Attributes:
        moves: room for rows of `PIECE` to `SERVER`.
        holders: rows of `RANK` to `BEFORE`, and behind them room for one for each move. The last of
            a rank and document counts.
        last: for each document, the last row of `holders`, or -1.
    """

    moves: IntArray
    holders: IntArray
    last: IntArray


class Prices(NamedTuple):
    """Price of a slice on its server, and its price at its home."""

    served: Price
    kept: Price


class _Wish(NamedTuple):
    """Size of the slice that a source should give to a server, in seconds of work.

    Attributes:
        surplus, over: work that the source wants to shed, and may shed at most.
        lack, room: work that the server should get, and may get at most.
        least_want: below this, no first rows are taken; else moves would become ever smaller.
    """

    surplus: float
    over: float
    lack: float
    room: float
    least_want: float


class _Slice(NamedTuple):
    """Rows [start, end) of a piece, the seconds that its home sheds and its server
    gets, and bytes exchanged per second shed.
    """

    start: int
    end: int
    shed: float
    added: float
    ratio: float


class _Move(NamedTuple):
    """A piece, the server that gets a slice of it, and the number of first keys
    of the document that the server then needs.
    """

    piece: int
    server: int
    keys: int


def task_counts(rows: Any, keys: Any, tile: int, window: int) -> tuple[Any, Any]:
    """Count keys that tasks read, and query-key pairs that they compute: in whole
    kernel tiles, with the keys behind a row in its own.

    Args:
        rows: query rows; numbers or arrays, like the results.
        keys: position after the last of them, which sees as many keys, or the last `window` of
            them.
        tile: rows of a kernel tile.
        window: keys that a row sees, its own included; 2**62 for all.
    """
    tiled = -(-rows // tile) * tile
    # Rows that see a whole window, and those before them, which see all there is.
    # No `numpy.maximum`: of numbers, numba takes long to compile it.
    rest = rows - (keys - window) * (keys > window)
    rest = rest * (rest > 0)
    full, unseen = rows - rest, keys - rows - (window - 1)
    pairs = 1.0 * full * window + rest * (keys - full - (rest - 1) / 2)
    return keys - unseen * (unseen > 0), pairs * (tiled / (rows + (rows == 0))) + tiled * (tile - 1) / 2


_task_counts = compiled(task_counts)


@compiled
def slice_seconds(price: Price, heads: float, start: int, end: int) -> float:
    """Return the seconds of query rows [start, end) of a document, 0 if there are none."""
    if start >= end:
        return 0.0
    read, pairs = _task_counts(end - start, end, price.tile, price.window)
    return float(price.task + heads * (price.row * (end - start) + price.key * read + price.pair * pairs))


@compiled
def tail_start(price: Price, heads: float, start: int, end: int, want: float, most: float) -> int:
    """Return the start of the tail of rows [start, end) that is nearest to
    `want` seconds, up to `most`, or the shortest.
    """
    grid = price.grid
    first, last = start // grid + 1, (end - 1) // grid  # at last, `first` takes no more than `want`
    if first > last:
        return start
    while first < last:
        middle = (first + last) // 2
        if slice_seconds(price, heads, middle * grid, end) > want:
            first = middle + 1
        else:
            last = middle
    before = max((first - 1) * grid, start)
    more = slice_seconds(price, heads, before, end)
    if more <= most and more - want < want - slice_seconds(price, heads, first * grid, end):
        return before
    return first * grid


@inner
def _lack(loads: Loads, rank: int) -> float:
    """Seconds of work that a rank lacks to the lower level; where nodes are evened out, as far as its node lacks them, too."""
    level, node = loads.levels[LOW], rank // loads.per_node
    return float(
        min((level - loads.seconds[rank]) * loads.speed[rank], (level - loads.node_seconds[node]) * loads.node_speed[node])
    )


@inner
def _spare(loads: Loads, rank: int, place: int) -> float:
    """Seconds of work that a rank has above a level; where nodes are evened out, as far as its node has them, too."""
    level, node = loads.levels[place], rank // loads.per_node
    return float(
        min((loads.seconds[rank] - level) * loads.speed[rank], (loads.node_seconds[node] - level) * loads.node_speed[node])
    )


@inner
def _emptiest(loads: Loads, first: int, last: int) -> int:
    """Find the emptiest of ranks [first, last) that lack work; -1 if none does."""
    emptiest = -1
    for rank in range(first, last):
        emptier = emptiest < 0 or loads.seconds[rank] < loads.seconds[emptiest]
        if emptier and loads.serves[rank] and _lack(loads, rank) > 0:
            emptiest = rank
    return emptiest


@inner
def _server_for(loads: Loads, source: int, surplus: float) -> int:
    """The emptiest rank that lacks work, or with `near` one in the node of the source that has room for half as much; or -1."""
    near, emptiest = loads.near, _emptiest(loads, loads.span[0], loads.span[1])
    if emptiest < 0 or not near:
        return emptiest
    other = _emptiest(loads, source // near * near, source // near * near + near)
    return other if other >= 0 and _lack(loads, other) >= 0.5 * min(surplus, _lack(loads, emptiest)) else emptiest


@inner
def _slice(prices: Prices, heads: float, span: tuple[int, int], held: int, wish: _Wish) -> _Slice:
    """Cut the tail of rows [start, end) that fulfils a wish of a server with the
    first `held` keys, or else their first rows.

    If neither does, the ratio is inf and the rest means nothing. First rows are taken only if no
    tail fits, because more of them make planning slow.
    """
    (start, end), served, kept = span, prices.served, prices.kept
    # What a server receives it does not compute meanwhile; its home sends it, and is rid of so much less.
    send = (served.row - kept.row) * heads
    whole, whole_kept = slice_seconds(served, heads, start, end), slice_seconds(kept, heads, start, end)
    rid = whole_kept - send * (end - start)
    scale = whole / rid if rid > 0 else 0.0
    most, want = min(wish.over * scale, wish.room), min(min(wish.surplus * scale, wish.room), wish.lack)
    x, y, ratio = start, end, math.inf
    if want <= 0:
        return _Slice(x, y, 0.0, 0.0, ratio)
    if whole > want and whole > min(most, 1.1 * want):
        x = tail_start(served, heads, start, end, want, most)
    shed = added = 0.0
    for _ in range(2):
        shed = whole_kept - slice_seconds(kept, heads, start, x) - slice_seconds(kept, heads, y, end) - send * (y - x)
        needed = max(y - max(held, x - (served.window - 1)), 0)
        added = slice_seconds(served, heads, x, y) - (served.key - kept.key) * heads * (y - needed)
        if 0 < shed <= wish.over and added <= wish.room:
            ratio = heads * (served.query_bytes * (y - x) + served.key_bytes * needed) / shed
            break
        if x == start or want < wish.least_want:
            break
        x, y = start, tail_start(served, heads, start, end, whole - want, math.inf)
        if slice_seconds(kept, heads, start, y) > wish.over:
            y = max((y - 1) // served.grid * served.grid, start)
    return _Slice(x, y, shed, added, ratio)


@inner
def _best_move(
    pieces: QueryPieces, prices: Prices, loads: Loads, ledger: Ledger, asked: tuple[int, int, int, float]
) -> tuple[_Move, _Slice]:
    """Find the move with the fewest bytes per second; its piece is -1 if there is none.

    `asked` holds the source, a server, the level that the source should come down to, and a leeway:
    the part of the work of both that the server may come up to, while the source may end below the
    band. Another server that has keys of a document may get a slice of it instead.
    """
    source, asked_server, aim, leeway = asked
    work, speed, level, holders = loads.seconds, loads.speed, loads.levels, ledger.holders
    move, best = _Move(-1, -1, 0), _Slice(0, 0, 0.0, 0.0, math.inf)
    looked_at = 0
    # Holders that lack much less than the server that was asked would get slivers, in very many moves.
    surplus = _spare(loads, source, aim)
    enough = _LEAST_LACK * min(surplus, _lack(loads, asked_server))
    for piece in range(pieces.offsets[source], pieces.offsets[source + 1]):
        start, end, last = pieces.start[piece], pieces.end[piece], ledger.last[pieces.number[piece]]
        if start >= end:
            continue
        if looked_at >= _LOOKED_AT and move.piece >= 0:
            break
        row = last
        while row >= 0 and holders[row, RANK] != asked_server:
            row = holders[row, BEFORE]
        server, held = asked_server, holders[row, KEYS] if row >= 0 else 0
        row, tried, looked_at = last, 0, looked_at + 1
        while server >= 0:
            room = (max(level[CAP], leeway * (work[source] + work[server])) - work[server]) * speed[server]
            over = room if leeway > 0 else _spare(loads, source, FLOOR)
            lack = _lack(loads, server) if work[server] < level[FLOOR] else math.inf
            wish = _Wish(surplus, over, lack, room, level[CAP] - level[HIGH])
            cut = _slice(prices, pieces.heads[piece], (start, end), held, wish)
            if cut.ratio < best.ratio:
                move, best = _Move(piece, server, max(held, cut.end)), cut
            server = -1
            while row >= 0 and server < 0 and tried < _HOLDERS:
                rank, held, row = holders[row, RANK], holders[row, KEYS], holders[row, BEFORE]
                fits = rank != asked_server and rank != source and work[rank] < level[FLOOR] and _lack(loads, rank) >= enough
                if fits and loads.serves[rank] and loads.span[0] <= rank < loads.span[1]:
                    server, tried = rank, tried + 1
    return move, best


@inner
def _moves_of_group(pieces: QueryPieces, prices: Prices, loads: Loads, ledger: Ledger, givers: tuple[IntArray, int, int]) -> int:
    """Make all moves in a group.

    Return the number of moves then, or -1. `givers` are its
    ranks, its number, and the moves so far.
    """
    order, group, count = givers
    work, speed, level, moves, holders = loads.seconds, loads.speed, loads.levels, ledger.moves, ledger.holders
    shed, grown = 0.0, 0.0
    # First ranks above the band give, and then, while others are below it, those that have more than these should.
    for above, until in ((CAP, HIGH), (LOW, FLOOR)):
        for source in order:
            leeway = 0.0
            while _spare(loads, source, above) > 0:
                surplus = _spare(loads, source, HIGH) if above == CAP and leeway == 0 else math.inf
                server = _server_for(loads, source, surplus)
                if server < 0 or (above == LOW and work[server] >= level[FLOOR]):
                    break
                move, cut = _best_move(pieces, prices, loads, ledger, (source, server, until, leeway))
                if move.piece < 0 or (above == LOW and cut.added > 2.0 * cut.shed):
                    # The shortest slice may be more than the tolerated band is wide. Then a source below it, or a server above it
                    # but lower than the source was, is better than leaving the source as it is.
                    if above == LOW or leeway > 0 or loads.per_node > 1:
                        break
                    leeway = 0.5
                    continue
                if count == len(moves):
                    return -1
                row, number = len(holders) - len(moves) + count, pieces.number[move.piece]
                moves[count, PIECE], moves[count, SERVER] = move.piece, move.server
                moves[count, START], moves[count, END] = cut.start, cut.end
                holders[row, RANK], holders[row, KEYS], holders[row, BEFORE] = move.server, move.keys, ledger.last[number]
                ledger.last[number] = row
                if cut.end < pieces.end[move.piece]:
                    pieces.start[move.piece] = cut.end
                else:
                    pieces.end[move.piece] = cut.start
                leeway, count = 0.0, count + 1
                work[source] -= cut.shed / speed[source]
                work[move.server] += cut.added / speed[move.server]
                home, node = source // loads.per_node, move.server // loads.per_node
                loads.node_seconds[home] -= cut.shed / loads.node_speed[home]
                loads.node_seconds[node] += cut.added / loads.node_speed[node]
                # Levels rise to where they will be when all surplus is moved at the same rate.
                shed, grown = shed + cut.shed, grown + cut.added - cut.shed
                rise = 1 + grown / shed * max(loads.surplus[group], shed) / loads.work[group]
                for place in range(len(level)):
                    level[place] = loads.begin[group, place] * rise
    return count


def _make_moves(pieces: QueryPieces, prices: Prices, loads: Loads, ledger: Ledger, begun: tuple[IntArray, int]) -> int:
    """Make all moves, in one group after another.

    Args:
        pieces: pieces of the layout; they shrink.
        prices: prices of slices.
        loads: work of the ranks; updated.
        ledger: earlier moves, with the homes of pieces of documents that lie on several ranks as
            holders.
        begun: all ranks by groups, in each group the slowest first, and the number of earlier
            moves.

    Returns:
        The number of moves; -1 if the ledger has no room for them.
    """
    order, count = begun
    for group in range(len(loads.surplus)):
        first, last = group * loads.size, (group + 1) * loads.size
        loads.span[0], loads.span[1] = first, last
        for place in range(len(loads.levels)):
            loads.levels[place] = loads.begin[group, place]
        count = _moves_of_group(pieces, prices, loads, ledger, (order[first:last], group, count))
        if count < 0:
            break
    return count


make_moves = compiled(_make_moves, keep=Path(__file__))
