"""`balance`: moves query rows between ranks until the last rank ends as early as it can.

**A trial** (`make_moves`) is for a time T: every rank that would end after T gives tails of its
pieces away, rows [x, end) of a document, each to a rank that still ends by T with it, until it ends
by T itself. Of all tails that would do, it gives the cheapest: that with the fewest seconds of
exchange and of repeated work for a second that it saves. How many rows a server takes, and how many
a home has to give, are solutions of a quadratic equation (`solve_rows`). **The plan** is that of
the lowest T that a trial reaches: bisection between the mean of all ranks and the end without
moves.

`end_seconds` alone knows what a rank waits for. A key leaves its home once for each group of
servers that pass it on to each other (`schedule.relays`): those of a node where its document lies,
and those of all other nodes. Long documents are tried whole and in head groups, which need a part
of the keys each. Where nodes differ, a first pass lets nodes that have too much give to other
nodes; and moves inside nodes alone are tried.

All ranks make the same moves: this is IEEE double arithmetic in the order in which it is written.
numba compiles the loop when it is first called, and keeps the machine code beside the source or in
the user's cache, under a name with a hash of the sources. If numba is told to compile nothing, the
loop runs in Python, and makes the same moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule import parts, slice_cost, tails
from hf_distca.schedule.compiled import compile_function, compile_inner
from hf_distca.schedule.cost import CostModel, MarginalCost, TransientBytes
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.parts import (
    BETWEEN,
    END,
    INSIDE,
    KEYS,
    PIECE,
    PREVIOUS,
    RANK,
    RECEIVED,
    SENT,
    SERVER,
    START,
    UNIT,
    Batch,
    Pieces,
    State,
    list_splits,
)
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.relays import add_relays
from hf_distca.schedule.slice_cost import estimate_slice_seconds
from hf_distca.schedule.tails import (
    Offer,
    count_keys,
    end_seconds,
    find_held,
    find_unit,
    weigh_tail,
)

# Who gives to whom: ranks of nodes with too much to other nodes; all to all; all in their node.
_TO_OTHER_NODES, _TO_ALL, _TO_OWN_NODE = range(3)
# Pieces that a rank looks at for a tail, the deepest first, and servers that have keys of each.
_MOST_PIECES, _MOST_HOLDERS = 8, 8
# Part of T by which a rank ends earlier than it has to.
_CLOSE = 0.0005
# Times T that a rank may end later for the trial to go on: it may end before those of later T.
_USEFUL = 1.05
# The finest tolerance that is aimed at, and how many trials are made for it.
_FINEST_TOLERANCE, _MOST_TRIALS = 0.002, 16


@compile_inner
def _update_ends(batch: Batch, state: State, rank: int) -> None:
    """Update when a rank ends, and those that share its link."""
    first = batch.link[BETWEEN, rank]
    for other in range(first, len(state.ends)):
        if batch.link[BETWEEN, other] != first:
            break
        node = other // batch.per_node
        state.node_ends[node] -= state.ends[other]
        state.ends[other] = end_seconds(batch, state, other)
        state.node_ends[node] += state.ends[other]


@compile_inner
def _add_traffic(
    batch: Batch, state: State, ranks: tuple[int, int], sent: float, got: float
) -> None:
    """Add bytes that one rank sends, and that another gets, to their links."""
    source, server = ranks
    is_near = source // batch.per_node == server // batch.per_node
    level = INSIDE if is_near else BETWEEN
    wire, link = batch.wire, batch.link
    state.traffic[SENT, level, link[level, source]] += sent * wire[level, source]
    state.traffic[RECEIVED, level, link[level, server]] += got * wire[level, server]


@compile_inner
def _add_holder(batch: Batch, state: State, part: int, server: int, end: int) -> None:
    """Note that a server has the keys of a part before `end`."""
    count = state.counts[0]
    state.holders[count, RANK], state.holders[count, KEYS] = server, end
    state.holders[count, PREVIOUS] = state.last_holder[part]
    state.holders[count, UNIT] = find_unit(batch, part, server)
    state.last_holder[part] = count
    state.counts[0] += 1


@compile_inner
def _make_move(batch: Batch, state: State, offer: Offer, row: int) -> None:
    """Give rows [row, end) of a piece to a server."""
    piece, source, server = offer.piece, offer.source, offer.server
    cost, part, start, end = batch.cost, batch.part[piece], batch.start[piece], state.end[piece]
    heads, (query, key, sent_query, sent_key) = batch.heads[part], batch.transient
    before = estimate_slice_seconds(cost, heads, start, end)
    after = estimate_slice_seconds(cost, heads, start, row)
    state.compute[source] -= (before - after) / batch.speeds[source]
    added = estimate_slice_seconds(cost, heads, row, end)
    state.compute[server] += added / batch.speeds[server]
    held = find_held(batch, state, part, server)
    span = (max(held[0], end - (cost.window - 1)), end)
    amount = (end - row) * heads
    row_bytes = amount * (cost.query_bytes + cost.key_bytes * (end > cost.window))
    _add_traffic(batch, state, (source, server), row_bytes, row_bytes)
    is_windowed = end > cost.window
    state.held[server] += amount * (query + key * is_windowed)
    state.held[source] += amount * (sent_query + sent_key * is_windowed)
    for segment in range(batch.segments[part], batch.segments[part + 1]):
        home = batch.home[segment]
        keys, sent = count_keys(batch, held, segment, span)
        state.held[server] += heads * key * keys
        if keys and home != server:
            key_bytes = heads * cost.key_bytes
            _add_traffic(batch, state, (home, server), sent * key_bytes, keys * key_bytes)
            state.held[home] += heads * sent_key * keys
            _update_ends(batch, state, home)
    if end > held[0]:
        _add_holder(batch, state, part, server, end)
    count = state.counts[1]
    state.moves[count, PIECE], state.moves[count, SERVER] = piece, server
    state.moves[count, START], state.moves[count, END] = row, end
    state.counts[1] += 1
    state.end[piece] = row
    _update_ends(batch, state, source)
    _update_ends(batch, state, server)


@compile_inner
def _may_serve(batch: Batch, state: State, offer: Offer, server: int, phase: int) -> bool:
    """Return whether a rank may get tails of the source of an offer."""
    node = server // batch.per_node
    is_near = node == offer.source // batch.per_node
    return bool(
        state.ends[server] < offer.latest * (1 - _CLOSE)
        and batch.can_serve[server]
        and server != offer.source
        and (phase != _TO_OWN_NODE or is_near)
        and (phase != _TO_OTHER_NODES or not is_near)
        and (phase != _TO_OTHER_NODES or state.node_ends[node] < offer.latest * batch.per_node)
    )


@compile_inner
def _find_emptiest(batch: Batch, state: State, offer: Offer, phase: int) -> tuple[int, int]:
    """Find the emptiest ranks that may serve: of the source's node, and of others; -1 if there is
    none.
    """
    near, far = -1, -1
    for rank in range(len(state.ends)):
        if not _may_serve(batch, state, offer, rank, phase):
            continue
        if rank // batch.per_node == offer.source // batch.per_node:
            near = rank if near < 0 or state.ends[rank] < state.ends[near] else near
        else:
            far = rank if far < 0 or state.ends[rank] < state.ends[far] else far
    return near, far


@compile_inner
def _find_move(batch: Batch, state: State, offer: Offer, phase: int) -> tuple[Offer, int]:
    """Find the cheapest tail of all pieces of a source: for the emptiest ranks, and for those that
    have keys of its document. Its piece is -1 if there is none.
    """
    near, far = _find_emptiest(batch, state, offer, phase)
    lowest, best, first, looked = math.inf, offer, 0, 0
    for piece in range(batch.offsets[offer.source], batch.offsets[offer.source + 1]):
        if batch.start[piece] >= state.end[piece]:
            continue
        if looked >= _MOST_PIECES and best.piece >= 0:
            break
        looked += 1
        row, count, server = state.last_holder[batch.part[piece]], -2, near
        while count < _MOST_HOLDERS:
            if server >= 0 and (count < 0 or _may_serve(batch, state, offer, server, phase)):
                tail = Offer(piece, offer.source, server, offer.latest, offer.goal)
                lost, start = weigh_tail(batch, state, tail)
                if lost < lowest:
                    lowest, best, first = lost, tail, start
            count += 1
            if count < 0:
                server = far
            elif row < 0:
                break
            else:
                server, row = state.holders[row, RANK], state.holders[row, PREVIOUS]
    return best, first


@compile_inner
def _relieve_rank(batch: Batch, state: State, source: int, latest: float, phase: int) -> None:
    """Make moves of a rank until it ends by its goal, or none is left."""
    while state.counts[1] < len(state.moves):
        goal = latest
        if phase == _TO_OTHER_NODES:
            excess = state.node_ends[source // batch.per_node] - latest * batch.per_node
            goal = max(latest, state.ends[source] - excess)
        if state.ends[source] <= goal:
            break
        offer = Offer(-1, source, -1, latest, goal * (1 - _CLOSE))
        offer, row = _find_move(batch, state, offer, phase)
        if offer.piece < 0:
            break
        _make_move(batch, state, offer, row)


def _make_moves(
    batch: Batch, state: State, order: IntArray, times: tuple[float, float], phase: int
) -> float:
    """Make the moves of a trial and return when the last rank ends.

    Args:
        batch: the pieces.
        state: changed by the moves.
        order: ranks in the order in which they give, the latest first.
        times: T, and seconds after which no rank may end for the trial to be of use.
        phase: who gives to whom.
    """
    latest, useful = times
    count = -1
    # Again, as ranks whose keys others gave away may be late.
    while count < state.counts[1]:
        count = state.counts[1]
        for source in order:
            _relieve_rank(batch, state, source, latest, phase)
            if phase != _TO_OTHER_NODES and state.ends[source] > useful:
                return math.inf
    last = 0.0
    for end in state.ends:
        last = max(last, end)
    return last


make_moves = compile_function(
    _make_moves, keep=(__file__, tails.__file__, parts.__file__, slice_cost.__file__)
)


def balance(
    layout: Layout,
    cost: CostModel,
    config: DistCAConfig,
    ranks: Ranks = UNIFORM_RANKS,
    *,
    allow_relays: bool = True,
) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange;
    see `PlanLoad`); where it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and their ranks; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with
            its window, or for layers without one if no document is longer than the window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `head_groups`, `max_transient_bytes`,
            `ping_pong` and `serve_in_place` are read. A tolerance below 0.002 counts as 0.002. With
            head groups, the layout of the plan is `layout` with some documents split by heads. With
            a bound, only tails are moved that fit it. With `ping_pong` the layout is that of a
            nano-batch, whose exchange costs only what is longer than the compute beside it.
        ranks: properties of the ranks; the same on every rank. A slower one gets less, so that all
            end together.
        allow_relays: whether servers may forward keys.

    Raises:
        ConfigError: if `ranks` and the layout have different numbers of ranks, or if not even a
            row and a key fit the bound.
    """
    ranks.check_count(layout.world_size)
    # All links are those inside a node.
    if ranks.per_node == layout.world_size and cost.node_bytes_per_second is not None:
        cost = replace(cost, exchange_bytes_per_second=cost.node_bytes_per_second)
        ranks = replace(ranks, per_node=None)
    ranks = ranks.without_irrelevant_nodes(cost)
    cost = cost.without_unused_window(layout.longest)
    TransientBytes.from_shape(cost.shape).check_bound(config.max_transient_bytes)
    has_relays = allow_relays and cost.window is None and config.max_transient_bytes is None
    return PlanTrials(layout, cost, config, ranks, has_relays).find_plan()


