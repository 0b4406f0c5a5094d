"""The scheduler in plain Python, to be read first.

`schedule.balance` makes the same kind of plans, fast.

Ranks hold documents, and in every layer all wait for the one whose attention takes longest.
Attention of a slice of query rows can be computed by any rank that gets these rows and all keys
before their end. So who sends which slices to whom?

**The formula.** Rows [a, b) of a document, of which a part `heads` of the heads is computed, take
forward and backward together::

    seconds = task + heads * (row * n + key * b + pair * tiled * (b - (n - tile) / 2))

Here n = b - a, and `tiled` is n in whole kernel tiles. The last factor is the mean of keys that a
row sees or has behind it in its tile. The traffic is `query_bytes` for each moved row and, once to
each server, `key_bytes` for each key before the end of its last slice. Rows at the end of a
document see the most keys, so its *tail* takes the most seconds along for the fewest rows.

**The steps.**

1. Weigh the plan that moves nothing: `PlanLoad` says how many seconds each rank computes and
  exchanges, and when the last ends.
2. `HeadSplit` (`schedule.heads`): long documents may be split by heads, for a server of some of the
   heads needs the keys of these alone. To the other steps, each head group is a document.
3. `Levels` (`schedule.greedy`): ranks below `floor` come up to `low`, ranks above `cap` come down
  to `high`.
4. `even_out`: the heaviest rank gives slices away until it is below the cap, then the next one
   does; levels are set to what they rose to, and all go once more; then, while ranks are below the
   floor, those above `low` give (`is_filling`). A slice goes to the emptiest rank, or to one that
   has keys of the document. Of all tails that the rank could cut off its pieces (`cut_tail`), it
   gives the one that sends the fewest bytes per second.
5. `add_relays` (`schedule.relays`): keys that several servers need leave their holder once, and
  servers pass them on.
6. `make_reference_plan` takes steps 3 to 5 twice, to even out compute alone, and compute and
   exchange together (`PlanTrials.make_step`); and with nodes for each node by itself, and again for
   all ranks as one group. The plan whose last rank ends first is taken; if it gains less than
   `min_gain`, nothing moves.

Left out are windows, unequal speeds, a bound of transient bytes, moves of first rows, moves that
even out nodes before their ranks, and the further plans of `balance`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import PlanTrials
from hf_distca.schedule.cost import CostModel, MarginalCost
from hf_distca.schedule.greedy import BalanceStep, GreedyPlanner, Levels, PlanRows
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.moves import MAX_HOLDERS, MIN_DEFICIT
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks


def apply_formula(marginal: MarginalCost, heads: float, start: int, end: int) -> float:
    """Return the seconds of rows [start, end), 0 if there are none."""
    rows = end - start
    pairs = -(-rows // marginal.tile) * marginal.tile * (end - (rows - marginal.tile) / 2)
    return (
        marginal.task + heads * (marginal.row * rows + marginal.key * end + marginal.pair * pairs)
        if rows
        else 0.0
    )


@dataclass(slots=True)
class QueryPiece:
    """Rows [start, end) of a document or head group that their home still computes, and the slices
    (start, end, server) that were moved.
    """

    document: int
    heads: float
    start: int
    end: int
    home: int
    slices: list[tuple[int, int, int]] = field(default_factory=list)


class TailMove(NamedTuple):
    """Rows of a piece from `start` on, for a server: seconds removed from its home and added to the
    server, and the bytes.
    """

    piece: QueryPiece
    start: int
    server: int
    removed: float
    added: float
    bytes: float


@dataclass
class BalanceState:
    """Steps 3 and 4: slices move until no rank of a group is above the cap, or nothing fits any
    more.

    Attributes:
        pieces: what the ranks of the group compute; their tails become slices.
        work: seconds of all ranks, which are evened out.
        step: what slices cost their servers and homes, and half the width of the band around the
            mean, as a part of it.
        group: the ranks that share work: those of a node, or all.
    """

    pieces: list[QueryPiece]
    work: list[float]
    step: BalanceStep
    group: range

    def even_out(self) -> None:
        """Make all moves."""
        group_seconds = [self.work[rank] for rank in self.group]
        speeds = np.ones(len(group_seconds))
        self.start_levels = Levels.choose(
            np.array(group_seconds), speeds, speeds > 0, self.step.tolerance
        )
        excess = math.fsum(max(seconds - self.start_levels.high, 0.0) for seconds in group_seconds)
        # Nothing is divided by 0.
        removed = 1e-30
        added_work = 0.0
        total_work = math.fsum(group_seconds) or 1.0
        # By document: how many keys ranks have there anyway, in the order in which they came by
        # them.
        self.held_keys: dict[int, dict[int, int]] = defaultdict(dict)
        for piece in sorted(self.pieces, key=lambda piece: piece.end):
            self.held_keys[piece.document][piece.home] = piece.end
        order = sorted(self.group, key=lambda rank: -self.work[rank])
        # A slice may cost its server more than its home. Levels rise with what that adds to the
        # work of all: at first, as if all excess were moved at the rate so far.
        phases = (False, excess), (False, 0.0), (True, 0.0)
        for (self.is_filling, expected), source in itertools.product(phases, order):
            self.rise = 1 + added_work * max(expected / removed, 1.0) / total_work
            mine = [piece for piece in self.pieces if piece.home == source]
            while move := self.find_next_move(source, mine):
                piece = move.piece
                holder_keys = self.held_keys[move.piece.document]
                # To the end of the order.
                holder_keys[move.server] = max(holder_keys.pop(move.server, 0), piece.end)
                piece.slices.append((move.start, piece.end, move.server))
                piece.end = move.start
                self.work[source] -= move.removed
                self.work[move.server] += move.added
                removed += move.removed
                added_work = added_work + move.added - move.removed
                self.rise = 1 + added_work * max(expected / removed, 1.0) / total_work

    def find_next_move(self, source: int, pieces: list[QueryPiece]) -> TailMove | None:
        """Find the move with the fewest bytes per second.

        If none fits the levels, a server may get up to half of the work of both.
        """
        work = self.work
        levels = Levels(*(self.rise * level for level in self.start_levels))
        giving_level, target_level = (
            (levels.low, levels.floor) if self.is_filling else (levels.cap, levels.high)
        )
        emptiest = min(self.group, key=lambda rank: work[rank])
        if not self.is_filling and work[emptiest] >= levels.low:
            # Sources gave more than they had to: now servers get more than they lacked.
            levels = levels._replace(low=levels.high)
        self.levels = levels
        if work[source] <= giving_level or work[emptiest] >= (
            levels.floor if self.is_filling else levels.low
        ):
            return None
        # Holders of keys that lack much less would get slivers, in very many moves.
        max_seconds = min(
            levels.floor,
            levels.low
            - MIN_DEFICIT * min(work[source] - target_level, levels.low - work[emptiest]),
        )
        for leeway in (0.0,) if self.is_filling else (0.0, 0.5):
            moves = []
            for piece in (piece for piece in pieces if piece.start < piece.end):
                holders = reversed(self.held_keys[piece.document])
                candidates = [
                    rank
                    for rank in holders
                    if rank in self.group
                    and rank not in (emptiest, source)
                    and work[rank] < max_seconds
                ]
                tails = (
                    self.cut_tail(piece, server, leeway)
                    for server in (emptiest, *candidates[:MAX_HOLDERS])
                )
                moves += [move for move in tails if move is not None]
            if moves:
                move = min(moves, key=lambda move: move.bytes / move.removed)
                return None if self.is_filling and move.added > 2 * move.removed else move
        return None

    def cut_tail(self, piece: QueryPiece, server: int, leeway: float) -> TailMove | None:
        """Cut off the tail of a piece that its home should lose and a server lacks; None if none
        fits.
        """
        server_cost, home_cost = self.step.marginals
        levels, heads, end, grid = self.levels, piece.heads, piece.end, home_cost.grid
        home = self.work[piece.home]
        filled = self.work[server]
        room = max(levels.cap, leeway * (home + filled)) - filled
        max_excess = room if leeway else home - levels.floor
        send, receive = (
            heads * (server_cost.row - home_cost.row),
            heads * (server_cost.key - home_cost.key),
        )  # seconds of a row and of a key
        server_seconds, home_seconds = (
            apply_formula(server_cost, heads, piece.start, end),
            apply_formula(home_cost, heads, piece.start, end),
        )
        removable = home_seconds - send * (end - piece.start)
        # For each second less at home the server gets so many more.
        scale = server_seconds / removable if removable > 0 else 0.0
        target_level = levels.floor if self.is_filling else levels.high
        target = min(
            (home - target_level) * scale,
            room,
            levels.low - filled if filled < levels.floor else math.inf,
        )
        max_seconds = room if leeway else min(max_excess * scale, room)
        if target <= 0:
            return None
        start = piece.start
        starts = range(piece.start // grid * grid + grid, end, grid)
        if starts and server_seconds > target and server_seconds > min(max_seconds, 1.1 * target):
            first = bisect_left(
                starts, -target, key=lambda start: -apply_formula(server_cost, heads, start, end)
            )
            tails = {
                start: apply_formula(server_cost, heads, start, end)
                for start in starts[max(first - 1, 0) : first + 1]
            }
            fitting = (start for start, seconds in tails.items() if seconds <= max_seconds)
            start = min(fitting, key=lambda start: abs(tails[start] - target), default=starts[-1])
        keys = max(end - self.held_keys[piece.document].get(server, 0), 0)
        added = apply_formula(server_cost, heads, start, end) - receive * (end - keys)
        removed = (
            home_seconds
            - apply_formula(home_cost, heads, piece.start, start)
            - send * (end - start)
        )
        if not 0 < removed <= max_excess or added > room:
            return None
        return TailMove(
            piece,
            start,
            server,
            removed,
            added,
            heads * (home_cost.query_bytes * (end - start) + home_cost.key_bytes * keys),
        )


def build_plan(planner: GreedyPlanner, pieces: list[QueryPiece]) -> Plan:
    """Build the plan of what was moved from pieces, and what is left of them."""
    rows = [
        (number, start, end, server)
        for number, piece in enumerate(pieces)
        for start, end, server in [(piece.start, piece.end, piece.home), *piece.slices]
        if start < end
    ]
    return planner.make_plan(PlanRows(*np.array(rows, dtype=np.int64).reshape(-1, 4).T))


def make_reference_plan(
    layout: Layout, cost: CostModel, config: DistCAConfig, per_node: int | None = None
) -> Plan:
    """Assign every query token of `layout` to a server, as `balance` does for ranks that are all
    alike.

    With nodes of `per_node` ranks, plans are made node by node and in one group, and measured with
    the rates of both links. No work moves between nodes before the rest moves inside them, as it
    does in `balance`.

    Raises:
        ConfigError: if a document is longer than the cost model's window, or `config` bounds
            transient bytes.
    """
    cost = cost.without_unused_window(layout.longest)
    if config.max_transient_bytes is not None or cost.window is not None:
        raise ConfigError(
            f"window={cost.window}, {config}: the reference knows no windows and no bound of"
            " transient bytes."
        )
    ranks = Ranks(per_node=per_node).without_irrelevant_nodes(cost)
    trials = PlanTrials(layout, cost, config, ranks, allow_relays=True)
    unmoved, world = trials.unmoved_load, layout.world_size
    if not config.balance or world < 2 or trials.cannot_gain:
        return unmoved.plan
    planner, best = trials.planner, unmoved
    segment, unmoved_pieces = planner.pieces
    for size, part in itertools.product(
        sorted({ranks.per_node or world, world}), trials.exchange_parts
    ):
        step = trials.make_step(cost.exchange_bytes_per_second, part, size)
        pieces = [
            QueryPiece(number, heads, start, end, home)
            for number, heads, start, end, home in zip(
                unmoved_pieces.number.tolist(),
                unmoved_pieces.heads.tolist(),
                unmoved_pieces.start.tolist(),
                unmoved_pieces.end.tolist(),
                layout.rank[segment].tolist(),
                strict=True,
            )
        ]
        work = (unmoved.compute_seconds + part * unmoved.exchange_seconds).tolist()
        for group in (range(first, first + size) for first in range(0, world, size)):
            mine = [piece for piece in pieces if piece.home in group]
            BalanceState(mine, work, step, group).even_out()
        load = trials.weigh_plan(build_plan(planner, pieces))
        if (
            load.slowest_seconds < best.slowest_seconds * trials.improvement_factor
            and load.slowest_seconds <= unmoved.slowest_seconds * (1 - config.min_gain)
        ):
            best = load
    return best.plan
