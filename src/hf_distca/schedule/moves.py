"""The moves of the greedy, one after another; see `schedule.greedy`. All of it is compiled."""

from __future__ import annotations

import math

from hf_distca.schedule.compiled import Ints, compiled, inlined
from hf_distca.schedule.free import change, drop, nearest, server_for, settle
from hf_distca.schedule.pieces import (
    add_piece,
    earlier,
    find_pieces,
    forget,
    furthest_of,
    least,
    next_pieces,
    take_out,
)
from hf_distca.schedule.slices import keys, seconds, slice_of
from hf_distca.schedule.sorting import DOWN, sort
from hf_distca.schedule.state import (
    ABLE,
    ALL,
    CAP,
    END,
    FLOOR,
    FREE,
    GROWN,
    HIGH,
    HOLDERS,
    KEYS,
    KNOWN,
    LAST,
    LOOKED,
    LOOKS,
    LOW,
    MOVES,
    NEXT,
    NUMBER,
    PIECES,
    RANK,
    SEGMENT,
    SHED,
    START,
    SURPLUS,
    UNASKED,
    Fit,
    Holders,
    Move,
    Pieces,
    Servers,
    State,
    hold,
    holder_of,
)

__all__ = ["make_moves"]

# Servers that already hold keys of a document and are looked at for each of its pieces.
_MOST_HOLDERS = 8
# How much more or less than the last one a server may want for what slices cost to be remembered.
_ALIKE = 0.3
# Ranks that a rank below the band asks for work.
_DONORS = 8
# Ranks in a row that no donor has anything for, after which no other asks: with thousands of ranks asking takes long.
_FAILURES = 4


@compiled
def make_moves(state: State, ranks: Ints, scratch: Ints, fills_all: bool) -> bool:
    """All moves, from the state before the first of them.

    Args:
        state: what moves read and change.
        ranks, scratch: room for two numbers of each rank.
        fills_all: whether ranks that are too low take from others, after those that are too high have given.

    Returns:
        Whether the columns of the state were long enough for all moves.
    """
    work = state.servers.work
    sort(ranks, scratch, work, work, DOWN)
    if not _unload(state, ranks):
        return False
    if not fills_all:
        return True
    sort(ranks, scratch, work, work, DOWN)
    return _lift(state, ranks)


@compiled
def _unload(state: State, order: Ints) -> bool:
    """Ranks above the band, in this order, give slices away until they are at their level.

    Returns:
        Whether the columns of the state were long enough for all moves.
    """
    servers = state.servers
    work, level = servers.work, servers.level
    for source in order:
        if work[source] <= level[CAP]:
            break
        while work[source] > level[CAP] and servers.counts[FREE] > 0:
            surplus = (work[source] - level[HIGH]) * servers.speed[source]
            move = _nothing()
            # A tile of rows may be more than the tolerated band is wide. Then a source too low, which `lift` mends, or a server
            # too high, but lower than the source was, is better than leaving the source as it is.
            for leeway in (0.0, 0.5):
                server = servers.free[0] if leeway else server_for(servers, surplus)
                move = _cheapest(state, source, server, surplus, leeway)
                if move.piece >= 0:
                    break
            if move.piece < 0:
                break
            if not _apply(state, move):
                return False
    return True


@compiled
def _lift(state: State, heaviest: Ints) -> bool:
    """Ranks that are still too low take from the heaviest, whichever of those gives for the fewest bytes.

    Args:
        state: after `_unload`.
        heaviest: all ranks in that order. It is kept up to date.

    Returns:
        Whether the columns of the state were long enough for all moves.
    """
    servers, per_node = state.servers, state.prices.per_node
    work, speed, level, count = servers.work, servers.speed, servers.level, servers.counts
    donors, failed = min(_DONORS, len(heaviest)), 0
    while count[FREE] > 0 and work[servers.free[0]] < level[FLOOR] and failed < _FAILURES:
        server, best = servers.free[0], _nothing()
        for at in range(donors + per_node):
            # The heaviest, and then those of the server's node.
            donor = heaviest[at] if at < donors else server // per_node * per_node + at - donors
            if work[donor] <= level[LOW]:
                continue
            want = min((work[donor] - level[FLOOR]) * speed[donor], (level[LOW] - work[server]) * speed[server])
            move = _cheapest(state, donor, server, want, 0.0)
            if move.piece < 0:
                continue
            if best.piece < 0 or (move.bytes_per_second, donor) < (best.bytes_per_second, best.source):
                best = move
        if best.piece < 0:
            failed += 1
            drop(servers, server)
            continue
        failed = 0
        if not _apply(state, best):
            return False
        settle(work, heaviest, best.source)
        settle(work, heaviest, best.server)
    return True


@compiled
def _nothing() -> Move:
    return Move(math.inf, -1, -1, -1, 0, 0, 0.0, 0.0)


