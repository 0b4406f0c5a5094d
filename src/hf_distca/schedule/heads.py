"""Cuts of documents: by heads, each group of key/value heads with the query
heads that read them; and the grid of rows.

A slice of query rows needs all keys before it, however few its rows are. With `groups` head groups,
a slice of one group needs only its part of the keys: for the same compute it has `groups` times as
many rows, each with a part of the bytes, so the bytes of queries stay the same and those of keys
are divided. Attention of a head depends on no other head, so nothing has to be merged.

Backward reads and writes every key of a slice, however few its rows are: with FlashAttention 4 on
an H100, slices of 128 rows have a third of the rate of whole documents, those of 1K rows four
fifths. So rows are cut on a grid of several tiles if ranks compute enough to be evened out
nevertheless.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, FloatArray, Price
from hf_distca.schedule.layout import Layout

__all__ = ["Heads", "cut_grid", "possible_groups"]

# The part of the mean seconds of a rank that a server typically lacks.
_TYPICAL = 0.25
# Groups where that is enough, and the part of the mean seconds that the keys of a group may travel for it to be.
_USUAL = 4
_TRAVEL = 0.4
# The part of the seconds of its pairs that the keys of a slice may take for it to be long enough; tiles that always are; and how
# many times the tolerance a slice may take: ranks are evened out by many, most of them from earlier in a document.
_OF_PAIRS = 0.125
_LONG = 8
_TIMES_TOLERATED = 4
# Numbers of documents are multiplied by that of the groups.
_LARGEST = 2**56


class Heads(NamedTuple):
    """Documents that a plan may split, and the number of groups.

    Attributes:
        groups: head groups; 1 if nothing is split.
        documents: for each document of the layout, whether it may be split.
    """

    groups: int
    documents: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, layout: Layout, price: Price, cost: CostModel, seconds: FloatArray, most: int) -> Heads:
        """Find documents whose slices would have more bytes of keys than of queries, on ranks with work to give away.

        Args:
            layout: documents and their ranks.
            price: prices of tasks.
            cost: the cost model.
            seconds: attention seconds of each rank.
            most: groups at most; 1 to split nothing.
        """
        possible = possible_groups(cost.shape.key_value_heads, most)
        long, given = np.zeros((2, len(layout.documents)), dtype=np.bool_)
        if (
            possible == [1]
            or cost.window is not None
            or math.isinf(cost.exchange_bytes_per_second)
            or not price.pair
            or layout.groups > 1
            or layout.context.any()
            or np.abs(layout.documents).max(initial=0) > _LARGEST
        ):
            return cls(1, long)
        # A slice of F seconds at position y has F / (p * y) rows. Its bytes of queries are as many as those of keys if
        # q * F / (p * y) = kv * y.
        mean = math.fsum(seconds.tolist()) / len(seconds)
        length = math.sqrt(_TYPICAL * mean * price.query_bytes / (price.key_bytes * price.pair))
        # More groups are more tasks; they are worth it where keys travel nearly as long as ranks compute.
        travel = layout.longest * cost.shape.moved_key_bytes / cost.exchange_bytes_per_second
        groups = max(count for count in possible if count <= _USUAL)
        groups = next((count for count in possible if count > groups and travel / groups > _TRAVEL * mean), groups)
        long[layout.place[layout.end >= length]] = True
        given[layout.place[seconds[layout.rank] > mean]] = True
        return cls(groups, long & given)


def cut_grid(price: Price, heads: Heads, longest: int, tolerated: float) -> int:
    """Choose the grid on which documents are cut: the grid of the price, doubled
    until slices are long enough for their keys.

    Args:
        price: prices of tasks.
        heads: possible splits by heads: slices of some of the heads take less.
        longest: rows of the longest document, whose last rows take longest.
        tolerated: seconds by which ranks may differ from their mean.
    """
    grid, most = price.grid, _TIMES_TOLERATED * min(heads.groups, _USUAL) * tolerated
    while grid < _LONG * price.tile and price.key > _OF_PAIRS * price.pair * grid and 2 * grid * price.pair * longest <= most:
        grid *= 2
    return grid


def possible_groups(heads: int, most: int) -> list[int]:
    """List the numbers of groups into which key/value heads can be split, from 1 up to a limit."""
    return [count for count in range(1, min(most, heads) + 1) if heads % count == 0]
