"""The handle that the mask function returns, the batch to which it refers, and the `LayerPlanner`
that plans the layers of this batch.

A model makes its mask once per forward and kind of layer. Instead of a dense mask it gets a handle,
a small object that travels to every layer as `attention_mask`. Because the handle is an argument,
the recompute of activation checkpointing gets the same handle, and each micro-batch has its own
handle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey, build_local_layout
from hf_distca.agreement.batch_plan import MicroBatchPlan
from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.families import (
    check_cut_documents,
    check_mask_numbers,
    warn_of_packing,
)
from hf_distca.integration.layer_kinds import make_initial_cost
from hf_distca.integration.mask_objects import MaskObject
from hf_distca.integration.nano_batches import NanoBatches
from hf_distca.integration.processes import print_if_slow
from hf_distca.integration.seen_ahead import Ahead, sum_documents
from hf_distca.integration.session import Session
from hf_distca.kernels import ScoreOptions
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.gpus import make_gpu_cost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

_LOCAL_GROUP = AttentionGroup()
# Keyword argument with which a pipeline stage passes a `LayerPlanner` to the forward of a model.
# Without this argument, the forward makes a `LayerPlanner` for the current session.
PLANNER = "distca_planner"
# Keyword argument that models with recurrent layers pass to their layers. Its attribute `documents`
# has the documents of the batch, which these models read before attention does.
MODEL_ROWS = "distca_rows"


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """This rank's plan for the layers of a micro-batch that call attention in the same way.

    Attributes:
        group: the ranks that take part; a group of one rank if this rank works alone.
        route: the rows that this rank sends and receives, and the tasks that it runs.
        token_indices: int64 indices of the tokens that are not padding, on the device of q; None
            if there is no padding.
        window: maximum number of keys that a query sees; None if no document on any rank is longer
            than the layer's window.
        meter: counts the work of this micro-batch in this kind of layer.
        outputs: outputs of the layers, for activation checkpointing; None if no recompute can
            follow.
        name: name of the micro-batch, for errors.
        call_numbers: counts the calls of attention, in forwards and recomputes.
        make_exchange: makes the `LayerExchange` of a call of attention. It takes the arguments of
            `LayerExchange`.
        stage_attention: function that computes attention in a pipeline stage, from module, inputs
            and scores; None outside pipelines.
        dtype: dtype in which the layers compute; None in `ForwardBatch.plans`.
        server: runs the tasks of the layers; None if `dtype` is None.
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
        if group.monitor is None:  # no other rank waits for this one
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
        window: maximum number of keys that a query sees in this kind of layer; None for no limit.
        chunk: length of the chunks into which this kind of layer cuts documents; None for no cuts.
        ahead: which later tokens a token sees; None for causal attention.
        config: config of the model that made the mask. Checks of documents read it.
        rotary_reason: why the rotary embedding of this model cannot compute documents in several
            parts; None if it can.
        is_generating: whether `generate` runs this forward. If so, no other rank takes part.
        can_recompute: whether layers may run again in backward. They can if gradients were recorded
            when the mask was made.
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


