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

1. Weigh the plan that moves nothing: `PlanLoad` says how many seconds each rank computes and exchanges, and when the last ends.
2. `Heads` (`schedule.heads`): long documents may be split by heads, for a server of some of the heads needs the keys of these
   alone. To the other steps, each head group is a document.
3. `Levels` (`schedule.greedy`): ranks below `floor` come up to `low`, ranks above `cap` come down to `high`.
4. `even_out`: the heaviest rank gives slices away until it is below the cap, then the next one does; then, while ranks are below
   the floor, those above `low` do (`filling`). A slice goes to the emptiest rank, or to one that has keys of the document. Of
   all tails that the rank could cut off its pieces (`tail`), it gives the one that sheds a second for the fewest bytes.
5. `relieve` (`schedule.relays`): keys that several servers need leave their holder once, and servers pass them on.
6. `reference_plan` takes steps 3 to 5 twice, to even out compute alone, and compute and exchange together (`ways_to_count`); and
   with nodes for each node by itself, and again for all ranks as one group. The plan whose last rank ends first is taken; if it
   gains less than `min_gain`, nothing moves.

Left out are windows, unequal speeds, a bound of transient bytes, moves of first rows, moves that
even out nodes before their ranks, and the further plans of `balance`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import CostModel, Price
from hf_distca.schedule.greedy import Levels
from hf_distca.schedule.heads import Heads, cut_grid
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.relays import relieve

__all__ = ["reference_plan"]

_FINEST, _FINEST_WITH_EXCHANGE = 0.002, 0.02  # tolerances below which the grid is too coarse
_LEAST_LACK = 0.25  # part of what a server should get that ranks with keys of the document have to lack
_HOLDERS = 8  # ranks that have keys of a document and are looked at
_EQUAL, _EQUAL_HIDDEN = 0.2, 0.5  # parts of the tolerance by which a plan has to end before one of nodes


