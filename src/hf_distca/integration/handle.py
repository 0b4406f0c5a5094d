"""The handle that the mask function returns, which travels to every layer as `attention_mask`, and
the batch of the forward behind it.

A model makes its mask once per forward and kind of layer. Instead of a dense mask it gets a small
object. Because that is an argument, it is the same object in the recompute of activation
checkpointing and another one for every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.integration.families import (
    check_cut_documents,
    check_mask_numbers,
    warn_of_packing,
)
from hf_distca.integration.mask_objects import MaskObject
from hf_distca.integration.nano_batches import NanoBatches
from hf_distca.integration.seen_ahead import Ahead
from hf_distca.integration.session import Session
from hf_distca.kernels.base import ScoreOptions
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout

# Keyword argument of a model's forward: the `LayerPlanner` of its handles, in place of one that
# plans with the session; given by stages of a pipeline.
PLANNER = "distca_planner"
# Keyword argument of layers whose model has read the documents of the batch before them, as those
# with recurrent layers do: an object with `documents`.
MODEL_ROWS = "distca_rows"


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Plan of the layers of a micro-batch that are called alike, as this rank carries it out.

    Attributes:
        group: the ranks that take part; a group of this rank alone if no others do.
        route: this rank's route.
        token_indices: int64 indices of the tokens that are not padding, on the device of q; None
            if there is no padding.
        window: keys that a row sees at most; None if no document on any rank is longer than the
            layer's window.
        meter: counts the work of this micro-batch in this kind of layer.
        outputs: outputs of the layers, for activation checkpointing; None where no recompute can
            follow.
        name: name of the micro-batch, for errors.
        call_numbers: counts the calls of attention, those of recomputes among them.
        make_exchange: makes the `LayerExchange` of a call, with its arguments.
        stage_attention: computes attention from module, inputs and scores instead; for stages of a
            pipeline.
        dtype: dtype in which the layers compute; None in the plan of layers that are called in
            several ways.
        server: runs their tasks; None as above.
    """

    group: AttentionGroup
    route: Route
    token_indices: torch.Tensor | None
    window: int | None
    meter: Meter
    outputs: OutputStore | None = None
    name: str = "a micro-batch"
    call_numbers: Iterator[int] = field(default_factory=itertools.count)
    make_exchange: Callable[..., LayerExchange] = LayerExchange
    stage_attention: Callable[[torch.nn.Module, Inputs, ScoreOptions], torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    server: AttentionServer | None = None

    def compute_attention(self, module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Compute core attention of one layer for this rank's tokens."""
        group, server = self.group, cast("AttentionServer", self.server)
        if self.stage_attention is not None:
            return self.stage_attention(module, inputs, server.scores)
        number = next(self.call_numbers)
        stored = None if self.outputs is None else self.outputs.find_outputs(module, inputs)
        if group.monitor is None:  # nobody waits for this rank
            return compute_core_attention(
                inputs, self.make_exchange(self.route, group, server, stored)
            )
        label = f"layer {getattr(module, 'layer_idx', number)} of {self.name}"
        try:
            return compute_core_attention(
                inputs, self.make_exchange(self.route, group, server, stored, label)
            )
        except Exception:
            with group.report_errors(f"computing {label}"):
                raise


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Facts that the mask function found about one forward and one kind of layer.

    Attributes:
        window: keys that a row of this kind of layer sees at most, None for all.
        chunk: length of the chunks that documents are cut into in this kind of layer, None for no
            cuts.
        ahead: what tokens see of those behind them, None for causal attention.
        config: config of the model that made the mask, for checks of its documents.
        rotary_reason: reason why positions of this model do not allow documents in several parts,
            or None.
        is_generating: whether this forward is one of `generate`, so that no other rank may be asked
            to take part.
        can_recompute: whether layers may run again in backward: the mask was made while gradients
            were recorded.
        training: whether the model that made the mask is in training mode; None if it is not known.
    """

    window: int | None = None
    chunk: int | None = None
    ahead: Ahead | None = None
    config: PreTrainedConfig | None = None
    rotary_reason: str | None = None
    is_generating: bool = False
    can_recompute: bool = True
    training: bool | None = None

    @property
    def model_type(self) -> str | None:
        """Type of the model."""
        return getattr(self.config, "model_type", None)


class Planning(Protocol):
    """Planning of the layers of a forward; see `LayerPlanner`."""

    session: Session

    def uses_nano_batches(self, batch: ForwardBatch, training: bool) -> bool:
        """Return whether layers run as two nano-batches."""

    def read_documents(
        self, batch: ForwardBatch, arguments: Mapping[str, Any], training: bool
    ) -> Documents:
        """Read the documents of a batch from the keyword arguments of a layer or of attention."""

    def plan_layers(
        self,
        batch: ForwardBatch,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerPlan:
        """Plan one kind of layer of a micro-batch."""


@dataclass(eq=False)
class ForwardBatch:
    """The batch of one forward, in one kind of layer.

    Attributes:
        planner: plans the layers, with the session of the mask function.
        tokens: the tokens, with the documents as the model got them, for models that pass none to
            attention.
        context: other facts from the mask function.
        plans: filled by the first layer of each kind: some models pass the window only to the
            attention function.
        call_plans: plans of layers that are called alike, by the arguments that distinguish their
            calls.
        group: the ranks that take part, once they are known.
        documents: documents of the batch, once they were read.
        has_segments: whether the model's recurrent layers, if it has any, run along their segments.
        nano_batches: the cut of the batch in two, once a layer has used it.
    """

    planner: Planning
    tokens: TokenBatch
    context: ForwardContext = field(default_factory=ForwardContext)
    plans: dict[PlanKey, LayerPlan] = field(default_factory=dict)
    call_plans: dict[tuple[object, ...], LayerPlan] = field(default_factory=dict)
    group: AttentionGroup | None = None
    documents: Documents | None = None
    has_segments: bool = False
    nano_batches: NanoBatches | None = None

    def is_training(self, module: torch.nn.Module) -> bool:
        """Return whether this is a forward of training, which all ranks run.

        The model says it, not the layer at hand: frozen layers may be in evaluation mode. Where no
        model is known, `module` says it.
        """
        return module.training if self.context.training is None else self.context.training

    def make_key(
        self, shape: AttentionShape, device: str, window: int | None, nano: int = 0
    ) -> PlanKey:
        """Return the plan key of a layer that passes this window to the attention
        function; the mask's own window goes first.
        """
        if self.context.window is not None:
            window = self.context.window
        return PlanKey(shape, device, window, self.context.chunk, nano)

    def read_documents(
        self, arguments: Mapping[str, Any], *, span_ranks: bool, training: bool
    ) -> Documents:
        """Read the documents of the batch from the keyword arguments of a layer or of attention."""
        rows = arguments.get(MODEL_ROWS)
        if rows is None:
            tokens = self.tokens.with_documents(arguments)
            documents = tokens.read_documents(span_ranks=span_ranks, training=training)
            if documents.is_packed(tokens.length):
                warn_of_packing(self.context.model_type)
        else:  # its model has read them
            documents = rows.documents
            self.has_segments = True
        self.documents = documents.cut_into_chunks(self.context.chunk)
        return self.documents

    def check_documents(
        self, documents: Documents, layout: Layout | None, window: int | None, rank: int = 0
    ) -> None:
        """Check documents of the batch, or of a nano-batch, for layers with a window, or None for
        no window; this is a rank of the layout.

        Without a layout, all of them are whole here.

        `check_cut_documents` raises on all ranks or none, because all know the layout; other checks
        are about this rank's own mask.
        """
        context = self.context
        documents.check_holes(window)
        if documents.has_mask_numbers:
            check_mask_numbers(context.config)
        if layout is not None and documents.span_ranks and layout.is_scattered:
            check_cut_documents(
                context.model_type, context.rotary_reason, has_segments=self.has_segments
            )
            if context.ahead is not None:
                context.ahead.check_whole(documents, layout, rank)

    @property
    def cannot_overlap(self) -> bool:
        """True if both nano-batches are planned and neither exchanges anything: there is nothing to
        hide.
        """
        plans = [plan for key, plan in self.plans.items() if key.nano]
        return len(plans) > 1 and not any(plan.route.exchanges for plan in plans)


class MaskStandIn(MaskObject):
    """Stand-in for the mask of one forward and one kind of layer: the handle.

    All layers, and their recomputes, get the same object; in ping-pong each nano-batch its half.

    This is no dataclass: FSDP with mixed precision rebuilds dataclasses, with the dictionaries in
    them, for every layer that it wraps.

    Attributes:
        batch: the batch of the forward.
        nano: 0 for a whole batch, 1 and 2 for its nano-batches.
    """

    def __init__(self, batch: ForwardBatch, nano: int = 0) -> None:
        self.batch, self.nano = batch, nano

    def select_half(self, nano: int) -> MaskStandIn:
        """See `MaskObject.select_half`."""
        return MaskStandIn(self.batch, nano)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask that it stands for, for models that give it to transformers again."""
        rows, length = self.batch_shape
        return rows, 1, length, length

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Rows and tokens that it is the mask of."""
        cut = self.batch.nano_batches if self.nano else None
        return self.batch.tokens.shape if cut is None else cut.shapes[self.nano - 1]
