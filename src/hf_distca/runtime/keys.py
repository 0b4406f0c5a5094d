"""Keys of one rank under a plan: which runs of them it sends, gets and passes on, and the pool that its tasks read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.runtime.exchange import Rows, joined, part_of
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, KeyTransfers

__all__ = ["KeyPool", "Keys", "Passing", "Piece", "TokenIndex", "starts_of"]


class Piece(NamedTuple):
    """Keys [start, start + rows) of a section of the message, or of this rank's own, `step` apart, if `section` is None.

    Sections of the second hop, if there is one, count on after those of the first.
    """

    section: int | None
    start: int
    rows: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class KeyPool:
    """How received keys and this rank's own make the pool in which every document's prefix is one run.

    Attributes:
        pieces: what the pool is made of, in its order.
        way_back: rows of the pool that came from the ranks that hold them, in the order they came, and how many copies come back
            from each.
    """

    pieces: tuple[Piece, ...]
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens of the pool."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def own(self) -> list[tuple[int, Piece]]:
        """Runs of this rank's own keys: row of the pool, and the run."""
        at = itertools.accumulate((piece.rows for piece in self.pieces), initial=0)
        return [(first, piece) for first, piece in zip(at, self.pieces, strict=False) if piece.section is None]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from own rows and the message's sections."""
        from_each = ((own_TKD if piece.section is None else sections[piece.section], piece) for piece in self.pieces)
        return joined([part_of(tensor, *piece[1:]) for tensor, piece in from_each], own_TKD)


@dataclass(frozen=True, eq=False)
class Passing:
    """The second hop of keys: what this rank passes on as a relay, and what comes from other relays.

    Attributes:
        pieces: what is passed on, of sections of the first hop.
        rows: rows of the pool where each piece lies: (row of the pool, rows).
        keys: rows of what is passed on that go to other ranks, and of theirs that come.
        way_back: rows of the pool that came from relays, in the order they came, and how many copies come back from each.
    """

    pieces: tuple[Piece, ...]
    rows: tuple[tuple[int, int], ...]
    keys: Rows
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens that are passed on."""
        return sum(piece.rows for piece in self.pieces)


class TokenIndex:
    """Where the tokens of documents lie on one rank.

    Tokens are counted in tensors of all heads. Messages and pools are made of *rows*: of a token, or of one of its head groups if
    documents of the layout are split. Then the rows of a group are `step` apart.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank, self.step = layout, rank, layout.groups
        self._segments: dict[int, list[tuple[int, int, int]]] = {}
        first = int(layout.offsets[rank])
        for row, segment in enumerate(layout.segments(rank)):
            place = (segment.start, segment.end, int(layout.token[first + row]))
            for document in (segment.document, *layout.groups_of(segment.document)):
                self._segments.setdefault(document, []).append(place)
        for places in self._segments.values():
            places.sort()

    def row(self, document: int, position: int) -> int:
        """Row of a document position that lies on this rank, among its own in a message or pool."""
        token = self.of(document, position)
        return token if self.step == 1 else token * self.step + document % (self.step + 1) - 1

    def query_row(self, task: CATask) -> int:
        """As `row`, the first query row of a task."""
        return self.row(task.document, task.start) - int(self.layout.context_tokens[self.rank])

    def query(self, task: CATask) -> int:
        """Index among the query rows of this rank of the first row of a task."""
        return self.of(task.document, task.start) - int(self.layout.context_tokens[self.rank])

    def of(self, document: int, position: int) -> int:
        """Token index of a document position that lies on this rank."""
        for start, end, token in self._segments[document]:
            if start <= position < end:
                return token + position - start
        raise KeyError((document, position))

    def run(self, document: int, start: int, end: int) -> int | None:
        """Token index of position `start`, if positions [start, end) lie here as one run of tokens; else None."""
        found, position = None, start
        for first, last, token in self._segments.get(document, []):
            if not first <= position < last:
                continue
            here = token + position - first
            if found is None:
                found = here
            elif here != found + position - start:
                return None
            if end <= last:
                return found
            position = last
        return None


class _Found(NamedTuple):
    """A run of keys that the pool gets: from `source` in a hop, from row `at` of its section or of this rank's own."""

    document: int
    start: int
    end: int
    hop: int
    source: int
    at: int


