"""`MicroBatchWork`: the work of every rank for a micro-batch under a strategy, also derived from
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, FloatArray, count_causal_pairs
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.waves import TransientBytes
from hf_distca.simulate.beside_attention import Directions, layer_seconds, tensor_seconds
from hf_distca.simulate.memory import KernelBytes
from hf_distca.simulate.setting import Setting

__all__ = [
    "Candidate",
    "MicroBatchWork",
    "all_layers",
    "copy_seconds",
    "fixed_seconds",
    "in_calls",
    "moves_of",
    "of_documents",
    "of_nano_batches",
    "of_plan",
    "side_by_side",
    "sums",
]


@dataclass(frozen=True)
class MicroBatchWork:
    """Work of a micro-batch.

    Seconds are those of all layers of the model together, or of one where a function says so.

    Attributes:
        tokens: tokens that the linear layers of each rank run on, shape (ranks,).
        attention: seconds of core attention.
        exposed: seconds that each rank waits for messages of core attention.
        wire: seconds that such messages take, hidden or not, both directions together, shape
            (ranks,).
        received: bytes that one layer's exchange holds on each rank, shape (ranks,).
        pairs: query-key pairs computed, of one layer of each kind.
        meeting: number of neighbours that wait for each other's messages in every layer; 1 for
            ranks that wait for nobody, or whose neighbours take equally long.
        kept: bytes of exchanges that stay until backward, in all layers and micro-batches in
            flight.
        between: bytes of plans that cross between nodes, both directions together; None for
            strategies without plans.
        idle: seconds in which a rank has nothing to do, as a pool's server before it gets any rows.
        linear_speed: speed of linear layers, 1 for the setting's hardware; shape (ranks,), or (1,)
            if all are alike.
    """

    tokens: FloatArray
    attention: Directions
    exposed: Directions
    wire: FloatArray
    received: FloatArray
    pairs: float
    meeting: int = 1
    kept: npt.ArrayLike = 0.0
    between: float | None = None
    idle: Directions = field(default_factory=lambda: np.zeros((2, 1)))
    linear_speed: FloatArray = field(default_factory=lambda: np.ones(1))


@dataclass(frozen=True)
class Candidate:
    """A way in which a strategy can run a step; of several, the fastest that fits in memory counts.

    Attributes:
        works: the work of each micro-batch, or, with `ticks`, of each tick of all stages' ranks.
        degree: ranks that share a document or a row, if the strategy chooses that.
        ticks: whether stages run the same phase, and idle ones serve.
        holders: the setting with only the ranks that hold weights, if not all do.
    """

    works: list[MicroBatchWork]
    degree: int | None = None
    ticks: bool = False
    holders: Setting | None = None


def sums(values: npt.NDArray[Any], index: IntArray, count: int) -> FloatArray:
    """Sum values that have the same index, along the last axis, which then has `count` places."""
    rows = [np.bincount(index, weights=row, minlength=count) for row in np.atleast_2d(values)]
    return np.reshape(rows, (*values.shape[:-1], count)).astype(np.float64)


def in_calls(cost: CostModel, seconds: Directions, calls: int = 1) -> Directions:
    """Return the seconds of tasks, shape (2, ranks), in so many calls of the kernel."""
    return np.stack(
        [
            cost.forward.add_call_overhead(seconds[0], calls),
            cost.backward.add_call_overhead(seconds[1], calls),
        ]
    )


def copy_seconds(setting: Setting, bytes_: npt.ArrayLike) -> FloatArray:
    """Return the seconds of packing rows to send, or of unpacking received ones: each byte is read
    and written.
    """
    return np.asarray(2 * np.asarray(bytes_) / setting.hardware.copy_rate)


def fixed_seconds(cost: CostModel, peers: int) -> float:
    """Return the fixed seconds of an exchange with so many other ranks."""
    return cost.exchange_seconds + cost.peer_seconds * peers if peers else 0.0


def all_layers(setting: Setting, of_layer: Callable[[CostModel], MicroBatchWork]) -> MicroBatchWork:
    """Combine the work of all layers of the model, from that of a layer of each kind; kinds differ
    in their cost models.
    """
    kinds = [(layers, of_layer(setting.cost(window))) for window, layers in setting.model.kinds]
    works = [work for _, work in kinds]

    def total(name: str) -> FloatArray:
        return np.asarray(np.sum([layers * getattr(work, name) for layers, work in kinds], axis=0))

    return MicroBatchWork(
        tokens=works[0].tokens,
        attention=total("attention"),
        exposed=total("exposed"),
        wire=total("wire"),
        received=np.max([work.received for work in works], axis=0),
        pairs=sum(work.pairs for work in works),
        meeting=max(work.meeting for work in works),
        between=None if works[0].between is None else float(total("between")),
        idle=total("idle"),
        linear_speed=works[0].linear_speed,
    )


def side_by_side(groups: Sequence[MicroBatchWork]) -> MicroBatchWork:
    """Concatenate the work of several groups of ranks."""
    names = ("tokens", "attention", "exposed", "wire", "received")
    joined = {
        name: np.concatenate([getattr(group, name) for group in groups], axis=-1) for name in names
    }
    return MicroBatchWork(
        **joined,
        pairs=sum(group.pairs for group in groups),
        meeting=len(groups[0].tokens) if joined["wire"].any() else 1,
        between=sum(group.between or 0.0 for group in groups),
    )


def of_documents(setting: Setting, length: IntArray, rank: IntArray) -> MicroBatchWork:
    """Compute the work of whole documents, each on one rank of the attention group, without
    exchanges.
    """
    ranks = setting.group
    nothing = np.zeros((2, ranks))

    def of_layer(cost: CostModel) -> MicroBatchWork:
        seconds = sums(cost.estimate_directions(length, length), rank, ranks)
        return MicroBatchWork(
            tokens=sums(length, rank, ranks),
            attention=in_calls(cost, seconds),
            exposed=nothing,
            wire=nothing[0],
            received=nothing[0],
            pairs=float(count_causal_pairs(length, length, cost.window).sum()),
        )

    return all_layers(setting, of_layer)


class Moves(NamedTuple):
    """Seconds of each rank in one layer of a plan."""

    attention: Directions
    unblocked: Directions  # of tasks that wait for nothing
    dispatch: Directions
    back: Directions
    received: FloatArray  # bytes
    pairs: float
    between: float = 0.0  # bytes that cross between nodes

    @property
    def wire(self) -> FloatArray:
        return np.asarray(np.concatenate([self.dispatch, self.back]).sum(axis=0))


def moves_of(setting: Setting, plan: Plan, cost: CostModel, nodes: Ranks) -> Moves:
    """Compute one layer of a plan, on ranks that compute equally fast."""
    load = PlanLoad(plan, cost, ranks=nodes)
    cost, shape, ranks = load.cost, load.cost.shape, plan.layout.world_size
    rows = plan.end - plan.start
    tasks = cost.estimate_directions(rows, plan.end, plan.heads)
    attention, nothing = in_calls(cost, sums(tasks, plan.server, ranks)), np.zeros((2, ranks))
    pairs = float(load.pairs.sum())
    if not plan.moved:
        return Moves(attention, attention, nothing, nothing, nothing[0], pairs)
    queries, keys, transfers = load.query_tokens, load.key_tokens, load.needed_keys
    at_home = plan.home == plan.server
    # Where rows are given away, others no longer lie one after another: a call takes copies of
    # them, and puts results back.
    left = sums(rows * plan.heads * at_home, plan.server, ranks) * (queries[0] > 0)
    taken = np.outer(
        [1, 2], copy_seconds(setting, left * (shape.row_bytes + shape.key_value_bytes))
    )

    def seconds(query_bytes: int, key_bytes: int) -> FloatArray:
        # The way back takes as long as the way there: what counts is the busier of a rank's two
        # roles.
        moved = load.count_node_bytes(query_bytes, key_bytes)
        # Packed where they leave, and put in place where they come.
        copied = copy_seconds(setting, np.sum(moved, axis=(0, 1)))
        # Relays pass keys on, and get their gradients, in an exchange of their own.
        exchanges = 2 if plan.relays is not None and key_bytes else 1
        fixed = exchanges * (cost.exchange_seconds + cost.peer_seconds * load.peer_counts)
        return np.asarray(moved.estimate_seconds(cost, load.ranks).max(axis=0) + copied + fixed)

    saved_bytes = shape.query_bytes + 2 * shape.output_bytes + shape.lse_bytes
    there = seconds(shape.query_bytes, shape.key_value_bytes)
    remote = transfers.source != transfers.server
    waits = np.isin(
        plan.document * ranks + plan.server,
        np.unique(transfers.document[remote] * ranks + transfers.server[remote]),
    )
    row_bytes = TransientBytes.of(shape)
    # Own rows that need keys from elsewhere go into a server's pools, too, with their own keys.
    waiting = sums(rows * (at_home & waits), plan.server, ranks)
    kernel = KernelBytes.of(shape)
    received = (row_bytes.query + kernel.row) * queries[1] + (row_bytes.key + kernel.key) * keys[1]
    received = received + row_bytes.sent_query * queries[0] + row_bytes.sent_key * keys[0]
    received = received + (row_bytes.query // 2 + shape.query_bytes + row_bytes.key) * waiting
    return Moves(
        attention=attention + taken,
        unblocked=sums(tasks * (at_home & ~waits), plan.server, ranks),
        dispatch=np.stack([there, seconds(saved_bytes, shape.key_value_bytes)]),
        # Gradients of queries and keys take as long as these do.
        back=np.stack([seconds(shape.output_bytes + shape.lse_bytes, 0), there]),
        received=received,
        pairs=pairs,
        between=float(load.node_bytes.inter_node[0].sum()),
    )


def of_plan(
    setting: Setting, plan: Plan, cost: CostModel, nodes: Ranks = UNIFORM_RANKS
) -> MicroBatchWork:
    """Compute one layer of a plan in one stream: a rank computes its own tasks while messages
    arrive, and waits for outputs.
    """
    layer = moves_of(setting, plan, cost, nodes)
    return MicroBatchWork(
        tokens=plan.layout.query_tokens.astype(np.float64),
        attention=layer.attention,
        exposed=np.maximum(layer.dispatch - layer.unblocked, 0) + layer.back,
        wire=layer.wire,
        received=layer.received,
        pairs=layer.pairs,
        meeting=plan.layout.world_size if plan.moved else 1,
        between=layer.between,
    )


def of_nano_batches(
    setting: Setting, plans: Sequence[Plan], cost: CostModel, nodes: Ranks = UNIFORM_RANKS
) -> MicroBatchWork:
    """Compute one layer of the plans of two nano-batches in ping-pong.

    In turns: linear layers of A beside the return of B, those of B beside the dispatch of A,
    attention of A beside the dispatch of B, attention of B beside the return of A. A rank waits for
    the part of a message that is longer than the computation beside it.
    """
    first, second = (moves_of(setting, plan, cost, nodes) for plan in plans)
    tokens = [plan.layout.query_tokens.astype(np.float64) for plan in plans]
    linear = [layer_seconds(setting, count) + tensor_seconds(setting, count) for count in tokens]
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
        between=first.between + second.between,
    )
