"""The trial for a time T: every rank that would end after T gives away tails of its pieces.

A *part* is a document, or a head group of a document. A *piece* is the rows of a part on one rank,
and a *tail* is the last rows of a piece. A rank gives away tails until it ends by T, and each tail
goes to a rank that then still ends by T. The cheapest possible tail goes first. This is the tail
with the fewest seconds of exchange and of repeated work for each second that its home saves
(`schedule.tails`).

All ranks make the same moves, because this module uses IEEE double arithmetic in a fixed order.
numba compiles the code at the first call. It keeps the machine code next to the source or in the
user's cache, under a name with a hash of the sources. If compilation by numba is disabled, the code
runs in Python and makes the same moves.
"""

from __future__ import annotations

import math

from hf_distca.schedule import slice_cost, tails
from hf_distca.schedule.compiled import compile_function, compile_inner
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.slice_cost import estimate_slice_seconds
from hf_distca.schedule.tails import (
    CLOSE,
    COMPUTE,
    END,
    FIRST,
    HELD,
    HIGH,
    HOLDER,
    HOME,
    KEYS,
    LAST,
    LATEST,
    LEFT_HOME,
    LOW,
    PART,
    PIECE,
    PREVIOUS,
    RANK,
    RECEIVED,
    SEGMENT,
    SENT,
    SERVER,
    SERVES,
    SPEED,
    START,
    STOP,
    USEFUL,
    WIRE,
    Batch,
    end_seconds,
    find_held,
    find_link,
    find_unit,
    is_far,
    weigh_tail,
)

# For one move, a rank tries `_MOST_PIECES` pieces, and further pieces only until it finds a tail.
# As servers, it tries the ranks that end first, and up to `_MOST_HOLDERS` ranks with keys of the
# document.
_MOST_PIECES, _MOST_HOLDERS = 4, 2


@compile_inner
def _update_ends(batch: Batch, rank: int) -> None:
    """Update the end times of a rank and of the ranks that share its link to other nodes."""
    first = find_link(batch, rank)
    for other in range(first, min(first + batch.shared, batch.ranks.shape[1])):
        batch.ranks[END, other] = end_seconds(batch, other)


@compile_inner
def _add_traffic(batch: Batch, source: int, server: int, sent: float, received: float) -> None:
    """Add the bytes that `source` sends and the bytes that `server` receives to the busy seconds of
    their links.
    """
    ranks, far, out, into = batch.ranks, 0, source, server
    if is_far(batch, source, server):
        far, out, into = 1, find_link(batch, source), find_link(batch, server)
    ranks[SENT + far, out] += sent * ranks[WIRE + far, source]
    ranks[RECEIVED + far, into] += received * ranks[WIRE + far, server]


@compile_inner
def _give_keys(batch: Batch, part: int, server: int, start: int, end: int) -> None:
    """Give a server the keys that rows [start, end) of a part need and that the server lacks."""
    held = find_held(batch, part, server)
    if end <= held:
        return
    begin, key_bytes = max(held, start - (batch.cost.window - 1)), batch.cost.key_bytes
    heads, (_, key, _, sent_key) = batch.heads[part], batch.transient
    unit = find_unit(batch, part, server)
    for number in range(batch.parts[part, SEGMENT], batch.parts[part + 1, SEGMENT]):
        segment = batch.segments[number]
        home, low, high = segment[HOME], max(segment[LOW], begin), min(segment[HIGH], end)
        if low >= high:
            continue
        batch.ranks[HELD, server] += heads * key * (high - low)
        if home == server:
            continue
        batch.ranks[HELD, home] += heads * sent_key * (high - low)
        sent = high - low
        if batch.has_relays:
            sent = max(high - max(low, segment[LEFT_HOME + unit]), 0)
            segment[LEFT_HOME + unit] = max(high, segment[LEFT_HOME + unit])
        _add_traffic(
            batch, home, server, heads * key_bytes * sent, heads * key_bytes * (high - low)
        )
        _update_ends(batch, home)
    row = batch.counts[0]
    holder = batch.holders[row]
    holder[RANK], holder[KEYS], holder[PREVIOUS] = server, end, batch.parts[part, HOLDER]
    batch.parts[part, HOLDER] = row
    batch.counts[0] += 1


@compile_inner
def _make_move(batch: Batch, piece: int, source: int, server: int, row: int) -> None:
    """Give rows [row, end) of a piece to a server."""
    cost, ranks, part = batch.cost, batch.ranks, batch.pieces[piece, PART]
    heads, start, end = batch.heads[part], batch.pieces[piece, FIRST], batch.pieces[piece, LAST]
    query, key, sent_query, sent_key = batch.transient
    is_windowed = end >= cost.window  # if so, each moved row needs one more key
    before = estimate_slice_seconds(cost, heads, start, end)
    after = estimate_slice_seconds(cost, heads, start, row)
    ranks[COMPUTE, source] -= (before - after) / ranks[SPEED, source]
    added = estimate_slice_seconds(cost, heads, row, end)
    ranks[COMPUTE, server] += added / ranks[SPEED, server]
    ranks[HELD, server] += (end - row) * heads * (query + key * is_windowed)
    ranks[HELD, source] += (end - row) * heads * (sent_query + sent_key * is_windowed)
    row_bytes = (end - row) * heads * (cost.query_bytes + cost.key_bytes * is_windowed)
    _add_traffic(batch, source, server, row_bytes, row_bytes)
    _give_keys(batch, part, server, end, end)
    move = batch.moves[batch.counts[1]]
    move[PIECE], move[START], move[STOP], move[SERVER] = piece, row, end, server
    batch.counts[1] += 1
    batch.pieces[piece, LAST] = row
    _update_ends(batch, source)
    _update_ends(batch, server)


