"""Tails of pieces for `schedule.balance`: when a rank ends, how many rows a tail has, and what it
costs to give it away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_distca.schedule.compiled import compile_inner
from hf_distca.schedule.cost import MarginalCost
from hf_distca.schedule.parts import (
    BETWEEN,
    INSIDE,
    KEYS,
    PREVIOUS,
    RANK,
    RECEIVED,
    SENT,
    UNIT,
    Batch,
    State,
)
from hf_distca.schedule.slice_cost import estimate_slice_seconds


class Offer(NamedTuple):
    """A piece that `source` may give a tail of to `server`.

    Attributes:
        latest: T, in seconds.
        goal: when the source should end.
    """

    piece: int
    source: int
    server: int
    latest: float
    goal: float


class Exchange(NamedTuple):
    """Seconds of the links of both ranks of an offer, with the keys that the tail needs.

    Attributes:
        arrive, leave: of the link that rows arrive at the server by, and leave the source by.
        other_arrive, other_leave: of the busiest other link of the server, and of the source.
        row_arrive, row_leave: of each row.
        keys: of all keys that the server receives.
        pool: keys that the server gets into its pool.
    """

    arrive: float
    leave: float
    other_arrive: float
    other_leave: float
    row_arrive: float
    row_leave: float
    keys: float
    pool: int


@compile_inner
def end_seconds(batch: Batch, state: State, rank: int) -> float:
    """Return when a rank ends. Its links carry at the same time."""
    traffic, link = state.traffic, batch.link[BETWEEN, rank]
    exchange = max(
        max(traffic[SENT, INSIDE, rank], traffic[RECEIVED, INSIDE, rank]),
        max(traffic[SENT, BETWEEN, link], traffic[RECEIVED, BETWEEN, link]),
    )
    compute = state.compute[rank]
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
def find_unit(batch: Batch, part: int, rank: int) -> int:
    """Return the node of a rank if tokens of the part lie there, else -1."""
    node = rank // batch.per_node
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        if batch.home[segment] // batch.per_node == node:
            return int(node)
    return -1


@compile_inner
def find_held(batch: Batch, state: State, part: int, server: int) -> tuple[int, int, int, int]:
    """Find the first keys of a part that a server has, and the most that any rank has that passes
    keys on to it: how many, which rank, and how many others have.
    """
    unit, row = find_unit(batch, part, server), state.last_holder[part]
    held, most, holder, second = 0, 0, -1, 0
    while row >= 0:
        rank, keys = state.holders[row, RANK], state.holders[row, KEYS]
        if rank == server:
            held = max(held, keys)
        if state.holders[row, UNIT] == unit and rank != holder and keys > most:
            second, most, holder = most, keys, rank
        elif state.holders[row, UNIT] == unit and rank != holder:
            second = max(second, keys)
        elif rank == holder:
            most = max(most, keys)
        row = state.holders[row, PREVIOUS]
    return held, most, holder, second


@compile_inner
def count_keys(
    batch: Batch, held: tuple[int, int, int, int], segment: int, span: tuple[int, int]
) -> tuple[int, int]:
    """Count the keys of a segment inside a span, and those of them that its home has to send."""
    begin, end = max(batch.first[segment], span[0]), min(batch.last[segment], span[1])
    known = held[3] if held[2] == batch.home[segment] else held[1]
    return max(end - begin, 0), max(end - max(begin, known * batch.has_relays), 0)


@compile_inner
def _weigh_exchange(batch: Batch, state: State, offer: Offer) -> Exchange:
    """Weigh what a tail of a piece adds to the links of its source and of its server."""
    source, server = offer.source, offer.server
    cost, part, end = batch.cost, batch.part[offer.piece], state.end[offer.piece]
    heads, traffic, wire = batch.heads[part], state.traffic, batch.wire
    held = find_held(batch, state, part, server)
    span = (max(held[0], end - (cost.window - 1)), end)
    node = server // batch.per_node
    near_keys, far_keys, near_sent, far_sent, pool = 0, 0, 0, 0, 0
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        home = batch.home[segment]
        keys, sent = count_keys(batch, held, segment, span)
        pool += keys
        is_near = home // batch.per_node == node
        near_keys += keys * (is_near and home != server)
        far_keys += keys * (not is_near)
        near_sent += sent * (is_near and home == source)
        far_sent += sent * (not is_near and home == source)
    key_bytes = heads * cost.key_bytes
    near_seconds, far_seconds = (
        near_keys * key_bytes * wire[INSIDE, server],
        far_keys * key_bytes * wire[BETWEEN, server],
    )
    into, out = batch.link[BETWEEN, server], batch.link[BETWEEN, source]
    arrive = traffic[RECEIVED, INSIDE, server] + near_seconds
    other_arrive = traffic[RECEIVED, BETWEEN, into] + far_seconds
    leave = traffic[SENT, INSIDE, source] + near_sent * key_bytes * wire[INSIDE, source]
    other_leave = traffic[SENT, BETWEEN, out] + far_sent * key_bytes * wire[BETWEEN, source]
    level = INSIDE
    if source // batch.per_node != node:
        arrive, other_arrive, leave, other_leave = other_arrive, arrive, other_leave, leave
        level = BETWEEN
    # With a window, each row needs a key more.
    row_bytes = heads * (cost.query_bytes + cost.key_bytes * (end > cost.window))
    return Exchange(
        arrive,
        leave,
        max(other_arrive, max(traffic[SENT, INSIDE, server], traffic[SENT, BETWEEN, into])),
        max(other_leave, max(traffic[RECEIVED, INSIDE, source], traffic[RECEIVED, BETWEEN, out])),
        row_bytes * wire[level, server],
        row_bytes * wire[level, source],
        near_seconds + far_seconds,
        pool,
    )


@compile_inner
def _count_taken(batch: Batch, state: State, offer: Offer, exchange: Exchange) -> float:
    """Count the rows of a tail that its server can take and end by T."""
    cost, part, end = batch.cost, batch.part[offer.piece], state.end[offer.piece]
    heads, speed, latest = batch.heads[part], batch.speeds[offer.server], offer.latest
    spare = latest - state.compute[offer.server]
    fixed = cost.task + heads * cost.key * min(end, cost.window - 1)
    if batch.hidden:
        if max(exchange.other_arrive, exchange.arrive) >= latest or exchange.leave >= latest:
            return 0.0
        rows = min(
            solve_rows(cost, heads, end, spare * speed - fixed, 0.0),
            min(
                (latest - exchange.arrive) / exchange.row_arrive,
                (latest - exchange.leave) / exchange.row_leave,
            ),
        )
    else:
        idle, busy = (spare - exchange.other_arrive) * speed, (spare - exchange.arrive) * speed
        rows = min(
            solve_rows(cost, heads, end, idle - fixed, 0.0),
            solve_rows(cost, heads, end, busy - fixed, exchange.row_arrive * speed),
        )
    if batch.most_bytes == math.inf:
        return float(rows)
    query, key, sent_query, sent_key = batch.transient
    # With a window, each row needs a key more.
    query += key * (end > cost.window)
    sent_query += sent_key * (end > cost.window)
    room = batch.most_bytes - state.held[offer.server] - heads * key * exchange.pool
    sent = batch.most_bytes - state.held[offer.source] - heads * sent_key * exchange.pool
    return float(min(rows, min(room / (heads * query), sent / (heads * sent_query))))


@compile_inner
def _count_given(batch: Batch, state: State, offer: Offer, exchange: Exchange) -> float:
    """Count the rows of a tail that its source has to give to end at its goal."""
    cost, part, end = batch.cost, batch.part[offer.piece], state.end[offer.piece]
    heads, speed = batch.heads[part], batch.speeds[offer.source]
    excess, key = state.compute[offer.source] - offer.goal, batch.heads[part] * cost.key
    if batch.hidden:
        return solve_rows(cost, heads, end, excess * speed, key)
    return max(
        solve_rows(cost, heads, end, (excess + exchange.other_leave) * speed, key),
        solve_rows(
            cost,
            heads,
            end,
            (excess + exchange.leave) * speed,
            key - exchange.row_leave * speed,
        ),
    )


@compile_inner
def weigh_tail(batch: Batch, state: State, offer: Offer) -> tuple[float, int]:
    """Return the seconds that are lost for a second that the source saves, and the first row of the
    tail; inf if no tail gains enough.
    """
    piece, source, server = offer.piece, offer.source, offer.server
    cost, heads = batch.cost, batch.heads[batch.part[piece]]
    start, end = batch.start[piece], state.end[piece]
    exchange = _weigh_exchange(batch, state, offer)
    # From the grid's line after which the server can take all, or from that before which the source
    # need not give any.
    first = end - _count_taken(batch, state, offer, exchange)
    row = start if first <= start else int(-(-first // batch.grid)) * batch.grid
    wanted = end - _count_given(batch, state, offer, exchange)
    if wanted > row:
        row = max(row, int(wanted // batch.grid) * batch.grid)
    if row >= end:
        return math.inf, row
    added = estimate_slice_seconds(cost, heads, row, end)
    removed = estimate_slice_seconds(cost, heads, start, end) - estimate_slice_seconds(
        cost, heads, start, row
    )
    leave = max(exchange.other_leave, exchange.leave + (end - row) * exchange.row_leave)
    compute = state.compute[source] - removed / batch.speeds[source]
    gain = state.ends[source] - (max(compute, leave) if batch.hidden else compute + leave)
    excess = state.ends[source] - offer.goal
    enough = 0.05 * min(excess, offer.latest - state.ends[server]) + 0.001 * offer.latest
    if gain <= 0 or gain < min(enough, 0.9 * excess):
        return math.inf, row
    lost = (end - row) * exchange.row_arrive + exchange.keys + max(added - removed, 0.0)
    return lost / gain, row
