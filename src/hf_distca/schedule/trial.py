"""The trial for a time T: every rank that would end after T gives tails of its pieces away.

A *part* is a document, or a head group of one; a *piece* is the rows of a part on a rank, and a
tail of it rows [x, end). Each tail goes to a rank that still ends by T with it, until its home ends
by T itself. Of all tails that would do, the cheapest goes first: that with the fewest seconds of
exchange and of repeated work for a second that the home saves. How many rows a server takes, and
how many a home has to give, are solutions of a quadratic equation (`solve_rows`). `end_seconds`
alone knows what a rank waits for.

All ranks make the same moves: this is IEEE double arithmetic in the order in which it is written.
numba compiles it when it is first called, and keeps the machine code beside the source or in the
user's cache, under a name with a hash of the sources. If numba is told to compile nothing, it runs
in Python, and makes the same moves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_distca.schedule import slice_cost
from hf_distca.schedule.compiled import compile_function, compile_inner
from hf_distca.schedule.cost import MarginalCost, TransientBytes
from hf_distca.schedule.layout import BoolArray, FloatArray, IntArray
from hf_distca.schedule.slice_cost import estimate_slice_seconds

# Rows of `Batch.ranks`. Traffic is in seconds that a link is busy, inside a node and, one row
# further, between nodes; that of a shared link stands at the first rank of those that share it.
COMPUTE, SENT, RECEIVED, HELD, END, LATEST = 0, 1, 3, 5, 6, 7
# Columns of `Batch.moves`: a piece, rows [start, end) of its document, and the rank that gets them.
PIECE, START, STOP, SERVER = range(4)
# Columns of `Batch.holders`: a rank that has the first keys of a part, how many, and the row of the
# part's holder before.
RANK, KEYS, PREVIOUS = range(3)
# Columns of `Batch.sent`: nodes where rows of a part lie, by the rest of their number, and others.
UNITS, OTHERS = 9, 8
# Pieces that a rank looks at for a tail, the deepest first, and servers that have keys of each.
_MOST_PIECES, _MOST_HOLDERS = 4, 2
# Part of T by which a rank ends earlier than it has to.
_CLOSE = 0.0005


class Batch(NamedTuple):
    """Pieces and ranks, and the state of a trial.

    Attributes:
        cost: of slices.
        grid: documents are cut at its multiples.
        shared: ranks that share a link between nodes.
        hidden: whether exchanges are hidden behind compute.
        has_relays: whether servers pass keys on, so that a home sends each key once to a unit:
            servers of a node where rows of the document lie, or those of all other nodes.
        transient: bytes that a rank holds for a row and a key that it gets, and sends.
        most_bytes: bytes that a rank may hold.
        heads: (parts,) the part of the heads that each has.
        segments: (parts + 1,) segments of part p are [segments[p], segments[p + 1]).
        first, last, home: (segments,) keys [first, last) lie on rank `home`.
        offsets: (ranks + 1,) pieces of rank r are [offsets[r], offsets[r + 1]), deepest first.
        part, start: (pieces,) the part and the first row of each.
        node, first_of_node: (ranks,), (nodes + 1,) the node of each, and its first rank; all are
            one node if nodes are not told apart.
        speeds, can_serve: (ranks,) the relative speed of each, and whether it may get tails.
        wire, link: (2, ranks) seconds a byte, and the first rank that shares the link: inside a
            node and between nodes.
        ranks: (8, ranks) compute, traffic, transient bytes, end, and T, in seconds.
        end: (pieces,) where the rows end that are left.
        sent: (segments, units) the key before which all have left their home for a unit; the last
            unit are nodes without rows of the part.
        last_holder: (parts,) the last row of `holders`, or -1.
        holders, moves: room for rows.
        counts: (2,) rows of `holders` and of `moves`.
    """

    cost: MarginalCost
    grid: int
    shared: int
    hidden: bool
    has_relays: bool
    transient: TransientBytes
    most_bytes: float
    heads: FloatArray
    segments: IntArray
    first: IntArray
    last: IntArray
    home: IntArray
    offsets: IntArray
    part: IntArray
    start: IntArray
    node: IntArray
    first_of_node: IntArray
    speeds: FloatArray
    can_serve: BoolArray
    wire: FloatArray
    link: IntArray
    ranks: FloatArray
    end: IntArray
    sent: IntArray
    last_holder: IntArray
    holders: IntArray
    moves: IntArray
    counts: IntArray


@compile_inner
def end_seconds(batch: Batch, rank: int) -> float:
    """Return when a rank ends. Its links carry at the same time, and both ways."""
    ranks, link = batch.ranks, batch.link[1, rank]
    exchange = max(
        max(ranks[SENT, rank], ranks[RECEIVED, rank]),
        max(ranks[SENT + 1, link], ranks[RECEIVED + 1, link]),
    )
    compute = ranks[COMPUTE, rank]
    return float(max(compute, exchange) if batch.hidden else compute + exchange)


@compile_inner
def solve_rows(
    cost: MarginalCost, heads: float, end: int, seconds: float, row_seconds: float
) -> float:
    """Return how many rows before position `end` take so many seconds, with `row_seconds` more for
    each; a very large number if all take less.

    Rows that see a whole window are equal. The n rows before a position b have n b - n (n - 1) / 2
    pairs.
    """
    if seconds <= 0:
        return 0.0
    pair = heads * cost.pair
    row = heads * cost.row + pair * (cost.tile - 1) / 2 + row_seconds
    full = max(end - (cost.window - 1), 0)
    full_row = row + heads * cost.key + pair * cost.window
    rest = seconds - full * full_row
    if rest <= 0:
        return seconds / full_row
    linear = pair * (end - full + 0.5) + row
    square = linear * linear - 2 * pair * rest
    if square < 0 or linear <= 0:
        return 1e18
    return full + (linear - math.sqrt(square)) / pair


@compile_inner
def _update_ends(batch: Batch, rank: int) -> None:
    """Update when a rank ends, and those that share its link."""
    first = batch.link[1, rank]
    for other in range(first, min(first + batch.shared, len(batch.speeds))):
        batch.ranks[END, other] = end_seconds(batch, other)


@compile_inner
def _add_traffic(batch: Batch, source: int, server: int, sent: float, received: float) -> None:
    """Add bytes that one rank sends, and that another receives, to their links."""
    far = int(batch.node[source] != batch.node[server])
    wire, link, ranks = batch.wire, batch.link, batch.ranks
    ranks[SENT + far, link[far, source]] += sent * wire[far, source]
    ranks[RECEIVED + far, link[far, server]] += received * wire[far, server]


@compile_inner
def _find_held(batch: Batch, part: int, server: int) -> int:
    """Find how many of the first keys of a part a server has."""
    row = batch.last_holder[part]
    while row >= 0:
        # The last row of a rank is that with the most keys.
        if batch.holders[row, RANK] == server:
            return int(batch.holders[row, KEYS])
        row = batch.holders[row, PREVIOUS]
    return 0


@compile_inner
def _find_unit(batch: Batch, part: int, server: int) -> int:
    """Find the unit of a part that a server belongs to."""
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        if batch.node[batch.home[segment]] == batch.node[server]:
            return int(batch.node[server] % OTHERS)
    return OTHERS


@compile_inner
def _give_keys(batch: Batch, part: int, server: int, start: int, end: int) -> None:
    """Give a server the keys that rows [start, end) of a part need and that it has not."""
    held = _find_held(batch, part, server)
    if end <= held:
        return
    begin, key_bytes = max(held, start - (batch.cost.window - 1)), batch.cost.key_bytes
    heads, (_, key, _, sent_key) = batch.heads[part], batch.transient
    unit = _find_unit(batch, part, server)
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        low, high = max(batch.first[segment], begin), min(batch.last[segment], end)
        if low >= high:
            continue
        home = batch.home[segment]
        batch.ranks[HELD, server] += heads * key * (high - low)
        if home == server:
            continue
        batch.ranks[HELD, home] += heads * sent_key * (high - low)
        sent = high - low
        if batch.has_relays:
            sent = max(high - max(low, batch.sent[segment, unit]), 0)
            batch.sent[segment, unit] = max(high, batch.sent[segment, unit])
        _add_traffic(
            batch, home, server, heads * key_bytes * sent, heads * key_bytes * (high - low)
        )
        _update_ends(batch, home)
    row = batch.counts[0]
    holder = batch.holders[row]
    holder[RANK], holder[KEYS], holder[PREVIOUS] = server, end, batch.last_holder[part]
    batch.last_holder[part] = row
    batch.counts[0] += 1


@compile_inner
def _make_move(batch: Batch, piece: int, source: int, server: int, row: int) -> None:
    """Give rows [row, end) of a piece to a server."""
    cost, ranks, part, end = batch.cost, batch.ranks, batch.part[piece], batch.end[piece]
    heads, start = batch.heads[part], batch.start[piece]
    query, _, sent_query, _ = batch.transient
    before = estimate_slice_seconds(cost, heads, start, end)
    after = estimate_slice_seconds(cost, heads, start, row)
    ranks[COMPUTE, source] -= (before - after) / batch.speeds[source]
    added = estimate_slice_seconds(cost, heads, row, end)
    ranks[COMPUTE, server] += added / batch.speeds[server]
    ranks[HELD, server] += (end - row) * heads * query
    ranks[HELD, source] += (end - row) * heads * sent_query
    row_bytes = (end - row) * heads * cost.query_bytes
    _add_traffic(batch, source, server, row_bytes, row_bytes)
    _give_keys(batch, part, server, row, end)
    move = batch.moves[batch.counts[1]]
    move[PIECE], move[START], move[STOP], move[SERVER] = piece, row, end, server
    batch.counts[1] += 1
    batch.end[piece] = row
    _update_ends(batch, source)
    _update_ends(batch, server)


class _Links(NamedTuple):
    """Seconds of the links of a home and of a server, with the keys that a tail needs.

    Attributes:
        arrive, leave: of the link by which rows arrive at the server, and leave the home.
        other_arrive, other_leave: of the busiest other link of the server, and of the home.
        row_arrive, row_leave: of each row.
        key_seconds, keys: of all keys that the server receives; how many it has not.
    """

    arrive: float
    leave: float
    other_arrive: float
    other_leave: float
    row_arrive: float
    row_leave: float
    key_seconds: float
    keys: int


@compile_inner
def _weigh_links(batch: Batch, piece: int, source: int, server: int) -> _Links:
    """Weigh the links of a tail that a server gets."""
    ranks, wire, cost, part = batch.ranks, batch.wire, batch.cost, batch.part[piece]
    end, node = batch.end[piece], batch.node[server]
    begin = max(_find_held(batch, part, server), end - (cost.window - 1))
    near, far, near_sent, far_sent, keys = 0, 0, 0, 0, 0
    unit = _find_unit(batch, part, server)
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        home = batch.home[segment]
        is_far = batch.node[home] != node
        low, high = max(batch.first[segment], begin), min(batch.last[segment], end)
        count = max(high - low, 0)
        sent = max(high - max(low, batch.sent[segment, unit]), 0) * (home == source)
        keys += count
        near += count * (home != server and not is_far)
        far += count * is_far
        near_sent += sent * (home != server and not is_far)
        far_sent += sent * is_far
    key_bytes, into, out = (
        batch.heads[part] * cost.key_bytes,
        batch.link[1, server],
        batch.link[1, source],
    )
    near_seconds, far_seconds = (
        near * key_bytes * wire[0, server],
        far * key_bytes * wire[1, server],
    )
    arrive, other_arrive = (
        ranks[RECEIVED, server] + near_seconds,
        ranks[RECEIVED + 1, into] + far_seconds,
    )
    leave = ranks[SENT, source] + near_sent * key_bytes * wire[0, source]
    other_leave = ranks[SENT + 1, out] + far_sent * key_bytes * wire[1, source]
    level = int(batch.node[source] != node)
    if level:
        arrive, other_arrive, leave, other_leave = other_arrive, arrive, other_leave, leave
    # With a window, each row needs a key more.
    row_bytes = batch.heads[part] * (cost.query_bytes + cost.key_bytes * (end > cost.window))
    return _Links(
        arrive,
        leave,
        max(other_arrive, max(ranks[SENT, server], ranks[SENT + 1, into])),
        max(other_leave, max(ranks[RECEIVED, source], ranks[RECEIVED + 1, out])),
        row_bytes * wire[level, server],
        row_bytes * wire[level, source],
        near_seconds + far_seconds,
        keys,
    )


@compile_inner
def _count_taken(batch: Batch, piece: int, source: int, server: int, links: _Links) -> float:
    """Count the rows of a tail that its server can take and end by T."""
    cost, ranks, end, speed = batch.cost, batch.ranks, batch.end[piece], batch.speeds[server]
    heads, latest = batch.heads[batch.part[piece]], ranks[LATEST, server]
    spare = latest - ranks[COMPUTE, server]
    fixed = cost.task + heads * cost.key * min(end, cost.window - 1)
    if batch.hidden:
        if max(links.other_arrive, max(links.arrive, links.leave)) >= latest:
            return 0.0
        rows = min(
            solve_rows(cost, heads, end, spare * speed - fixed, 0.0),
            min(
                (latest - links.arrive) / links.row_arrive, (latest - links.leave) / links.row_leave
            ),
        )
    else:
        idle, busy = (spare - links.other_arrive) * speed, (spare - links.arrive) * speed
        rows = min(
            solve_rows(cost, heads, end, idle - fixed, 0.0),
            solve_rows(cost, heads, end, busy - fixed, links.row_arrive * speed),
        )
    if batch.most_bytes < math.inf:
        query, key, sent_query, sent_key = batch.transient
        is_windowed = end > cost.window
        room = batch.most_bytes - ranks[HELD, server] - heads * key * links.keys
        sent = batch.most_bytes - ranks[HELD, source] - heads * sent_key * links.keys
        rows = min(
            rows,
            min(
                room / (heads * (query + key * is_windowed)),
                sent / (heads * (sent_query + sent_key * is_windowed)),
            ),
        )
    return float(rows)


@compile_inner
def _count_given(batch: Batch, piece: int, source: int, goal: float, links: _Links) -> float:
    """Count the rows of a tail that its home has to give to end at its goal."""
    cost, heads, end = batch.cost, batch.heads[batch.part[piece]], batch.end[piece]
    speed, key = batch.speeds[source], heads * cost.key
    excess = batch.ranks[COMPUTE, source] - goal
    if batch.hidden:
        return solve_rows(cost, heads, end, excess * speed, key)
    idle, busy = (excess + links.other_leave) * speed, (excess + links.leave) * speed
    return max(
        solve_rows(cost, heads, end, idle, key),
        solve_rows(cost, heads, end, busy, key - links.row_leave * speed),
    )


@compile_inner
def _weigh_tail(batch: Batch, piece: int, source: int, server: int) -> tuple[float, int]:
    """Return the seconds that are lost for a second that the source saves, and the first row of the
    tail; inf if no tail gains enough.
    """
    cost, ranks, heads = batch.cost, batch.ranks, batch.heads[batch.part[piece]]
    start, end = batch.start[piece], batch.end[piece]
    goal = ranks[LATEST, source] * (1 - _CLOSE)
    links = _weigh_links(batch, piece, source, server)
    # From the grid's line after which the server can take all, or from that before which the source
    # need not give any.
    first = end - _count_taken(batch, piece, source, server, links)
    row = start if first <= start else int(-(-first // batch.grid)) * batch.grid
    wanted = end - _count_given(batch, piece, source, goal, links)
    if wanted > row:
        row = max(row, int(wanted // batch.grid) * batch.grid)
    if row >= end:
        return math.inf, row
    added = estimate_slice_seconds(cost, heads, row, end)
    removed = estimate_slice_seconds(cost, heads, start, end) - estimate_slice_seconds(
        cost, heads, start, row
    )
    leave = max(links.other_leave, links.leave + (end - row) * links.row_leave)
    compute = ranks[COMPUTE, source] - removed / batch.speeds[source]
    gain = ranks[END, source] - (max(compute, leave) if batch.hidden else compute + leave)
    excess, latest = ranks[END, source] - goal, ranks[LATEST, server]
    enough = 0.05 * min(excess, latest - ranks[END, server]) + 0.001 * latest
    if gain <= 0 or gain < min(enough, 0.9 * excess):
        return math.inf, row
    lost = (end - row) * links.row_arrive + links.key_seconds + max(added - removed, 0.0)
    return lost / gain, row


@compile_inner
def _may_serve(batch: Batch, source: int, server: int, inside: bool) -> bool:
    """Return whether a rank may get tails of another."""
    return bool(
        batch.ranks[END, server] < batch.ranks[LATEST, server] * (1 - _CLOSE)
        and batch.can_serve[server]
        and server != source
        and (batch.node[server] == batch.node[source] or not inside)
    )


@compile_inner
def _find_emptiest(batch: Batch, source: int, first: int, last: int, found: int) -> int:
    """Find which of ranks [first, last) and `found` ends first and may serve; -1 for none."""
    earliest = math.inf if found < 0 else batch.ranks[END, found]
    for rank in range(first, last):
        if batch.ranks[END, rank] < earliest and _may_serve(batch, source, rank, False):
            earliest, found = batch.ranks[END, rank], rank
    return found


@compile_inner
def _find_move(batch: Batch, source: int, inside: bool) -> tuple[int, int, int]:
    """Find the cheapest tail of all pieces of a rank, for the emptiest ranks and for those that
    have keys of its document: its piece, or -1, the server and the first row.
    """
    node = batch.node[source]
    first, last = batch.first_of_node[node], batch.first_of_node[node + 1]
    near, far = _find_emptiest(batch, source, first, last, -1), -1
    if not inside:
        far = _find_emptiest(batch, source, 0, first, far)
        far = _find_emptiest(batch, source, last, len(batch.speeds), far)
    lowest, best, looked = math.inf, (-1, -1, 0), 0
    for piece in range(batch.offsets[source], batch.offsets[source + 1]):
        if batch.start[piece] >= batch.end[piece]:
            continue
        if looked >= _MOST_PIECES and best[0] >= 0:
            break
        looked += 1
        holder, server, count = batch.last_holder[batch.part[piece]], near, -2
        while count < _MOST_HOLDERS:
            if server >= 0 and (count < 0 or _may_serve(batch, source, server, inside)):
                lost, row = _weigh_tail(batch, piece, source, server)
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
    """Give all ranks the keys of others that their own rows need."""
    for rank in range(len(batch.speeds)):
        for piece in range(batch.offsets[rank + 1] - 1, batch.offsets[rank] - 1, -1):
            part = batch.part[piece]
            if batch.segments[part + 1] - batch.segments[part] > 1:
                _give_keys(batch, part, rank, batch.start[piece], batch.end[piece])
        _update_ends(batch, rank)


def _make_moves(batch: Batch, order: IntArray, useful: float, inside: bool) -> bool:
    """Make the moves of a trial; the times T of all ranks are `batch.ranks[LATEST]`.

    Args:
        batch: changed by the moves.
        order: ranks in the order in which they give, the latest first. If there is none, all get
            the keys of others that their own rows need, which precedes all trials.
        useful: seconds after which no rank may end for the trial to be of use.
        inside: whether ranks give only to ranks of their node.

    Returns:
        Whether it is of use.
    """
    if not len(order):
        _give_own_keys(batch)
    ranks, count = batch.ranks, -1
    # Again, as ranks whose keys others gave away may be late.
    while count < batch.counts[1]:
        count = batch.counts[1]
        for rank in order:
            while ranks[END, rank] > ranks[LATEST, rank] and batch.counts[1] < len(batch.moves):
                piece, server, row = _find_move(batch, rank, inside)
                if piece < 0:
                    break
                _make_move(batch, piece, rank, server, row)
            if ranks[END, rank] > useful:
                return False
    return True


make_moves = compile_function(_make_moves, keep=(__file__, slice_cost.__file__))
