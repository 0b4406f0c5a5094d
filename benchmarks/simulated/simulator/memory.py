"""Peak memory of a rank, by term: the largest of several moments of a step.

The count covers torch's allocations for modules of transformers, operation by operation: tensors
that autograd saves for backward, and other tensors alive at the same moment.
`benchmarks/memory/peak_memory.py` compares it with allocations of CPU processes.

Three moments can be the fullest: the loss, whose logits are as wide as the vocabulary; the backward
of a feed-forward layer; and the backward of attention, together with the tensors of its exchange.
The last two are counted in the last layer, when all other layers wait and none has gradients, and
in the first layer, when no other layer waits and all have gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import FloatArray
from simulator.setting import Setting

_MOMENT_BYTES = 8  # Adam's two moments in float32
_WIDE = 4  # bytes of a float32
# Bytes per logit: its log-softmax, and the gradients of both, in float32 (torch's cross_entropy, in
# backward).
_LOGIT_BYTES = 12
_CHUNK_WORDS = 32768  # vocabulary entries per chunk of logits in a chunked loss (TRL)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on a rank at one moment of a step, as numbers or arrays of shape (ranks,).

    Attributes:
        weights, gradients, optimizer: bytes of each that stay on the rank between layers.
        gathered: whole weights and gradients under FSDP2 and ZeRO-3: of the embedding and the
            output layer, which FSDP2 keeps in the root's group, of the current layer, and of its
            neighbours, of which one is gathered ahead and one is reduced.
        checkpoints: tensors that wait for backward: inputs of layers, or without checkpointing
            everything that layers save.
        outputs: o and the log-sum-exp of attention, kept under checkpointing if attention is not
            repeated.
        layer: tensors of the current layer.
        exchange: tensors that an exchange of attention holds for other ranks, and from them.
        loss: logits, and the hidden states and gradients at that moment.
        host: checkpoints and outputs that were offloaded to the host; not part of `total`.
    """

    weights: FloatArray | float = 0.0
    gradients: FloatArray | float = 0.0
    optimizer: FloatArray | float = 0.0
    gathered: FloatArray | float = 0.0
    checkpoints: FloatArray | float = 0.0
    outputs: FloatArray | float = 0.0
    layer: FloatArray | float = 0.0
    exchange: FloatArray | float = 0.0
    loss: FloatArray | float = 0.0
    host: FloatArray | float = 0.0

    @property
    def total(self) -> FloatArray:
        """Bytes on the device."""
        return np.asarray(sum(getattr(self, term) for term in TERMS))

    def select_rank(self, rank: int) -> RankMemory:
        values = (np.atleast_1d(getattr(self, part.name)) for part in fields(self))
        return RankMemory(*(float(value[rank if len(value) > 1 else 0]) for value in values))


# The terms of the device's memory.
TERMS = tuple(part.name for part in fields(RankMemory) if part.name != "host")


def compute_state_bytes(setting: Setting) -> RankMemory:
    """Compute the bytes of weights, gradients and Adam's state.

    Under FSDP2 all are sharded and in float32, as in accelerate's mixed precision. Otherwise
    gradients are whole and in float32, and weights of two bytes have a copy in float32, which
    ``"zero1"`` shards with the optimizer.
    """
    held, element, group = setting.rank_parameters, setting.hardware.element_bytes, setting.group
    if setting.sharding == "fsdp":
        return RankMemory(held * _WIDE / group, held * _WIDE / group, held * _MOMENT_BYTES / group)
    optimizer = held * (_MOMENT_BYTES + (_WIDE if element < _WIDE else 0))
    return RankMemory(
        held * element, held * _WIDE, optimizer / (group if setting.sharding == "zero1" else 1)
    )