@inlined
def _cheaper(p: Pieces, one: Move, other: Move) -> bool:
    """Whether a move exchanges fewer bytes per second moved; if they are equal, the order of servers and of rows decides."""
    if one.piece < 0 or other.piece < 0:
        return one.piece >= 0
    if one.bytes_per_second != other.bytes_per_second:
        return one.bytes_per_second < other.bytes_per_second
    if one.server != other.server or one.piece == other.piece:
        return (one.server, one.start, one.end) < (other.server, other.start, other.end)
    return earlier(p, one.piece, other.piece)


@compiled
def _cheapest(state: State, source: int, server: int, surplus: float, leeway: float) -> Move:
    """The cheapest slice for `server`, or for one that holds keys of a document already.

    With `leeway` it may bring the server up to that part of what both have, and the source below the band; without, the one not
    above it and the other not below.
    """
    p, prices, holders, servers = state.pieces, state.prices, state.holders, state.servers
    if p.first[source] == UNASKED:
        find_pieces(state, source)
    want = min(surplus, servers.level[LOW] - servers.work[server])
    if not p.want[source] * (1 - _ALIKE) <= want <= p.want[source] * (1 + _ALIKE):
        p.want[source] = want
        forget(p, prices, source)
    servers.counts[LOOKS] += 1
    looks, near = servers.counts[LOOKS], nearest(servers, prices.per_node, source, server)
    best, following = _nothing(), -1
    last_start, last_end, last_document = -1, -1, -1
    while True:
        piece, following = (following, -1) if following >= 0 else next_pieces(p, source, looks)
        # No slice of the pieces behind moves a second for fewer bytes, or did when somebody looked.
        if piece < 0 or (best.piece >= 0 and p.ratio[piece] >= best.bytes_per_second):
            return best
        p.rows[piece, LOOKED] = looks
        number = p.rows[piece, NUMBER]
        if prices.parts > 1 and not holders.numbers[number, KNOWN]:
            # Groups of heads of the same rows, which follow each other, are as good as each other.
            document = number // prices.parts
            if last_end == p.rows[piece, END] and last_start == p.rows[piece, START] and last_document == document:
                continue
            last_start, last_end, last_document = p.rows[piece, START], p.rows[piece, END], document
        # The server, one in the node of the source, and some, not too many, that hold keys of the document already.
        found, rank, holder = _nothing(), server, -1
        for turn in range(2 + _MOST_HOLDERS):
            if turn == 1:
                rank = near
            elif turn > 1:
                holder = _next_able(holders, servers, number, holder)
                if holder >= 0 and holders.rows[holder, RANK] == server:
                    holder = _next_able(holders, servers, number, holder)
                if holder < 0:
                    break
                rank = holders.rows[holder, RANK]
            if rank >= 0:
                move = _slice(state, source, piece, rank, surplus, leeway)
                if _cheaper(p, move, found):
                    found = move
        p.ratio[piece] = found.bytes_per_second
        if _cheaper(p, found, best):
            best = found


@inlined
def _next_able(holders: Holders, servers: Servers, number: int, before: int) -> int:
    """Of those that hold keys of a document, the next row whose rank may take work, after the one before; -1 if there is none.

    Whoever has enough stays that way, and is left out from now on.
    """
    at: int = holders.numbers[number, ABLE] - 1 if before < 0 else holders.rows[before, NEXT]
    while at >= 0 and servers.work[holders.rows[at, RANK]] >= servers.level[FLOOR]:
        at = holders.rows[at, NEXT]
    if before < 0:
        holders.numbers[number, ABLE] = at + 1
    else:
        holders.rows[before, NEXT] = at
    if at < 0:
        holders.numbers[number, LAST] = before + 1
    return at