def formula(price: Price, heads: float, start: int, end: int) -> float:
    """Seconds of rows [start, end), 0 if there are none."""
    rows = end - start
    pairs = -(-rows // price.tile) * price.tile * (end - (rows - price.tile) / 2)
    return price.task + heads * (price.row * rows + price.key * end + price.pair * pairs) if rows else 0.0


@dataclass(slots=True)
class QueryPiece:
    """Rows [start, end) of a document that their home still computes, and the slices (start, end, server) that were moved."""

    document: int
    heads: float
    start: int
    end: int
    home: int
    slices: list[tuple[int, int, int]] = field(default_factory=list)


class TailMove(NamedTuple):
    """Rows of a piece from `start` on, for a server: seconds that its home sheds and the server gets, and the bytes."""

    piece: QueryPiece
    start: int
    server: int
    shed: float
    added: float
    bytes: float


@dataclass
class Evening:
    """Steps 3 and 4: slices move until no rank of a group is above the cap, or nothing fits any more.

    Attributes:
        pieces: what the ranks of the group compute; their tails become slices.
        work: seconds of all ranks, which are evened out.
        tolerance: half the width of the band around the mean, as a part of it.
        served, kept: what a slice costs its server, and its home.
        group: the ranks that share work: those of a node, or all.
    """

    pieces: list[QueryPiece]
    work: list[float]
    tolerance: float
    served: Price
    kept: Price
    group: range

    def even_out(self, grid: int) -> None:
        """Make all moves; pieces are cut at multiples of the grid."""
        some = [self.work[rank] for rank in self.group]
        self.levels = base = Levels.of(np.array(some), np.ones(len(some)), np.ones(len(some), dtype=np.bool_), self.tolerance)
        surplus, shed, grown = math.fsum(max(seconds - base.high, 0.0) for seconds in some), 0.0, 0.0
        # By document: how many keys ranks have there anyway, in the order in which they came by them.
        self.held: dict[int, dict[int, int]] = defaultdict(dict)
        for piece in sorted(self.pieces, key=lambda piece: piece.end):
            self.held[piece.document][piece.home] = piece.end
        order = sorted(self.group, key=lambda rank: -self.work[rank])
        for self.filling, source in itertools.product((False, True), order):
            mine = [piece for piece in self.pieces if piece.home == source]
            while move := self.next_move(source, mine, grid):
                piece, held = move.piece, self.held[move.piece.document]
                held[move.server] = max(held.pop(move.server, 0), piece.end)  # to the end of the order
                piece.slices.append((move.start, piece.end, move.server))
                piece.end = move.start
                self.work[source] -= move.shed
                self.work[move.server] += move.added
                # A slice may cost its server more than its home. Levels rise with what that adds to the work of all.
                shed, grown = shed + move.shed, grown + move.added - move.shed
                scale = 1 + grown / shed * max(surplus, shed) / math.fsum(some)
                self.levels = Levels(*(scale * level for level in base))

    def next_move(self, source: int, pieces: list[QueryPiece], grid: int) -> TailMove | None:
        """Find the move with the fewest bytes per second.

        If none fits the levels, a server may get up to half of the work of both.
        """
        work, levels = self.work, self.levels
        above, aim = (levels.low, levels.floor) if self.filling else (levels.cap, levels.high)
        emptiest = min(self.group, key=lambda rank: work[rank])
        if work[source] <= above or work[emptiest] >= (levels.floor if self.filling else levels.low):
            return None
        # Holders of keys that lack much less would get slivers, in very many moves.
        enough = min(levels.floor, levels.low - _LEAST_LACK * min(work[source] - aim, levels.low - work[emptiest]))
        for leeway in (0.0,) if self.filling else (0.0, 0.5):
            moves = []
            for piece in (piece for piece in pieces if piece.start < piece.end):
                holders = reversed(self.held[piece.document])
                near = [rank for rank in holders if rank in self.group and rank not in (emptiest, source) and work[rank] < enough]
                tails = (self.tail(piece, server, leeway, grid) for server in (emptiest, *near[:_HOLDERS]))
                moves += [move for move in tails if move is not None]
            if moves:
                move = min(moves, key=lambda move: move.bytes / move.shed)
                return None if self.filling and move.added > 2 * move.shed else move
        return None

    def tail(self, piece: QueryPiece, server: int, leeway: float, grid: int) -> TailMove | None:
        """Cut off the tail of a piece that its home should lose and
        a server lacks; None if none fits.
        """
        kept, served, levels, heads, end = self.kept, self.served, self.levels, piece.heads, piece.end
        home, filled = self.work[piece.home], self.work[server]
        room = max(levels.cap, leeway * (home + filled)) - filled
        over = room if leeway else home - levels.floor
        send, receive = heads * (served.row - kept.row), heads * (served.key - kept.key)  # seconds of a row and of a key
        whole, all_kept = formula(served, heads, piece.start, end), formula(kept, heads, piece.start, end)
        rid = all_kept - send * (end - piece.start)
        scale = whole / rid if rid > 0 else 0.0  # for each second less at home the server gets so many more
        aim = levels.floor if self.filling else levels.high
        wanted = min((home - aim) * scale, room, levels.low - filled if filled < levels.floor else math.inf)
        most = room if leeway else min(over * scale, room)
        if wanted <= 0:
            return None
        start, starts = piece.start, range(piece.start // grid * grid + grid, end, grid)
        if starts and whole > wanted and whole > min(most, 1.1 * wanted):
            first = bisect_left(starts, -wanted, key=lambda start: -formula(served, heads, start, end))
            tails = {start: formula(served, heads, start, end) for start in starts[max(first - 1, 0) : first + 1]}
            fitting = (start for start, seconds in tails.items() if seconds <= most)
            start = min(fitting, key=lambda start: abs(tails[start] - wanted), default=starts[-1])
        keys = max(end - self.held[piece.document].get(server, 0), 0)
        added = formula(served, heads, start, end) - receive * (end - keys)
        shed = all_kept - formula(kept, heads, piece.start, start) - send * (end - start)
        if not 0 < shed <= over or added > room:
            return None
        return TailMove(piece, start, server, shed, added, heads * (kept.query_bytes * (end - start) + kept.key_bytes * keys))


def unmoved_pieces(layout: Layout) -> list[QueryPiece]:
    """List the pieces of all ranks if nothing moves, the deepest in their documents first."""
    rows = [(rank, *row) for rank in range(layout.world_size) for row in layout.segments(rank)[int(layout.context[rank]) :]]
    heads = layout.heads_of(np.array([document for _, document, _, _ in rows], dtype=np.int64)).tolist()
    pieces = [QueryPiece(row[1], part, row[2], row[2] + row[3], row[0]) for row, part in zip(rows, heads, strict=True)]
    return sorted(pieces, key=lambda piece: (-piece.end, piece.document))


def plan_of(layout: Layout, groups: int, pieces: list[QueryPiece]) -> Plan:
    """Pieces as a plan. A document of which no head group moved is not split, and neighbours on one server become one task."""
    width = groups + 1 if groups > 1 else 1
    apart = {piece.document // width for piece in pieces if piece.slices and piece.document % width}
    tasks = []
    for piece in pieces:
        document, group = divmod(piece.document, width)
        if document not in apart and group > 1:
            continue
        number = piece.document if document in apart else document * width
        rows = [(piece.start, piece.end, piece.home), *reversed(piece.slices)]
        for server, some in itertools.groupby([row for row in rows if row[0] < row[1]], key=itemgetter(2)):
            start, end, _ = zip(*some, strict=True)
            tasks.append((number, start[0], end[-1], piece.home, server))
    split = np.isin(layout.documents, np.array(sorted(apart), dtype=np.int64))
    return Plan.from_tasks(layout.split(split, groups) if groups > 1 else layout, tasks)


def ways_to_count(unmoved: PlanLoad, price: Price, config: DistCAConfig) -> list[tuple[list[float], float, Price]]:
    """List seconds of ranks, tolerance, and the price of a slice on its server: for compute
    alone, and with exchanges if they take time.
    """
    compute, rate = unmoved.compute_seconds, unmoved.cost.exchange_bytes_per_second
    ways = [(compute.tolist(), max(config.tolerance, _FINEST), price)]
    if not config.ping_pong and rate < math.inf:
        both = compute + unmoved.exchange_seconds
        ways.append((both.tolist(), max(config.tolerance, _FINEST_WITH_EXCHANGE), price.with_exchange(rate)))
    return ways


def reference_plan(layout: Layout, cost: CostModel, config: DistCAConfig, per_node: int | None = None) -> Plan:
    """Assign every query token of `layout` to a server, as `balance` does for ranks that are all alike.

    With nodes of `per_node` ranks, plans are made node by node and in one group, and measured with the rates of both links. No
    work moves between nodes before the rest moves inside them, as it does in `balance`.

    Raises:
        ConfigError: if a document is longer than the cost model's window, or `config` bounds transient bytes.
    """
    if config.max_transient_bytes is not None or (cost.window is not None and cost.window < layout.longest):
        raise ConfigError(f"window={cost.window}, {config}: the reference knows no windows and no bound of transient bytes.")
    cost, ranks, world = replace(cost, window=None), Ranks(per_node=per_node).seen_by(cost), layout.world_size
    unmoved = relieve(PlanLoad(Plan.local(layout), cost, overlapped=config.ping_pong, ranks=ranks), config.min_gain)
    compute, price = unmoved.compute_seconds, Price.of(cost, config.tile)
    mean = math.fsum(compute.tolist()) / len(compute)
    within = np.abs(compute - mean).max() <= mean * config.tolerance
    if not config.balance or world < 2 or not price.pair or within:
        return unmoved.plan
    heads = Heads.of(layout, price, cost, compute, config.head_groups)
    grid = cut_grid(price, heads, layout.longest, config.tolerance * mean)
    split = layout if heads.groups == 1 else layout.split(heads.documents, heads.groups)
    best, enough = unmoved, unmoved.slowest_seconds * (1 - config.min_gain)
    equal = (_EQUAL_HIDDEN if config.ping_pong else _EQUAL) * config.tolerance
    ways = ways_to_count(unmoved, price, config)
    for size, (work, tolerance, served) in itertools.product(sorted({ranks.per_node or world, world}), ways):
        pieces = unmoved_pieces(split)
        for group in (range(first, first + size) for first in range(0, world, size)):
            mine = [piece for piece in pieces if piece.home in group]
            Evening(mine, list(work), tolerance, served, price, group).even_out(grid)
        load = relieve(PlanLoad(plan_of(layout, heads.groups, pieces), cost, overlapped=config.ping_pong, ranks=ranks))
        if load.slowest_seconds < best.slowest_seconds * (1 - equal) and load.slowest_seconds <= enough:
            best = load
    return best.plan
