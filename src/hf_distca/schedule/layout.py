"""Which documents lie where: position ids, cu_seqlens or lengths become a `Layout`.

A *document* is a run of tokens that attend causally to each other and to nothing else. A *segment* is the part of a
document that lies on one rank. A *layout* holds the segments of all ranks for one micro-batch, in token order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hf_distca.errors import DistCAError, LayoutError
from hf_distca.schedule.compiled import handed
from hf_distca.schedule.index import CONTEXT, FINE, OFFSETS, SEGMENT, IntArray, Segments, Wrong, index_of, split_of

__all__ = ["IntArray", "Layout", "Segment", "as_integers", "documents_from_positions", "lengths_from_cu_seqlens", "repeated"]


class Segment(NamedTuple):
    """Tokens [start, start + length) of a document, in document positions, on one rank."""

    document: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Document position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class Layout:
    """All segments of all ranks for one micro-batch.

    The three columns have one row per segment, ordered by rank and, within a rank, by token: the tokens of a rank are its
    segments one after another. Build one with a ``from_...`` method; each checks that every document is covered exactly once.

    The first segments of a rank may be *context*: their keys are read, their queries are computed elsewhere. The second
    nano-batch of ping-pong has one where a document crosses the cut.

    Attributes:
        document: document number of each segment.
        start: first document position of each segment.
        length: tokens of each segment, at least 1.
        offsets: ``ranks + 1`` numbers from 0; the segments of rank r are rows ``offsets[r]`` to ``offsets[r + 1]``.
        context: how many segments of each rank are context; none if not given.
        groups: head groups that documents are split in, as `split` does; 1 if none is.
        longest: length of the longest document in tokens, 0 if there is none.
        scattered: whether any document lies in more than one run of tokens, on several ranks or with a gap on one.
    """

    document: IntArray
    start: IntArray
    length: IntArray
    offsets: IntArray
    context: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    groups: int = 1
    longest: int = field(init=False, repr=False)
    scattered: bool = field(init=False, repr=False)
    _index: Segments = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.offsets) or self.offsets[0] != 0:
            _refuse(self, Wrong(OFFSETS))
        if not len(self.context):
            object.__setattr__(self, "context", np.zeros(self.world_size, dtype=np.int64))
        rows = [len(column) for column in (self.document, self.start, self.length)]
        if any(count != self.offsets[-1] for count in rows):
            raise LayoutError(f"columns of {str(rows)[1:-1]} rows for {self.offsets[-1]} segments.")
        if len(self.context) != self.world_size:
            _refuse(self, Wrong(CONTEXT))
        columns = self.document, self.start, self.length, self.offsets, self.context
        indexed, summary, wrong = index_of(columns, self.by_document, self.groups)
        if wrong.what != FINE:
            _refuse(self, wrong)
        object.__setattr__(self, "_index", indexed)
        object.__setattr__(self, "longest", summary.longest)
        object.__setattr__(self, "scattered", summary.scattered)

    @classmethod
    def from_segments(cls, ranks: Sequence[Sequence[tuple[int, int, int]]], context: Sequence[int] = ()) -> Layout:
        """Build from ``(document, start, length)`` rows per rank. A document may lie on any number of ranks, in any cut.

        The first ``context[rank]`` rows of a rank are context.
        """
        rows = as_integers([row for rank in ranks for row in rank], "segments as (document, start, length)", (-1, 3))
        offsets = np.cumsum([0, *(len(rank) for rank in ranks)], dtype=np.int64)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], offsets, as_integers(context, "context"))

    @classmethod
    def from_lengths(cls, ranks: Sequence[Sequence[int]]) -> Layout:
        """Build from the document lengths of each rank, where no document crosses ranks. Documents are numbered in order."""
        counts = [len(rank) for rank in ranks]
        length = as_integers([n for rank in ranks for n in rank], "document lengths")
        return cls(np.arange(len(length)), np.zeros_like(length), length, np.cumsum([0, *counts], dtype=np.int64))

    @classmethod
    def from_positions(cls, ranks: Sequence[npt.ArrayLike], *, span_ranks: bool = False) -> Layout:
        """Build from the position ids of each rank (one flat array of integers per rank).

        A run of consecutive positions is one document. With ``span_ranks``, a run that starts above 0 continues the run
        that ends right before it, on whichever rank that is; two runs with the same end leave this open and are an error.
        Without, every run is a document of its own, as it is for transformers.
        """
        runs = [documents_from_positions(positions) for positions in ranks]
        if not span_ranks:
            return cls.from_lengths([[length for _, length in rank] for rank in runs])
        return cls.from_runs(runs)

    @classmethod
    def from_runs(cls, ranks: Sequence[Sequence[tuple[int, int]]]) -> Layout:
        """Build from ``(first position, length)`` rows per rank, linking runs as `from_positions` does with ``span_ranks``."""
        return cls.from_segments(_chain(ranks))

    @classmethod
    def joined(cls, first: Layout, second: Layout) -> Layout:
        """On each rank the tokens of the first layout and then those of the second, with which it shares no document."""
        order = np.argsort(np.concatenate([first.rank, second.rank]), kind="stable")
        document = np.concatenate([first.document, second.document])[order]
        start, length = (np.concatenate(pair)[order] for pair in ((first.start, second.start), (first.length, second.length)))
        return cls(document, start, length, first.offsets + second.offsets)

    def split(self, apart: npt.NDArray[np.bool_], groups: int) -> Layout:
        """The same tokens with some documents split by heads: each counts as `groups` documents, one for each group of heads.

        Document d is then number ``d * (groups + 1)``, and group g of one that is split ``d * (groups + 1) + 1 + g``. A group
        lies where the whole document lies, and takes its part of the attention and of the bytes (`heads_of`).

        Args:
            apart: of each of `documents`, whether it is to be split. Only those with all heads can be.
            groups: at least 2; it must divide the key/value heads of the layers.

        Raises:
            LayoutError: if there is context, or if documents were split in another number of groups before.
        """
        if self.groups not in (1, groups) or self.context.any():
            raise LayoutError(f"a layout with {self.groups} head groups and context {self.context.tolist()} cannot be split.")
        return Layout(*split_of(self.columns, apart, groups + 1 if self.groups == 1 else 1, groups), groups=groups)

    def heads_of(self, document: IntArray) -> npt.NDArray[np.float64]:
        """What part of the heads each of these documents of the layout has: 1, or of a head group ``1 / groups``."""
        return np.where(self._group(document) == 0, 1.0, 1.0 / self.groups)

    def has_all_heads(self, document: int) -> bool:
        """Whether this document of the layout is none of the head groups of one."""
        return document % (self.groups + 1) == 0 or self.groups == 1

    def unsplit(self, document: IntArray) -> IntArray:
        """The numbers that these documents of the layout had before it was split."""
        return document // (self.groups + 1) if self.groups > 1 else document

    def _group(self, document: IntArray) -> IntArray:
        """From 1 the head group that each document is, 0 if it has all heads."""
        return np.asarray(document % (self.groups + 1) if self.groups > 1 else np.zeros_like(document))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    @property
    def columns(self) -> Segments:
        """All of it as compiled functions take it."""
        return handed(self._index)

    @property
    def rank(self) -> IntArray:
        """Rank of each segment."""
        return self._index.rank

    @property
    def end(self) -> IntArray:
        """Document position after the last token of each segment."""
        return self._index.end

    @property
    def token(self) -> IntArray:
        """Index, among the tokens of its rank, of the first token of each segment."""
        return self._index.token

    @property
    def queries(self) -> npt.NDArray[np.bool_]:
        """Whether the queries of a segment are to be computed: false for context."""
        return self._index.queries

    @cached_property
    def context_tokens(self) -> IntArray:
        """Tokens of context on each rank: its first query row has the key with this index."""
        return np.bincount(self.rank, weights=self.length * ~self.queries, minlength=self.world_size).astype(np.int64)

    @cached_property
    def query_tokens(self) -> IntArray:
        """Tokens on each rank whose queries are to be computed; those of a document that is split are counted once."""
        counted = self.queries & (self._group(self.document) <= 1)
        return np.bincount(self.rank, weights=self.length * counted, minlength=self.world_size).astype(np.int64)

    @cached_property
    def by_document(self) -> IntArray:
        """The segments in order of document and position."""
        return np.lexsort((self.start, self.document))

    @property
    def documents(self) -> IntArray:
        """The numbers of all documents, in order."""
        return self._index.documents

    @property
    def place(self) -> IntArray:
        """Of each segment, the place of its document among `documents`."""
        return self._index.place

    @property
    def spans(self) -> npt.NDArray[np.bool_]:
        """Of each of `documents`, whether it lies on more than one rank."""
        return self._index.spans

    @property
    def spanning(self) -> frozenset[int]:
        """Documents that lie on more than one rank."""
        return frozenset(self.documents[self.spans].tolist())

    def segments(self, rank: int) -> list[Segment]:
        """The segments of one rank in token order."""
        rows = slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))
        columns = (self.document[rows].tolist(), self.start[rows].tolist(), self.length[rows].tolist())
        return [Segment(*row) for row in zip(*columns, strict=True)]


def repeated(apart: npt.NDArray[np.bool_], groups: int) -> tuple[IntArray, IntArray]:
    """Rows of what is split by heads: of each that is `apart` one for each group, of each other one.

    Returns:
        The row that each is made of, and what its document number is more: 0 for one with all heads, 1 for the first group.
    """
    count = np.where(apart, groups, 1)
    row = np.repeat(np.arange(len(count)), count)
    part = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, np.where(apart[row], 1 + part, 0)


def as_integers(values: object, what: str, shape: tuple[int, ...] = (-1,), error: type[DistCAError] = LayoutError) -> IntArray:
    """`values` as an int64 array of this shape, where -1 is any length.

    Nothing is rounded, parsed or wrapped around, all of which numpy would do.

    Raises:
        LayoutError: or `error`, if the values are not whole numbers in this shape.
    """
    expected = f"{what} must be whole numbers of shape {shape}"
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(f"{expected}, got rows of different lengths: {_shown(values)}.") from ragged
    if not array.size:
        return np.zeros([max(n, 0) for n in shape], dtype=np.int64)
    fits = array.ndim == len(shape) and all(n in (-1, found) for n, found in zip(shape, array.shape, strict=True))
    if not fits or array.dtype.kind not in "iu":
        raise error(f"{expected}, got shape {array.shape} of {array.dtype}: {_shown(values)}.")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise error(f"{expected} of 64 bits with sign, got {array.max()}.")
    return array.astype(np.int64)


def _shown(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 100 else text[:100] + "..."


def documents_from_positions(positions: npt.ArrayLike) -> list[tuple[int, int]]:
    """Runs of consecutive positions as ``(first position, length)``."""
    position = np.asarray(positions)
    if position.ndim != 1 or (position.size and position.dtype.kind not in "iu"):
        raise LayoutError(
            f"position ids must be a flat array of integers, got shape {position.shape} of {position.dtype}: "
            "pass one array per rank, rows of a batch one after another."
        )
    if not position.size:
        return []
    if position.min() < 0:
        at = int(position.argmin())
        raise LayoutError(f"position id {int(position[at])} at token {at} is negative: positions start at 0.")
    position = as_integers(position, "position ids")
    first = np.flatnonzero(np.concatenate([[True], np.diff(position) != 1]))
    length = np.diff(np.append(first, position.size))
    return list(zip(position[first].tolist(), length.tolist(), strict=True))


def lengths_from_cu_seqlens(cu_seqlens: Iterable[int]) -> list[int]:
    """Document lengths from cumulative sequence lengths ``[0, n0, n0 + n1, ...]``; empty documents are dropped."""
    bounds = as_integers(list(cu_seqlens), "cu_seqlens").tolist()
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if not bounds or bounds[0] != 0 or any(n < 0 for n in lengths):
        raise LayoutError(f"cu_seqlens must start at 0 and never fall, got {bounds[:8]}{'...' if len(bounds) > 8 else ''}.")
    return [n for n in lengths if n]


def _refuse(layout: Layout, wrong: Wrong) -> NoReturn:
    """Say what is wrong with the columns."""
    document, start, length = layout.document, layout.start, layout.length
    at = wrong.row
    if wrong.what == OFFSETS:
        raise LayoutError(f"offsets {layout.offsets.tolist()}: they begin with 0 and never fall.")
    if wrong.what == CONTEXT:
        raise LayoutError(
            f"context of {layout.context.tolist()} segments for ranks with {np.diff(layout.offsets).tolist()}: "
            "give one number a rank, at most as many as it has segments."
        )
    one = f"segment {at} is (document {document[at]}, start {start[at]}, length {length[at]})"
    if wrong.what == SEGMENT and (length[at] < 1 or start[at] < 0):
        raise LayoutError(f"{one}: start must be >= 0 and length >= 1. Leave empty documents out.")
    if wrong.what == SEGMENT:
        raise LayoutError(f"{one}, which ends at {start[at] + length[at]}: the limit is 2**48 tokens.")
    raise LayoutError(
        f"document {document[at]} has a segment that starts at {start[at]} where position {wrong.expected} is next: "
        "the segments of a document must cover it from 0 to its end without gap or overlap."
    )


def _chain(runs: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int, int]]]:
    """Give runs document numbers by linking each run that starts above 0 to the one run that ends there."""
    ends: dict[int, list[tuple[int, int]]] = {}
    for rank, rank_runs in enumerate(runs):
        for row, (start, length) in enumerate(rank_runs):
            ends.setdefault(start + length, []).append((rank, row))
    wanted = [start for rank_runs in runs for start, _ in rank_runs if start]
    open_questions = sorted({p for p in wanted if len(ends.get(p, [])) != 1 or wanted.count(p) != 1})
    if open_questions:
        position = open_questions[0]
        starting = [rank for rank, rank_runs in enumerate(runs) for start, _ in rank_runs if start == position]
        ending = [rank for rank, _ in ends.get(position, [])]
        raise LayoutError(
            f"{len(starting)} run(s) start at position {position} and {len(ending)} end there, on ranks {starting} and {ending}: "
            "which belong together is not in the position ids. Give document numbers instead (PackedDocuments in the batch)."
        )
    numbers: dict[tuple[int, int], int] = {}

    def number(rank: int, row: int) -> int:
        path = []
        while (rank, row) not in numbers and runs[rank][row][0]:
            path.append((rank, row))
            rank, row = ends[runs[rank][row][0]][0]
        found = numbers.setdefault((rank, row), len(numbers))
        numbers.update(dict.fromkeys(path, found))
        return found

    return [[(number(rank, row), *run) for row, run in enumerate(rank_runs)] for rank, rank_runs in enumerate(runs)]