@dataclass(eq=False)
class ForwardBatch:
    """The batch of one forward, in one kind of layer.

    Attributes:
        planner: plans the layers, for the session that was in use when the mask was made.
        tokens: description of the tokens. It includes the documents that the model got, because
            some models do not pass the documents on to attention.
        context: other facts from the mask function.
        plans: plan of each kind of layer. A plan is made when the first layer of the kind calls
            attention, because some models pass the window only to the attention function.
        call_plans: plans with dtype and server, by the arguments that distinguish calls of
            attention.
        group: the ranks that take part; None until they are known.
        documents: documents of the batch; None until they are read.
        has_segments: whether the model passed the documents to its layers, so that recurrent
            layers run along segments.
        nano_batches: the cut of the batch in two; None until a layer uses it.
    """

    planner: LayerPlanner
    tokens: TokenBatch
    context: ForwardContext = field(default_factory=ForwardContext)
    plans: dict[PlanKey, LayerPlan] = field(default_factory=dict)
    call_plans: dict[tuple[object, ...], LayerPlan] = field(default_factory=dict)
    group: AttentionGroup | None = None
    documents: Documents | None = None
    has_segments: bool = False
    nano_batches: NanoBatches | None = None

    def is_training(self, module: torch.nn.Module) -> bool:
        """Return whether this is a training forward, which all ranks run.

        The mode of the model decides, because frozen layers may be in evaluation mode. If the model
        is not known, the mode of `module` decides.
        """
        return module.training if self.context.training is None else self.context.training

    def make_key(
        self, shape: AttentionShape, device: str, window: int | None, nano: int = 0
    ) -> PlanKey:
        """Return the plan key of a layer that passes this window to the attention function. A
        window of the mask takes precedence.
        """
        if self.context.window is not None:
            window = self.context.window
        return PlanKey(shape, device, window, self.context.chunk, nano)

    def check_documents(
        self, documents: Documents, layout: Layout | None, window: int | None, rank: int = 0
    ) -> None:
        """Check documents of the batch, or of a nano-batch, for one kind of layer.

        `check_cut_documents` raises on all ranks or on no rank, because all ranks know the layout.
        The other checks concern only this rank's mask, and may raise on this rank alone.

        Args:
            documents: the documents.
            layout: layout of all ranks; None if all documents of this rank are whole.
            window: window of the layers; None for no window.
            rank: this rank in the layout.
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
        """True if both nano-batches are planned and exchange nothing. Running them in turns would
        then gain nothing.
        """
        plans = [plan for key, plan in self.plans.items() if key.nano]
        return len(plans) > 1 and not any(plan.route.exchanges for plan in plans)


class MaskStandIn(MaskObject):
    """The handle, which stands in for the mask of one forward and one kind of layer.

    All layers and their recomputes get the same handle. If a layer runs as two nano-batches, each
    nano-batch gets its own handle.

    It is not a dataclass, because FSDP with mixed precision rebuilds dataclasses, with the
    dictionaries in them, for every layer that it wraps.

    Attributes:
        batch: the batch of the forward.
        nano: 0 for the whole batch, 1 or 2 for a nano-batch.
    """

    def __init__(self, batch: ForwardBatch, nano: int = 0) -> None:
        self.batch, self.nano = batch, nano

    def select_half(self, nano: int) -> MaskStandIn:
        """Return the handle of a nano-batch, 1 or 2."""
        return MaskStandIn(self.batch, nano)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape that a dense mask would have. transformers reads it if a model passes the handle
        on.
        """
        rows, length = self.batch_shape
        return rows, 1, length, length

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(rows, tokens) of the batch or nano-batch."""
        cut = self.batch.nano_batches if self.nano else None
        return self.batch.tokens.shape if cut is None else cut.shapes[self.nano - 1]


class LayerPlanner:
    """Plans the layers of micro-batches for a session.

    A `LayerPlanner` finds the ranks that take part, their documents and the costs of layers, and
    makes the route of this rank.

    Attributes:
        session: the session whose settings, group and kernels are used.
        planner: makes the plans of the session's micro-batches.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.planner = session, session.planner

    def find_group(self, batch: ForwardBatch, training: bool) -> AttentionGroup:
        """Return the ranks that take part in a forward: this rank alone, or the attention group. In
        the second case, all ranks of the group must call this; see `Session.join_group`.
        """
        if batch.group is None:
            # Making the group needs all ranks, so a rank that evaluates or generates alone must not
            # join it.
            is_shared = not batch.context.is_generating and (
                training or self.takes_all_ranks(batch.tokens.packed)
            )
            batch.group = self.session.join_group() if is_shared else _LOCAL_GROUP
        return batch.group

    def takes_all_ranks(self, documents: PackedDocuments | Documents | None) -> bool:
        """Return whether all ranks run a forward in evaluation mode together.

        They do if `balance_evaluation` is set, or if the shares contain a cut document (in a
        forward of a teacher model, for example), because no rank could compute such a document
        alone. Every rank gets the same answer, because a share contains the layout of all ranks. If
        a rank gets no batch at all, the others raise an error after `timeout_seconds`, as in
        training.
        """
        share = None if documents is None else documents.dealt_share
        return self.session.config.balance_evaluation or (share is not None and share.is_cut)

    def uses_nano_batches(self, batch: ForwardBatch, training: bool) -> bool:
        """Return whether layers run as two nano-batches."""
        return self.session.config.ping_pong and self.find_group(batch, training).size > 1

    def read_documents(
        self, batch: ForwardBatch, arguments: Mapping[str, Any], training: bool
    ) -> Documents:
        """Read the documents of a batch from the keyword arguments of a layer or of attention."""
        if batch.documents is not None:
            return batch.documents
        group = batch.group or self.find_group(batch, training)
        reporting: AbstractContextManager[None] = nullcontext()
        if group.size > 1:
            number = self.planner.number + 1
            reporting = self.planner.report_errors(
                group, f"reading documents for micro-batch {number}"
            )
        with reporting:
            rows = arguments.get(MODEL_ROWS)
            if rows is None:
                documents = batch.tokens.with_documents(arguments).read_documents(
                    span_ranks=self.session.config.documents_span_ranks, training=training
                )
                if documents.is_packed(batch.tokens.length):
                    warn_of_packing(batch.context.model_type)
            else:  # the model's forward has read the documents
                documents = rows.documents
                batch.has_segments = True
            batch.documents = documents.cut_into_chunks(batch.context.chunk)
        return batch.documents

    def plan_layers(
        self,
        batch: ForwardBatch,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerPlan:
        """Plan one kind of layer of a micro-batch, with the other ranks or alone. If this is the
        first nano-batch, plan the second one as well.

        Args:
            batch: batch of the forward.
            arguments: keyword arguments of attention, which define the documents.
            query: (batch, heads, length, width) in the dtype that attention computes in.
            key: key of the plan.
            training: whether this is a forward of training, which all ranks run.
        """
        group = self.find_group(batch, training)
        # Plan both nano-batches at once, so that ranks exchange their documents only once.
        keys = [key, key._replace(nano=2)] if key.nano == 1 else [key]
        whole, cut = self.read_documents(batch, arguments, training), batch.nano_batches
        requests = [
            (
                sum_documents(
                    batch.context.ahead,
                    cut.documents[part.nano - 1] if cut is not None and part.nano else whole,
                    part.window,
                    query.device,
                ),
                part,
            )
            for part in keys
        ]
        if group.size == 1:
            evaluating = batch.context.is_generating or not training
            layer_plans = [
                self._make_local_plan(batch, *request, query.device, evaluating=evaluating)
                for request in requests
            ]
        else:
            number = self.planner.number
            with self.planner.report_errors(group, f"measuring costs for micro-batch {number + 1}"):
                self.make_cost(key, query, group)
            # The first plan may be slow: after an installation it compiles loops of the scheduler.
            with nullcontext() if number else print_if_slow("making the first plan"):
                plans = self.planner.plan(requests, group)
            activity = f"taking up a plan for micro-batch {plans[0].number}"
            with self.planner.report_errors(group, activity):
                for (documents, _), planned in zip(requests, plans, strict=True):
                    layout = planned.plan.layout
                    batch.check_documents(documents, layout, key.window, group.rank)
                layer_plans = [
                    self.make_layer_plan(documents, planned, group, query.device)
                    for (documents, _), planned in zip(requests, plans, strict=True)
                ]
        if not (batch.context.can_recompute and training):
            layer_plans = [replace(plan, outputs=None) for plan in layer_plans]
        batch.plans |= zip(keys, layer_plans, strict=True)
        return layer_plans[0]

    def _make_local_plan(
        self,
        batch: ForwardBatch,
        documents: Documents,
        key: PlanKey,
        device: torch.device,
        *,
        evaluating: bool,
    ) -> LayerPlan:
        """Make the plan of a micro-batch for this rank alone. For whole documents no layout is
        made, because their lengths suffice.

        Raises:
            LayoutError: if a part of a document is missing.
            UnsupportedError: instead of the LayoutError, if `evaluating` is true and documents may
                span ranks.
        """
        layout = None
        if documents.has_whole_documents:
            lengths = documents.runs[:, 2].tolist()
            window = _limit_window(key.window, max(lengths, default=0))
            route = Route.for_whole_documents(lengths)
        else:
            with self.session.report_errors("planning alone"):
                layout = _build_local_layout(documents, evaluating=evaluating)
            window = _limit_window(key.window, layout.longest)
            route = Route.build(Plan.make_local(layout, window), 0)
        batch.check_documents(documents, layout, key.window)
        return LayerPlan(
            _LOCAL_GROUP,
            route,
            _move_token_indices(documents, device),
            window,
            # Timing a layer on CUDA takes four events, which cost host time. So layers are timed
            # only on request.
            Meter(self.session.meter, timed=self.session.times_local_work or key.device != "cuda"),
            OutputStore(),
            make_exchange=documents.make_exchange,
        )

    @mark_joint_step
    def make_cost(self, key: PlanKey, query: torch.Tensor, group: AttentionGroup) -> None:
        """Make the cost model of a shape if there is none yet. Collective: all ranks of the group
        call it at the same point.
        """
        costs = self.planner.costs
        costs.dtypes[key.shape, key.device] = str(query.dtype)
        if (key.shape, key.device) in costs:
            return
        cost = make_initial_cost(key._replace(window=None), self.session.config)
        is_own = isinstance(self.session.config.cost_model, CostModel)
        if not is_own and query.device.type == "cuda":
            cost = self._add_gpu_factor(cost, query, group)
        costs[key.shape, key.device] = cost

    def _add_gpu_factor(
        self, cost: CostModel, query: torch.Tensor, group: AttentionGroup
    ) -> CostModel:
        """Return the cost model of this GPU and kernel if its rates are the same on all ranks, else
        `cost`. Collective.

        All ranks must plan with the same cost model. Differences in speed between ranks are
        measured during training.
        """
        kernel = self.session.choose_kernel(query, cost.shape, ScoreOptions(1.0)).name
        if kernel == "cuda":  # users can make torch run another kernel under this name
            kernel = torch.nn.attention.current_flash_attention_impl() or kernel
        device = torch.cuda.get_device_name(query.device)
        factored = make_gpu_cost(cost.shape, device, kernel, tile=cost.tile)
        rates = [factored.forward.flops_per_second, factored.exchange_bytes_per_second]
        rows = group.gather_same_length(
            np.array(rates).view(np.int64), activity="comparing GPUs and attention kernels"
        )
        return factored if all(np.array_equal(row, rows[0]) for row in rows) else cost

    @mark_joint_step
    def make_layer_plan(
        self,
        documents: Documents,
        planned: MicroBatchPlan,
        group: AttentionGroup,
        device: torch.device,
    ) -> LayerPlan:
        """Make this rank's plan for a kind of layer from the plan of all ranks.

        `documents` are the documents of this rank.
        """
        plan, nano = planned.plan, planned.key.nano
        part = f", nano-batch {nano}" if nano else ""
        source = f" ({planned.source}, plan {plan.digest[:8]})" if planned.source else ""
        return LayerPlan(
            group,
            Route.build(plan, group.rank),
            _move_token_indices(documents, device),
            plan.window,
            planned.meter,
            OutputStore(),
            f"micro-batch {planned.number}{part}{source}",
            make_exchange=documents.make_exchange,
        )


def _move_token_indices(documents: Documents, device: torch.device) -> torch.Tensor | None:
    """Copy `Documents.token_indices` to a device; None if there is no padding."""
    return (
        None
        if documents.token_indices is None
        else to_device(torch.from_numpy(documents.token_indices), device)
    )


def _build_local_layout(documents: Documents, *, evaluating: bool) -> Layout:
    try:
        return build_local_layout(documents)
    except LayoutError as error:
        if not (evaluating and documents.span_ranks):
            raise
        raise UnsupportedError(
            "a model in evaluation mode got a document that spans ranks, but each rank evaluates"
            " alone: call model.train() to train, or set DistCAConfig(balance_evaluation=True) if"
            " all ranks evaluate together."
        ) from error


def _limit_window(window: int | None, longest: int) -> int | None:
    """Return the window if the longest document does not fit in it, else None."""
    return None if window is None or window >= longest else window
