"""The moves of the greedy, one after another; see `schedule.greedy`. All of it is compiled."""

from __future__ import annotations

import math
from typing import Any

from hf_distca.schedule.compiled import compiled, entry
from hf_distca.schedule.slices import keys, least_bytes, most_seconds, seconds, slice_of
from hf_distca.schedule.state import (
    ALL,
    CAP,
    FLOOR,
    FREE,
    GONE,
    GROWN,
    HIGH,
    HOLDERS,
    LOOKS,
    LOW,
    MEAN,
    MOVES,
    PIECES,
    SHED,
    SURPLUS,
    UNASKED,
    Move,
    State,
    hold,
    holder_of,
)

__all__ = ["hold_all", "lift", "unload"]

# Servers that already hold keys of a document and are looked at for each of its pieces.
_HOLDERS = 8
# How much more or less than the last one a server may want for what slices cost to be remembered.
_ALIKE = 0.3
# Ranks that a rank below the band asks for work.
_DONORS = 8
# Ranks in a row that no donor has anything for, after which no other asks: with thousands of ranks asking takes long.
_FAILURES = 4

@entry
def hold_all(state: State, segments: Any) -> None:
    """Note which keys the homes of these segments, in the order of the layout, need anyway."""
    source = 0
    for segment in segments:
        while state.offsets[source + 1] <= segment:
            source += 1
        for number in _numbers(state, segment):
            hold(state.holders, state.count, number, source, state.end[segment])


@compiled
def _numbers(state: State, segment: int) -> range:
    """The numbers that the document of a segment has: its own, or those of its head groups."""
    first = state.document[segment] * state.parts
    return range(first + 1, first + state.parts) if state.apart[segment] else range(first, first + 1)


@entry
def unload(state: State, order: Any) -> bool:
    """Ranks above the band, in this order, give slices away until they are at their level.

    Returns:
        Whether the columns of the state were long enough for all moves.
    """
    for source in order:
        if state.work[source] <= state.level[CAP]:
            break
        while state.work[source] > state.level[CAP] and state.count[FREE] > 0:
            surplus = (state.work[source] - state.level[HIGH]) * state.speed[source]
            move = _cheapest(state, source, _server_for(state, surplus), surplus, True)
            if move.piece < 0:
                # A tile of rows may be more than the tolerated band is wide. Then a source too low, which `lift` mends, or a
                # server too high, but lower than the source was, is better than leaving the source as it is.
                move = _cheapest(state, source, state.free[0], surplus, False)
            if move.piece < 0:
                break
            if not _apply(state, source, move):
                return False
    return True


@entry
def lift(state: State, heaviest: Any) -> bool:
    """Ranks that are still too low take from the heaviest, whichever of those gives for the fewest bytes.

    Args:
        state: after `unload`.
        heaviest: all ranks in that order. It is kept up to date.

    Returns:
        Whether the columns of the state were long enough for all moves.
    """
    work, speed, level = state.work, state.speed, state.level
    failed = 0
    while state.count[FREE] > 0 and work[state.free[0]] < level[FLOOR] and failed < _FAILURES:
        server = state.free[0]
        donors = min(_DONORS, len(heaviest))
        giver, best = -1, Move(math.inf, -1, -1, 0, 0, 0.0, 0.0)
        for at in range(donors + state.per_node):
            # The heaviest, and then those of the server's node.
            donor = heaviest[at] if at < donors else server // state.per_node * state.per_node + at - donors
            if work[donor] <= level[LOW]:
                continue
            want = min((work[donor] - level[FLOOR]) * speed[donor], (level[LOW] - work[server]) * speed[server])
            move = _cheapest(state, donor, server, want, True)
            if move.piece >= 0 and (giver < 0 or (move.bytes_per_second, donor) < (best.bytes_per_second, giver)):
                giver, best = donor, move
        if giver < 0:
            failed += 1
            _drop(state, 0)
            continue
        failed = 0
        if not _apply(state, giver, best):
            return False
        _settle(work, heaviest, giver)
        _settle(work, heaviest, best.server)
    return True


