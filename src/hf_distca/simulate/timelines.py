"""Seconds of a step from the work of its micro-batches: data parallel, 1F1B, and ticks in which all stages do the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.simulate.linear_layers import Directions, head_seconds, layer_seconds, tensor_seconds
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import MicroBatchWork

__all__ = ["Timeline", "data_parallel", "one_forward_one_backward", "rank_seconds", "same_phase"]


class Timeline(NamedTuple):
    """A step, without what is exchanged for weights.

    Attributes:
        seconds: until the last rank is done.
        busy: seconds of each rank in which it computes or exchanges.
    """

    seconds: float
    busy: FloatArray


def rank_seconds(setting: Setting, work: MicroBatchWork, *, keeps_attention: bool) -> Directions:
    """Seconds of each rank for a micro-batch, all layers of the model, without the output layer.

    Args:
        setting: model and hardware.
        work: the micro-batch.
        keeps_attention: whether attention is not repeated where layers are.
    """
    linear, tensor = layer_seconds(setting, work.tokens), tensor_seconds(setting, work.tokens)
    layers = setting.model.layers
    forward = layers * (linear.forward + tensor) + work.attention.forward + work.exposed.forward
    backward = layers * (linear.backward + tensor) + work.attention.backward + work.exposed.backward
    if setting.checkpointing != "none":
        backward = backward + layers * (linear.forward + tensor)
        if setting.checkpointing == "full" and not keeps_attention:
            backward = backward + work.attention.forward + work.exposed.forward
    return Directions(forward, backward)


def data_parallel(setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]) -> Timeline:
    """Every rank runs its micro-batches, whose `rank_seconds` are `parts`; all wait for the last one at the end.

    Ranks that exchange something in every layer wait for each other in each direction of a micro-batch, too.
    """
    busy, ends = np.zeros((2, len(works[0].tokens)))
    for work, both in zip(works, parts, strict=True):
        for seconds in (both.forward, head_seconds(setting, work.tokens), both.backward):
            busy, ends = busy + seconds, ends + seconds
            if work.meeting > 1:
                ends = np.repeat(ends.reshape(-1, work.meeting).max(axis=1), work.meeting)
    return Timeline(float(ends.max()), busy)


def _hop_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Seconds in which a stage's outputs travel to the next one."""
    bytes_ = tokens * setting.model.hidden * setting.hardware.element_bytes / setting.tensor
    return np.asarray(bytes_ / setting.hardware.link_rate + setting.hardware.exchange_seconds)


def one_forward_one_backward(setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]) -> Timeline:
    """1F1B: each rank of the group stands for a pipeline, whose stages have equally many layers.

    Args:
        setting: model and hardware.
        works, parts: micro-batches, and their `rank_seconds`.
    """
    stages, count = setting.stages, len(works)
    heads = [head_seconds(setting, work.tokens) for work in works]
    hops = [_hop_seconds(setting, work.tokens) for work in works]
    ends: dict[tuple[int, int, bool], FloatArray] = {}  # by stage, micro-batch, and whether it is the backward
    free = [np.zeros(len(works[0].tokens)) for _ in range(stages)]
    busy = np.zeros((stages, len(works[0].tokens)))
    orders = [_order(stages, stage, count) for stage in range(stages)]
    done = [0] * stages
    while any(done[stage] < 2 * count for stage in range(stages)):
        for stage in range(stages):
            while done[stage] < 2 * count:
                number, back = orders[stage][done[stage]]
                before = _before(stage, number, stages, back=back)
                if before is not None and before not in ends:
                    break
                ready = np.zeros_like(hops[number]) if before is None else ends[before]
                if before is not None and before[0] != stage:
                    ready = ready + hops[number]
                seconds = (parts[number].backward if back else parts[number].forward) / stages
                if stage == stages - 1:
                    seconds = seconds + heads[number] * (2 / 3 if back else 1 / 3)
                free[stage] = np.maximum(free[stage], ready) + seconds
                busy[stage] += seconds
                ends[stage, number, back] = free[stage]
                done[stage] += 1
    return Timeline(float(max(end.max() for end in free)), busy.ravel())


def _order(stages: int, stage: int, count: int) -> list[tuple[int, bool]]:
    """What a stage runs, as (micro-batch, whether backward)."""
    ahead = min(stages - 1 - stage, count)
    order = [(number, False) for number in range(ahead)]
    for number in range(count - ahead):
        order += [(number + ahead, False), (number, True)]
    return order + [(number, True) for number in range(count - ahead, count)]


def _before(stage: int, number: int, stages: int, *, back: bool) -> tuple[int, int, bool] | None:
    """The part of a micro-batch that a stage waits for, as (stage, micro-batch, whether backward); None if it waits for none."""
    if not back:
        return (stage - 1, number, False) if stage else None
    return (stage, number, False) if stage == stages - 1 else (stage + 1, number, True)


def same_phase(setting: Setting, ticks: Sequence[MicroBatchWork], parts: Sequence[Directions]) -> Timeline:
    """All stages in a forward or all in a backward tick, in which those without a micro-batch serve.

    Args:
        setting: model and hardware.
        ticks: of each tick of one direction, the work of all stages' ranks, stage after stage, of all layers of the model. The
            ticks of the other direction are the same.
        parts: `rank_seconds` of each tick.
    """
    seconds, busy = 0.0, np.zeros(len(ticks[0].tokens))
    last = np.arange(len(busy)) >= len(busy) - setting.group
    for tick, both in zip(ticks, parts, strict=True):
        head = np.where(last, head_seconds(setting, tick.tokens), 0.0)
        hop = _hop_seconds(setting, tick.tokens).max()
        for part, share in ((both.forward, 1 / 3), (both.backward, 2 / 3)):
            taken = part / setting.stages + head * share
            busy += taken
            seconds += float(taken.max() + hop)
    return Timeline(seconds, busy)