@inlined
def _slice(state: State, source: int, piece: int, server: int, surplus: float, leeway: float) -> Move:
    """The cheapest slice of a piece for a server."""
    p, prices, holders, servers = state.pieces, state.prices, state.holders, state.servers
    start, end, number = p.rows[piece, START], p.rows[piece, END], p.rows[piece, NUMBER]
    grouped = number % prices.parts > 0
    price, own = (prices.group_price, prices.group_own) if grouped else (prices.price, prices.own)
    level, work, speed = servers.level, servers.work[server], servers.speed[server]
    top = max(level[CAP], leeway * (servers.work[source] + work))
    room = (top - work) * speed
    whole, all_own = seconds(price, start, end), seconds(own, start, end)
    over = above = (servers.work[source] - level[FLOOR]) * servers.speed[source]
    if prices.exchanged:
        # The server's seconds are more than those that the source is rid of.
        rid = all_own - (price.row - own.row) * (end - start)
        if rid <= 0:
            return _nothing()
        surplus, above = surplus * whole / rid, above * whole / rid
    want = min(surplus, (level[LOW] - work) * speed if work < level[FLOOR] else room)
    if want <= 0:
        return _nothing()  # levels fell since it was said to have room
    holder = holder_of(holders, number, server)
    held = holders.rows[holder, KEYS] if holder >= 0 else 0
    most = room if leeway else min(above, room)
    if whole <= want or (whole <= most and whole <= 1.1 * want):
        x, y = start, end
    else:
        x, y = slice_of(price, start, end, want, most, held)
    x, y = _fitting(prices.group_fit if grouped else prices.fit, price.window, price.tile, start, x, y)
    if y <= x:
        return _nothing()
    needed = keys(price, x, y, held)
    added = seconds(price, x, y) - (price.key - own.key) * (y - needed)
    shed = all_own - seconds(own, start, x) - seconds(own, y, end) - (price.row - own.row) * (y - x)
    if not 0 < shed <= (room if leeway else over) or added > room:
        return _nothing()
    if x == start and y == end and holders.numbers[number, KNOWN]:
        needed -= _saved(state, source, piece)
    ratio = (price.query_bytes * (y - x) + price.key_bytes * needed) / shed
    if prices.per_node and source // prices.per_node == server // prices.per_node:
        ratio *= price.near
    return Move(ratio, source, server, piece, x, y, shed, added)


@compiled
def _saved(state: State, source: int, piece: int) -> int:
    """K/V tokens that the source no longer needs from others once the whole piece is gone."""
    segments, holders = state.segments, state.holders
    number: int = state.pieces.rows[piece, NUMBER]
    end: int = state.pieces.rows[piece, END]
    holder = holder_of(holders, number, source)
    if holder >= 0 and holders.rows[holder, KEYS] > end:
        return 0
    rest = furthest_of(state.pieces, source, number, piece)
    saved = end - rest
    for segment in range(segments.offsets[source], segments.offsets[source + 1]):
        if segments.place[segment] == number // state.prices.parts:
            saved -= max(0, min(segments.end[segment], end) - max(segments.start[segment], rest))
    return saved


@compiled
def _apply(state: State, move: Move) -> bool:
    """Carry out a move; false if there is no room for it."""
    p, holders, servers, prices = state.pieces, state.holders, state.servers, state.prices
    count, level, total, source = servers.counts, servers.level, servers.total, move.source
    if count[MOVES] == len(state.moves) or count[PIECES] + 2 > len(p.rows) or count[HOLDERS] == len(holders.rows):
        return False
    start, end = p.rows[move.piece, START], p.rows[move.piece, END]
    number, segment = p.rows[move.piece, NUMBER], p.rows[move.piece, SEGMENT]
    take_out(p, source, move.piece)
    for first, last in ((start, move.start), (move.end, end)):
        if first < last:
            rest = add_piece(p, count, source, (first, last, number, segment))
            p.ratio[rest] = least(prices, number, last)
    if prices.price.window == 0:
        hold(holders, count, number, move.server, move.end)
        holder = holder_of(holders, number, source)
        if holder >= 0:
            holders.rows[holder, KEYS] = furthest_of(p, source, number, move.piece)
    row = count[MOVES]
    count[MOVES] += 1
    for place, value in enumerate((segment, number, move.start, move.end, source, move.server)):
        state.moves[row, place] = value
    # A server reads keys that the home reads too, and starts a task more: moving adds work. The levels rise to where they will
    # be when all surplus is moved at the same rate.
    total[SHED] += move.shed
    total[GROWN] += move.added - move.shed
    scale = 1 + total[GROWN] / total[SHED] * max(total[SURPLUS], total[SHED]) / total[ALL]
    for place in range(len(level)):
        level[place] = scale * servers.base[place]
    change(servers, source, -move.shed)
    change(servers, move.server, move.added)
    return True


@compiled
def _fitting(fit: Fit, window: int, tile: int, start: int, x: int, y: int) -> tuple[int, int]:
    """The part of [x, y), in a piece that begins at `start`, that fits a server; empty if no tile of rows does.

    Rows and keys at half of the bound each is the most work. Further back, keys leave less for rows.
    """
    bound, query, key = fit.bound, fit.query, fit.key
    first = 0 if window == 0 else max(0, x - window + 1)
    if bound == 0 or query * (y - x) + key * (y - first) <= bound:
        return x, y
    if window == 0:
        half = bound // (2 * key) // tile * tile
        if max(half, start + tile) < y:
            y = max(half, (start // tile + 1) * tile)
        rows = (bound - key * y) // query
    else:
        rows = max((bound - key * (window - 1)) // (query + key), (bound - key * y) // query)
    x = max(start, -(-(y - rows) // tile) * tile)
    return (x, y) if rows > 0 and x < y else (start, start)
