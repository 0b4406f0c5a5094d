"""Where the segments of a layout and its documents lie: the loop behind `schedule.layout`. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.compiled import Ints, array, column, compiled, entry, room

__all__ = ["CONTEXT", "FINE", "GAP", "LARGEST", "OFFSETS", "SEGMENT", "Index", "IntArray", "Wrong", "index_of"]

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


class Index(NamedTuple):
    """What `Layout` says of its segments and documents, under the same names."""

    rank: IntArray
    end: IntArray
    token: IntArray
    queries: BoolArray
    place: IntArray
    documents: IntArray
    spans: BoolArray
    runs: BoolArray


def index_of(columns: tuple[IntArray, ...], order: IntArray, groups: int) -> tuple[Index, int, Wrong]:
    """The index of a layout, its longest document, and what is wrong with its columns.

    Args:
        columns: document, start, length, offsets and context of the layout; the first three as long as the last offset says.
        order: the segments in order of document and position.
        groups: head groups that documents are split in; 1 if none is.
    """
    rows = len(order)
    rank, end, token, place, documents = (room(rows) for _ in range(5))
    queries, spans, runs = (room(rows, bool) for _ in range(3))
    filled = Index(rank, end, token, queries, place, documents, spans, runs)
    document, start, length, offsets, context = map(column, columns)
    wrong, count, longest = _index(document, start, length, offsets, context, column(order), groups, filled)
    documents, spans, runs = array(documents)[:count], array(spans, bool)[:count], array(runs, bool)[:count]
    found = Index(array(rank), array(end), array(token), array(queries, bool), array(place), documents, spans, runs)
    return found, longest, Wrong(*wrong)


@entry
def _index(
    document: Ints, start: Ints, length: Ints, offsets: Ints, context: Ints, order: Ints, groups: int, index: Index
) -> tuple[tuple[int, int, int], int, int]:
    """Fill the index in; what is wrong, how many documents there are, and the length of the longest."""
    wrong = _by_rank(document, start, length, offsets, context, groups, index)
    if wrong[0] != FINE:
        return wrong, 0, 0
    return _by_document(document, start, length, order, index)


@compiled
def _by_rank(
    document: Ints, start: Ints, length: Ints, offsets: Ints, context: Ints, groups: int, index: Index
) -> tuple[int, int, int]:
    """Go through the segments in the order of ranks and tokens; what is wrong."""
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
def _by_document(document: Ints, start: Ints, length: Ints, order: Ints, index: Index) -> tuple[tuple[int, int, int], int, int]:
    """Go through the segments in order of document and position, each of which has to start where the one before ends."""
    count, longest, before = 0, 0, -1
    for row in order:
        fresh = before < 0 or document[row] != document[before]
        expected = 0 if fresh else index.end[before]
        if start[row] != expected:
            return (GAP, row, expected), count, longest
        if fresh:
            index.documents[count], index.spans[count], index.runs[count] = document[row], False, True
            count += 1
        elif index.rank[row] != index.rank[before]:
            index.spans[count - 1], index.runs[count - 1] = True, False
        elif index.token[row] != index.token[before] + length[before]:
            index.runs[count - 1] = False
        index.place[row] = count - 1
        longest = max(longest, index.end[row])
        before = row
    return (FINE, -1, 0), count, longest