@compiled
def _settle(work: Any, heaviest: Any, rank: int) -> None:
    """Bring a rank whose work has changed to its place among the heaviest."""
    at = 0
    while heaviest[at] != rank:
        at += 1
    while at > 0 and (-work[rank], rank) < (-work[heaviest[at - 1]], heaviest[at - 1]):
        heaviest[at] = heaviest[at - 1]
        at -= 1
    while at + 1 < len(heaviest) and (-work[heaviest[at + 1]], heaviest[at + 1]) < (-work[rank], rank):
        heaviest[at] = heaviest[at + 1]
        at += 1
    heaviest[at] = rank


@compiled
def _free_at(state: State, work: float, rank: int) -> int:
    """Where in `free` a rank with so much work stands, or would stand."""
    low, high = 0, state.count[FREE]
    while low < high:
        middle = (low + high) // 2
        if (state.work[state.free[middle]], state.free[middle]) < (work, rank):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _drop(state: State, at: int) -> None:
    state.count[FREE] -= 1
    for place in range(at, state.count[FREE]):
        state.free[place] = state.free[place + 1]


@compiled
def _change(state: State, rank: int, moved: float) -> None:
    """A rank has so many seconds of work more."""
    at = _free_at(state, state.work[rank], rank)
    if at < state.count[FREE] and state.free[at] == rank:
        _drop(state, at)
    state.work[rank] += moved / state.speed[rank]
    if state.work[rank] < state.level[MEAN]:
        at = _free_at(state, state.work[rank], rank)
        for place in range(state.count[FREE], at, -1):
            state.free[place] = state.free[place - 1]
        state.free[at] = rank
        state.count[FREE] += 1


@compiled
def _server_for(state: State, surplus: float) -> int:
    """A server that the surplus fits exactly, or else the emptiest."""
    work, speed, level = state.work, state.speed, state.level
    emptiest = state.free[0]
    if (level[LOW] - work[emptiest]) * speed[emptiest] > surplus:
        at = _free_at(state, level[FLOOR] - surplus, -1)
        if at < state.count[FREE]:
            fits = state.free[at]
            if work[fits] + surplus / speed[fits] <= level[CAP]:
                return fits
    return emptiest


@compiled
def _near(state: State, source: int, but: int) -> int:
    """The emptiest server in the node of the source, if it may take work; -1 if not, or if nodes do not matter."""
    best = -1
    first = source // max(state.per_node, 1) * state.per_node
    for rank in range(first, first + state.per_node):
        if rank != but and state.work[rank] < state.level[FLOOR] and (best < 0 or state.work[rank] < state.work[best]):
            best = rank
    return best


@compiled
def _add_piece(state: State, source: int, start: int, end: int, number: int, segment: int) -> None:
    pieces, row = state.pieces, state.count[PIECES]
    state.count[PIECES] += 1
    pieces.start[row], pieces.end[row], pieces.number[row], pieces.segment[row] = start, end, number, segment
    pieces.after[row], pieces.looked[row] = state.first[source], 0
    pieces.ratio[row] = _least(state, row)
    state.first[source] = row


@compiled
def _find_pieces(state: State, source: int) -> None:
    """The pieces of a rank that nobody has asked so far."""
    state.first[source] = -1
    for segment in range(state.offsets[source] + state.context[source], state.offsets[source + 1]):
        for number in _numbers(state, segment):
            _add_piece(state, source, state.start[segment], state.end[segment], number, segment)


@compiled
def _least(state: State, piece: int) -> float:
    """Bytes that are exchanged at least for a second moved with a slice of a piece."""
    price = state.group_price if state.pieces.number[piece] % state.parts else state.price
    near = price.near if state.per_node else 1.0
    return near * least_bytes(price) / most_seconds(price, state.pieces.end[piece])


@compiled
def _earlier(state: State, one: int, other: int) -> bool:
    """Whether a piece comes before another that is as cheap: deeper rows first."""
    p = state.pieces
    a = (-p.end[one], p.start[one], p.number[one], p.segment[one])
    return a < (-p.end[other], p.start[other], p.number[other], p.segment[other])


@compiled
def _next_piece(state: State, source: int) -> int:
    """Of the pieces of a rank that were not looked at this time, the one that seems cheapest; -1 if there is none."""
    p, best = state.pieces, -1
    at = state.first[source]
    while at >= 0:
        if p.looked[at] != state.count[LOOKS] and (
            best < 0 or p.ratio[at] < p.ratio[best] or (p.ratio[at] == p.ratio[best] and _earlier(state, at, best))
        ):
            best = at
        at = p.after[at]
    return best


