"""`StageAttention`: computes a stage's attention while a schedule runs, and serves other stages.

The forward and the backward of a call run in different ticks (see `pipeline.ticks`), in which the
other stages run different micro-batches. So forward and backward have different plans, and a call
gets a new route when its backward begins. This costs nothing, because backward sends the rows again
anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.borrowed import is_in_backward
from hf_distca.errors import DistCADesyncError, UnsupportedError
from hf_distca.integration.handle import ForwardBatch, LayerPlan, LayerPlanner
from hf_distca.integration.session import Session
from hf_distca.kernels.base import Grads, Outputs, ScoreOptions, TaskBatch
from hf_distca.kernels.varlen import to_device
from hf_distca.pipeline.tick_calls import CallPart, LayerKind, MicroBatch, MicroBatchPart, OwnCall
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import NOTHING_POOLED, Route

# Placeholder for the route of a layer plan, because each call gets its own route. It is marked as
# exchanging, because layers run as nano-batches only if there is an exchange to hide.
_NO_ROUTE = Route(TaskBatch((), (), (), ()), NOTHING_POOLED, exchanges=True)


class LayerKindRecorder(LayerPlanner):
    """Records the kind of each attention call in a forward of a stage, in the order of the calls.
    This forward involves no other ranks and computes no attention.

    Attributes:
        kinds: the kind of each call, by the `id` of its module.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.kinds = dict[int, LayerKind]()

    def uses_nano_batches(self, batch: ForwardBatch, training: bool) -> bool:
        """Return False, because the recorded layers run whole. See
        `LayerPlanner.uses_nano_batches`.
        """
        return False

    def plan_layers(
        self,
        batch: ForwardBatch,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerPlan:
        """See `LayerPlanner.plan_layers`."""
        plan = batch.plans[key] = LayerPlan(
            AttentionGroup(),
            _NO_ROUTE,
            None,
            None,
            self.session.meter,
            stage_attention=partial(self._record, key),
        )
        return plan

    def _record(
        self, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: ScoreOptions
    ) -> torch.Tensor:
        """Record the kind of a call. Return zeros, because the outputs are not used."""
        if id(module) in self.kinds:
            raise UnsupportedError(
                f"{type(module).__name__} computes attention twice in a forward, which pipeline"
                " stages do not support."
            )
        self.kinds[id(module)] = LayerKind.from_call(key, inputs, scores)
        return inputs.q_THD.new_zeros((*inputs.q_THD.shape[:2], key.shape.value_head_dim))


class StageAttention(LayerPlanner):
    """Plans and computes a stage's attention while a schedule runs, and serves other stages.

    Attributes:
        group: the ranks of all stages.
        modules: `id` of each module that calls attention, in the order of the calls.
        micro_batch: the micro-batch whose forward runs.
        nano_batches: whether the layers of this step run as two nano-batches.
    """

    def __init__(
        self,
        session: Session,
        group: AttentionGroup,
        device: torch.device,
        modules: Sequence[int],
    ) -> None:
        super().__init__(session)
        self.group, self.device, self.modules = group, device, modules
        self.micro_batch: MicroBatch | None = None
        self.nano_batches = False

    def uses_nano_batches(self, batch: ForwardBatch, training: bool) -> bool:
        """See `LayerPlanner.uses_nano_batches`."""
        if self.nano_batches and self.micro_batch is not None:
            chunk = batch.context.chunk
            batch.documents = self.micro_batch.documents.cut_into_chunks(chunk)
        return self.nano_batches

    def plan_layers(
        self,
        batch: ForwardBatch,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerPlan:
        """See `LayerPlanner.plan_layers`. Each call gets its route only when the layer runs."""
        micro_batch = self.micro_batch
        if micro_batch is None:
            raise DistCADesyncError(
                "a stage of a pipeline ran a forward outside its schedule: let `Schedule.step`"
                " run it."
            )
        cut = batch.nano_batches
        if cut is not None and key.nano:
            documents = cut.documents[key.nano - 1]
        else:
            documents = micro_batch.documents.cut_into_chunks(batch.context.chunk)
        part = MicroBatchPart(micro_batch.number, key.chunk, key.nano)
        batch.check_documents(documents, micro_batch.layouts[part], key.window)
        kept = documents.token_indices
        keep = None if kept is None else to_device(torch.from_numpy(kept), query.device)
        plan = batch.plans[key] = LayerPlan(
            self.group,
            _NO_ROUTE,
            keep,
            None,
            self.session.meter,
            name=micro_batch.name,
            stage_attention=partial(self._attend, micro_batch, key),
        )
        return plan

    def _attend(
        self,
        micro_batch: MicroBatch,
        key: PlanKey,
        module: torch.nn.Module,
        inputs: Inputs,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        """Compute the attention of a module for a micro-batch, in its forward or in a recompute."""
        again = is_in_backward()
        kind = LayerKind.from_call(key, inputs, scores)
        if id(module) not in self.modules:
            raise UnsupportedError(
                f"{type(module).__name__} computes attention, but it did not in the first step:"
                " every step must run the same layers."
            )
        which = OwnCall(self.modules.index(id(module)), key.nano)
        if not again:
            micro_batch.reach(which)
        expected = micro_batch.parts[which].kind
        if kind != expected:
            raise DistCADesyncError(
                f"{micro_batch.name} has {kind}, but the first step found {expected}. Do not change"
                " layers after the first step."
            )
        # Force a backward even if nothing before the layer is trained, because other stages wait
        # for the rows of this stage.
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in inputs[:3]):
            inputs = inputs._replace(q_THD=inputs.q_THD.detach().requires_grad_())
        stored = (
            micro_batch.outputs[key.nano].find_outputs(module, inputs)
            if micro_batch.outputs
            else None
        )
        call = StageCall(self, micro_batch, which, stored)
        if again and call.recomputed_outputs is None:
            raise UnsupportedError(
                f"{type(module).__name__} computes attention again in backward, but its outputs"
                " were not kept in forward. Checkpoint activations with torch.utils.checkpoint, or"
                " switch checkpointing off."
            )
        return compute_core_attention(inputs, call)

    def make_server(self, part: CallPart) -> AttentionServer:
        """Make the server that runs the tasks of a call."""
        kind = part.kind
        scores = ScoreOptions(kind.scale, part.window, kind.softcap)
        query = kind.make_empty_operands(self.device).q_THD
        return AttentionServer(
            self.session.choose_kernel(query, kind.key.shape, scores),
            scores,
            self.session.meter,
        )

    def serve(self, parts: Sequence[CallPart], *, backward: bool) -> None:
        """Serve other stages in one call, or in the interleaved calls of two nano-batches. In these
        calls, this rank has no rows of its own.
        """
        with torch.no_grad():
            begun = [self._begin_serving(part, backward=backward) for part in parts]
            for call in begun:
                call.serve()
            for call in begun:
                call.finish(Grads if backward else Outputs)

    def _begin_serving(self, part: CallPart, *, backward: bool) -> LayerExchange:
        """Begin a call: launch the messages that bring rows of other ranks to this rank."""
        call = LayerExchange(part.route, self.group, self.make_server(part), None, part.name)
        if backward:
            call.begin_backward()
        call.begin_without_rows(part.kind.make_empty_operands(self.device))
        return call


class StageCall(LayerExchange):
    """A call of attention in which this rank has rows of its own."""

    def __init__(
        self,
        attention: StageAttention,
        micro_batch: MicroBatch,
        which: OwnCall,
        stored: LayerOutputs | None,
    ) -> None:
        part = micro_batch.parts[which]
        server = attention.make_server(part)
        super().__init__(part.route, attention.group, server, stored, part.name)
        # Mark the call as exchanging in any case: its backward may exchange even if its forward
        # does not, and nano-batches must take turns at the same points on all ranks.
        self.exchanges = True
        self._attention, self._micro_batch, self._which = attention, micro_batch, which

    def begin_backward(self) -> None:
        """Switch to the plan of the tick in which the backward runs."""
        super().begin_backward()
        part = self._micro_batch.reach(self._which)
        self.route, self.server = part.route, self._attention.make_server(part)
        self.label = part.name
