"""Choice of tails for `schedule.trial`. A tail is the rows that a rank gives to a server in one
move: the last rows of a piece of a document. The functions choose the length of a tail, and
estimate what its move costs and gains.

Only `end_seconds` combines compute and exchange into the time at which a rank ends. `solve_rows`
solves a quadratic equation. It gives the number of rows that a server can take, and the number that
a home must give away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_distca.schedule.compiled import compile_inner
from hf_distca.schedule.cost import ALL_KEYS, MarginalCost, TransientBytes
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.schedule.slice_cost import estimate_slice_seconds

# Rows of `Batch.ranks`. SENT, RECEIVED and WIRE have two rows each: the first is for links inside
# nodes, the second for links between nodes. The seconds that a shared link is busy are in the
# column of the first rank that shares it.
COMPUTE, SENT, RECEIVED, HELD, END, LATEST, USEFUL, SPEED, WIRE, SERVES, ROWS = (
    *(0, 1, 3, 5, 6, 7, 8, 9, 10, 12, 13),
)
# Columns of `Batch.parts`, `Batch.segments` and `Batch.pieces`.
SEGMENT, HOLDER = range(2)
LOW, HIGH, HOME, LEFT_HOME = range(4)
PART, FIRST, LAST = range(3)
# Columns of `Batch.moves`: a piece, rows [start, end) of its document, and the rank that gets them.
PIECE, START, STOP, SERVER = range(4)
# Columns of `Batch.holders`: a rank that has the first keys of a part, the number of these keys,
# and the index of the row with the part's previous holder.
RANK, KEYS, PREVIOUS = range(3)
# The servers of a part form UNITS units. A server on node n belongs to unit n % OTHERS if node n
# has rows of the part, else to the last unit, OTHERS.
UNITS, OTHERS = 9, 8
# Ranks aim to end slightly before T, earlier by this fraction of T.
CLOSE = 0.0005


class Batch(NamedTuple):
    """Parts and pieces of documents (see `schedule.trial`), ranks, and the state of a trial.

    Attributes:
        cost: marginal cost of slices.
        transient: bytes of memory that a query row and a key take on the rank that gets them, and
            on the rank that sends them.
        most_bytes: the most transient bytes that a rank may hold.
        grid: documents are cut at multiples of this number.
        per_node: number of ranks of a node; all ranks if nodes are not told apart.
        shared: number of ranks that share a link between nodes.
        hidden: whether exchanges are hidden behind compute.
        has_relays: whether servers forward keys, so that a home sends each key only once to each
            unit. A unit is the servers of a node where rows of the document lie, or the servers of
            all other nodes.
        heads: (parts,) fraction of the heads that each part has.
        offsets: (ranks + 1,) rank r has pieces [offsets[r], offsets[r + 1]), in decreasing order of
            their last positions.
        parts: (parts + 1, 2) the first segment of each part, and the part's newest row in `holders`
            (-1 for no row). The segments of a part end where the segments of the next part begin.
        segments: (segments, 3 + units) low, high and home: keys [low, high) of a part lie on rank
            home. Then, for each unit, the position up to which home has sent these keys to it.
        pieces: (pieces, 3) the part of each piece, and its rows [first, last) that are not moved.
        ranks: (13, ranks) seconds of compute and traffic; transient bytes; end, T, and the latest
            useful end in seconds; relative speed; seconds of a byte on each link; and 1 for ranks
            that may get tails.
        holders, moves: arrays with room for new rows.
        counts: (2,) number of rows in `holders` and in `moves`.
    """

    cost: MarginalCost
    transient: TransientBytes
    most_bytes: float
    grid: int
    per_node: int
    shared: int
    hidden: bool
    has_relays: bool
    heads: FloatArray
    offsets: IntArray
    parts: IntArray
    segments: IntArray
    pieces: IntArray
    ranks: FloatArray
    holders: IntArray
    moves: IntArray
    counts: IntArray


@compile_inner
def is_far(batch: Batch, rank: int, other: int) -> bool:
    """Return whether two ranks are on different nodes."""
    return rank // batch.per_node != other // batch.per_node


@compile_inner
def find_link(batch: Batch, rank: int) -> int:
    """Find the first rank that shares a rank's link to other nodes."""
    return rank - rank % batch.per_node % batch.shared