def compute_kernel_bytes(shape: AttentionShape) -> tuple[float, float]:
    """Compute the bytes that a kernel's backward needs internally, for each row and for each key.

    flash-attention 2 sums gradients of rows in float32 and writes those of keys for every query
    head (`mha_varlen_bwd` in flash_api.cpp: dq_accum, dk_expanded, dv_expanded); torch's kernel for
    CPUs needs about as much.
    """
    row_bytes = shape.query_bytes / shape.element_bytes * _WIDE
    return row_bytes, shape.query_bytes + shape.output_bytes


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Bytes of a layer per token.

    Attributes:
        input: input of the layer.
        attention, feed_forward: bytes that autograd saves in each half of the layer, inputs of
            norms included.
        attention_work, feed_forward_work: other bytes in the backward of each half.
        waiting: bytes that wait for backward, without attention's outputs if checkpointing keeps
            them.
        kept: attention's outputs, o and the log-sum-exp, if checkpointing keeps them.
    """

    input: float
    attention: float
    feed_forward: float
    attention_work: float
    feed_forward_work: float
    waiting: float
    kept: float

    @classmethod
    def from_setting(cls, setting: Setting) -> _LayerBytes:
        """Compute the bytes for the decoder layers of transformers, or for layers with fused norms
        and gated activations.

        A norm of transformers saves its input in float32, the normalized input, and its output
        (`LlamaRMSNorm`); a fused norm saves its input and its output (`LigerRMSNorm`). The gated
        activation saves gate, silu, up and their product; its backward holds gate, silu and up with
        three gradients (`LlamaMLP`). A fused activation saves gate, up and the product
        (`LigerSiLUMul`).
        """
        model, shape, fused = setting.model, setting.shape, setting.fused
        element = setting.hardware.element_bytes
        hidden, wide = (
            size / setting.tensor * element for size in (model.hidden, model.feed_forward)
        )
        norm = 2 * hidden if fused else hidden / element * _WIDE + 2 * hidden
        qkv = shape.query_bytes + shape.key_value_bytes
        heads = (shape.query_bytes + shape.key_value_bytes / 2) * model.head_norms
        outputs = (shape.output_bytes + shape.lse_bytes) * model.attention_share
        saved = (qkv + heads * (1 if fused else (_WIDE / element + 1))) * model.attention_share
        attention = norm + saved + outputs
        feed_forward = norm + wide * (3 if fused else 4)
        return cls(
            input=hidden,
            attention=attention,
            feed_forward=feed_forward,
            attention_work=hidden + shape.output_bytes + qkv + sum(compute_kernel_bytes(shape)),
            feed_forward_work=hidden + wide * (1 if fused else 2),
            waiting=attention + feed_forward if setting.checkpointing == "none" else hidden,
            kept=outputs if setting.checkpointing == "selective" else 0.0,
        )


def compute_activation_bytes(setting: Setting) -> float:
    """Return the bytes per token of a micro-batch that a rank's layers keep for backward, on the
    device or on the host.
    """
    layer = _LayerBytes.from_setting(setting)
    return setting.stage_layers * (layer.waiting + layer.kept)


def compute_host_bytes(setting: Setting) -> float:
    """Return the activation bytes that are offloaded to the host."""
    return compute_activation_bytes(setting) if setting.offload else 0.0


def count_in_flight(setting: Setting, *, same_phase: bool = False) -> int:
    """Return how many micro-batches wait for backward on the first of p stages: p in 1F1B, and 2 p
    - 1 if all stages run the same phase.
    """
    return min(2 * setting.stages - 1 if same_phase else setting.stages, setting.micro_batches)


def _compute_gathered_bytes(setting: Setting, layers: int) -> float:
    """Return the bytes of whole weights outside the layers and of `layers` layers, and of gradients
    of the output layer and of one layer.
    """
    if setting.sharding != "fsdp" or setting.group == 1:
        return 0.0
    model = setting.model
    heads = model.hidden * model.vocabulary * (2 if model.tied else 3)
    weights = heads + layers * model.layer_parameters
    return weights / setting.tensor * setting.hardware.element_bytes


def _compute_loss_bytes(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the bytes of the last norm, and of logits and their gradients per chunk or in all.

    In chunks, gradients of hidden states and of the output layer's weights are summed in float32
    (TRL's ChunkedLogProbFunction).
    """
    model = setting.model
    vocabulary = setting.model.vocabulary / setting.tensor
    norm = sums = model.hidden * (_WIDE + 2 * setting.hardware.element_bytes)
    if setting.loss_tokens is None:
        return tokens * (norm + vocabulary * _LOGIT_BYTES)
    weights = model.hidden * model.vocabulary / setting.tensor * _WIDE
    part = min(_CHUNK_WORDS * setting.tensor / model.vocabulary, 1.0)
    logits = np.minimum(tokens, setting.loss_tokens) * (vocabulary * _LOGIT_BYTES) * part
    return tokens * (norm + sums) + weights + logits


