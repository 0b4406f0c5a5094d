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
2. `head_groups`: long documents of ranks with work to give away are split by heads, for a server of
   some of the heads needs the keys of these alone.
3. `Levels` (`schedule.greedy`): ranks below `floor` come up to `low`, ranks above `cap` come down
   to `high`.
4. `even_out`: the heaviest rank gives slices away until it is below the cap, then the next one
   does; then, while ranks are below the floor, those above `low` do (`filling`). A slice goes to
   the emptiest rank, or to a rank that it fills exactly (`server_for`), or to a rank that has keys
   of the document. Of all tails that the rank could cut off its pieces (`tail`), it gives the one
   that sheds a second for the fewest bytes.
5. `relieve` (`schedule.relays`): keys that several servers need leave their holder once, and
   servers forward them.
6. `reference_plan` takes steps 3 to 5 twice, to even out compute alone, and compute and exchange
   together (`ways_to_count`); and with nodes for each node by itself, and again for all ranks as
   one group. The plan whose last rank ends first is taken; if it gains less than `min_gain`,
   nothing moves.

Left out are windows, unequal speeds, a bound of transient bytes, moves of first rows, moves that
even out nodes before their ranks, and the further plans of `balance`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import CostModel, Price
from hf_distca.schedule.greedy import Levels
from hf_distca.schedule.heads import WHOLE, cut_grid
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import CATask, Plan
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.relays import relieve

__all__ = ["reference_plan"]

_TYPICAL_SHARE = 0.25  # of the mean seconds of a rank: what a server typically lacks
_USUAL_GROUPS, _LONG_TRAVEL = 4, 0.4  # head groups that are enough where keys travel less than this part of the mean seconds
_FINEST, _FINEST_WITH_EXCHANGE = 0.002, 0.02  # tolerances below which the grid is too coarse
_LEAST_LACK = 0.25  # part of what a server should get that ranks with keys of the document have to lack
_HOLDERS = 8  # ranks that have keys of a document and are looked at


