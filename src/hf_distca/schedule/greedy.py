"""The greedy behind `balance`.

Every rank has a *level* that it should end at: ranks above the tolerated band come down to it, ranks below come up to it,
ranks inside are left alone. The heaviest rank gives first, to the emptiest server, always the slice with the fewest bytes
exchanged per second of work moved. Since the emptiest servers take the largest slices, the heaviest rank, which is the
busiest sender, sends its keys to as few servers as can be.

Every rank computes the plan for itself, so everything here is plain IEEE double arithmetic in a fixed order.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import Levels
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.waves import Fit

__all__ = ["Greedy"]

# Servers that already hold keys of a document and are looked at for each of its pieces.
_HOLDERS = 8
# How much more or less than the last one a server may want for what slices cost to be remembered.
_ALIKE = 0.3
# Ranks that a rank below the band asks for work.
_DONORS = 8
# Ranks in a row that no donor has anything for, after which no other asks: with thousands of ranks asking takes seconds.
_FAILURES = 4


class _Piece(NamedTuple):
    """Rows of a segment that its home still computes. Sorted, pieces with the longest prefix come first.

    Documents are numbered as in a split layout, if any may be split by heads; a segment of such a document has a piece for each
    head group.
    """

    minus_end: int
    start: int
    document: int
    segment: int


class _Move(NamedTuple):
    """A slice and what moving it does; sorts by bytes exchanged per second moved."""

    bytes_per_second: float
    server: int
    piece: _Piece
    start: int
    end: int
    shed: float
    added: float


class _Seen:
    """A rank's pieces by what slices of them cost when they were last looked at, for a server that wanted about as much.

    Attributes:
        order: a heap of bytes exchanged per second moved, infinite if there was no slice, or no more than they can be if nobody
            has looked; with the piece.
        gone: pieces in it that are no more.
    """

    def __init__(self) -> None:
        self.order: list[tuple[float, _Piece]] = []
        self.gone: set[_Piece] = set()
        self.want = 0.0

    def is_for(self, seconds: float) -> bool:
        """Whether a server wants about as much as those before."""
        return self.want * (1 - _ALIKE) <= seconds <= self.want * (1 + _ALIKE)


class Greedy:
    """One run of the greedy for one tolerance. With `fit`, slices are only moved as far as they fit a server.

    With `cap`, ranks above that many seconds come down to it, and `tolerance` is not read. With `exchanged`, prices that have
    what a server receives in them, `seconds` are those of compute and exchange, and that is what is evened out. Documents of
    `heads` are split if a slice of some of their heads is moved.

    Seconds of ranks and levels are what a rank takes; those of slices and of what is still to move are of a rank of speed 1.
    """

    def __init__(
        self,
        layout: Layout,
        price: Price,
        seconds: list[float],
        tolerance: float,
        fit: Fit | None = None,
        cap: float | None = None,
        ranks: Ranks = ALIKE,
        exchanged: Price | None = None,
        heads: Heads = WHOLE,
    ) -> None:
        self.layout, self.own, self.fit, self.fills_all = layout, price, fit, cap is None
        self.price = exchanged or price
        self.heads = heads
        # Numbers of a document and its head groups: document d becomes d * parts.
        self.parts = 1 if heads.groups == 1 else heads.groups + 1
        self.group_prices = self.price.of_group(heads.groups), self.own.of_group(heads.groups)
        self.work = list(seconds)
        self.speeds = speeds = ranks.each(len(seconds))
        mean = ranks.level(seconds)
        self.total = ranks.work(seconds)
        self.levels = Levels.of(seconds, speeds, mean, tolerance) if cap is None else Levels.below(cap)
        self.now = self.levels
        high = self.levels.high
        self.surplus = math.fsum((work - high) * speed for work, speed in zip(seconds, speeds, strict=True) if work > high)
        self.shed = self.grown = 0.0
        # Ranks of a node, if it matters who is in one.
        self.per_node = ranks.per_node if price.near < 1 and (ranks.per_node or 1) < len(seconds) else None
        # Ranks that may take work, emptiest first.
        self.free = sorted((work, rank) for rank, work in enumerate(seconds) if work < self.levels.mean)
        self.pieces: dict[int, list[_Piece]] = {}
        self.seen: dict[int, _Seen] = {}
        # document -> those of `held` that may take work; with others that turned out not to.
        self.able: dict[int, list[int]] = {}
        self.segments: dict[int, dict[int, list[tuple[int, int]]]] = {}
        # (segment, document, start, end, home, server)
        self.moved: list[tuple[int, int, int, int, int, int]] = []
        # document -> rank -> keys [0, n) that it needs anyway. Only documents on several ranks, and moved ones. Nothing with
        # a window: what a rank needs is no prefix then, and what two slices share is a window of keys at most.
        self.held: dict[int, dict[int, int]] = {}
        if price.window is None:
            self._hold_spanning()

    def plan(self) -> Plan:
        """Run and build the plan."""
        order = sorted(range(len(self.work)), key=lambda rank: (-self.work[rank], rank))
        for rank in order:
            if self.work[rank] <= self.now.cap:
                break
            self._unload(rank)
        if self.fills_all:
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
            for number in self._numbers(document):
                ranks = self.held.setdefault(number, {})
                ranks[rank] = max(ranks.get(rank, 0), end)

    def _numbers(self, document: int) -> range:
        """The numbers that a document has here: its own, or those of its head groups."""
        first = document * self.parts
        return range(first + 1, first + self.parts) if document in self.heads.documents else range(first, first + 1)

    def _pieces(self, rank: int) -> list[_Piece]:
        if rank not in self.pieces:
            first, context = int(self.layout.offsets[rank]), int(self.layout.context[rank])
            segments = enumerate(self.layout.segments(rank)[context:], first + context)
            self.pieces[rank] = sorted(_Piece(-s.end, s.start, n, row) for row, s in segments for n in self._numbers(s.document))
        return self.pieces[rank]

    def _unload(self, source: int) -> None:
        """Move slices away until the source is at its level."""
        while self.work[source] > self.now.cap and self.free:
            surplus = (self.work[source] - self.now.high) * self.speeds[source]
            server = self._server_for(surplus)
            # A tile of rows may be more than the tolerated band is wide. Then a source too low, which `_lift` mends, or a
            # server too high, but lower than the source was, is better than leaving the source as it is.
            move = self._best(source, server, surplus) or self._best(source, self.free[0][1], surplus, strict=False)
            if move is None:
                break
            self._apply(source, move)

    def _lift(self) -> None:
        """Ranks that are still too low take from the heaviest, whichever of those gives for the fewest bytes."""
        heaviest = sorted((-work, rank) for rank, work in enumerate(self.work))
        failed = 0
        while self.free and self.free[0][0] < self.now.floor and failed < _FAILURES:
            work, server = self.free[0]
            donors = [rank for _, rank in heaviest[:_DONORS]]
            donors += [rank for rank in self._node_of(server) if rank not in donors]
            offers = []
            for donor in donors:
                over, lack = self.work[donor] - self.now.floor, self.now.low - work
                want = min(over * self.speeds[donor], lack * self.speeds[server])
                if self.work[donor] > self.now.low and (move := self._best(donor, server, want)):
                    offers.append((move.bytes_per_second, donor, move))
            failed = 0 if offers else failed + 1
            if offers:
                _, donor, move = min(offers)
                before = {rank: self.work[rank] for rank in (donor, move.server)}
                self._apply(donor, move)
                for rank, was in before.items():
                    del heaviest[bisect_left(heaviest, (-was, rank))]
                    insort(heaviest, (-self.work[rank], rank))
            else:
                del self.free[0]

    def _server_for(self, surplus: float) -> int:
        """A server that the surplus fits exactly, or else the emptiest."""
        work, emptiest = self.free[0]
        if (self.now.low - work) * self.speeds[emptiest] > surplus:
            at = bisect_left(self.free, (self.now.floor - surplus, -1))
            if at < len(self.free) and self.free[at][0] + surplus / self.speeds[self.free[at][1]] <= self.now.cap:
                return self.free[at][1]
        return emptiest

    def _best(self, source: int, server: int, surplus: float, *, strict: bool = True) -> _Move | None:
        """The cheapest slice for `server`, or for one that holds keys of a document already.

        If `strict`, none that brings the source below the band or the server above it.
        """
        seen, want = self.seen.setdefault(source, _Seen()), min(surplus, self.now.low - self.work[server])
        if not seen.is_for(want):
            seen.want, seen.order, seen.gone = want, [(self._least(piece), piece) for piece in self._pieces(source)], set()
            heapq.heapify(seen.order)
        best: _Move | None = None
        near = self._near(source, server)
        order, looked, like = seen.order, list[tuple[float, _Piece]](), None
        # No slice of the pieces behind moves a second for fewer bytes, or did when somebody looked.
        while order and (best is None or order[0][0] < best.bytes_per_second):
            entry = heapq.heappop(order)
            piece = entry[1]
            if piece in seen.gone:
                continue
            looked.append(entry)
            if piece.document not in self.held and self.parts > 1:
                # Groups of heads of the same rows, which follow each other, are as good as each other.
                if like == (piece.minus_end, piece.start, piece.document // self.parts):
                    continue
                like = piece.minus_end, piece.start, piece.document // self.parts
            servers = [] if near is None else [near]
            servers += [server, *self._holders(piece.document, server)]
            found = [move for one in servers if (move := self._try(source, piece, one, surplus, strict)) is not None]
            cheapest = min(found, default=None)
            looked[-1] = math.inf if cheapest is None else cheapest.bytes_per_second, piece
            if cheapest is not None and (best is None or cheapest < best):
                best = cheapest
        for entry in looked:
            heapq.heappush(order, entry)
        return best

    def _least(self, piece: _Piece) -> float:
        """Bytes that are exchanged at least for a second moved with a slice of a piece."""
        price, _ = self._prices(piece.document)
        near = 1.0 if self.per_node is None else price.near
        return near * price.least_bytes / price.most_seconds(-piece.minus_end)

    def _prices(self, document: int) -> tuple[Price, Price]:
        """What slices of a document cost their servers, and what their home is rid of."""
        return self.group_prices if document % self.parts else (self.price, self.own)

    def _node_of(self, rank: int) -> range:
        """The ranks of a node; none if nodes do not matter."""
        if self.per_node is None:
            return range(0)
        first = rank // self.per_node * self.per_node
        return range(first, first + self.per_node)

    def _near(self, source: int, but: int) -> int | None:
        """The emptiest server in the node of the source, if it may take work."""
        able = [(self.work[rank], rank) for rank in self._node_of(source) if self.work[rank] < self.now.floor and rank != but]
        return min(able)[1] if able else None

    def _holders(self, document: int, but: int) -> list[int]:
        """Servers, not too many, that hold keys of a document and may take work."""
        if document not in self.held:
            return []
        able = self.able.get(document)
        if able is None:
            able = self.able[document] = list(self.held[document])
        # Whoever has enough stays that way.
        able[:] = [rank for rank in able if self.work[rank] < self.now.floor]
        return [rank for rank in able[: _HOLDERS + 1] if rank != but][:_HOLDERS]

    def _try(self, source: int, piece: _Piece, server: int, surplus: float, strict: bool) -> _Move | None:
        """The cheapest slice of a piece for a server."""
        start, end = piece.start, -piece.minus_end
        held = self.held.get(piece.document, {}).get(server, 0)
        price, own = self._prices(piece.document)
        work, speed = self.work[server], self.speeds[server]
        room = ((self.now.cap if strict else max(self.now.cap, (self.work[source] + work) / 2)) - work) * speed
        whole, all_own = price.seconds(start, end), own.seconds(start, end)
        over = above = (self.work[source] - self.now.floor) * self.speeds[source]
        if own is not price:
            # The server's seconds are more than those that the source is rid of.
            rid = all_own - (price.row - own.row) * (end - start)
            if rid <= 0:
                return None
            surplus, above = surplus * whole / rid, above * whole / rid
        want = min(surplus, (self.now.low - work) * speed if work < self.now.floor else room)
        most = min(above, room) if strict else room
        if whole <= want or (whole <= most and whole <= 1.1 * want):
            x, y = start, end
        else:
            x, y = price.slice(start, end, want, most, held)
        if self.fit is not None:
            x, y = self.fit.cut(start, x, y)
        if y <= x:
            return None
        keys = price.keys(x, y, held)
        added = price.seconds(x, y) - (price.key - own.key) * (y - keys)
        shed = all_own - own.seconds(start, x) - own.seconds(y, end) - (price.row - own.row) * (y - x)
        if not 0 < shed <= (over if strict else room) or added > room:
            return None
        if x == start and y == end and piece.document in self.held:
            keys -= self._saved(source, piece)
        ratio = (price.query_bytes * (y - x) + price.key_bytes * keys) / shed
        if self.per_node is not None and source // self.per_node == server // self.per_node:
            ratio *= price.near
        return _Move(ratio, server, piece, x, y, shed, added)

    def _saved(self, source: int, piece: _Piece) -> int:
        """K/V tokens that the source no longer needs from others once the whole piece is gone."""
        end = -piece.minus_end
        if self.held[piece.document].get(source, 0) > end:
            return 0
        rest = max((-p.minus_end for p in self.pieces[source] if p.document == piece.document and p != piece), default=0)
        own = self._own_segments(source, piece.document // self.parts)
        return end - rest - sum(max(0, min(last, end) - max(first, rest)) for first, last in own)

    def _own_segments(self, rank: int, document: int) -> list[tuple[int, int]]:
        """First and last position of what a rank holds of a document."""
        if rank not in self.segments:
            self.segments[rank] = {}
            for segment in self.layout.segments(rank):
                self.segments[rank].setdefault(segment.document, []).append((segment.start, segment.end))
        return self.segments[rank][document]

    def _apply(self, source: int, move: _Move) -> None:
        pieces, piece = self.pieces[source], move.piece
        del pieces[bisect_left(pieces, piece)]
        seen, end = self.seen[source], -piece.minus_end
        seen.gone.add(piece)
        for start, stop in ((piece.start, move.start), (move.end, end)):
            if start < stop:
                rest = piece._replace(minus_end=-stop, start=start)
                insort(pieces, rest)
                heapq.heappush(seen.order, (self._least(rest), rest))
        if self.price.window is None:
            held = self.held.setdefault(piece.document, {})
            if move.server not in held and piece.document in self.able:
                self.able[piece.document].append(move.server)
            held[move.server] = max(held.get(move.server, 0), move.end)
            if source in held:
                held[source] = max((-p.minus_end for p in pieces if p.document == piece.document), default=0)
        self.moved.append((piece.segment, piece.document, move.start, move.end, source, move.server))
        # A server reads keys that the home reads too, and starts a task more: moving adds work. The levels rise to where
        # they will be when all surplus is moved at the same rate.
        self.shed += move.shed
        self.grown += move.added - move.shed
        scale = 1 + self.grown / self.shed * max(self.surplus, self.shed) / self.total
        self.now = Levels(*(scale * level for level in self.levels))
        self._change(source, -move.shed)
        self._change(move.server, move.added)

    def _change(self, rank: int, seconds: float) -> None:
        old = self.work[rank]
        now = self.work[rank] = old + seconds / self.speeds[rank]
        at = bisect_left(self.free, (old, rank))
        if at < len(self.free) and self.free[at] == (old, rank):
            del self.free[at]
        if now < self.now.mean:
            insort(self.free, (now, rank))

    def _build(self) -> Plan:
        """Tasks: untouched segments, what is left of the others, and what was moved."""
        split = {move[1] // self.parts for move in self.moved if move[1] % self.parts}
        layout = self.layout.split(np.array(sorted(split)), self.heads.groups) if split else self.layout
        keep = layout.queries.copy()
        rows: list[tuple[int, int, int, int, int]] = []
        last = -1
        for segment, document, start, end, home, server in sorted(self.moved):
            number = document if split else document // self.parts
            if segment == last and rows[-1][0] == number and rows[-1][2] == start and rows[-1][4] == server:
                start = rows.pop()[1]
            rows.append((number, start, end, home, server))
            last = segment
        for rank, pieces in self.pieces.items():
            keep[layout.offsets[rank] : layout.offsets[rank + 1]] = False
            rows += [(number, p.start, -p.minus_end, rank, rank) for p in pieces for number in self._built(p.document, split)]
        extra = np.array(rows, dtype=np.int64).reshape(-1, 5)
        kept = (layout.document, layout.start, layout.end, layout.rank, layout.rank)
        c = [np.concatenate([column[keep], extra[:, i]]) for i, column in enumerate(kept)]
        return Plan(layout, c[0], c[1], c[2], c[3], c[4], self.price.window)

    def _built(self, number: int, split: set[int]) -> tuple[int, ...]:
        """The number in the plan of a document or head group; none if it is a group, not the first, of one that stays whole."""
        document, group = divmod(number, self.parts)
        if group == 0 or document in split:
            return (number,) if split else (document,)
        return (document * self.parts if split else document,) if group == 1 else ()
