"""Core attention disaggregation: hf-distca's own scheduler, on documents as given or dealt, and the published planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.simulate.loader_rules import packed_rows
from hf_distca.simulate.published import plan_published
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import MicroBatchWork, of_nano_batches, of_plan, together

__all__ = ["Placement", "dealt", "given", "halved", "published", "work_of"]


class Placement(NamedTuple):
    """Where the documents of a micro-batch lie, and who plans what moves.

    Attributes:
        layouts: one, or those of both nano-batches of ping-pong.
        planner: the plan of a layout.
    """

    layouts: tuple[Layout, ...]
    planner: Callable[[Layout, CostModel, DistCAConfig, Ranks], Plan]


def given(setting: Setting, lengths: IntArray, *, ping_pong: bool) -> Placement:
    """Rows as a packing loader fills them: documents are cut at the end of a row, and each part is one of its own."""
    layout = packed_rows(lengths, setting.group, setting.tokens_per_rank)
    return Placement(halved(layout, setting.tile) if ping_pong else (layout,), balance)


def dealt(setting: Setting, lengths: IntArray, *, ping_pong: bool) -> Placement:
    """Documents dealt by hf-distca, those of a node if there is room."""
    model = setting.cost(None if None in (window for window, _ in setting.model.kinds) else setting.model.window)
    place = (lengths, setting.group, setting.tokens_per_rank, model)
    nodes = setting.nodes.seen_by(model).per_node
    if ping_pong:
        return Placement(deal_nano_batches(*place, tile=setting.tile, ranks_per_node=nodes), balance)
    return Placement((deal(*place, tile=setting.tile, ranks_per_node=nodes),), balance)


def published(setting: Setting, lengths: IntArray, *, tolerance: float = 0.05) -> Placement:
    """Documents one after another, over as many ranks as they need, under the published planner, in two nano-batches."""
    ends = np.cumsum(lengths)
    # Whole documents in each nano-batch, as near to half of the tokens as they allow.
    first = int(np.abs(ends - ends[-1] / 2).argmin()) + 1

    def planner(layout: Layout, cost: CostModel, config: DistCAConfig, _: Ranks) -> Plan:
        plan = plan_published(layout, cost.shape, tolerance=tolerance, tile=config.tile)
        return replace(plan, window=cost.window)

    return Placement(
        (_one_after_another(lengths[:first], setting.group), _one_after_another(lengths[first:], setting.group)), planner
    )


def _one_after_another(documents: IntArray, ranks: int) -> Layout:
    """Documents in order over all ranks, with tokens as equal as can be. There may be fewer tokens than ranks, or none."""
    starts, total = np.cumsum(documents) - documents, int(documents.sum())
    least, more = divmod(total, ranks)
    bounds = np.concatenate([[0], np.cumsum(least + (np.arange(ranks) < more))])
    edges = np.unique(np.concatenate([starts, bounds]))
    edges = edges[edges < total].astype(np.int64)
    document = np.searchsorted(starts, edges, side="right") - 1
    return Layout(document, edges - starts[document], np.diff(edges, append=total), np.searchsorted(edges, bounds))


def halved(layout: Layout, tile: int) -> tuple[Layout, Layout]:
    """The nano-batches of a layout in which every document lies on one rank: cut between documents near the middle of a rank.

    Where no document begins near it, a document is cut, and the second nano-batch has its first part as context.
    """
    halves: tuple[list[list[tuple[int, int, int]]], ...] = ([], [])
    context = []
    for rank in range(layout.world_size):
        rows = layout.segments(rank)
        total = sum(row.length for row in rows)
        starts = np.cumsum([0, *(row.length for row in rows)])
        nearest = int(starts[np.abs(starts - total / 2).argmin()])
        near = min(nearest, total - nearest) >= total / 4
        cut = nearest if near else total // 2 // tile * tile or total // 2
        first: list[tuple[int, int, int]] = []
        second: list[tuple[int, int, int]] = []
        before = 0
        for row, start in zip(rows, starts.tolist(), strict=False):
            here = min(max(cut - start, 0), row.length)
            if here:
                first.append((row.document, row.start, here))
            if 0 < here < row.length:
                second.append((row.document, row.start, here))
                before = 1
            if here < row.length:
                second.append((row.document, row.start + here, row.length - here))
        halves[0].append(first)
        halves[1].append(second)
        context.append(before)
    return Layout.from_segments(halves[0]), Layout.from_segments(halves[1], context)


def work_of(setting: Setting, placed: Placement) -> MicroBatchWork:
    """The work of a micro-batch that lies so, all layers."""
    config = DistCAConfig(tile=setting.tile)
    kinds = []
    for window, layers in setting.model.kinds:
        cost = setting.cost(window)
        nodes = setting.nodes.seen_by(cost)
        if len(placed.layouts) == 1:
            kinds.append(of_plan(placed.planner(placed.layouts[0], cost, config, nodes), cost, nodes).times(layers))
            continue
        halves = [placed.planner(layout, cost, replace(config, ping_pong=True), nodes) for layout in placed.layouts]
        kinds.append(of_nano_batches(setting, (halves[0], halves[1]), cost, nodes).times(layers))
    return together(kinds)
