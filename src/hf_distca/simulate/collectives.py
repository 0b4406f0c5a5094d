"""Weights, gradients and the optimizer: what is exchanged for them in a step, what of it computing hides, and the update."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.simulate.setting import Setting

__all__ = ["Exchange", "gather_rate", "optimizer_seconds", "weight_exchange"]

_GRADIENT_BYTES = 4  # gradients that are kept whole are summed in float32
# Adam with weights in float32: gradient, two moments and weights are read; moments and weights are written, also in 16 bits.
_UPDATE_BYTES = 30


class Exchange(NamedTuple):
    """Seconds on the wire, and those of them that ranks wait for."""

    seconds: float
    exposed: float


def gather_rate(setting: Setting, ranks: int) -> float:
    """Bytes per second that each rank gets in an all-gather or gives in a reduce-scatter among neighbours of the group.

    Between nodes, a byte enters each node once: its ranks of the group share their links.
    """
    hardware = setting.hardware
    if ranks * setting.tensor <= setting.ranks_per_node:
        return hardware.node_rate
    beside = max(1, min(ranks, setting.ranks_per_node // setting.tensor))
    return min(hardware.node_rate, hardware.link_rate * beside)


def weight_exchange(setting: Setting, forward: float, backward: float) -> Exchange:
    """What a step exchanges for weights and gradients, beside so many seconds of computing of a micro-batch in each direction."""
    group, count = setting.group, setting.micro_batches
    if group == 1:
        return Exchange(0.0, 0.0)
    held = setting.model.parameters / (setting.tensor * setting.stages)
    once = held * (group - 1) / group / gather_rate(setting, group)
    element = setting.hardware.element_bytes
    if setting.sharding == "fsdp":
        # Weights are gathered for both directions of each micro-batch and gradients reduced, a layer ahead of computing.
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
    """Seconds of the update of a rank's weights."""
    held = setting.model.parameters / (setting.tensor * setting.stages)
    shards = 1 if setting.sharding == "ddp" else setting.group
    return held / shards * _UPDATE_BYTES / setting.hardware.memory_rate