class Keys:
    """Runs of keys that one rank sends and gets, and the pool that the latter make.

    Args:
        out: of each hop, the runs to send as (to, document, start, end), in the order of the message.
        found: the runs of the pool, in the order of messages, this rank's own among those of the first hop.
        token: where this rank's own lie.
    """

    def __init__(self, out: list[list[tuple[int, int, int, int]]], found: list[_Found], token: TokenIndex) -> None:
        self.out, self.found, self.token = out, found, token
        self.in_pool = sorted(found)
        starts = starts_of([run.end - run.start for run in self.in_pool])
        self.place = {(run.document, run.start): first for run, first in zip(self.in_pool, starts, strict=True)}
        self.runs: dict[int, list[tuple[int, int, int]]] = {}
        for run, first in zip(self.in_pool, starts, strict=True):
            self.runs.setdefault(run.document, []).append((run.start, run.end, first))
        others = sorted({(run.hop, run.source) for run in found if run.source != token.rank})
        self._sent: dict[int, Rows] = {}
        self.sections = {key: number for number, key in enumerate(others)}

    @classmethod
    def of(cls, hops: Sequence[KeyTransfers], pooled: set[int], token: TokenIndex) -> Keys:
        """From the runs of each hop that a rank sends or receives; of its own it needs those of `pooled` documents."""
        rank = token.rank
        out, found = [], []
        for hop, transfers in enumerate(hops):
            rows = list(zip(*(column.tolist() for column in transfers), strict=True))
            out.append(sorted((to, d, a, b) for d, a, b, source, to in rows if source == rank != to))
            next_row: dict[int, int] = {}  # of the section of a source
            for source, document, start, end in sorted((s, d, a, b) for d, a, b, s, to in rows if to == rank and d in pooled):
                at = token.row(document, start) if source == rank else next_row.get(source, 0)
                next_row[source] = next_row.get(source, 0) + end - start
                found.append(_Found(document, start, end, hop, source, at))
        return cls(out or [[]], found, token)

    def sent(self, hop: int) -> Rows:
        """Rows to send in a hop, of this rank's own or of what it passes on, and how many come."""
        if hop not in self._sent:
            self._sent[hop] = self._rows_sent(hop)
        return self._sent[hop]

    def _rows_sent(self, hop: int) -> Rows:
        first = self._first_passed if hop else {}
        runs = ((to, first[d, a] if hop else self.token.row(d, a), b - a) for to, d, a, b in self.out[hop])
        return Rows.of(runs, ((run.source, run.end - run.start) for run in self._came(hop)), 1 if hop else self.token.step)

    @property
    def pool(self) -> KeyPool:
        """How the pool is made."""
        return KeyPool(_pieces(map(self._piece, self.in_pool)), self._way_back(0))

    @property
    def passing(self) -> Passing:
        """The second hop."""
        passed = self._passed
        pieces = tuple(map(self._piece, passed))
        rows = tuple((self.place[run.document, run.start], run.end - run.start) for run in passed)
        return Passing(pieces, rows, self.sent(1), self._way_back(1))

    def row(self, document: int, position: int) -> int:
        """Where in the pool a document position lies."""
        return next(first + position - start for start, end, first in self.runs[document] if start <= position < end)

    @cached_property
    def _passed(self) -> list[_Found]:
        """What came to be passed on, as far as anybody gets it. Whoever needs less of a run needs its first keys."""
        ends: dict[tuple[int, int], int] = {}
        for _, document, start, end in self.out[1]:
            ends[document, start] = max(ends.get((document, start), 0), end)
        came = (run for run in self.in_pool if run.hop == 0 and (run.document, run.start) in ends)
        return [run._replace(end=ends[run.document, run.start]) for run in came]

    @cached_property
    def _first_passed(self) -> dict[tuple[int, int], int]:
        starts = starts_of([run.end - run.start for run in self._passed])
        return {(run.document, run.start): first for run, first in zip(self._passed, starts, strict=True)}

    def _came(self, hop: int) -> list[_Found]:
        return [run for run in self.found if run.hop == hop and run.source != self.token.rank]

    def _way_back(self, hop: int) -> Rows:
        back = ((run.source, self.place[run.document, run.start], run.end - run.start) for run in self._came(hop))
        return Rows.of(back, self.sent(hop).send.items())

    def _piece(self, run: _Found) -> Piece:
        section = self.sections.get((run.hop, run.source))
        return Piece(section, run.at, run.end - run.start, self.token.step if section is None else 1)


def _pieces(rows: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces, neighbours joined that continue each other."""
    pieces: list[Piece] = []
    for piece in rows:
        before = pieces[-1] if pieces else None
        if before and before.section == piece.section and before.start + before.rows * piece.step == piece.start:
            pieces[-1] = before._replace(rows=before.rows + piece.rows)
        else:
            pieces.append(piece)
    return tuple(pieces)


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of several runs starts when they lie one after another."""
    return tuple((np.cumsum(lengths, dtype=np.int64) - np.asarray(lengths, dtype=np.int64)).tolist())
