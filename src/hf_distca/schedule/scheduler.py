"""`balance`: which attention server computes which query rows.

The scheduler is greedy. Every rank has a *level* that it should end at: ranks above the tolerated band come down to it,
ranks below come up to it, ranks inside are left alone. The heaviest rank gives first, to the emptiest server, always the
slice with the fewest bytes exchanged per second of work moved.

What a slice costs. Query rows [x, y) of a document, moved to a server that holds none of its keys, exchange
q * (y - x) + kv * y bytes and move about p * (y**2 - x**2) / 2 seconds, with q and kv the bytes of a query and of a key
token and p the seconds of a query-key pair. For F seconds, with n = y - x rows, y = F / (p * n) + n / 2; the bytes
q * n + kv * (F / (p * n) + n / 2) are least at n = sqrt(F * kv / (p * (q + kv / 2))). Keys that the server holds anyway,
as home of a part of the document or for a slice it already has, are free.

Every rank computes the plan for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.summary import PlanLoad

__all__ = ["balance"]

# Coarser bands that are tried when the exchange of the wanted one weighs more than this part of the slowest rank's time.
_COARSER = (0.05, 0.15, 0.4)
_HEAVY_EXCHANGE = 0.1
# Levels are set inside the tolerated band, because slices end on tiles and seldom move exactly what was wanted.
_INNER_BAND = 0.7
# Servers that already hold keys of a document and are looked at for each of its pieces.
_HOLDERS = 8
# Ranks that a rank below the band asks for work.
_DONORS = 8


def balance(layout: Layout, cost: CostModel, config: DistCAConfig) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange, nothing hidden); where
    it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and where they lie; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank.
        config: `balance`, `tolerance`, `min_gain` and `tile` are read.
    """
    local = Plan.local(layout)
    if not config.balance or layout.world_size < 2:
        return local
    price = _Price.of(cost, config.tile)
    seconds = PlanLoad(local, cost).compute_seconds.tolist()
    # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
    if not price.pair or _within(seconds, config.tolerance):
        return local
    before = PlanLoad(local, cost).slowest_seconds
    best, fastest = local, before
    for tolerance in (config.tolerance, *(t for t in _COARSER if t > config.tolerance)):
        plan = _Greedy(layout, price, seconds, tolerance).plan()
        load = PlanLoad(plan, cost)
        if load.slowest_seconds > fastest * (1 - config.min_gain):
            # The first coarser band that does not help ends the search, unless nothing has helped yet.
            if best is not local:
                break
            continue
        best, fastest = plan, load.slowest_seconds
        if float(load.exchange_seconds.max()) <= _HEAVY_EXCHANGE * fastest:
            break
    return best


def _within(seconds: list[float], tolerance: float) -> bool:
    mean = sum(seconds) / len(seconds)
    return max(seconds) <= mean * (1 + tolerance) and min(seconds) >= mean * (1 - tolerance)


