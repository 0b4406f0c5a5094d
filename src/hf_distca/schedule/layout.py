"""`Layout`: the places of documents on ranks, made from position ids, cu_seqlens or lengths.

A *document* is a run of tokens that attend causally to each other and to nothing else. A *segment*
is the part of a document that lies on one rank. A *layout* holds the segments of all ranks for one
micro-batch, in token order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.errors import DistCAError, LayoutError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

# The largest position or length. Sums and products of larger numbers may not fit in 64 bits.
_LARGEST_NUMBER = 2**48


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

    The columns `document`, `start` and `length` have one row per segment, ordered by rank and,
    within a rank, by token. The tokens of a rank are those of its segments, one after another.
    Build a layout with a ``from_...`` method. Each method checks that every document is covered
    exactly once.

    The first segments of a rank may be *context*: their keys are read, but their queries are
    computed elsewhere. The second nano-batch of ping-pong has context if a document crosses the cut
    between the nano-batches.

    Attributes:
        document: document number of each segment.
        start: first document position of each segment.
        length: number of tokens of each segment, at least 1.
        offsets: ``ranks + 1`` row indices; the segments of rank r are rows
            ``[offsets[r], offsets[r + 1])``.
        context: number of context segments of each rank; 0 if not given.
        groups: number of head groups of a document that is split by heads (`split_heads`); 1 if no
            document is split.
        longest: length of the longest document in tokens, 0 without documents.
        is_scattered: whether any document lies in more than one run of tokens (on several ranks, or
            with a gap on one rank).
        rank, end: for each segment, its rank, and the document position after its last token.
        token: for each segment, the index of its first token among the tokens of its rank.
        has_queries: for each segment, whether its queries are to be computed; false for context.
        by_document: the segments in order of document and position.
        documents: the numbers of all documents, in order.
        place: for each segment, the index of its document in `documents`.
        has_many_ranks: for each of `documents`, whether it lies on more than one rank.
        run_start: for each segment, the document position where its run of consecutive tokens on
            its rank begins.
    """

    document: IntArray
    start: IntArray
    length: IntArray
    offsets: IntArray
    context: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    groups: int = 1
    longest: int = field(init=False, repr=False)
    is_scattered: bool = field(init=False, repr=False)
    rank: IntArray = field(init=False, repr=False)
    end: IntArray = field(init=False, repr=False)
    token: IntArray = field(init=False, repr=False)
    has_queries: BoolArray = field(init=False, repr=False)
    by_document: IntArray = field(init=False, repr=False)
    documents: IntArray = field(init=False, repr=False)
    place: IntArray = field(init=False, repr=False)
    has_many_ranks: BoolArray = field(init=False, repr=False)
    run_start: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        counts = np.diff(self.offsets)
        if not len(self.offsets) or self.offsets[0] != 0 or counts.min(initial=0) < 0:
            raise LayoutError(f"offsets {self.offsets.tolist()} must begin with 0 and never fall.")
        rows = [len(column) for column in (self.document, self.start, self.length)]
        if any(count != self.offsets[-1] for count in rows):
            raise LayoutError(
                f"the columns have {str(rows)[1:-1]} rows, but there are {self.offsets[-1]}"
                " segments: each column must have one row per segment."
            )
        if not len(self.context):
            object.__setattr__(self, "context", np.zeros(self.world_size, dtype=np.int64))
        if (
            len(self.context) != self.world_size
            or (self.context < 0).any()
            or (self.context > counts).any()
        ):
            raise LayoutError(
                f"context={self.context.tolist()} for ranks with {counts.tolist()} segments: give "
                "one number for each rank, at most the number of its segments."
            )
        wrong = (
            (self.start < 0)
            | (self.start > _LARGEST_NUMBER)
            | (self.length < 1)
            | (self.length > _LARGEST_NUMBER)
        )
        if wrong.any():
            row = wrong.argmax()
            raise LayoutError(
                f"segment {row} is (document {self.document[row]}, start {self.start[row]}, length"
                f" {self.length[row]}): start must be >= 0 and length >= 1 (leave empty documents"
                " out), and both at most 2**48."
            )
        vars(self).update(self._build_index(counts))

    def _build_index(self, counts: IntArray) -> dict[str, Any]:
        """Derive the other attributes from the columns; `counts` is the number of segments of each
        rank.
        """
        length = self.length
        end = self.start + self.length
        rank = np.repeat(np.arange(len(counts)), counts)
        # Head groups of a document follow each other and consist of the same tokens.
        is_repeated_group = self._find_head_group(self.document) > 1
        tokens = np.append(0, np.cumsum(np.where(is_repeated_group, 0, length)))
        token = (
            tokens[:-1] - np.where(is_repeated_group, length, 0) - tokens[self.offsets[:-1]][rank]
        )
        order = np.lexsort((self.start, self.document))
        document, start = self.document[order], self.start[order]
        starts_document = mark_changes(document)
        expected = np.where(starts_document, 0, np.append(0, end[order])[:-1])
        gap = start != expected
        if gap.any():
            row = gap.argmax()
            raise LayoutError(
                f"document {document[row]} has a segment that starts at {start[row]}, but position"
                f" {expected[row]} is next: the segments of a document must cover it from 0 to its"
                " end without gap or overlap."
            )
        starts_run = mark_changes(document, rank[order], token[order] - start)
        place, run = np.empty_like(order), np.empty_like(order)
        place[order] = np.cumsum(starts_document) - 1
        run[order] = start[starts_run][np.cumsum(starts_run) - 1]
        return {
            "longest": int(end.max(initial=0)),
            "is_scattered": bool((starts_run & ~starts_document).any()),
            "rank": rank,
            "end": end,
            "token": token,
            "has_queries": np.arange(len(length)) - self.offsets[:-1][rank] >= self.context[rank],
            "by_document": order,
            "documents": document[starts_document],
            "place": place,
            "has_many_ranks": (
                np.bincount(place[order], weights=mark_changes(rank[order]) & ~starts_document) > 0
            ),
            "run_start": run,
        }

    @classmethod
    def from_segments(
        cls, ranks: Sequence[Sequence[tuple[int, int, int]]], context: Sequence[int] = ()
    ) -> Layout:
        """Build a layout from rows ``(document, start, length)`` for each rank. A document may be
        cut anywhere, and may lie on any number of ranks.

        The first ``context[rank]`` rows of a rank are context.
        """
        rows = require_integers(
            [row for rank in ranks for row in rank],
            "segments as (document, start, length)",
            (-1, 3),
        )
        document, start, length = rows.T
        return cls(
            document, start, length, _find_offsets(ranks), require_integers(context, "context")
        )

    @classmethod
    def from_lengths(cls, ranks: Sequence[Sequence[int]]) -> Layout:
        """Build a layout from the document lengths of each rank. No document crosses ranks, and
        documents are numbered in order.
        """
        length = require_integers([n for rank in ranks for n in rank], "document lengths")
        return cls(np.arange(len(length)), np.zeros_like(length), length, _find_offsets(ranks))

    @classmethod
    def from_runs(cls, ranks: Sequence[Sequence[tuple[int, int]]]) -> Layout:
        """Build a layout from runs of consecutive position ids: rows ``(first position, length)``
        for each rank.

        A run that starts above 0 continues the run that ends right before it, on any rank.

        Raises:
            LayoutError: if position ids do not identify documents. If a run starts at a position
                above 0, no other run may start there, and exactly one run must end there.
        """
        return cls.from_segments(_number_documents(ranks))

    @classmethod
    def concatenate(cls, first: Layout, second: Layout) -> Layout:
        """Join two layouts: each rank gets its tokens of the first layout, then its tokens of the
        second.

        The layouts must have no document in common.
        """
        order = np.argsort(np.append(first.rank, second.rank), kind="stable")
        return cls(
            np.append(first.document, second.document)[order],
            np.append(first.start, second.start)[order],
            np.append(first.length, second.length)[order],
            first.offsets + second.offsets,
        )

    def place_on_holders(self, holds: Sequence[bool]) -> Layout:
        """Move the tokens of rank r to the r-th rank that `holds` marks."""
        ranks_before = np.cumsum(holds)
        return Layout(
            self.document,
            self.start,
            self.length,
            self.offsets[np.append(0, ranks_before)],
            np.where(holds, self.context[ranks_before - 1], 0),
        )

    def split_heads(self, split_mask: BoolArray, groups: int) -> Layout:
        """Split some documents by heads: each then counts as `groups` documents, one for each group
        of heads.

        Document d gets the number ``d * (groups + 1)``. If it is split, its group g gets the number
        ``d * (groups + 1) + 1 + g``. A group lies on the ranks of the whole document, and has a
        fraction of its attention and bytes (`compute_head_fractions`).

        Args:
            split_mask: for each of `documents`, whether to split it. Documents that are split
                already cannot be split again.
            groups: at least 2; it must divide the key/value heads of the layers.

        Raises:
            LayoutError: if there is context, or if documents are already split into another number
                of groups.
        """
        if self.groups not in (1, groups) or self.context.any():
            raise LayoutError(
                f"a layout with {self.groups} head groups and context {self.context.tolist()}"
                f" cannot be split into {groups} groups: it must have no context, and its number of"
                f" head groups must be 1 or {groups}."
            )
        row, part = repeat_split_rows(split_mask[self.place], groups)
        number = self.document * (groups + 1) if self.groups == 1 else self.document
        return Layout(
            number[row] + part,
            self.start[row],
            self.length[row],
            np.searchsorted(row, self.offsets),
            groups=groups,
        )

    def compute_head_fractions(self, document: IntArray) -> npt.NDArray[np.float64]:
        """Return the fraction of the heads that each of these documents has: 1, or ``1 / groups``
        for a head group.
        """
        return np.where(self._find_head_group(document) == 0, 1.0, 1.0 / self.groups)

    def restore_numbers(self, document: IntArray) -> IntArray:
        """Return the numbers that these documents of the layout had before the layout was split."""
        return document // (self.groups + 1) if self.groups > 1 else document

    def _find_head_group(self, document: IntArray) -> IntArray:
        """Return the index of each document's head group, from 1 on; 0 for a document with all
        heads.
        """
        return np.asarray(
            document % (self.groups + 1) if self.groups > 1 else np.zeros_like(document)
        )

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    @cached_property
    def context_tokens(self) -> IntArray:
        """Number of context tokens on each rank. On the rank, this is also the index of the first
        token with a query.
        """
        return np.bincount(
            self.rank, weights=self.length * ~self.has_queries, minlength=self.world_size
        ).astype(np.int64)

    @cached_property
    def query_tokens(self) -> IntArray:
        """Number of tokens on each rank whose queries are to be computed. A token of a document
        that is split by heads counts once.
        """
        counted = self.has_queries & (self._find_head_group(self.document) <= 1)
        return np.bincount(
            self.rank, weights=self.length * counted, minlength=self.world_size
        ).astype(np.int64)

    @cached_property
    def _positions(self) -> IntArray:
        """Start positions of the segments in `by_document`, shifted so that all documents form one
        increasing sequence.
        """
        return np.asarray((self.place * (self.longest + 1) + self.start)[self.by_document])

    def find_segments(self, place: IntArray, position: IntArray) -> IntArray:
        """Find the segments that contain these positions of documents.

        Row i stands for `position[i]` of the document `documents[place[i]]`. The result has indices
        in `by_document`.
        """
        return (
            np.searchsorted(self._positions, place * (self.longest + 1) + position, side="right")
            - 1
        )

    def find_places(self, document: IntArray) -> IntArray:
        """Return the index in `documents` of each document number.

        For an unknown number, the result is the index of another document.
        """
        return np.minimum(
            np.searchsorted(self.documents, document), max(len(self.documents) - 1, 0)
        )

    def list_segments(self, rank: int) -> list[Segment]:
        """Return the segments of one rank in token order."""
        rows = slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))
        return list(
            map(
                Segment,
                self.document[rows].tolist(),
                self.start[rows].tolist(),
                self.length[rows].tolist(),
            )
        )