@compile_inner
def _may_serve(batch: Batch, source: int, server: int, inside: bool) -> bool:
    """Return whether `server` may get tails of `source`."""
    return bool(
        batch.ranks[END, server] < batch.ranks[LATEST, server] * (1 - CLOSE)
        and batch.ranks[SERVES, server]
        and server != source
        and not (inside and is_far(batch, source, server))
    )


@compile_inner
def _find_emptiest(batch: Batch, source: int, first: int, last: int, found: int) -> int:
    """Find the rank that ends first among `found` and the ranks [first, last) that may serve.

    The result is -1 if there is no such rank. `found` is -1 if no rank was found before.
    """
    earliest = math.inf if found < 0 else batch.ranks[END, found]
    for rank in range(first, last):
        if batch.ranks[END, rank] < earliest and _may_serve(batch, source, rank, False):
            earliest, found = batch.ranks[END, rank], rank
    return found


@compile_inner
def _find_move(batch: Batch, source: int, inside: bool) -> tuple[int, int, int]:
    """Find the cheapest tail that a rank can give away.

    Possible servers are the ranks that end first, and ranks that have keys of the document. Return
    the piece (-1 if there is no tail), the server, and the first row of the tail.
    """
    first = source - source % batch.per_node
    last = first + batch.per_node
    near, far = _find_emptiest(batch, source, first, last, -1), -1
    if not inside:
        far = _find_emptiest(batch, source, 0, first, far)
        far = _find_emptiest(batch, source, last, batch.ranks.shape[1], far)
    lowest, best, looked = math.inf, (-1, -1, 0), 0
    for piece in range(batch.offsets[source], batch.offsets[source + 1]):
        if batch.pieces[piece, FIRST] >= batch.pieces[piece, LAST]:
            continue
        if looked >= _MOST_PIECES and best[0] >= 0:
            break
        looked += 1
        holder, server, count = batch.parts[batch.pieces[piece, PART], HOLDER], near, -2
        while count < _MOST_HOLDERS:
            if server >= 0 and (count < 0 or _may_serve(batch, source, server, inside)):
                lost, row = weigh_tail(batch, piece, source, server)
                if lost < lowest:
                    lowest, best = lost, (piece, server, row)
            count += 1
            if count < 0:
                server = far
            elif holder < 0:
                break
            else:
                server, holder = batch.holders[holder, RANK], batch.holders[holder, PREVIOUS]
    return best


@compile_inner
def _give_own_keys(batch: Batch) -> None:
    """Give each rank the keys that its own rows need from other ranks."""
    for rank in range(batch.ranks.shape[1]):
        for piece in range(batch.offsets[rank + 1] - 1, batch.offsets[rank] - 1, -1):
            part, first, last = batch.pieces[piece]
            if batch.parts[part + 1, SEGMENT] - batch.parts[part, SEGMENT] > 1:
                _give_keys(batch, part, rank, first, last)
        _update_ends(batch, rank)


def _make_moves(batch: Batch, order: IntArray, inside: bool) -> None:
    """Make the moves of a trial. The time T of each rank is in `batch.ranks[LATEST]`.

    Args:
        batch: changed by the moves. If a rank still ends after `batch.ranks[USEFUL]`, the trial
            stops, and T becomes infinite for all ranks. If `inside` is true, the trial stops only
            on the node of this rank.
        order: ranks in the order in which they give tails, beginning with the rank that ends last.
            An empty order prepares a batch for its trials: no rank gives tails, but each rank gets
            the keys that its own rows need from other ranks.
        inside: whether ranks give tails only to ranks of their node.
    """
    if not len(order):
        _give_own_keys(batch)
    ranks, count = batch.ranks, -1
    # Repeat, because a move adds traffic to the ranks that send keys for it, and these ranks may
    # then end late.
    while count < batch.counts[1]:
        count = batch.counts[1]
        for rank in order:
            while ranks[END, rank] > ranks[LATEST, rank] and batch.counts[1] < len(batch.moves):
                piece, server, row = _find_move(batch, rank, inside)
                if piece < 0:
                    break
                _make_move(batch, piece, rank, server, row)
            if ranks[END, rank] > ranks[USEFUL, rank]:
                for other in range(ranks.shape[1]):
                    if not (inside and is_far(batch, rank, other)):
                        ranks[LATEST, other] = math.inf


make_moves = compile_function(_make_moves, keep=(__file__, tails.__file__, slice_cost.__file__))
