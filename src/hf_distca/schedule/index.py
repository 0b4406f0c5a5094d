"""Layouts and plans as compiled functions take them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "BoolArray",
    "IntArray",
    "Segments",
    "Tasks",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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


class Tasks(NamedTuple):
    """The columns of a plan as compiled functions take them, and of each task the place of its document in the layout."""

    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    place: IntArray