def _find_offsets(ranks: Sequence[Sequence[Any]]) -> IntArray:
    """Return the offsets of each rank's rows among the rows of all ranks."""
    return np.cumsum([0, *map(len, ranks)], dtype=np.int64)


def mark_changes(*columns: npt.NDArray[Any]) -> BoolArray:
    """Mark the first row, and every row that differs from the row before it in any of these
    columns.
    """
    differs = np.zeros(len(columns[0]), dtype=np.bool_)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs


def enumerate_ranges(begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """List the integers in ranges [begin, end). Each end is at least its begin.

    Return, for each integer, the index of its range, and the integers themselves.
    """
    count = end - begin
    index = np.repeat(np.arange(len(count)), count)
    return index, np.arange(len(index)) + np.repeat(begin - (np.cumsum(count) - count), count)


def repeat_split_rows(split_mask: BoolArray, groups: int) -> tuple[IntArray, IntArray]:
    """Repeat each row that is split by heads, so that every head group has a row.

    Returns:
        For each new row, the index of its original row, and the number to add to its document
            number: 0 if the row keeps all heads, 1 for the first head group, 2 for the second, and
            so on.
    """
    row, part = enumerate_ranges(
        np.zeros(len(split_mask), dtype=np.int64), np.where(split_mask, groups, 1)
    )
    return row, np.where(split_mask[row], 1 + part, 0)


def require_integers(
    values: object,
    what: str,
    shape: tuple[int, ...] = (-1,),
    error: type[DistCAError] = LayoutError,
) -> IntArray:
    """Convert `values` to an int64 array of this shape, in which -1 stands for any length.

    numpy would round, parse or wrap around some wrong values. This function refuses such values.

    Raises:
        LayoutError: if the values are not whole numbers of this shape. Pass `error` to raise
            another type of error.
    """
    expected = f"{what} must be whole numbers of shape {shape}"
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(f"{expected}, got rows of different lengths: {values!r:.100}.") from ragged
    except RuntimeError as refused:  # torch cannot convert the tensor
        raise error(f"{expected}, got {values!r:.100} ({refused}).") from refused
    if not array.size:
        return np.zeros([max(n, 0) for n in shape], dtype=np.int64)
    fits = array.ndim == len(shape) and all(
        n in (-1, size) for n, size in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "iu":
        raise error(f"{expected}, got shape {array.shape} of {array.dtype}: {values!r:.100}.")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise error(f"{expected} that fit in int64, got {array.max()}.")
    return array.astype(np.int64)


def compute_lengths(cu_seqlens: Iterable[int]) -> list[int]:
    """Return document lengths from cumulative sequence lengths ``[0, n0, n0 + n1, ...]``; empty
    documents are dropped.
    """
    bounds = require_integers(list(cu_seqlens), "cu_seqlens").tolist()
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if not bounds or bounds[0] != 0 or any(n < 0 for n in lengths):
        raise LayoutError(
            "cu_seqlens must start at 0 and never fall, got"
            f" {bounds[:8]}{'...' if len(bounds) > 8 else ''}."
        )
    return [n for n in lengths if n]


def _number_documents(
    runs: Sequence[Sequence[tuple[int, int]]],
) -> list[list[tuple[int, int, int]]]:
    """Give document numbers to runs. A run that starts above position 0 gets the number of the run
    that ends at this position.
    """
    rows = [
        (start, rank, row, start + length)
        for rank, rank_runs in enumerate(runs)
        for row, (start, length) in enumerate(rank_runs)
    ]
    starting, ending = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for start, rank, _, end in sorted(rows):
        starting[start].append(rank)
        ending[end].append(rank)
    for position, ranks in starting.items():
        if position and not len(ranks) == len(ending[position]) == 1:
            raise LayoutError(
                f"{len(ranks)} run(s) start at position {position} (on ranks {ranks}) and"
                f" {len(ending[position])} end there (on ranks {ending[position]}). Position ids do"
                " not say which of these runs belong together: give document numbers"
                " (PackedDocuments in the batch)."
            )
    # The first dict maps the position where a run ends to the document number of the run. The
    # second maps the run itself to this number. A run that starts above 0 takes the number of the
    # run that ends at its start. A run without tokens may find no number, but `Layout` refuses runs
    # without tokens.
    number_ending_at: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    for number, (start, rank, row, end) in enumerate(sorted(rows)):
        number_ending_at[end] = numbers[rank, row] = (
            number_ending_at.get(start, number) if start else number
        )
    return [
        [(numbers[rank, row], *run) for row, run in enumerate(rank_runs)]
        for rank, rank_runs in enumerate(runs)
    ]