@compiled
def _cheaper(state: State, one: Move, other: Move) -> bool:
    """Whether a move exchanges fewer bytes per second moved; if they are equal, the order of servers and of rows decides."""
    if one.piece < 0 or other.piece < 0:
        return one.piece >= 0
    if one.bytes_per_second != other.bytes_per_second:
        return one.bytes_per_second < other.bytes_per_second
    if one.server != other.server or one.piece == other.piece:
        return (one.server, one.start, one.end) < (other.server, other.start, other.end)
    return _earlier(state, one.piece, other.piece)


@compiled
def _cheapest(state: State, source: int, server: int, surplus: float, strict: bool) -> Move:
    """The cheapest slice for `server`, or for one that holds keys of a document already.

    If `strict`, none that brings the source below the band or the server above it.
    """
    p, level = state.pieces, state.level
    want = min(surplus, level[LOW] - state.work[server])
    if state.first[source] == UNASKED:
        _find_pieces(state, source)
    if not state.want[source] * (1 - _ALIKE) <= want <= state.want[source] * (1 + _ALIKE):
        state.want[source] = want
        at = state.first[source]
        while at >= 0:
            p.ratio[at] = _least(state, at)
            at = p.after[at]
    state.count[LOOKS] += 1
    near = _near(state, source, server)
    best = Move(math.inf, -1, -1, 0, 0, 0.0, 0.0)
    last_start, last_end, last_document = -1, -1, -1
    while True:
        piece = _next_piece(state, source)
        # No slice of the pieces behind moves a second for fewer bytes, or did when somebody looked.
        if piece < 0 or (best.piece >= 0 and p.ratio[piece] >= best.bytes_per_second):
            return best
        p.looked[piece] = state.count[LOOKS]
        number = p.number[piece]
        if state.parts > 1 and not state.holders.known[number]:
            # Groups of heads of the same rows, which follow each other, are as good as each other.
            document = number // state.parts
            if last_end == p.end[piece] and last_start == p.start[piece] and last_document == document:
                continue
            last_start, last_end, last_document = p.start[piece], p.end[piece], document
        found = _slice(state, source, piece, server, surplus, strict)
        if near >= 0:
            other = _slice(state, source, piece, near, surplus, strict)
            if _cheaper(state, other, found):
                found = other
        at, looked = _able(state, number, -1), 0
        # Servers, not too many, that hold keys of the document already.
        while at >= 0 and looked < _HOLDERS:
            rank = state.holders.rank[at]
            if rank != server:
                looked += 1
                other = _slice(state, source, piece, rank, surplus, strict)
                if _cheaper(state, other, found):
                    found = other
            at = _able(state, number, at)
        p.ratio[piece] = found.bytes_per_second
        if _cheaper(state, found, best):
            best = found


@compiled
def _able(state: State, number: int, before: int) -> int:
    """Of those that hold keys of a document, the next row whose rank may take work, after the one before; -1 if there is none.

    Whoever has enough stays that way, and is left out from now on.
    """
    holders = state.holders
    at = holders.able[number] - 1 if before < 0 else holders.after[before]
    while at >= 0 and state.work[holders.rank[at]] >= state.level[FLOOR]:
        at = holders.after[at]
    if before < 0:
        holders.able[number] = at + 1
    else:
        holders.after[before] = at
    if at < 0:
        holders.last[number] = before + 1
    return at