@dataclass(frozen=True, slots=True)
class Formula:
    """Coefficients of the formula: seconds of a task, row, key and
    query-key pair, and the rows of a kernel tile.
    """

    task: float
    row: float
    key: float
    pair: float
    tile: int

    @classmethod
    def of(cls, cost: CostModel) -> Formula:
        """Read the coefficients of a cost model, forward and backward together."""
        return cls(*cost.prices, cost.tile)

    def seconds(self, heads: float, start: int, end: int) -> float:
        """Return the seconds of rows [start, end), 0 if there are none."""
        rows = end - start
        pairs = -(-rows // self.tile) * self.tile * (end - (rows - self.tile) / 2)
        return self.task + heads * (self.row * rows + self.key * end + self.pair * pairs) if rows else 0.0

    def start(self, heads: float, end: int, wanted: float) -> float:
        """Return the position from which on the rows before `end` take so
        many seconds: the formula, solved for a.
        """
        # x rows take the seconds that are left if pair * x * (end + tile / 2 - x / 2) + row * x = left.
        left = max(wanted - self.task - heads * self.key * end, 0.0)
        half = heads * (self.pair * (end + self.tile / 2) + self.row)
        square = half * half - 2 * heads * self.pair * left
        return max(end - 2 * left / (half + math.sqrt(square)), 0.0) if square > 0 else 0.0


@dataclass(slots=True)
class QueryPiece:
    """Rows [start, end) of a document, of all heads (group 0) or one group: a piece of its home, or a slice for a server."""

    document: int
    group: int
    heads: float
    start: int
    end: int
    home: int
    server: int


@dataclass(frozen=True, slots=True)
class TailMove:
    """Rows of a piece from `start` on, for a server: seconds that its home
    sheds and the server gets, and the bytes.
    """

    piece: QueryPiece
    start: int
    server: int
    shed: float
    added: float
    bytes: float


def unmoved_pieces(layout: Layout, groups: int = 1, documents: frozenset[int] = frozenset()) -> list[QueryPiece]:
    """List the pieces that each rank computes if nothing moves: one for each head
    group of `documents`, one for other documents.
    """
    pieces = []
    for rank in range(layout.world_size):
        for document, start, length in layout.segments(rank)[int(layout.context[rank]) :]:
            parts = range(1, groups + 1) if document in documents else (0,)
            heads = 1 / len(parts)
            pieces += [QueryPiece(document, group, heads, start, start + length, rank, rank) for group in parts]
    return sorted(pieces, key=lambda piece: (-piece.end, piece.document, piece.group))


def head_groups(layout: Layout, cost: CostModel, compute: list[float], most: int) -> tuple[int, frozenset[int]]:
    """Choose, in step 2, the number of head groups, and the documents to split:
    long ones of ranks with work to give away.
    """
    shape, mean, rate = cost.shape, sum(compute) / len(compute), cost.exchange_bytes_per_second
    possible = [count for count in range(1, min(most, shape.key_value_heads) + 1) if shape.key_value_heads % count == 0]
    if possible == [1] or layout.groups > 1 or any(layout.context) or rate == math.inf:
        return 1, frozenset()
    # A slice of F seconds at position y has F / (pair * y) rows. Its keys are as many bytes as its queries where
    # query_bytes * F / (pair * y) = key_bytes * y.
    length = math.sqrt(_TYPICAL_SHARE * mean * shape.moved_query_bytes / (shape.moved_key_bytes * Formula.of(cost).pair))
    travel = layout.longest * shape.moved_key_bytes / rate
    usual = max(count for count in possible if count <= _USUAL_GROUPS)
    groups = next((count for count in possible if count > usual and travel > _LONG_TRAVEL * mean * count), usual)
    pieces = unmoved_pieces(layout)
    busy = {piece.document for piece in pieces if compute[piece.home] > mean}
    return groups, frozenset(piece.document for piece in pieces if piece.end >= length) & busy


class Evening:
    """Steps 3 and 4: slices move until no rank is above the cap, or nothing fits any more.

    Args:
        pieces: pieces that ranks compute; they shrink.
        work: seconds of each rank, which are evened out.
        tolerance: half the width of the band around the mean, as a part of it.
        served: cost of a slice on its server.
        cost: cost of a slice at its home, and bytes of rows and keys.
        group: the ranks that share work: ranks of a node, or all.
    """

    def __init__(
        self, pieces: list[QueryPiece], work: list[float], tolerance: float, served: Formula, cost: CostModel, group: range
    ) -> None:
        self.work, self.served, self.kept, self.shape, self.group = list(work), served, Formula.of(cost), cost.shape, group
        self.pieces, some = [piece for piece in pieces if piece.home in group], [work[rank] for rank in group]
        self.total, self.shed, self.grown, self.filling = math.fsum(some), 0.0, 0.0, False
        self.levels = self.base = Levels.of(some, ALIKE, tolerance)
        self.surplus = math.fsum(max(seconds - self.base.high, 0.0) for seconds in some)
        # By document and group: how many keys ranks have there anyway, in the order in which they came by them.
        self.held: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for piece in sorted(pieces, key=lambda piece: piece.end):
            self.held[piece.document, piece.group][piece.home] = piece.end

    def even_out(self, grid: int) -> list[QueryPiece]:
        """Make all moves, cut at multiples of the grid, and return the pieces."""
        moved = []
        order = sorted(self.group, key=lambda rank: -self.work[rank])
        for self.filling, source in itertools.product((False, True), order):
            mine = [piece for piece in self.pieces if piece.home == source]
            while move := self.next_move(source, mine, grid):
                piece, server = move.piece, move.server
                moved.append(replace(piece, start=move.start, server=server))
                held = self.held[piece.document, piece.group]
                held[server] = max(held.pop(server, 0), piece.end)  # to the end of the order
                piece.end = move.start
                self.work[source] -= move.shed
                self.work[server] += move.added
                # A slice may cost its server more than its home. Levels rise with what that adds to the work of all.
                self.shed, self.grown = self.shed + move.shed, self.grown + move.added - move.shed
                scale = 1 + self.grown / self.shed * max(self.surplus, self.shed) / self.total
                self.levels = Levels(*(scale * level for level in self.base))
        return [piece for piece in self.pieces if piece.start < piece.end] + moved

    def next_move(self, source: int, pieces: list[QueryPiece], grid: int) -> TailMove | None:
        """Find the move with the fewest bytes per second.

        If none fits the levels, a server may get up to half of the work of both.
        """
        work, levels = self.work, self.levels
        above, aim = (levels.low, levels.floor) if self.filling else (levels.cap, levels.high)
        if work[source] <= above:
            return None
        for leeway, surplus in ((0.0, math.inf),) if self.filling else ((0.0, work[source] - aim), (0.5, math.inf)):
            best = self.server_for(surplus)
            if best is None or (self.filling and work[best] >= levels.floor):
                return None
            # Holders of keys that lack much less would get slivers, in very many moves.
            enough = min(levels.floor, levels.low - _LEAST_LACK * min(work[source] - aim, levels.low - work[best]))
            moves = []
            for piece in pieces:
                holders = reversed(self.held[piece.document, piece.group])
                near = [rank for rank in holders if rank in self.group and rank not in (best, source) and work[rank] < enough]
                tails = (self.tail(piece, server, leeway, grid) for server in (best, *near[:_HOLDERS]) if piece.start < piece.end)
                moves += [move for move in tails if move is not None]
            if moves:
                move = min(moves, key=lambda move: move.bytes / move.shed)
                return None if self.filling and move.added > 2 * move.shed else move
        return None

    def server_for(self, surplus: float) -> int | None:
        """Find the emptiest rank below the mean; if it lacks more than the surplus,
        prefer a rank that the surplus fills exactly.
        """
        work, levels = self.work, self.levels
        below = [rank for rank in self.group if work[rank] < levels.mean]
        emptiest = min(below, key=lambda rank: work[rank], default=None)
        if emptiest is None or levels.low - work[emptiest] <= surplus:
            return emptiest
        fitting = [rank for rank in below if levels.floor <= work[rank] + surplus <= levels.cap]
        return min(fitting, key=lambda rank: work[rank], default=emptiest)

    def tail(self, piece: QueryPiece, server: int, leeway: float, grid: int) -> TailMove | None:
        """Cut off the tail of a piece that its home should lose and
        a server lacks; None if none fits.
        """
        kept, served, levels, heads, end = self.kept, self.served, self.levels, piece.heads, piece.end
        home, filled = self.work[piece.home], self.work[server]
        room = max(levels.cap, leeway * (home + filled)) - filled
        over = room if leeway else home - levels.floor
        send, receive = heads * (served.row - kept.row), heads * (served.key - kept.key)  # seconds of a row and of a key
        whole, all_kept = served.seconds(heads, piece.start, end), kept.seconds(heads, piece.start, end)
        rid = all_kept - send * (end - piece.start)
        scale = whole / rid if rid > 0 else 0.0  # for each second less at home the server gets so many more
        aim = levels.floor if self.filling else levels.high
        wanted = min((home - aim) * scale, room, levels.low - filled if filled < levels.floor else math.inf)
        most = room if leeway else min(over * scale, room)
        if wanted <= 0:
            return None
        start = piece.start
        if whole > wanted and whole > min(most, 1.1 * wanted):
            last = (end - 1) // grid * grid  # the last possible start
            start = max(min(int(served.start(heads, end, wanted) / grid + 0.5) * grid, last), start)
            while start < last and served.seconds(heads, start, end) > most:
                start = start // grid * grid + grid
        keys = max(end - self.held[piece.document, piece.group].get(server, 0), 0)
        added = served.seconds(heads, start, end) - receive * (end - keys)
        shed = all_kept - kept.seconds(heads, piece.start, start) - send * (end - start)
        if not 0 < shed <= over or added > room:
            return None
        amount = self.shape.moved_query_bytes * (end - start) + self.shape.moved_key_bytes * keys
        return TailMove(piece, start, server, shed, added, heads * amount)


def plan_of(layout: Layout, pieces: list[QueryPiece], groups: int) -> Plan:
    """Make a plan of pieces.

    A document without a moved head group is not split, and
    neighbours on one server become one task.
    """
    apart = {piece.document for piece in pieces if piece.group and piece.home != piece.server}
    width = groups + 1 if apart else 1
    begins = {(document, start) for rank in range(layout.world_size) for document, start, _ in layout.segments(rank)}
    tasks: list[CATask] = []
    for piece in sorted(pieces, key=lambda piece: (piece.document, piece.group, piece.start)):
        if piece.group > 1 and piece.document not in apart:
            continue
        number = piece.document * width + (piece.group if piece.document in apart else 0)
        task = CATask(number, piece.start, piece.end, piece.home, piece.server)
        joined = tasks and tasks[-1]._replace(start=task.start, end=task.end) == task and tasks[-1].end == task.start
        if joined and (piece.document, piece.start) not in begins:
            task = tasks.pop()._replace(end=piece.end)
        tasks.append(task)
    split = np.array([document in apart for document in layout.documents.tolist()], dtype=np.bool_)
    return Plan.from_tasks(layout.split(split, groups) if apart else layout, tasks)


def reference_plan(layout: Layout, cost: CostModel, config: DistCAConfig, per_node: int | None = None) -> Plan:
    """Assign every query token of `layout` to a server, as `balance` does for ranks that are all alike.

    With nodes of `per_node` ranks, plans are made node by node and in one group, and measured with the rates of both links. No
    work moves between nodes before the rest moves inside them, as it does in `balance`.

    Raises:
        ConfigError: if a document is longer than the cost model's window, or `config` bounds transient bytes.
    """
    if config.max_transient_bytes is not None or (cost.window is not None and cost.window < layout.longest):
        raise ConfigError(f"window={cost.window}, {config}: the reference knows no windows and no bound of transient bytes.")
    cost, formula, ranks = replace(cost, window=None), Formula.of(cost), Ranks(per_node=per_node).seen_by(cost)
    unmoved = relieve(PlanLoad(Plan.local(layout), cost, overlapped=config.ping_pong, ranks=ranks), config.min_gain)
    compute, exchange = unmoved.compute_seconds.tolist(), unmoved.exchange_seconds.tolist()
    mean = math.fsum(compute) / len(compute)
    within = max(compute) <= mean * (1 + config.tolerance) and min(compute) >= mean * (1 - config.tolerance)
    if not config.balance or layout.world_size < 2 or not formula.pair or within:
        return unmoved.plan
    groups, documents = head_groups(layout, cost, compute, config.head_groups)
    heads = WHOLE._replace(groups=groups)
    grid = cut_grid(Price.of(cost, config.tile), heads, layout.longest, config.tolerance * mean)
    best, sizes = unmoved, [layout.world_size] if ranks.per_node is None else [ranks.per_node, layout.world_size]
    for size, (work, tolerance, served) in itertools.product(sizes, ways_to_count(compute, exchange, cost, config)):
        pieces = unmoved_pieces(layout, groups, documents)
        evened = [
            piece
            for first in range(0, layout.world_size, size)
            for piece in Evening(pieces, work, tolerance, served, cost, range(first, first + size)).even_out(grid)
        ]
        load = PlanLoad(plan_of(layout, evened, groups), cost, overlapped=config.ping_pong, ranks=ranks)
        load = relieve(load)
        enough = unmoved.slowest_seconds - load.slowest_seconds >= config.min_gain * unmoved.slowest_seconds
        if enough and load.slowest_seconds < best.slowest_seconds:
            best = load
    return best.plan


def ways_to_count(
    compute: list[float], exchange: list[float], cost: CostModel, config: DistCAConfig
) -> list[tuple[list[float], float, Formula]]:
    """List seconds of ranks, tolerance, and the cost of a slice on its server: for
    compute alone, and with exchanges if they take time.
    """
    formula, rate = Formula.of(cost), cost.exchange_bytes_per_second
    ways = [(compute, max(config.tolerance, _FINEST), formula)]
    if not config.ping_pong and rate < math.inf:
        row, key = cost.shape.moved_query_bytes / rate, cost.shape.moved_key_bytes / rate
        served = replace(formula, row=formula.row + row, key=formula.key + key)
        both = [sum(pair) for pair in zip(compute, exchange, strict=True)]
        ways.append((both, max(config.tolerance, _FINEST_WITH_EXCHANGE), served))
    return ways
