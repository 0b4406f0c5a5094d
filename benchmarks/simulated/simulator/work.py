"""Seconds of a rank outside core attention, and `MicroBatchWork`: the work of every rank for a
micro-batch under a strategy.

A matrix product takes the longer of its arithmetic, at the rate of large products, and of its reads
and writes (the roofline model). Operations between products only read and write memory: per layer
two norms, two residual additions, the rotary embedding and the gated activation. Backward takes
twice as long as forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, count_causal_pairs
from hf_distca.schedule.layout import FloatArray, IntArray
from simulator.profiles import add_call_overhead
from simulator.setting import Setting

Directions = FloatArray  # seconds of each rank, forward and backward: shape (2, ranks)

# Exchanges of all hidden states per direction of a layer with tensor and sequence parallelism: an
# all-gather before attention and before the feed-forward layer, and a reduce-scatter after each
# (arXiv 2205.05198, section 4.2.2).
_TENSOR_EXCHANGES = 4
_GRADIENT_BYTES = 4  # whole gradients are summed in float32
# Adam with weights in float32: gradient, two moments and weights are read; moments and weights are
# written, also in 16 bits.
_UPDATE_BYTES = 30


def _time_products(
    setting: Setting, sizes: list[tuple[float, float]], tokens: FloatArray
) -> FloatArray:
    hardware = setting.hardware
    inner, outer = np.array(sizes).T[..., None]
    moved = (tokens * (inner + outer) + inner * outer * (tokens > 0)) * hardware.element_bytes
    arithmetic = 2 * tokens * inner * outer / hardware.matmul_flops
    return np.asarray(np.maximum(arithmetic, moved / hardware.memory_rate).sum(axis=0))


def estimate_layer_seconds(setting: Setting, tokens: FloatArray) -> Directions:
    """Return the seconds of a decoder layer's matrix products on each rank, shape (ranks,)."""
    model, tensor = setting.model, setting.tensor
    queries, keys, wide = (
        model.attention_width / tensor,
        model.key_width / tensor,
        model.feed_forward / tensor,
    )
    sizes = [
        (model.hidden, queries + 2 * keys),
        (queries, model.hidden),
        (model.hidden, 2 * wide),
        (wide, model.hidden),
    ]
    elements = 10 * model.hidden / tensor + 2 * (queries + keys) + 3 * wide
    between = tokens * elements * setting.hardware.element_bytes / setting.hardware.memory_rate
    forward = _time_products(setting, sizes, tokens) * model.active_share + between
    return np.stack([forward, 2 * forward])


def estimate_head_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the seconds of the output layer and the loss, forward and backward together, on each
    rank, shape (ranks,).
    """
    model = setting.model
    outer = model.vocabulary / setting.tensor
    # The loss reads the logits, and also writes and reads them in float32 for the softmax and its
    # gradient.
    loss = tokens * outer * (setting.hardware.element_bytes + 8) / setting.hardware.memory_rate
    return np.asarray(3 * _time_products(setting, [(model.hidden, outer)], tokens) + loss)


def estimate_tensor_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the seconds of a layer's exchanges of hidden states in a tensor-parallel group, for
    one direction. Nothing hides these exchanges.
    """
    hardware = setting.hardware
    rate = hardware.gather_rate if setting.tensor <= setting.ranks_per_node else hardware.link_rate
    share = (setting.tensor - 1) / setting.tensor
    return np.asarray(
        _TENSOR_EXCHANGES * tokens * setting.model.hidden * hardware.element_bytes * share / rate
    )


