"""`LayerPlanner`: makes the plans of layers in a micro-batch, from its batch to the route."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey, build_local_layout
from hf_distca.agreement.batch_plan import MicroBatchPlan
from hf_distca.agreement.documents import Documents, PackedDocuments
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.handle import ForwardBatch, LayerPlan
from hf_distca.integration.layer_kinds import make_initial_cost
from hf_distca.integration.processes import print_if_slow
from hf_distca.integration.seen_ahead import sum_documents
from hf_distca.integration.session import Session
from hf_distca.kernels import Scores
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.gpus import make_gpu_cost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

_LOCAL_GROUP = AttentionGroup()


class LayerPlanner:
    """Plans micro-batches for layers of a model, with the state of a session: finds the ranks that
    take part, their documents and the costs of layers, and makes the route of this rank.

    Attributes:
        session: computes what is planned.
        planner: plans of the session's micro-batches.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.planner = session, session.planner

    def find_group(self, batch: ForwardBatch, training: bool) -> AttentionGroup:
        """Return the ranks that take part in a forward: this one alone if the others need not run
        it. All ranks must call this if they do; see `Session.join_group`.
        """
        if batch.group is None:
            # Making the group needs all ranks: a rank that evaluates or generates alone must not
            # ask for it.
            is_shared = not batch.context.is_generating and (
                training or self.takes_all_ranks(batch.tokens.packed)
            )
            batch.group = self.session.join_group() if is_shared else _LOCAL_GROUP
        return batch.group

    def takes_all_ranks(self, documents: PackedDocuments | Documents | None) -> bool:
        """Return whether all ranks run a forward of a model in evaluation mode, too.

        They do if one of the documents of their shares is cut, as for the teacher of a student: no
        rank could compute it alone. Every rank reads this from the layout of all, so all decide
        alike, and none waits for one that runs alone. A rank that gets no such batch at all is
        missed as in training: shares are compared, and `timeout_seconds` is the bound.
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
            return batch.read_documents(
                arguments, span_ranks=self.session.config.documents_span_ranks, training=training
            )

    def plan_layers(
        self,
        batch: ForwardBatch,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerPlan:
        """Plan one kind of layer of a micro-batch, with the other ranks or alone, and the kinds
        that are planned with it.

        Args:
            batch: batch of the forward.
            arguments: keyword arguments of attention, which define the documents.
            query: (batch, heads, length, width) in the dtype that attention computes in.
            key: key of the plan.
            training: whether the module is in training mode on this rank, and so on all.
        """
        group = self.find_group(batch, training)
        # Both nano-batches, so that ranks meet once.
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
            # The first plan after an installation compiles loops of the scheduler.
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
        """Make the plan of a micro-batch for this rank alone; for whole documents, their lengths
        suffice.

        Raises:
            LayoutError: if a part of a document is missing; an `UnsupportedError` while
                `evaluating`.
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
            # To time a layer on CUDA, the host records four events.
            Meter(self.session.meter, timed=self.session.times_local_work or key.device != "cuda"),
            OutputStore(),
            make_exchange=documents.make_exchange,
        )

    @mark_joint_step
    def make_cost(self, key: PlanKey, query: torch.Tensor, group: AttentionGroup) -> None:
        """Make the cost model of a shape, at its first layer; all ranks of the group at the same
        point. Collective.
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
        """Return the cost model of the GPU and kernel that run, or `cost` if ranks differ.
        Collective.

        Ranks plan with one cost model, and learn in training which of them are slower.
        """
        kernel = self.session.choose_kernel(query, cost.shape, Scores(1.0)).name
        if kernel == "cuda":  # torch may have been told to run another flash-attention in it
            kernel = torch.nn.attention.current_flash_attention_impl() or kernel
        device = torch.cuda.get_device_name(query.device)
        factored = make_gpu_cost(cost.shape, device, kernel, tile=cost.tile)
        rates = [factored.forward.flops_per_second, factored.exchange_bytes_per_second]
        same = group.is_equal_on_all(
            np.array(rates).view(np.int64), doing="comparing GPUs and attention kernels"
        )
        return factored if same else cost

    @mark_joint_step
    def make_layer_plan(
        self,
        documents: Documents,
        planned: MicroBatchPlan,
        group: AttentionGroup,
        device: torch.device,
    ) -> LayerPlan:
        """Make the layers' plan of a plan in use, for a rank that has these documents."""
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
    """Return `Documents.token_indices` on a device."""
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
            "a document that spans ranks met a model in evaluation mode, where each rank works"
            " alone: call model.train() to train, or set DistCAConfig(balance_evaluation=True) if"
            " all ranks evaluate together."
        ) from error


def _limit_window(window: int | None, longest: int) -> int | None:
    """Return the window if it hides a key of the longest document from one of its tokens, else
    None.
    """
    return None if window is None or window >= longest else window