@dataclass(frozen=True, slots=True)
class _Price:
    """A cost model as scalars: seconds of a task, query row, key and query-key pair; bytes of a moved query and key token."""

    task: float
    row: float
    key: float
    pair: float
    kernel_tile: int
    tile: int
    query_bytes: int
    key_bytes: int

    @classmethod
    def of(cls, cost: CostModel, tile: int) -> _Price:
        # Differences of the model itself, so that its formula stays in one place. Any rows and keys would do.
        shape, n = cost.shape, cost.tile
        forward, backward = cost.forward, cost.backward
        byte = 1 / forward.bytes_per_second + 2 / backward.bytes_per_second
        flop = 1 / forward.flops_per_second + 2.5 / backward.flops_per_second
        return cls(
            task=forward.task_seconds + backward.task_seconds,
            row=byte * (shape.query_bytes + shape.output_bytes),
            key=byte * shape.key_value_bytes,
            pair=flop * shape.pair_flops,
            kernel_tile=n,
            tile=tile,
            query_bytes=shape.moved_query_bytes,
            key_bytes=shape.moved_key_bytes,
        )

    def seconds(self, start: int, end: int) -> float:
        """Seconds of query rows [start, end), 0 if there are none."""
        rows = end - start
        if rows <= 0:
            return 0.0
        tiled = -(-rows // self.kernel_tile) * self.kernel_tile
        return self.task + self.key * end + tiled * (self.row + self.pair * (end - (rows - 1) / 2))

    def start_for(self, end: int, want: float) -> float:
        """Start of the slice that ends at `end` and takes `want` seconds; below 0 if the document is too short."""
        half = self.pair * (end + 0.5) + self.row
        seconds = max(want - self.task - self.key * end, 0.0)
        square = half * half - 2 * self.pair * seconds
        return end - 2 * seconds / (half + math.sqrt(square)) if square > 0 else -1.0

    def end_for(self, start: int, want: float) -> float:
        """End of the slice that begins at `start` and takes `want` seconds."""
        linear = 0.5 + (self.row + self.key) / self.pair
        right = 2 * (want - self.task + self.row * start) / self.pair + start * (start + 1.0)
        return math.sqrt(max(linear * linear + right, 0.0)) - linear

    def slice(self, start: int, end: int, want: float, most: float, held: int) -> tuple[int, int]:
        """The cheapest slice of rows [start, end) that takes about `want` seconds, for a server that holds `held` keys.

        Never more than `most` seconds, unless a single tile of rows takes more.
        """
        rows = self.cheapest_rows(want)
        y = self.end_of(rows, want)
        # Keys that are there cost nothing: a later slice has fewer rows.
        last = min(end, held) if held > start and y <= held else end
        if y > last or y < held:
            rows = last - self.start_for(last, want)
        elif y - rows < start:
            rows = self.end_for(start, want) - start
        tiles = max(int(rows / self.tile + 0.5), 1)
        x, y = self.place(start, last, tiles, want)
        if tiles > 1 and self.seconds(x, y) > most:
            x, y = self.place(start, last, tiles - 1, want)
        return x, y

    def cheapest_rows(self, want: float) -> float:
        """Rows of the slice of `want` seconds that exchanges the fewest bytes, wherever in a document that is."""
        return math.sqrt(want * self.key_bytes / (self.pair * (self.query_bytes + self.key_bytes / 2)))

    def end_of(self, rows: float, want: float) -> float:
        """End of the slice that takes `want` seconds with `rows` rows."""
        return (want - self.task - self.row * rows) / (self.key + rows * self.pair) + (rows - 1) / 2

    def place(self, start: int, end: int, tiles: int, want: float) -> tuple[int, int]:
        """Where in [start, end) a slice of so many tiles takes `want` seconds, or nearest to it.

        Rows come in tiles, and a tile of rows deep in a document takes long: shifting the slice is the finer adjustment.
        """
        tile, rows = self.tile, tiles * self.tile
        x = int((self.end_of(rows, want) - rows) / tile + 0.5) * tile
        x = min(x, -(-(end - rows) // tile) * tile)
        return (start, min((start + rows) // tile * tile, end)) if x <= start else (x, min(x + rows, end))


class _Piece(NamedTuple):
    """Rows of a segment that its home still computes. Sorted, pieces with the longest prefix come first."""

    minus_end: int
    start: int
    document: int
    segment: int


class _Move(NamedTuple):
    """A slice and what moving it does; sorts by bytes exchanged per second moved."""

    bytes_per_second: float
    server: int
    piece: int
    start: int
    end: int
    shed: float
    added: float


class _Greedy:
    """One run of the greedy for one tolerance."""

    def __init__(self, layout: Layout, price: _Price, seconds: list[float], tolerance: float) -> None:
        self.layout, self.price = layout, price
        self.work = list(seconds)
        mean = sum(seconds) / len(seconds)
        # A server reads keys that the home read already, and starts a task more: moving adds work, and so raises the mean.
        wants = [mean - work for work in seconds if work < mean * (1 - tolerance)]
        ends = (min(price.end_of(price.cheapest_rows(want), want), layout.longest) for want in wants)
        self.mean = mean = mean + math.fsum(price.task + price.key * max(end, 0.0) for end in ends) / len(seconds)
        self.floor, self.cap = mean * (1 - tolerance), mean * (1 + tolerance)
        self.low, self.high = _levels(seconds, mean, tolerance * _INNER_BAND)
        # Ranks that may take work, emptiest first.
        self.free = sorted((work, rank) for rank, work in enumerate(seconds) if work < mean)
        self.pieces: dict[int, list[_Piece]] = {}
        self.moved: list[tuple[int, int, int, int, int]] = []
        # document -> rank -> keys [0, n) that it needs anyway. Only documents on several ranks, and moved ones.
        self.held: dict[int, dict[int, int]] = {}
        self._hold_spanning()

    def plan(self) -> Plan:
        """Run and build the plan."""
        order = sorted(range(len(self.work)), key=lambda rank: (-self.work[rank], rank))
        for rank in order:
            if self.work[rank] <= self.cap:
                break
            self._unload(rank)
        self._lift()
        return self._build()

    def _hold_spanning(self) -> None:
        layout = self.layout
        spanning = layout.spanning
        if not spanning:
            return
        rows = np.flatnonzero(np.isin(layout.document, np.array(sorted(spanning))))
        columns = (layout.document[rows].tolist(), layout.rank[rows].tolist(), layout.end[rows].tolist())
        for document, rank, end in zip(*columns, strict=True):
            ranks = self.held.setdefault(document, {})
            ranks[rank] = max(ranks.get(rank, 0), end)

    def _pieces(self, rank: int) -> list[_Piece]:
        if rank not in self.pieces:
            first = int(self.layout.offsets[rank])
            self.pieces[rank] = sorted(
                _Piece(-s.end, s.start, s.document, first + i) for i, s in enumerate(self.layout.segments(rank))
            )
        return self.pieces[rank]

    def _unload(self, source: int) -> None:
        """Move slices away until the source is at its level."""
        while self.work[source] > self.cap and self.free:
            surplus = self.work[source] - self.high
            server = self._server_for(surplus)
            # A tile of rows may be more than the tolerated band is wide: rather a source too low, which `_lift` mends.
            move = self._best(source, server, surplus, self.floor) or self._best(source, self.free[0][1], surplus, 0.0)
            if move is None:
                break
            self._apply(source, move)

    def _lift(self) -> None:
        """Ranks that are still too low take from the heaviest, whichever of those gives for the fewest bytes."""
        while self.free and self.free[0][0] < self.floor:
            work, server = self.free[0]
            donors = heapq.nsmallest(_DONORS, range(len(self.work)), key=lambda rank: (-self.work[rank], rank))
            offers = []
            for donor in donors:
                want = min(self.work[donor] - self.floor, self.low - work)
                if self.work[donor] > self.low and (move := self._best(donor, server, want, self.floor)):
                    offers.append((move.bytes_per_second, donor, move))
            if offers:
                self._apply(*min(offers)[1:])
            else:
                del self.free[0]

    def _server_for(self, surplus: float) -> int:
        """A server that the surplus fits exactly, or else the emptiest."""
        if self.low - self.free[0][0] > surplus:
            at = bisect_left(self.free, (self.floor - surplus, -1))
            if at < len(self.free) and self.free[at][0] + surplus <= self.cap:
                return self.free[at][1]
        return self.free[0][1]

    def _best(self, source: int, server: int, surplus: float, keep: float) -> _Move | None:
        """The cheapest slice for `server`, or for one that holds keys of a document already. The source keeps `keep` seconds."""
        best: _Move | None = None
        price, pieces = self.price, self._pieces(source)
        for row, piece in enumerate(pieces):
            end = -piece.minus_end
            # No slice of a shorter prefix moves a second for fewer bytes than its queries alone.
            rate = price.row + price.pair * end + (price.task + price.key * end) / price.tile
            if best is not None and price.query_bytes > best.bytes_per_second * rate:
                break
            held = self.held.get(piece.document)
            if held is None:
                best = self._try(source, row, piece, server, 0, surplus, keep, best)
                continue
            best = self._try(source, row, piece, server, held.get(server, 0), surplus, keep, best)
            for other in self._holders(held, server):
                best = self._try(source, row, piece, other, held[other], surplus, keep, best)
        return best

    def _holders(self, held: dict[int, int], but: int) -> Iterator[int]:
        found = 0
        for rank in held:
            if rank != but and self.work[rank] < self.floor:
                yield rank
                found += 1
                if found == _HOLDERS:
                    return

    def _try(
        self, source: int, row: int, piece: _Piece, server: int, held: int, surplus: float, keep: float, best: _Move | None
    ) -> _Move | None:
        price, start, end = self.price, piece.start, -piece.minus_end
        work = self.work[server]
        room = self.cap - work
        want = min(surplus, self.low - work if work < self.floor else room)
        most = min(self.work[source] - keep, room)
        whole = price.seconds(start, end)
        if whole <= want or (whole <= most and whole <= 1.1 * want):
            x, y = start, end
        else:
            x, y = price.slice(start, end, want, most, held)
            if y <= x:
                return best
        added = price.seconds(x, y)
        shed = whole - price.seconds(start, x) - price.seconds(y, end)
        if not 0 < shed <= most or added > room:
            return best
        keys = max(y - held, 0)
        if x == start and y == end and piece.document in self.held:
            keys -= self._saved(source, piece)
        ratio = (price.query_bytes * (y - x) + price.key_bytes * keys) / shed
        if best is None or ratio < best.bytes_per_second:
            return _Move(ratio, server, row, x, y, shed, added)
        return best

    def _saved(self, source: int, piece: _Piece) -> int:
        """K/V tokens that the source no longer needs from others once the whole piece is gone."""
        end = -piece.minus_end
        if self.held[piece.document].get(source, 0) > end:
            return 0
        rest = max((-p.minus_end for p in self.pieces[source] if p.document == piece.document and p != piece), default=0)
        own = [s for s in self.layout.segments(source) if s.document == piece.document]
        return end - rest - sum(max(0, min(s.end, end) - max(s.start, rest)) for s in own)

    def _apply(self, source: int, move: _Move) -> None:
        pieces = self.pieces[source]
        piece = pieces.pop(move.piece)
        end = -piece.minus_end
        if piece.start < move.start:
            insort(pieces, piece._replace(minus_end=-move.start))
        if move.end < end:
            insort(pieces, piece._replace(start=move.end))
        held = self.held.setdefault(piece.document, {})
        held[move.server] = max(held.get(move.server, 0), move.end)
        if source in held:
            held[source] = max((-p.minus_end for p in pieces if p.document == piece.document), default=0)
        self.moved.append((piece.document, move.start, move.end, source, move.server))
        self._change(source, -move.shed)
        self._change(move.server, move.added)

    def _change(self, rank: int, seconds: float) -> None:
        old = self.work[rank]
        self.work[rank] = old + seconds
        at = bisect_left(self.free, (old, rank))
        if at < len(self.free) and self.free[at] == (old, rank):
            del self.free[at]
        if old + seconds < self.mean:
            insort(self.free, (old + seconds, rank))

    def _build(self) -> Plan:
        """Tasks: untouched segments, what is left of the others, and what was moved."""
        layout = self.layout
        keep = np.ones(len(layout.document), dtype=bool)
        rows = list(self.moved)
        for rank, pieces in self.pieces.items():
            keep[layout.offsets[rank] : layout.offsets[rank + 1]] = False
            rows += [(p.document, p.start, -p.minus_end, rank, rank) for p in pieces]
        extra = np.array(rows, dtype=np.int64).reshape(-1, 5)
        kept = (layout.document, layout.start, layout.end, layout.rank, layout.rank)
        return Plan(layout, *(np.concatenate([column[keep], extra[:, i]]) for i, column in enumerate(kept)))


def _levels(seconds: list[float], mean: float, band: float) -> tuple[float, float]:
    """Seconds that ranks below the band should come up to, and ranks above it down to.

    What one side sheds the other takes: the side with more to do stops at the edge of the band, the other goes further.
    """
    low, high = mean * (1 - band), mean * (1 + band)
    surplus = math.fsum(w - high for w in seconds if w > high)
    deficit = math.fsum(low - w for w in seconds if w < low)
    if surplus >= deficit:
        return min(_fill(seconds, surplus), mean), high
    return low, max(-_fill([-w for w in seconds], deficit), mean)


def _fill(seconds: list[float], amount: float) -> float:
    """The level that `amount` poured over the lowest ranks reaches."""
    total = 0.0
    ordered = sorted(seconds)
    for count, work in enumerate(ordered, 1):
        total += work
        level = (amount + total) / count
        if count == len(ordered) or level <= ordered[count]:
            return level
    return 0.0
