"""Where the segments of a layout and its documents lie: the loop behind `schedule.layout`. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FINE",
    "BoolArray",
    "IntArray",
    "Segments",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# What may be wrong with the columns of a layout.
FINE = 0
# Position: sums and products of what is larger may not fit in 64 bits.
LARGEST = 2**48


class Segments(NamedTuple):
    """A layout as compiled functions take it: columns of its segments and documents, under the names that `Layout` has.

    Attributes:
        order: the segments in order of document and position (`Layout.by_document`).
        by_end: the segments in order of rank; of a rank its context first, then by where they end in their documents.
        document, start, end, rank, token, place, queries: of each segment.
        offsets, context: of each rank.
        documents, spans: of each document.
    """

    order: IntArray
    by_end: IntArray
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
