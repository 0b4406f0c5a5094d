"""Cuts of documents: by heads, each group of key/value heads with the query heads that read them;
and the grid of rows.

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

from hf_distca.schedule.cost import CostModel, MarginalCost
from hf_distca.schedule.layout import FloatArray, Layout

# The part of the mean seconds of a rank that a server typically lacks.
_TYPICAL_DEFICIT = 0.25
# Groups where that is enough, and the part of the mean seconds that the keys of a group may travel
# for it to be.
_USUAL_GROUPS = 4
_LONG_TRAVEL = 0.4
# The part of the seconds of its pairs that the keys of a slice may take for it to be long enough;
# tiles that always are; and how many times the tolerance a slice may take: ranks are evened out by
# many, most of them from earlier in a document.
_KEY_SECONDS_PART = 0.125
_LONG_TILES = 8
_TOLERANCES_PER_SLICE = 4
# Numbers of documents are multiplied by that of the groups.
_LARGEST_NUMBER = 2**56


class HeadSplit(NamedTuple):
    """Documents that a plan may split, and the number of groups.

    Attributes:
        groups: head groups; 1 if nothing is split.
        documents: for each document of the layout, whether it may be split.
    """

    groups: int
    documents: npt.NDArray[np.bool_]

    @classmethod
    def find(
        cls,
        layout: Layout,
        marginal: MarginalCost,
        cost: CostModel,
        seconds: FloatArray,
        max_groups: int,
    ) -> HeadSplit:
        """Find documents whose slices would have more bytes of keys than of queries, on ranks with
        work to give away.

        Args:
            layout: documents and their ranks.
            marginal: marginal cost of tasks.
            cost: the cost model.
            seconds: attention seconds of each rank.
            max_groups: groups at most; 1 to split nothing.
        """
        group_counts = list_group_counts(cost.shape.key_value_heads, max_groups)
        long, on_busy_rank = np.zeros((2, len(layout.documents)), dtype=np.bool_)
        if (
            group_counts == [1]
            or cost.window is not None
            or math.isinf(cost.exchange_bytes_per_second)
            or not marginal.pair
            or layout.groups > 1
            or layout.context.any()
            or np.abs(layout.documents).max(initial=0) > _LARGEST_NUMBER
        ):
            return cls(1, long)
        # A slice of F seconds at position y has F / (p * y) rows. Its bytes of queries are as many
        # as those of keys if q * F / (p * y) = kv * y.
        mean = math.fsum(seconds.tolist()) / len(seconds)
        length = math.sqrt(
            _TYPICAL_DEFICIT * mean * marginal.query_bytes / (marginal.key_bytes * marginal.pair)
        )
        # More groups are more tasks; they are worth it where keys travel nearly as long as ranks
        # compute.
        travel_seconds = (
            layout.longest * cost.shape.moved_key_bytes / cost.exchange_bytes_per_second
        )
        groups = max(count for count in group_counts if count <= _USUAL_GROUPS)
        groups = next(
            (
                count
                for count in group_counts
                if count > groups and travel_seconds / groups > _LONG_TRAVEL * mean
            ),
            groups,
        )
        long[layout.place[layout.end >= length]] = True
        on_busy_rank[layout.place[seconds[layout.rank] > mean]] = True
        return cls(groups, long & on_busy_rank)


def choose_grid(
    marginal: MarginalCost, heads: HeadSplit, longest: int, tolerated_seconds: float
) -> int:
    """Choose the grid on which documents are cut: the grid of the marginal cost, doubled
    until slices are long enough for their keys.

    Args:
        marginal: marginal cost of tasks.
        heads: possible splits by heads: slices of some of the heads take less.
        longest: rows of the longest document, whose last rows take longest.
        tolerated_seconds: seconds by which ranks may differ from their mean.
    """
    grid = marginal.grid
    max_slice_seconds = _TOLERANCES_PER_SLICE * min(heads.groups, _USUAL_GROUPS) * tolerated_seconds
    while (
        grid < _LONG_TILES * marginal.tile
        and marginal.key > _KEY_SECONDS_PART * marginal.pair * grid
        and 2 * grid * marginal.pair * longest <= max_slice_seconds
    ):
        grid *= 2
    return grid


def list_group_counts(heads: int, max_groups: int) -> list[int]:
    """List the numbers of groups into which key/value heads can be split, from 1 up to a limit."""
    return [count for count in range(1, min(max_groups, heads) + 1) if heads % count == 0]
