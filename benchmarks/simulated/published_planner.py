"""The published DistCA planner: greedy on query-key pairs, as section 4.2 of arXiv 2510.18121
describes it.

Ranks below the mean are served, the emptiest first: of all pieces on ranks above it, the one that
brings the most pairs for its bytes moves, whole or cut at a tile, until the rank lacks no more than
the tolerance. So a rank above the mean may stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel, count_causal_pairs
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from simulator.disaggregated import make_candidates
from simulator.setting import Setting
from simulator.strategies import Strategy
from simulator.work import Candidate


class _Items:
    """Pieces of documents in columns that grow."""

    def __init__(self, layout: Layout) -> None:
        columns = (layout.document, layout.start, layout.end, layout.rank, layout.rank)
        self.document, self.start, self.end, self.home, self.server = (
            np.array(column) for column in columns
        )

    def split(self, item: int, position: int) -> int:
        """Cut an item in two; the number of the second one."""
        self.document, self.home, self.server = (
            np.append(column, column[item]) for column in (self.document, self.home, self.server)
        )
        self.start, self.end = np.append(self.start, position), np.append(self.end, self.end[item])
        self.end[item] = position
        return len(self.document) - 1


def plan_published(
    layout: Layout, shape: AttentionShape, *, tolerance: float = 0.05, tile: int = 128
) -> Plan:
    """Plan with the published planner.

    Args:
        layout: documents and where they lie; no context.
        shape: heads and widths, for the bytes that a move costs.
        tolerance: how far a rank may stay below the mean, as a fraction of it.
        tile: documents are cut at multiples of it.
    """
    items, ranks = _Items(layout), layout.world_size
    load = np.bincount(
        layout.rank, weights=count_causal_pairs(layout.length, layout.end), minlength=ranks
    )
    mean = load.sum() / ranks
    spare = load - mean
    for server in np.argsort(spare, kind="stable").tolist():
        while spare[server] < -tolerance * mean:
            part = _best(items, spare, -spare[server], shape, tile)
            if part is None:
                break
            item, start, end = part
            if end < items.end[item]:
                items.split(item, end)
            if start > items.start[item]:
                item = items.split(item, start)
            work = float(count_causal_pairs(end - start, end))
            spare[items.server[item]] -= work
            spare[server] += work
            items.server[item] = server
    return Plan(layout, items.document, items.start, items.end, items.home, items.server)


def _best(
    items: _Items, spare: FloatArray, wanted: float, shape: AttentionShape, tile: int
) -> tuple[int, int, int] | None:
    """The item, and the part [start, end) of it, that brings the most pairs for its bytes."""
    query, key = shape.query_bytes + shape.output_bytes, shape.key_value_bytes
    candidates = np.flatnonzero(spare[items.server] > 0)
    start, end = (
        items.start[candidates].astype(np.float64),
        items.end[candidates].astype(np.float64),
    )
    rows = end - start
    pairs = rows * (end - (rows - 1) / 2)
    most = np.minimum(np.minimum(pairs, spare[items.server[candidates]]), wanted)
    # So many rows from the end of the item, or from its start, have these pairs.
    tail = np.minimum(
        np.rint((end + 0.5 - np.sqrt(np.maximum((end + 0.5) ** 2 - 2 * most, 0))) / tile) * tile,
        rows,
    )
    head = np.minimum(
        np.rint((np.sqrt((start + 0.5) ** 2 + 2 * most) - start - 0.5) / tile) * tile, rows
    )
    whole = most >= pairs
    tail, head = np.where(whole, rows, tail), np.where(whole, rows, head)
    tail_work, head_work = tail * (end - (tail - 1) / 2), head * (start + (head + 1) / 2)
    tail_score = tail_work / (query * tail + key * end)
    head_score = head_work / (query * head + key * (start + head) + 1e-9)
    score = np.maximum(tail_score, head_score)
    if not len(score) or score.max() <= 0:
        return None
    best = int(np.argmax(score))
    item = int(candidates[best])
    if tail_score[best] >= head_score[best]:
        return item, int(end[best] - tail[best]), int(end[best])
    return item, int(start[best]), int(start[best] + head[best])


def in_nano_batches(setting: Setting, batches: Sequence[IntArray]) -> list[Candidate]:
    """Documents one after another over as many ranks as they need, whole ones in each of two
    nano-batches.
    """

    def planner(layout: Layout, cost: CostModel, config: DistCAConfig, _: Ranks) -> Plan:
        return replace(plan_published(layout, cost.shape, tile=config.tile), window=cost.window)

    placements = []
    for lengths in batches:
        ends = np.cumsum(lengths)
        # As near to half of the tokens as documents allow.
        first = int(np.abs(ends - ends[-1] / 2).argmin()) + 1
        placements.append(
            (
                one_after_another(lengths[:first], setting.group),
                one_after_another(lengths[first:], setting.group),
            )
        )
    return make_candidates(setting, placements, planner)


def one_after_another(documents: IntArray, ranks: int) -> Layout:
    """Documents in order over all ranks, with tokens as equal as can be. There may be fewer tokens
    than ranks, or none.
    """
    starts, total = np.cumsum(documents) - documents, int(documents.sum())
    least, more = divmod(total, ranks)
    bounds = np.concatenate([[0], np.cumsum(least + (np.arange(ranks) < more))])
    edges = np.unique(np.concatenate([starts, bounds]))
    edges = edges[edges < total].astype(np.int64)
    document = np.searchsorted(starts, edges, side="right") - 1
    return Layout(
        document,
        edges - starts[document],
        np.diff(edges, append=total),
        np.searchsorted(edges, bounds),
    )


PUBLISHED = Strategy(
    "published",
    "published DistCA planner",
    in_nano_batches,
    "documents in order over ranks; greedy on pairs, tolerance 0.05; two nano-batches in turns; in"
    " stages as hf-distca",
    disaggregated=True,
)