def _iterate_moments(
    setting: Setting,
    tokens: npt.ArrayLike,
    received: npt.ArrayLike,
    kept: npt.ArrayLike,
    flying: int,
) -> Iterator[RankMemory]:
    """Yield the moments that can be the fullest; for the arguments see `find_fullest_moment`."""
    count = np.asarray(tokens, dtype=np.float64)
    layer = _LayerBytes.from_setting(setting)
    repeated = setting.checkpointing != "none"
    all_layers = flying * setting.stage_layers
    before = after = compute_state_bytes(setting)
    if setting.micro_batches == 1:
        before = replace(after, gradients=0.0)
        if setting.sharding == "fsdp":  # the root's gradients are reduced last
            layers = setting.model.layers * setting.model.layer_parameters
            after = replace(after, gradients=after.gradients * layers / setting.model.parameters)

    def make_moment(held: RankMemory, waiting: int) -> RankMemory:
        on_device = min(waiting, 1) if setting.offload else waiting
        return replace(
            held,
            checkpoints=count * layer.waiting * on_device,
            outputs=count * layer.kept * on_device,
            exchange=np.asarray(kept),
            host=count * compute_host_bytes(setting) * flying,
        )

    yield replace(
        make_moment(before, all_layers),
        gathered=_compute_gathered_bytes(setting, 0),
        loss=_compute_loss_bytes(setting, count),
    )
    # A repeated layer saves everything again, except tensors that waited anyway: outputs, and the
    # input if a norm saves it.
    shared = layer.kept + (
        layer.input if setting.fused or setting.hardware.element_bytes == _WIDE else 0.0
    )
    attention = (
        layer.attention - shared if repeated else -layer.feed_forward
    ) + layer.attention_work
    feed_forward = (
        layer.attention + layer.feed_forward - shared if repeated else 0.0
    ) + layer.feed_forward_work
    for held, waiting in ((before, all_layers), (after, all_layers - setting.stage_layers + 1)):
        held = replace(make_moment(held, waiting), gathered=_compute_gathered_bytes(setting, 4))
        yield replace(held, layer=count * feed_forward)
        yield replace(held, layer=count * attention, exchange=held.exchange + np.asarray(received))


def find_fullest_moment(
    setting: Setting,
    tokens: npt.ArrayLike,
    received: npt.ArrayLike = 0.0,
    kept: npt.ArrayLike = 0.0,
    *,
    same_phase: bool = False,
) -> RankMemory:
    """Return the memory of the fullest rank at its fullest moment.

    Args:
        setting: the simulated setting.
        tokens: tokens of a micro-batch, one number per rank or one for all ranks.
        received: bytes that the exchange of a layer holds while it runs.
        kept: bytes of exchanges that stay until backward.
        same_phase: whether all stages run the same phase.
    """
    moments = _iterate_moments(
        setting, tokens, received, kept, count_in_flight(setting, same_phase=same_phase)
    )
    moment = max(moments, key=lambda memory: float(np.max(memory.total)))
    return moment.select_rank(int(np.argmax(np.atleast_1d(moment.total))))


def find_most_tokens(setting: Setting, received: float = 0.0, kept: float = 0.0) -> int:
    """Return the tokens of a micro-batch that fill a rank's memory, if exchanges hold `received`
    and `kept` bytes per token.
    """
    # Each token needs at least a layer's input.
    limit = int(setting.hardware.memory_bytes / _LayerBytes.from_setting(setting).input) + 1
    fitting = bisect_right(
        range(limit),
        setting.hardware.memory_bytes,
        key=lambda n: float(find_fullest_moment(setting, n, n * received, n * kept).total),
    )
    return max(fitting - 1, 0)
