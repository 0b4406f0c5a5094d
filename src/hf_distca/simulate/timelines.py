"""Seconds of a step from the work of its micro-batches: data parallel, 1F1B, and ticks in which all
stages do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.simulate.beside_attention import (
    Directions,
    head_seconds,
    layer_seconds,
    tensor_seconds,
)
from hf_distca.simulate.memory import host_bytes
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import MicroBatchWork

__all__ = [
    "Timeline",
    "data_parallel",
    "linear_seconds",
    "one_forward_one_backward",
    "rank_seconds",
    "same_phase",
]


class Timeline(NamedTuple):
    """A step, without exchanges of weights.

    Attributes:
        seconds: seconds until the last rank is done.
        busy: seconds of each rank in which it computes or exchanges.
    """

    seconds: float
    busy: FloatArray


def linear_seconds(setting: Setting, tokens: FloatArray) -> Directions:
    """Return the seconds of the linear layers of the whole model for so many tokens of each rank,
    shape (ranks,).

    With checkpointing, backward runs their forward once more.
    """
    forward, backward = setting.model.layers * (
        layer_seconds(setting, tokens) + tensor_seconds(setting, tokens)
    )
    return np.stack([forward, backward if setting.checkpointing == "none" else backward + forward])


def rank_seconds(setting: Setting, work: MicroBatchWork) -> Directions:
    """Return the seconds of each rank for a micro-batch, all layers of the model, without the
    output layer.

    Nothing hides the copies of offloading, as in transformers (`activation_checkpointing_kwargs`).
    """
    copies = setting.stages * host_bytes(setting) * work.tokens / setting.hardware.host_rate
    seconds = (
        linear_seconds(setting, work.tokens) / work.linear_speed
        + work.attention
        + work.exposed
        + copies
    )
    if setting.checkpointing == "full":
        seconds[1] += work.attention[0] + work.exposed[0]
    return seconds


def data_parallel(
    setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run the micro-batches of every rank, with `parts` from `rank_seconds`; all wait for the last
    one at the end.

    Ranks that exchange something in every layer wait for each other in each direction of a
    micro-batch, too.
    """
    busy, ends = np.zeros((2, len(works[0].tokens)))
    for work, (forward, backward) in zip(works, parts, strict=True):
        head = head_seconds(setting, work.tokens) / work.linear_speed
        for seconds, idle in ((forward, work.idle[0]), (head, 0.0), (backward, work.idle[1])):
            busy, ends = busy + seconds, ends + seconds + idle
            if work.meeting > 1:
                ends = np.repeat(ends.reshape(-1, work.meeting).max(axis=1), work.meeting)
    return Timeline(float(ends.max()), busy)


def _hop_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the seconds that a stage's outputs travel to the next one."""
    bytes_ = tokens * setting.model.hidden * setting.hardware.element_bytes / setting.tensor
    return np.asarray(bytes_ / setting.hardware.link_rate + setting.hardware.exchange_seconds)


def one_forward_one_backward(
    setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run 1F1B: each rank of the group stands for a pipeline, whose stages have equally many
    layers.

    If all calls took one tick, stage s of p would run the forward of micro-batch m in tick 2 m + s
    or before, and its backward in tick 2 (m + p) - 1 - s. In the order of these ticks every call
    follows the calls that it waits for.
    """
    stages, count = setting.stages, len(works)
    calls = [(2 * m + s, m, s, 0) for m in range(count) for s in range(stages)]
    calls += [(2 * (m + stages) - 1 - s, m, s, 1) for m in range(count) for s in range(stages)]
    heads = [head_seconds(setting, work.tokens) for work in works]
    hops = [_hop_seconds(setting, work.tokens) for work in works]
    free, busy = np.zeros((2, stages, len(works[0].tokens)))
    ready = [np.zeros_like(hop) for hop in hops]  # when a micro-batch is where its next call runs
    for _, number, stage, direction in sorted(calls):
        seconds = parts[number][direction] / stages
        last = stage == stages - 1
        if last:
            seconds = seconds + heads[number] * (2 / 3 if direction else 1 / 3)
        free[stage] = np.maximum(free[stage], ready[number]) + seconds
        busy[stage] += seconds
        ready[number] = free[stage] + (0.0 if last and not direction else hops[number])
    return Timeline(float(free.max()), busy.ravel())


def same_phase(
    setting: Setting, ticks: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run ticks: all stages in forward or all in backward, where stages without a micro-batch
    serve.

    `ticks` has, for each tick of one direction, the work of all stages' ranks, stage after stage,
    in all layers of the model. The ticks of the other direction are the same.
    """
    seconds, busy = 0.0, np.zeros(len(ticks[0].tokens))
    last = np.arange(len(busy)) >= len(busy) - setting.group
    for tick, both in zip(ticks, parts, strict=True):
        head = np.where(last, head_seconds(setting, tick.tokens), 0.0)
        hop = _hop_seconds(setting, tick.tokens).max()
        for part, share in zip(both, (1 / 3, 2 / 3), strict=True):
            taken = part / setting.stages + head * share
            busy += taken
            seconds += float(taken.max() + hop)
    return Timeline(seconds, busy)