@dataclass(frozen=True)
class PlanTrials:
    """Plans for a layout, made and weighed; for the attributes see `balance`."""

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    has_relays: bool

    @cached_property
    def unmoved_load(self) -> PlanLoad:
        """Load of the plan that moves nothing, except that keys are forwarded if that alone gains
        enough.
        """
        return self.weigh_plan(Plan.make_local(self.layout, self.cost.window), self.config.min_gain)

    @cached_property
    def marginal(self) -> MarginalCost:
        """Cost of slices."""
        return MarginalCost.from_cost_model(self.cost)

    @cached_property
    def mean_seconds(self) -> float:
        """Seconds of compute of each rank if all end together: no plan ends before."""
        return self.ranks.compute_even_seconds(self.unmoved_load.compute_seconds)

    @property
    def tolerance(self) -> float:
        """Part of T that is searched for."""
        return max(self.config.tolerance, _FINEST_TOLERANCE)

    def weigh_plan(self, plan: Plan, min_gain: float = 0.0) -> PlanLoad:
        """Weigh a plan, with forwarded keys if they gain at least so much."""
        load = PlanLoad(plan, self.cost, overlapped=self.config.ping_pong, ranks=self.ranks)
        return add_relays(load, min_gain) if self.has_relays else load

    def find_plan(self) -> Plan:
        """Find the plan whose last rank ends first; if it does not gain enough, nothing moves."""
        best, required = self.unmoved_load, self.unmoved_load.slowest_seconds
        required *= 1 - self.config.min_gain
        can_gain = self.layout.world_size > 1 and required >= self.mean_seconds
        # Without seconds of pairs, attention is as long as its tokens are many.
        if not (self.config.balance and can_gain and self.marginal.pair):
            return best.plan
        for end, plan_pieces, moves in sorted(self.find_moves(), key=lambda row: row[0]):
            if end >= min(best.slowest_seconds, required):
                break
            load = self.weigh_plan(plan_pieces.make_plan(moves))
            if load.slowest_seconds < best.slowest_seconds and load.slowest_seconds <= required:
                best = load
        return best.plan

    def find_moves(self) -> list[tuple[float, Pieces, IntArray]]:
        """Find the moves of every way, if they end before those of the ways tried earlier: the
        last end by the trial, the pieces, the moves.
        """
        ways = [[_TO_ALL]]
        if self.ranks.per_node is not None:
            ways = [[_TO_OTHER_NODES, _TO_ALL], [_TO_ALL], [_TO_OWN_NODE]]
        plans, best = list[tuple[float, Pieces, IntArray]](), math.inf
        splits = list_splits(self.unmoved_load, self.config, self.marginal, self.mean_seconds)
        for groups, split_mask in splits:
            # No way ends much before the mean.
            if best * (1 - self.tolerance) <= self.mean_seconds:
                break
            some = Pieces.cut(self.unmoved_load, self.config, groups, split_mask, self.has_relays)
            for way in ways:
                # What stays in its node is weighed in any case: a trial knows messages between
                # nodes less exactly than the full estimate.
                end, moves = self._bisect(some, way, math.inf if _TO_OWN_NODE in way else best)
                if moves is not None:
                    plans.append((end, some, moves))
                    best = min(best, end)
        return plans

    def _bisect(
        self, batch_pieces: Pieces, way: list[int], best: float
    ) -> tuple[float, IntArray | None]:
        """Find the lowest T that trials of a way reach: the end of the last rank, and the moves;
        None if they do not reach much before the best end of others.
        """
        mean = low = self.mean_seconds
        tolerance = self.tolerance
        high = min(float(batch_pieces.start.ends.max()), best * (1 - tolerance))
        latest = high if math.isfinite(best) else min(mean * (1 + tolerance), high)
        moves = None
        for _ in range(_MOST_TRIALS):
            state = batch_pieces.restore()
            end = math.inf
            for phase in way:
                order = np.argsort(-state.ends, kind="stable")
                times = latest, min(high, _USEFUL * latest)
                end = make_moves(batch_pieces.batch, state, order, times, phase)
            if end <= high:
                high, moves = end, state.moves[: state.counts[1]].copy()
            if end > latest:
                low = latest
            if high <= low * (1 + 1.5 * tolerance) or low == high:
                break
            # Twice as late, and more, until it is reached.
            latest = min((low + high) / 2, mean + 5 * max(low - mean, tolerance * mean))
        return high, moves
