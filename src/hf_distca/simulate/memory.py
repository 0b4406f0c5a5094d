"""Peak memory of a rank: weights and the optimizer, activations that wait for backward, and what an exchange brings."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import FloatArray
from hf_distca.simulate.setting import Setting

__all__ = ["activation_bytes", "in_flight", "most_tokens", "peak_bytes", "weight_bytes"]

_OPTIMIZER_BYTES = 12  # two moments and the weights in float32
_LOSS_TOKENS = 4096  # the loss is taken of so many tokens at a time


def weight_bytes(setting: Setting) -> float:
    """Weights, gradients and the optimizer's state on a rank."""
    held, element, group = setting.rank_parameters, setting.hardware.element_bytes, setting.group
    if setting.sharding == "fsdp":
        whole = 2 * setting.model.layer_parameters / setting.tensor * element  # the layer at work and the next one
        return held / group * (2 * element + _OPTIMIZER_BYTES) + whole
    gradients = held * (element + 4)
    return gradients + held * _OPTIMIZER_BYTES / (group if setting.sharding == "zero1" else 1)


def _layer_bytes(setting: Setting) -> float:
    """What a layer holds for each token: inputs of norms and matrix products, q, k, v, o, and three of the gated activation."""
    model, shape = setting.model, setting.shape
    inside = shape.query_bytes + shape.key_value_bytes + shape.output_bytes
    return inside + (4 * model.hidden + 3 * model.feed_forward) / setting.tensor * setting.hardware.element_bytes


def activation_bytes(setting: Setting) -> float:
    """What each token of a micro-batch leaves for the backward of a rank's layers.

    With checkpointing a layer keeps its input, and selectively o and the log-sum-exp, too.
    """
    shape = setting.shape
    if setting.checkpointing == "none":
        return setting.stage_layers * (_layer_bytes(setting) + shape.lse_bytes)
    kept = shape.output_bytes + shape.lse_bytes if setting.checkpointing == "selective" else 0
    return setting.stage_layers * (setting.model.hidden / setting.tensor * setting.hardware.element_bytes + kept)


def _working_bytes(setting: Setting) -> float:
    """What a layer that is recomputed holds for each token of a micro-batch."""
    return 0.0 if setting.checkpointing == "none" else _layer_bytes(setting)


def _loss_bytes(setting: Setting, tokens: FloatArray | int) -> FloatArray:
    token_bytes = setting.model.vocabulary / setting.tensor * (setting.hardware.element_bytes + 8)
    return np.asarray(np.minimum(tokens, _LOSS_TOKENS) * token_bytes)


def in_flight(setting: Setting, *, same_phase: bool = False) -> int:
    """Micro-batches that wait for backward on the first of p stages: p in 1F1B, and 2 p - 1 where all run the same phase."""
    return min(2 * setting.stages - 1 if same_phase else setting.stages, setting.micro_batches)


def peak_bytes(setting: Setting, tokens: npt.ArrayLike, received: npt.ArrayLike = 0.0, *, same_phase: bool = False) -> float:
    """Peak of the fullest rank, if each holds so many tokens of a micro-batch and receives so many bytes for a layer."""
    flying = in_flight(setting, same_phase=same_phase)
    count, brought = np.asarray(tokens, dtype=np.float64), np.asarray(received, dtype=np.float64)
    held = count * (activation_bytes(setting) * flying + _working_bytes(setting)) + _loss_bytes(setting, count)
    return weight_bytes(setting) + float(np.max(held + brought))


def most_tokens(setting: Setting, received: float = 0.0) -> int:
    """Tokens of a micro-batch with which a rank's memory is full, if it receives so many bytes for each."""
    token_bytes = activation_bytes(setting) * in_flight(setting) + _working_bytes(setting) + received
    room = setting.hardware.memory_bytes - weight_bytes(setting) - float(_loss_bytes(setting, _LOSS_TOKENS))
    return max(math.floor(room / token_bytes), 0)
