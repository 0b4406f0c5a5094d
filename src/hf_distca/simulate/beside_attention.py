"""Everything of a step but core attention: linear layers, tensor parallelism, weights and
gradients, and the optimizer.

A matrix product takes the longer of its arithmetic at the rate of large products and of its reads
and writes (the roofline model). Operations between products only read and write memory: per layer
two norms, two residual additions, the rotary embedding and the gated activation. Backward takes
twice as much of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.simulate.setting import Setting

__all__ = [
    "Directions",
    "Exchange",
    "gather_rate",
    "head_seconds",
    "layer_seconds",
    "optimizer_seconds",
    "tensor_seconds",
    "weight_exchange",
]

Directions = FloatArray  # seconds of each rank, forward and backward: shape (2, ranks)

# Exchanges of all hidden states in each direction of a layer with tensor and sequence parallelism:
# an all-gather in front of attention and of the feed-forward layer, a reduce-scatter behind each
# (arXiv 2205.05198, section 4.2.2).
_TENSOR_EXCHANGES = 4
_GRADIENT_BYTES = 4  # gradients that are kept whole are summed in float32
# Adam with weights in float32: gradient, two moments and weights are read; moments and weights are
# written, also in 16 bits.
_UPDATE_BYTES = 30


def _products(setting: Setting, sizes: list[tuple[float, float]], tokens: FloatArray) -> FloatArray:
    hardware = setting.hardware
    seconds = np.zeros_like(tokens)
    for inner, outer in sizes:
        arithmetic = 2 * tokens * inner * outer / hardware.matmul_flops
        moved = (
            (tokens * (inner + outer) + inner * outer * (tokens > 0))
            * hardware.element_bytes
            / hardware.memory_rate
        )
        seconds += np.maximum(arithmetic, moved)
    return seconds


def layer_seconds(setting: Setting, tokens: FloatArray) -> Directions:
    """Return the seconds of the linear layers of one decoder layer for so many tokens of each rank,
    shape (ranks,).
    """
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
    forward = _products(setting, sizes, tokens) * model.active_share + between
    return np.stack([forward, 2 * forward])


def head_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return forward and backward seconds of the output layer and the loss together on each rank,
    shape (ranks,).
    """
    model = setting.model
    outer = model.vocabulary / setting.tensor
    # The loss reads the logits, and writes and reads them in float32 for the softmax and its
    # gradient.
    loss = tokens * outer * (setting.hardware.element_bytes + 8) / setting.hardware.memory_rate
    return np.asarray(3 * _products(setting, [(model.hidden, outer)], tokens) + loss)


def tensor_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the seconds in one direction of a layer for exchanges of hidden states in a
    tensor-parallel group, not hidden by anything.
    """
    if setting.tensor == 1:
        return np.zeros_like(tokens)
    hardware = setting.hardware
    rate = hardware.gather_rate if setting.tensor <= setting.ranks_per_node else hardware.link_rate
    share = (setting.tensor - 1) / setting.tensor
    return np.asarray(
        _TENSOR_EXCHANGES * tokens * setting.model.hidden * hardware.element_bytes * share / rate
    )


class Exchange(NamedTuple):
    """Seconds on the wire, and the part of them that ranks wait for."""

    seconds: float
    exposed: float


def gather_rate(setting: Setting, ranks: int) -> float:
    """Return the bytes per second that each rank gets in an all-gather, or gives in a
    reduce-scatter, among neighbours of the group.

    Between nodes, a byte enters each node once: its ranks of the group share their links.
    """
    hardware = setting.hardware
    if ranks * setting.tensor <= setting.ranks_per_node:
        return hardware.gather_rate
    beside = max(1, min(ranks, setting.ranks_per_node // setting.tensor))
    return min(hardware.gather_rate, hardware.link_rate * beside)


def weight_exchange(setting: Setting, forward: float, backward: float) -> Exchange:
    """Return the exchange of weights and gradients in a step, beside so many seconds of
    computing of a micro-batch in each direction.
    """
    group, count = setting.group, setting.micro_batches
    if group == 1:
        return Exchange(0.0, 0.0)
    once = setting.rank_parameters * (group - 1) / group / gather_rate(setting, group)
    element = setting.hardware.element_bytes
    if setting.sharding == "fsdp":
        # Weights are gathered for both directions of each micro-batch and gradients reduced, a
        # layer ahead of computing.
        gather, both = once * element, 2 * once * element
        first = gather / setting.stage_layers
        exposed = max(gather - forward, first) + max(both - backward, first)
        return Exchange(count * (gather + both), count * exposed)
    if setting.sharding == "zero1":
        gather, reduce = once * element, once * _GRADIENT_BYTES
        return Exchange(gather + reduce, max(gather - forward, 0.0) + max(reduce - backward, 0.0))
    reduce = 2 * once * _GRADIENT_BYTES
    return Exchange(reduce, max(reduce - backward, reduce / setting.stage_layers))


def optimizer_seconds(setting: Setting) -> float:
    """Return the seconds of the update of a rank's weights."""
    shards = 1 if setting.sharding == "ddp" else setting.group
    return setting.rank_parameters / shards * _UPDATE_BYTES / setting.hardware.memory_rate
