"""Where the segments of a layout and its documents lie: the loop behind `schedule.layout`. All of it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.compiled import Flags, Ints, array, column, compiled, entry, room

__all__ = [
    "CONTEXT",
    "FINE",
    "GAP",
    "LARGEST",
    "OFFSETS",
    "SEGMENT",
    "BoolArray",
    "IntArray",
    "Segments",
    "Summary",
    "Wrong",
    "index_of",
    "split_of",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# What may be wrong with the columns of a layout.
FINE, OFFSETS, CONTEXT, SEGMENT, GAP = range(5)
# Position: sums and products of what is larger may not fit in 64 bits.
LARGEST = 2**48


class Wrong(NamedTuple):
    """What is wrong with the columns of a layout, `FINE` to `GAP`, where, and for a gap the position that is next."""

    what: int
    row: int = -1
    expected: int = 0


class Segments(NamedTuple):
    """A layout as compiled functions take it: columns of its segments and documents, under the names that `Layout` has.

    Attributes:
        order: the segments in order of document and position (`Layout.by_document`).
        document, start, end, rank, token, place, queries: of each segment.
        offsets, context: of each rank.
        documents, spans: of each document.
    """

    order: IntArray
    document: IntArray
    start: IntArray
    end: IntArray
    rank: IntArray
    token: IntArray
    place: IntArray
    queries: BoolArray
    offsets: IntArray
    context: IntArray
    documents: IntArray
    spans: BoolArray


class Summary(NamedTuple):
    """Of a layout: how many documents it has, the length of the longest, and whether any lies in more than one run of tokens."""

    documents: int
    longest: int
    scattered: bool


def index_of(columns: tuple[IntArray, ...], order: IntArray, groups: int) -> tuple[Segments, Summary, Wrong]:
    """A layout for compiled functions, as arrays, a summary of it, and what is wrong with its columns.

    Args:
        columns: document, start, length, offsets and context of the layout; the first three as long as the last offset says.
        order: the segments in order of document and position.
        groups: head groups that documents are split in; 1 if none is.
    """
    rows = len(order)
    document, start, length, offsets, context = map(column, columns)
    numbers, flags = room(5 * rows), room(2 * rows, bool)
    end, rank, token, place, documents = (numbers[at * rows : (at + 1) * rows] for at in range(5))
    queries, spans = flags[:rows], flags[rows:]
    found = Segments(column(order), document, start, end, rank, token, place, queries, offsets, context, documents, spans)
    wrong, summary = _index(found, length, groups)
    count = summary[0]
    arrays: list[Any] = [np.asarray(one) for one in found]
    arrays[-2:] = (one[:count] for one in arrays[-2:])
    return Segments(*arrays), Summary(*summary), Wrong(*wrong)


def split_of(segments: Segments, apart: BoolArray, scale: int, groups: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Columns of a layout in which some documents are split by heads: document, start, length and offsets.

    Args:
        segments: of the layout before.
        apart: of each of its documents, whether it is to be split.
        scale: by which its numbers are multiplied: 1 more than `groups`, or 1 if some documents are split already.
        groups: in how many parts.
    """
    rows = len(segments.order) + (groups - 1) * int(np.count_nonzero(apart[np.asarray(segments.place)]))
    made, offsets = room(3 * rows), room(len(segments.offsets))
    _split(segments, column(apart), scale, groups, made, offsets)
    document, start, length = array(made).reshape(3, rows)
    return document, start, length, array(offsets)


@entry
def _split(segments: Segments, apart: Flags, scale: int, groups: int, made: Ints, offsets: Ints) -> None:
    """Fill the columns in, of document, start and length one after another."""
    rows, count = len(made) // 3, 0
    document, start, length = made[:rows], made[rows : 2 * rows], made[2 * rows :]
    for rank in range(len(offsets) - 1):
        for segment in range(segments.offsets[rank], segments.offsets[rank + 1]):
            split = apart[segments.place[segment]]
            for group in range(1 if split else 0, groups + 1 if split else 1):
                document[count] = segments.document[segment] * scale + group
                start[count], length[count] = segments.start[segment], segments.end[segment] - segments.start[segment]
                count += 1
        offsets[rank + 1] = count


@entry
def _index(index: Segments, length: Ints, groups: int) -> tuple[tuple[int, int, int], tuple[int, int, bool]]:
    """Fill the index in; what is wrong, and a summary."""
    wrong = _by_rank(index, length, groups)
    if wrong[0] != FINE:
        return wrong, (0, 0, False)
    return _by_document(index, length)


@compiled
def _by_rank(index: Segments, length: Ints, groups: int) -> tuple[int, int, int]:
    """Go through the segments in the order of ranks and tokens; what is wrong."""
    document, start, offsets, context = index.document, index.start, index.offsets, index.context
    for rank in range(len(offsets) - 1):
        first, last = offsets[rank], offsets[rank + 1]
        if not 0 <= first <= last <= len(start):
            return OFFSETS, rank, 0
        if not 0 <= context[rank] <= last - first:
            return CONTEXT, rank, 0
        token = 0
        for row in range(first, last):
            if not (0 <= start[row] <= LARGEST and 1 <= length[row] <= LARGEST):
                return SEGMENT, row, 0
            index.rank[row], index.end[row] = rank, start[row] + length[row]
            index.queries[row] = row - first >= context[rank]
            # Groups of a document follow each other and are the same tokens.
            if groups > 1 and document[row] % (groups + 1) > 1:
                token -= length[row]
            index.token[row] = token
            token += length[row]
    return FINE, -1, 0


@compiled
def _by_document(index: Segments, length: Ints) -> tuple[tuple[int, int, int], tuple[int, int, bool]]:
    """Go through the segments in order of document and position, each of which has to start where the one before ends."""
    document, count, longest, before, scattered = index.document, 0, 0, -1, False
    for row in index.order:
        fresh = before < 0 or document[row] != document[before]
        expected = 0 if fresh else index.end[before]
        if index.start[row] != expected:
            return (GAP, row, expected), (count, longest, scattered)
        if fresh:
            index.documents[count], index.spans[count] = document[row], False
            count += 1
        elif index.rank[row] != index.rank[before]:
            index.spans[count - 1] = scattered = True
        elif index.token[row] != index.token[before] + length[before]:
            scattered = True
        index.place[row] = count - 1
        longest = max(longest, index.end[row])
        before = row
    return (FINE, -1, 0), (count, longest, scattered)