@compile_inner
def end_seconds(batch: Batch, rank: int) -> float:
    """Return the time at which a rank ends, in seconds. All its links work at the same time, and in
    both directions at once.
    """
    ranks, link = batch.ranks, find_link(batch, rank)
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
    """Return how many rows before position `end` take `seconds` together. The time of a row is its
    compute plus `row_seconds`.

    The result is a very large number if all rows before `end` together take less. All rows that see
    a whole window cost the same. Without a window, the n rows before position b have
    n b - n (n - 1) / 2 pairs.
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
def find_held(batch: Batch, part: int, server: int) -> int:
    """Find how many of a part's first keys a server has.

    With a window, the result is 0, because a server then has only keys near its rows, and few other
    rows need these keys.
    """
    if batch.cost.window < ALL_KEYS:
        return 0
    row = batch.parts[part, HOLDER]
    while row >= 0:
        # The newest row of a rank comes first, and has the most keys.
        if batch.holders[row, RANK] == server:
            return int(batch.holders[row, KEYS])
        row = batch.holders[row, PREVIOUS]
    return 0


@compile_inner
def find_unit(batch: Batch, part: int, server: int) -> int:
    """Return the unit of `part` to which the node of `server` belongs (see `UNITS`)."""
    for segment in range(batch.parts[part, SEGMENT], batch.parts[part + 1, SEGMENT]):
        if not is_far(batch, batch.segments[segment, HOME], server):
            return server // batch.per_node % OTHERS
    return OTHERS


class _Links(NamedTuple):
    """Seconds for which the links of a home and of a server are busy if a tail moves with its keys.

    Attributes:
        arrive: busy seconds of the link on which the tail arrives at the server. Keys are counted,
            rows are not.
        leave: the same for the link on which the tail leaves the home.
        other_arrive, other_leave: busy seconds of the busiest other link of the server, and of the
            home.
        row_arrive, row_leave: seconds that each row adds to `arrive` and to `leave`.
        key_seconds: seconds in which the server receives the keys of the tail.
        keys: number of keys that the tail adds to the server's pool.
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
    """Compute the seconds of the links that carry a tail to a server."""
    ranks, cost, part, end = (
        batch.ranks,
        batch.cost,
        batch.pieces[piece, PART],
        batch.pieces[piece, LAST],
    )
    begin = max(find_held(batch, part, server), end - (cost.window - 1))
    near, far, near_sent, far_sent, keys = 0, 0, 0, 0, 0
    unit = find_unit(batch, part, server)
    for number in range(batch.parts[part, SEGMENT], batch.parts[part + 1, SEGMENT]):
        segment = batch.segments[number]
        low, high = max(segment[LOW], begin), min(segment[HIGH], end)
        count = max(high - low, 0)
        sent = max(high - max(low, segment[LEFT_HOME + unit]), 0) * (segment[HOME] == source)
        keys += count
        if is_far(batch, segment[HOME], server):
            far, far_sent = far + count, far_sent + sent
        elif segment[HOME] != server:
            near, near_sent = near + count, near_sent + sent
    key_bytes = batch.heads[part] * cost.key_bytes
    into, out = find_link(batch, server), find_link(batch, source)
    near_seconds = near * key_bytes * ranks[WIRE, server]
    far_seconds = far * key_bytes * ranks[WIRE + 1, server]
    arrive, other_arrive = (
        ranks[RECEIVED, server] + near_seconds,
        ranks[RECEIVED + 1, into] + far_seconds,
    )
    leave = ranks[SENT, source] + near_sent * key_bytes * ranks[WIRE, source]
    other_leave = ranks[SENT + 1, out] + far_sent * key_bytes * ranks[WIRE + 1, source]
    level = int(is_far(batch, source, server))
    if level:
        arrive, other_arrive, leave, other_leave = other_arrive, arrive, other_leave, leave
    # If the window hides the first key, a tail that begins one row earlier needs one more key.
    row_bytes = batch.heads[part] * (cost.query_bytes + cost.key_bytes * (end >= cost.window))
    return _Links(
        arrive,
        leave,
        max(other_arrive, max(ranks[SENT, server], ranks[SENT + 1, into])),
        max(other_leave, max(ranks[RECEIVED, source], ranks[RECEIVED + 1, out])),
        row_bytes * ranks[WIRE + level, server],
        row_bytes * ranks[WIRE + level, source],
        near_seconds + far_seconds,
        keys,
    )


@compile_inner
def _count_taken(batch: Batch, piece: int, source: int, server: int, links: _Links) -> float:
    """Count the last rows of a piece that a server can take and still end by T."""
    cost, ranks, speed = batch.cost, batch.ranks, batch.ranks[SPEED, server]
    end, latest = batch.pieces[piece, LAST], ranks[LATEST, server]
    heads = batch.heads[batch.pieces[piece, PART]]
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
        is_windowed = end >= cost.window
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
    """Count the last rows of a piece that its home must give away to end by `goal`."""
    cost, end, speed = batch.cost, batch.pieces[piece, LAST], batch.ranks[SPEED, source]
    heads = batch.heads[batch.pieces[piece, PART]]
    key = heads * cost.key
    excess = batch.ranks[COMPUTE, source] - goal
    if batch.hidden:
        return solve_rows(cost, heads, end, excess * speed, key)
    idle, busy = (excess + links.other_leave) * speed, (excess + links.leave) * speed
    return max(
        solve_rows(cost, heads, end, idle, key),
        solve_rows(cost, heads, end, busy, key - links.row_leave * speed),
    )


@compile_inner
def weigh_tail(batch: Batch, piece: int, source: int, server: int) -> tuple[float, int]:
    """Choose the tail of a piece that `source` would give to `server`.

    Return the seconds lost for each second that `source` saves (inf if no tail gains enough), and
    the first row of the tail.
    """
    cost, ranks, heads = batch.cost, batch.ranks, batch.heads[batch.pieces[piece, PART]]
    start, end = batch.pieces[piece, FIRST], batch.pieces[piece, LAST]
    goal = ranks[LATEST, source] * (1 - CLOSE)
    links = _weigh_links(batch, piece, source, server)
    # The tail has as many rows as the server can take, but no more than the source needs to give.
    # Its first row is rounded to the grid: up if the server sets the limit, else down.
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
    compute = ranks[COMPUTE, source] - removed / ranks[SPEED, source]
    gain = ranks[END, source] - (max(compute, leave) if batch.hidden else compute + leave)
    excess, latest = ranks[END, source] - goal, ranks[LATEST, server]
    enough = 0.05 * min(excess, latest - ranks[END, server]) + 0.001 * latest
    if gain <= 0 or gain < min(enough, 0.9 * excess):
        return math.inf, row
    lost = (end - row) * links.row_arrive + links.key_seconds + max(added - removed, 0.0)
    return lost / gain, row
