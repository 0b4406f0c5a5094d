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
    held = setting.model.parameters / (setting.tensor * setting.stages)
    element, group = setting.hardware.element_bytes, setting.group
    if setting.sharding == "fsdp":
        whole = 2 * setting.model.layer_parameters / setting.tensor * element  # the layer at work and the next one
        return held / group * (2 * element + _OPTIMIZER_BYTES) + whole
    gradients = held * (element + 4)
    return gradients + held * _OPTIMIZER_BYTES / (group if setting.sharding == "zero1" else 1)


def activation_bytes(setting: Setting) -> float:
    """What each token of a micro-batch leaves for the backward of a rank's layers.

    A layer keeps the inputs of both norms and of the matrix products, q, k, v, o, the log-sum-exp, and three tensors of the gated
    activation. With checkpointing it keeps its input, and selectively or under hf-distca o and the log-sum-exp.
    """
    model, shape, element = setting.model, setting.shape, setting.hardware.element_bytes
    kept = shape.output_bytes + shape.lse_bytes
    hidden = model.hidden / setting.tensor * element
    if setting.checkpointing == "none":
        inside = shape.query_bytes + shape.key_value_bytes + kept
        layer = 4 * hidden + inside + 3 * model.feed_forward / setting.tensor * element
    else:
        layer = hidden + (kept if setting.checkpointing == "selective" else 0)
    return float(layer * setting.stage_layers)


def _working_bytes(setting: Setting) -> float:
    """What a layer that is recomputed holds for each token of a micro-batch."""
    if setting.checkpointing == "none":
        return 0.0
    model, shape, element = setting.model, setting.shape, setting.hardware.element_bytes
    inside = shape.query_bytes + shape.key_value_bytes + shape.output_bytes
    return float(inside + (4 * model.hidden + 3 * model.feed_forward) / setting.tensor * element)


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
