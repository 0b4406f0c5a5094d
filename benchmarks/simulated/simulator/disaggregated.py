"""Core attention disaggregation: placement of documents on ranks, as given or dealt, the plans, and
the resulting work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel, TransientBytes
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.tools.advise.ways import pack_rows
from simulator.memory import compute_kernel_bytes
from simulator.setting import TILE, Setting
from simulator.work import (
    Candidate,
    Directions,
    MicroBatchWork,
    combine_layers,
    concatenate_groups,
    divide_into_calls,
    estimate_copy_seconds,
    estimate_layer_seconds,
    estimate_tensor_seconds,
    sum_by_index,
)


class Moves(NamedTuple):
    """Seconds of each rank in one layer of a plan."""

    attention: Directions
    unblocked: Directions  # of tasks that wait for no message
    dispatch: Directions
    back: Directions
    received: FloatArray  # bytes
    pairs: float

    @property
    def wire(self) -> FloatArray:
        """Seconds of messages in both directions together, shape (ranks,)."""
        return np.asarray(np.concatenate([self.dispatch, self.back]).sum(axis=0))


def compute_moves(setting: Setting, plan: Plan, cost: CostModel, nodes: Ranks) -> Moves:
    """Compute one layer of a plan on ranks of equal speed."""
    load = PlanLoad(plan, cost, ranks=nodes)
    cost, shape, ranks = load.cost, load.cost.shape, plan.layout.world_size
    rows = plan.end - plan.start
    tasks = cost.estimate_directions(rows, plan.end, plan.heads)
    attention = divide_into_calls(cost, sum_by_index(tasks, plan.server, ranks))
    nothing = np.zeros((2, ranks))
    pairs = float(load.pairs.sum())
    if not plan.moved:
        return Moves(attention, attention, nothing, nothing, nothing[0], pairs)
    queries, keys, transfers = load.query_tokens, load.key_tokens, load.needed_keys
    at_home = plan.home == plan.server
    # After rows are given away, the others no longer lie in sequence: a call copies them and writes
    # results back.
    left = sum_by_index(rows * plan.heads * at_home, plan.server, ranks) * (queries[0] > 0)
    taken = np.outer(
        [1, 2], estimate_copy_seconds(setting, left * (shape.row_bytes + shape.key_value_bytes))
    )

    def estimate_seconds(query_bytes: int, key_bytes: int) -> FloatArray:
        # Return takes as long as dispatch: the busier of a rank's two roles counts.
        moved = load.count_node_bytes(query_bytes, key_bytes)
        # Bytes are copied where they leave and where they arrive.
        copied = estimate_copy_seconds(setting, np.sum(moved, axis=(0, 1)))
        # Relays pass keys on and receive their gradients in a separate exchange.
        exchanges = 2 if plan.relays is not None and key_bytes else 1
        fixed = exchanges * (cost.exchange_seconds + cost.peer_seconds * load.peer_counts)
        return np.asarray(moved.estimate_seconds(cost, load.ranks).max(axis=0) + copied + fixed)

    saved_bytes = shape.query_bytes + 2 * shape.output_bytes + shape.lse_bytes
    there = estimate_seconds(shape.query_bytes, shape.key_value_bytes)
    remote = transfers.source != transfers.server
    waits = np.isin(
        plan.document * ranks + plan.server,
        np.unique(transfers.document[remote] * ranks + transfers.server[remote]),
    )
    row_bytes = TransientBytes.from_shape(shape)
    # Own rows that need keys from other ranks also go into a server's pools, with their own keys.
    waiting = sum_by_index(rows * (at_home & waits), plan.server, ranks)
    row, key = compute_kernel_bytes(shape)
    received = (row_bytes.query + row) * queries[1] + (row_bytes.key + key) * keys[1]
    received = received + row_bytes.sent_query * queries[0] + row_bytes.sent_key * keys[0]
    received = received + (row_bytes.query // 2 + shape.query_bytes + row_bytes.key) * waiting
    return Moves(
        attention=attention + taken,
        unblocked=sum_by_index(tasks * (at_home & ~waits), plan.server, ranks),
        dispatch=np.stack([there, estimate_seconds(saved_bytes, shape.key_value_bytes)]),
        # Gradients of queries and keys take as long.
        back=np.stack([estimate_seconds(shape.output_bytes + shape.lse_bytes, 0), there]),
        received=received,
        pairs=pairs,
    )


def compute_plan_work(
    setting: Setting, plan: Plan, cost: CostModel, nodes: Ranks = UNIFORM_RANKS
) -> MicroBatchWork:
    """Compute one layer of a plan in one stream: a rank computes its own tasks while messages
    arrive, then waits for outputs.
    """
    layer = compute_moves(setting, plan, cost, nodes)
    return MicroBatchWork(
        tokens=plan.layout.query_tokens.astype(np.float64),
        attention=layer.attention,
        exposed=np.maximum(layer.dispatch - layer.unblocked, 0) + layer.back,
        wire=layer.wire,
        received=layer.received,
        pairs=layer.pairs,
        meeting=plan.layout.world_size if plan.moved else 1,
    )


def compute_nano_batch_work(
    setting: Setting, plans: Sequence[Plan], cost: CostModel, nodes: Ranks = UNIFORM_RANKS
) -> MicroBatchWork:
    """Compute one layer of the plans of both nano-batches in ping-pong.

    In turns, linear layers of A overlap with the return of B, those of B with the dispatch of A,
    attention of A with the dispatch of B, and attention of B with the return of A. A rank waits for
    the part of a message that takes longer than the computation.
    """
    first, second = (compute_moves(setting, plan, cost, nodes) for plan in plans)
    tokens = [plan.layout.query_tokens.astype(np.float64) for plan in plans]
    linear = [
        estimate_layer_seconds(setting, count) + estimate_tensor_seconds(setting, count)
        for count in tokens
    ]
    beside = (
        (first.dispatch, linear[1]),
        (second.dispatch, first.attention),
        (first.back, second.attention),
        (second.back, linear[0]),
    )
    return MicroBatchWork(
        tokens=tokens[0] + tokens[1],
        attention=first.attention + second.attention,
        exposed=np.asarray(sum(np.maximum(message - work, 0) for message, work in beside)),
        wire=first.wire + second.wire,
        received=np.maximum(first.received, second.received),
        pairs=first.pairs + second.pairs,
        meeting=len(tokens[0]) if any(plan.moved for plan in plans) else 1,
    )


# The documents of a micro-batch: a layout, or one for each nano-batch of ping-pong.
Placement = tuple[Layout, ...]
# The smaller nano-batch's least part of the tokens, as in training
# (`hf_distca.integration.nano_batches`).
_SMALLEST = 3 / 8
Planner = Callable[[Layout, CostModel, DistCAConfig, Ranks], Plan]


def fill_given_rows(setting: Setting, lengths: IntArray, *, ping_pong: bool) -> Placement:
    """Fill rows like a packing loader: the end of a row cuts a document, and each part is a
    separate document.
    """
    layout = pack_rows(lengths, setting.group, setting.tokens_per_rank)
    return split_in_halves(layout) if ping_pong else (layout,)


def deal_documents(setting: Setting, lengths: IntArray, *, ping_pong: bool) -> Placement:
    """Deal documents by hf-distca, to ranks of one node if there is room."""
    model = setting.dealing_cost
    arguments = (lengths, setting.group, setting.tokens_per_rank, model)
    nodes = setting.nodes.without_irrelevant_nodes(model).per_node
    if ping_pong:
        return deal_nano_batches(*arguments, tile=TILE, ranks_per_node=nodes)
    return (deal(*arguments, tile=TILE, ranks_per_node=nodes),)


def split_in_halves(layout: Layout) -> tuple[Layout, Layout]:
    """Split a layout with whole documents on each rank into nano-batches, between documents near
    the middle of a rank.

    If no document begins there, one is cut, and the second nano-batch has its first part as
    context.
    """
    cuts = []
    for begin, end in pairwise(layout.offsets.tolist()):
        starts = np.append(0, np.cumsum(layout.length[begin:end]))
        total = int(starts[-1])
        nearest = int(starts[np.abs(starts - total / 2).argmin()])
        near = min(nearest, total - nearest) >= _SMALLEST * total
        half = total // 2
        cuts.append(nearest if near else half // TILE * TILE if half >= 4 * TILE else half)
    before = np.clip(np.array(cuts)[layout.rank] - layout.token, 0, layout.length)
    after = layout.length - before
    crosses = (before > 0) & (after > 0)
    # Of each segment, the second nano-batch has the part after the cut, and as context the part
    # before it if the segment crosses the cut.
    there = np.stack([crosses, after > 0], axis=1)
    document, rank, start, length = (
        np.stack(columns, axis=1)[there]
        for columns in (
            [layout.document, layout.document],
            [layout.rank, layout.rank],
            [layout.start, layout.start + before],
            [before, after],
        )
    )
    ranks = np.arange(layout.world_size + 1)
    first = before > 0
    return (
        Layout(
            layout.document[first],
            layout.start[first],
            before[first],
            np.searchsorted(layout.rank[first], ranks),
        ),
        Layout(
            document,
            start,
            length,
            np.searchsorted(rank, ranks),
            context=np.bincount(layout.rank[crosses], minlength=layout.world_size),
        ),
    )


def compute_placement_work(
    setting: Setting, placement: Placement, planner: Planner = balance
) -> MicroBatchWork:
    """Compute the work of a micro-batch with this placement in all layers."""
    config = DistCAConfig(ping_pong=len(placement) > 1)

    def compute_layer(cost: CostModel) -> MicroBatchWork:
        nodes = setting.nodes.without_irrelevant_nodes(cost)
        plans = [planner(layout, cost, config, nodes) for layout in placement]
        return (
            compute_plan_work(setting, plans[0], cost, nodes)
            if len(plans) == 1
            else compute_nano_batch_work(setting, plans, cost, nodes)
        )

    return combine_layers(setting, compute_layer)


def make_candidates(
    setting: Setting, placements: Sequence[Placement], planner: Planner = balance
) -> list[Candidate]:
    """Make the only candidate for these placements; in a pipeline, idle stages serve."""
    staged = setting.stages > 1
    placements = _list_ticks(setting, placements) if staged else placements
    return [
        Candidate(
            [compute_placement_work(setting, placement, planner) for placement in placements],
            ticks=staged,
        )
    ]


def make_group_candidates(
    place: Callable[..., Placement],
    share: Callable[[IntArray, int, int], list[IntArray]],
    ping_pong: bool,
    setting: Setting,
    batches: Sequence[IntArray],
) -> list[Candidate]:
    """Make the candidates of hf-distca: the ranks of a large attention group share attention in
    smaller groups with separate documents.

    `place` places the documents of a micro-batch, like `fill_given_rows`; `share` divides a
    micro-batch among groups with equally many tokens.
    """
    count = setting.group // setting.shared
    if count == 1:
        return make_candidates(
            setting, [place(setting, lengths, ping_pong=ping_pong) for lengths in batches]
        )
    group = replace(setting, ranks=setting.ranks // count)
    works = []
    for lengths in batches:
        parts = share(lengths, count, group.tokens)
        works.append(
            concatenate_groups(
                [
                    compute_placement_work(group, place(group, part, ping_pong=ping_pong))
                    for part in parts
                ]
            )
        )
    return [Candidate(works)]


def _list_ticks(setting: Setting, placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements on the ranks of all stages in each tick of one direction; stages
    without a micro-batch have no documents.
    """
    none = np.zeros(0, dtype=np.int64)
    empty = (Layout(none, none, none, np.zeros(setting.group + 1, dtype=np.int64)),) * len(
        placements[0]
    )
    padded = [empty] * (setting.stages - 1) + [*placements] + [empty] * (setting.stages - 1)
    # A micro-batch enters the first stage first.
    running = [
        padded[tick : tick + setting.stages][::-1]
        for tick in range(len(placements) + setting.stages - 1)
    ]
    return [
        tuple(_concatenate_layouts(nano_batch) for nano_batch in zip(*stages, strict=True))
        for stages in running
    ]


def _concatenate_layouts(layouts: Sequence[Layout]) -> Layout:
    """Concatenate the ranks of several layouts, which have different documents."""
    documents, first = [], 0
    for layout in layouts:
        documents.append(layout.document + first)
        first += int(layout.document.max(initial=-1)) + 1
    segments = np.concatenate([np.diff(layout.offsets) for layout in layouts])
    return Layout(
        np.concatenate(documents),
        np.concatenate([layout.start for layout in layouts]),
        np.concatenate([layout.length for layout in layouts]),
        np.append(0, np.cumsum(segments)),
        np.concatenate([layout.context for layout in layouts]),
    )