def estimate_gather_rate(setting: Setting, ranks: int) -> float:
    """Return the bytes per second that a rank receives in an all-gather, or sends in a
    reduce-scatter, in its group.

    Between nodes, a byte enters each node once, because the ranks of the group in a node share
    their links.
    """
    hardware = setting.hardware
    if ranks * setting.tensor <= setting.ranks_per_node:
        return hardware.gather_rate
    beside = max(1, min(ranks, setting.ranks_per_node // setting.tensor))
    return min(hardware.gather_rate, hardware.link_rate * beside)


def estimate_weight_exchange(setting: Setting, forward: float, backward: float) -> float:
    """Return the seconds that ranks wait for weights and gradients in a step, if a micro-batch
    computes for `forward` and `backward` seconds.
    """
    group, count = setting.group, setting.micro_batches
    once = setting.rank_parameters * (group - 1) / group / estimate_gather_rate(setting, group)
    gather = once * setting.hardware.element_bytes
    reduce = once * _GRADIENT_BYTES
    if setting.sharding == "fsdp":
        # Weights are gathered for both directions of each micro-batch and gradients are reduced,
        # one layer ahead of compute.
        first = gather / setting.stage_layers
        exposed = max(gather - forward, first) + max(2 * gather - backward, first)
        return count * exposed
    if setting.sharding == "zero1":
        return max(gather - forward, 0.0) + max(reduce - backward, 0.0)
    return max(2 * reduce - backward, 2 * reduce / setting.stage_layers)


def estimate_optimizer_seconds(setting: Setting) -> float:
    """Return the seconds of updating a rank's weights."""
    shards = 1 if setting.sharding == "ddp" else setting.group
    return setting.rank_parameters / shards * _UPDATE_BYTES / setting.hardware.memory_rate


@dataclass(frozen=True)
class MicroBatchWork:
    """Work of a micro-batch.

    Seconds are those of all layers of the model, or of one layer where a function says so.

    Attributes:
        tokens: tokens that the linear layers of each rank run on, shape (ranks,).
        attention: seconds of core attention.
        exposed: seconds for which each rank waits for messages of core attention.
        wire: seconds of all these messages, hidden or not, in both directions together, shape
            (ranks,).
        received: bytes that one layer's exchange holds on each rank, shape (ranks,).
        pairs: computed query-key pairs, summed over one layer of each kind.
        meeting: number of neighbours that wait for each other's messages in every layer; 1 if no
            rank waits, or if neighbours take equally long.
        kept: bytes of exchanges that stay until backward, for all layers and micro-batches in
            flight.
    """

    tokens: FloatArray
    attention: Directions
    exposed: Directions
    wire: FloatArray
    received: FloatArray
    pairs: float
    meeting: int = 1
    kept: npt.ArrayLike = 0.0


@dataclass(frozen=True)
class Candidate:
    """One way to run a step under a strategy. Of several, the fastest that fits in memory counts.

    Attributes:
        works: the work of each micro-batch, or, with `ticks`, of each tick of all stages' ranks.
        degree: ranks that share a document or a row, if the strategy chooses this number.
        ticks: whether all stages run the same phase while idle ones serve.
    """

    works: list[MicroBatchWork]
    degree: int | None = None
    ticks: bool = False


def sum_by_index(values: npt.NDArray[Any], index: IntArray, count: int) -> FloatArray:
    """Sum the values of each index along the last axis, which then has length `count`."""
    rows = [np.bincount(index, weights=row, minlength=count) for row in np.atleast_2d(values)]
    return np.reshape(rows, (*values.shape[:-1], count)).astype(np.float64)


def divide_into_calls(cost: CostModel, seconds: Directions, calls: int = 1) -> Directions:
    """Return the seconds of tasks in `calls` kernel calls, shape (2, ranks)."""
    return np.stack(
        [
            add_call_overhead(cost.forward, seconds[0], calls),
            add_call_overhead(cost.backward, seconds[1], calls),
        ]
    )


def estimate_copy_seconds(setting: Setting, bytes_: npt.ArrayLike) -> FloatArray:
    """Return the seconds of packing rows to send or unpacking received ones."""
    return np.asarray(2 * np.asarray(bytes_) / setting.hardware.copy_rate)


def compute_fixed_seconds(cost: CostModel, peers: int) -> float:
    """Return the fixed seconds of an exchange with `peers` other ranks."""
    return cost.exchange_seconds + cost.peer_seconds * peers if peers else 0.0


def combine_layers(
    setting: Setting, of_layer: Callable[[CostModel], MicroBatchWork]
) -> MicroBatchWork:
    """Combine the work of all layers of the model from that of one layer of each kind. Kinds differ
    in their cost models.
    """
    kinds = [
        (layers, of_layer(setting.make_cost_model(window)))
        for window, layers in setting.model.kinds
    ]
    works = [work for _, work in kinds]

    def add_up(name: str) -> FloatArray:
        return np.asarray(np.sum([layers * getattr(work, name) for layers, work in kinds], axis=0))

    return MicroBatchWork(
        tokens=works[0].tokens,
        attention=add_up("attention"),
        exposed=add_up("exposed"),
        wire=add_up("wire"),
        received=np.max([work.received for work in works], axis=0),
        pairs=sum(work.pairs for work in works),
        meeting=max(work.meeting for work in works),
    )


def concatenate_groups(groups: Sequence[MicroBatchWork]) -> MicroBatchWork:
    """Concatenate the work of several groups of ranks."""
    joined = {
        name: np.concatenate([getattr(group, name) for group in groups], axis=-1)
        for name in ("tokens", "attention", "exposed", "wire", "received")
    }
    return MicroBatchWork(
        **joined,
        pairs=sum(group.pairs for group in groups),
        meeting=len(groups[0].tokens) if joined["wire"].any() else 1,
    )


def compute_document_work(setting: Setting, length: IntArray, rank: IntArray) -> MicroBatchWork:
    """Compute the work of whole documents, each on one rank, without exchanges."""
    ranks = setting.group
    nothing = np.zeros((2, ranks))

    def compute_layer(cost: CostModel) -> MicroBatchWork:
        seconds = sum_by_index(cost.estimate_directions(length, length), rank, ranks)
        return MicroBatchWork(
            tokens=sum_by_index(length, rank, ranks),
            attention=divide_into_calls(cost, seconds),
            exposed=nothing,
            wire=nothing[0],
            received=nothing[0],
            pairs=float(count_causal_pairs(length, length, cost.window).sum()),
        )

    return combine_layers(setting, compute_layer)