@compiled
def _slice(state: State, source: int, piece: int, server: int, surplus: float, strict: bool) -> Move:
    """The cheapest slice of a piece for a server."""
    nothing = Move(math.inf, -1, -1, 0, 0, 0.0, 0.0)
    start, end, number = state.pieces.start[piece], state.pieces.end[piece], state.pieces.number[piece]
    price, own = (state.group_price, state.group_own) if number % state.parts else (state.price, state.own)
    level, work, speed = state.level, state.work[server], state.speed[server]
    top = level[CAP] if strict else max(level[CAP], (state.work[source] + work) / 2)
    room = (top - work) * speed
    whole, all_own = seconds(price, start, end), seconds(own, start, end)
    over = above = (state.work[source] - level[FLOOR]) * state.speed[source]
    if state.exchanged:
        # The server's seconds are more than those that the source is rid of.
        rid = all_own - (price.row - own.row) * (end - start)
        if rid <= 0:
            return nothing
        surplus, above = surplus * whole / rid, above * whole / rid
    want = min(surplus, (level[LOW] - work) * speed if work < level[FLOOR] else room)
    if want <= 0:
        return nothing  # levels fell since it was said to have room
    holder = holder_of(state.holders, number, server)
    held = state.holders.keys[holder] if holder >= 0 else 0
    most = min(above, room) if strict else room
    if whole <= want or (whole <= most and whole <= 1.1 * want):
        x, y = start, end
    else:
        x, y = slice_of(price, start, end, want, most, held)
    x, y = _fitting(state, start, x, y)
    if y <= x:
        return nothing
    needed = keys(price, x, y, held)
    added = seconds(price, x, y) - (price.key - own.key) * (y - needed)
    shed = all_own - seconds(own, start, x) - seconds(own, y, end) - (price.row - own.row) * (y - x)
    if not 0 < shed <= (over if strict else room) or added > room:
        return nothing
    if x == start and y == end and state.holders.known[number]:
        needed -= _saved(state, source, piece)
    ratio = (price.query_bytes * (y - x) + price.key_bytes * needed) / shed
    if state.per_node and source // state.per_node == server // state.per_node:
        ratio *= price.near
    return Move(ratio, server, piece, x, y, shed, added)


@compiled
def _furthest(state: State, source: int, number: int, but: int) -> int:
    """The last row of a document that a rank still computes, apart from one piece."""
    p, furthest = state.pieces, 0
    at = state.first[source]
    while at >= 0:
        if p.number[at] == number and at != but:
            furthest = max(furthest, p.end[at])
        at = p.after[at]
    return furthest


@compiled
def _saved(state: State, source: int, piece: int) -> int:
    """K/V tokens that the source no longer needs from others once the whole piece is gone."""
    number, end = state.pieces.number[piece], state.pieces.end[piece]
    holder = holder_of(state.holders, number, source)
    if holder >= 0 and state.holders.keys[holder] > end:
        return 0
    rest = _furthest(state, source, number, piece)
    saved = end - rest
    for segment in range(state.offsets[source], state.offsets[source + 1]):
        if state.document[segment] == number // state.parts:
            saved -= max(0, min(state.end[segment], end) - max(state.start[segment], rest))
    return saved


@compiled
def _apply(state: State, source: int, move: Move) -> bool:
    """Carry out a move; false if there is no room for it."""
    p, holders, count, total = state.pieces, state.holders, state.count, state.total
    if count[MOVES] == len(state.moves[0]) or count[PIECES] + 2 > len(p.start) or count[HOLDERS] == len(holders.rank):
        return False
    piece = move.piece
    start, end, number, segment = p.start[piece], p.end[piece], p.number[piece], p.segment[piece]
    before, at = -1, state.first[source]
    while at != piece:
        before, at = at, p.after[at]
    if before < 0:
        state.first[source] = p.after[piece]
    else:
        p.after[before] = p.after[piece]
    p.segment[piece] = GONE
    if start < move.start:
        _add_piece(state, source, start, move.start, number, segment)
    if move.end < end:
        _add_piece(state, source, move.end, end, number, segment)
    if state.price.window == 0:
        hold(holders, count, number, move.server, move.end)
        holder = holder_of(holders, number, source)
        if holder >= 0:
            holders.keys[holder] = _furthest(state, source, number, -1)
    row = count[MOVES]
    count[MOVES] += 1
    for column, value in zip(state.moves, (segment, number, move.start, move.end, source, move.server)):
        column[row] = value
    # A server reads keys that the home reads too, and starts a task more: moving adds work. The levels rise to where they will
    # be when all surplus is moved at the same rate.
    total[SHED] += move.shed
    total[GROWN] += move.added - move.shed
    scale = 1 + total[GROWN] / total[SHED] * max(total[SURPLUS], total[SHED]) / total[ALL]
    for place in range(len(state.level)):
        state.level[place] = scale * state.base[place]
    _change(state, source, -move.shed)
    _change(state, move.server, move.added)
    return True


@compiled
def _fitting(state: State, start: int, x: int, y: int) -> tuple[int, int]:
    """The part of [x, y), in a piece that begins at `start`, that fits a server; empty if no tile of rows does.

    Rows and keys at half of the bound each is the most work. Further back, keys leave less for rows.
    """
    (bound, query, key), window, tile = state.fit, state.price.window, state.price.tile
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
