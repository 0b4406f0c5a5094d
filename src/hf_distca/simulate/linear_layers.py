"""Everything of a model but core attention: seconds of linear layers, of the output layer, and of tensor parallelism.

A matrix product takes the longer of its arithmetic at the rate of large products and of its reads and writes (the roofline
model). What lies between products only reads and writes memory: per layer two norms, two residual additions, the rotary embedding
and the gated activation. Backward takes twice as much of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.simulate.setting import Setting

__all__ = ["Directions", "head_seconds", "layer_seconds", "tensor_seconds"]

# Exchanges of all hidden states in each direction of a layer with tensor and sequence parallelism: an all-gather in front of
# attention and of the feed-forward layer, a reduce-scatter behind each (arXiv 2205.05198, section 4.2.2).
_TENSOR_EXCHANGES = 4


class Directions(NamedTuple):
    """Seconds forward and backward, of each rank."""

    forward: FloatArray
    backward: FloatArray


def _products(setting: Setting, sizes: list[tuple[float, float]], tokens: FloatArray) -> FloatArray:
    hardware = setting.hardware
    seconds = np.zeros_like(tokens)
    for inner, outer in sizes:
        arithmetic = 2 * tokens * inner * outer / hardware.matmul_flops
        moved = (tokens * (inner + outer) + inner * outer * (tokens > 0)) * hardware.element_bytes / hardware.memory_rate
        seconds += np.maximum(arithmetic, moved)
    return seconds


def layer_seconds(setting: Setting, tokens: FloatArray) -> Directions:
    """Seconds of the linear layers of one decoder layer on each rank.

    Args:
        setting: model and hardware.
        tokens: tokens of each rank, shape (ranks,).
    """
    model, tensor = setting.model, setting.tensor
    queries, keys, wide = model.attention_width / tensor, model.key_width / tensor, model.feed_forward / tensor
    sizes = [(model.hidden, queries + 2 * keys), (queries, model.hidden), (model.hidden, 2 * wide), (wide, model.hidden)]
    elements = 10 * model.hidden / tensor + 2 * (queries + keys) + 3 * wide
    between = tokens * elements * setting.hardware.element_bytes / setting.hardware.memory_rate
    forward = _products(setting, sizes, tokens) + between
    return Directions(forward, 2 * forward)


def head_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Forward and backward seconds of the output layer and the loss on each rank, shape (ranks,)."""
    model = setting.model
    outer = model.vocabulary / setting.tensor
    # The loss reads the logits, and writes and reads them in float32 for the softmax and its gradient.
    loss = tokens * outer * (setting.hardware.element_bytes + 8) / setting.hardware.memory_rate
    return np.asarray(3 * _products(setting, [(model.hidden, outer)], tokens) + loss)


def tensor_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Seconds of one direction of a layer in which a tensor-parallel group exchanges hidden states, not hidden by anything."""
    if setting.tensor == 1:
        return np.zeros_like(tokens)
    hardware = setting.hardware
    rate = hardware.node_rate if setting.tensor <= setting.ranks_per_node else hardware.link_rate
    share = (setting.tensor - 1) / setting.tensor
    return np.asarray(_TENSOR_EXCHANGES * tokens * setting.model.hidden * hardware.element_bytes * share / rate)
