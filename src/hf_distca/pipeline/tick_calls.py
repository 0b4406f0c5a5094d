"""A stage's part in the attention of a tick: with the rows of its own micro-batch, or as a server
only.

A call has one plan for its forward and another for its backward, when other micro-batches are in
the same tick. Rows travel again in backward anyway, so this costs nothing: when its backward
begins, a call changes its route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import in_backward
from hf_distca.errors import DistCADesyncError, UnsupportedError
from hf_distca.integration.handle import AttentionHandle, LayerWork
from hf_distca.integration.session import Session
from hf_distca.integration.work_planner import WorkPlanner
from hf_distca.kernels.base import Grads, Operands, Outputs, Scores, TaskBatch
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.call import AttentionServer, Call, Inputs
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.empty_rows import make_empty_operands
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs, OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout

__all__ = [
    "DTYPES",
    "WHY_NOT_OTHERS",
    "CallPart",
    "LayerKindRecorder",
    "LayerKind",
    "MicroBatch",
    "OwnCall",
    "MicroBatchPart",
    "StageAttention",
    "TickCalls",
    "select_own_calls",
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16)  # ranks tell each other the index
WHY_NOT_OTHERS = (
    "Pipeline stages run in float64, float32 or bfloat16. float16 needs a GradScaler, which would"
    " skip the optimizer's step on the stages whose own gradients overflow and not on the others:"
    " use bfloat16."
)


class MicroBatchPart(NamedTuple):
    """Part of a micro-batch that one plan covers: chunk size of its documents, and the nano-batch
    as in `PlanKey`.
    """

    chunk: int | None
    nano: int


class LayerKind(NamedTuple):
    """All that a server needs to know of a layer. Calls of one kind can be made together.

    Attributes:
        key: plan of its tasks.
        dtype: dtype of q, k and v.
        scale, softcap: see `Scores`.
    """

    key: PlanKey
    dtype: torch.dtype
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, key: PlanKey, inputs: Inputs, scores: Scores) -> LayerKind:
        """Return the kind of a call; raise if stages cannot run in its dtype."""
        dtype = inputs.q_THD.dtype
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"attention of a pipeline stage is computed in {dtype}. {WHY_NOT_OTHERS}"
            )
        return cls(key, dtype, scores.scale, scores.softcap)

    def __str__(self) -> str:
        shape, window = self.key.shape, self.key.window
        seen = "all keys" if window is None else f"the last {window} keys"
        return (
            f"{shape.query_heads} heads of width {shape.head_dim} in {self.dtype} that see {seen}"
            f" (scale {self.scale:g})"
        )

    @property
    def numbers(self) -> list[int | float | None]:
        """Numbers that describe the kind, without the device."""
        key = self.key
        return [
            *astuple(key.shape),
            key.window,
            key.chunk,
            DTYPES.index(self.dtype),
            self.scale,
            self.softcap,
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[Any], device: str) -> LayerKind:
        """Rebuild a kind from its `numbers`, on devices of this type."""
        *shape, window, chunk, dtype, scale, softcap = numbers
        return cls(
            PlanKey(AttentionShape(*shape), device, window, chunk), DTYPES[dtype], scale, softcap
        )

    def make_empty_operands(self, device: torch.device) -> Operands:
        """Return operands without rows."""
        return make_empty_operands(self.key.shape, self.dtype, device)


@dataclass(frozen=True, eq=False)
class CallPart:
    """A rank's part in a call of attention that stages make together.

    Attributes:
        number: number of the call in its tick, from 0; nano-batches have the same.
        name: description of the call, the same on all ranks.
        kind: kind of the layers, and the nano-batch.
        stage_call: number of the call in this rank's own micro-batch, in the order of its forward;
            None if the rank only serves.
        route: route of this rank.
        window: window of the plan.
    """

    number: int
    name: str
    kind: LayerKind
    stage_call: int | None
    route: Route
    window: int | None


class OwnCall(NamedTuple):
    """Identifier of a call of a micro-batch: its number in its stage, from 0, and its nano-batch, 0
    for all of it.
    """

    number: int
    nano: int


def select_own_calls(parts: Iterable[CallPart]) -> Iterator[tuple[OwnCall, CallPart]]:
    """Yield the parts that are calls of this rank's own micro-batch."""
    return (
        (OwnCall(part.stage_call, part.kind.key.nano), part)
        for part in parts
        if part.stage_call is not None
    )


class TickCalls:
    """The calls of a tick, in the order in which this rank reaches them: layers in forward order,
    or reversed in backward.

    `serve` takes part in a call, or in calls of two nano-batches in turns, without rows of this
    rank's own; `doing` describes this rank's work, for errors.
    """

    def __init__(
        self, parts: Sequence[CallPart], serve: Callable[[Sequence[CallPart]], None], doing: str
    ) -> None:
        self._parts, self._serve, self._doing, self._next = parts, serve, doing, 0

    def serve_until(self, number: int, nano: int) -> CallPart:
        """Serve until this call of this rank's own micro-batch, or nano-batch, is next, and return
        its part.
        """
        part = self._serve_others()
        if part is None or (part.stage_call, part.kind.key.nano) != (number, nano):
            raise DistCADesyncError(
                f"{self._doing} came to its attention call {number} where it has none:"
                f" {_SAME_LAYERS}."
            )
        self._next += 1
        return part

    def finish(self) -> None:
        """Serve in the remaining calls, none of which may be of this rank's own micro-batch."""
        part = self._serve_others()
        if part is not None:
            raise DistCADesyncError(
                f"{self._doing} never came to its attention call {part.stage_call}: {_SAME_LAYERS}."
            )

    def _serve_others(self) -> CallPart | None:
        """Serve up to the next call of this rank's own micro-batch, and return its part; None if
        there is none.
        """
        while self._next < len(self._parts):
            part = self._parts[self._next]
            if part.stage_call is not None:
                return part
            together = [
                other for other in self._parts[self._next :][:2] if other.number == part.number
            ]
            self._next += len(together)
            if exchanged := [other for other in together if other.route.exchanges]:
                self._serve(exchanged)
        return None


_SAME_LAYERS = (
    "every micro-batch must run the same layers, forward and backward, as the first step found them"
)


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way through this rank's stage.

    Attributes:
        name: for errors.
        documents: documents of this rank.
        layouts: for each part of this micro-batch, its documents on all copies of the model, by
            rank.
        forward, backward: the calls of its tick; backward once that has begun.
        parts: this rank's part in each of its calls in forward, by number and nano-batch.
        moved: the calls in which anything is moved, forward or backward.
        outputs: stored outputs of each nano-batch, or of nano-batch 0, for activation
            checkpointing; empty if no backward follows.
        numbers: number of the call of each module that has called attention, by the module's id and
            nano-batch.
    """

    name: str
    documents: Documents
    layouts: Mapping[MicroBatchPart, Layout]
    forward: TickCalls
    parts: Mapping[OwnCall, CallPart]
    moved: Set[OwnCall]
    outputs: Mapping[int, OutputStore]
    backward: TickCalls | None = None
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def identify_call(self, module: torch.nn.Module, nano: int, *, again: bool) -> OwnCall:
        """Identify the call of a module, in its forward or `again` in a recompute."""
        name, known = type(module).__name__, (id(module), nano) in self.numbers
        if again and not known:
            raise UnsupportedError(
                f"{name} computes attention in backward that it did not in forward."
            )
        if known and not again:
            raise UnsupportedError(
                f"{name} computes attention twice in a forward, which stages of a pipeline cannot."
            )
        before = sum(other == nano for _, other in self.numbers)
        return OwnCall(self.numbers.setdefault((id(module), nano), before), nano)

    def backward_part(self, call: OwnCall) -> CallPart:
        """Return this rank's part in the backward of one of its calls, which begins now."""
        if self.backward is None:
            raise DistCADesyncError(
                f"the backward of {self.name} ran outside its schedule: let `Schedule.step` run it."
            )
        return self.backward.serve_until(*call)


class LayerKindRecorder(WorkPlanner):
    """Records the kinds of a stage's calls of attention, in their order, in a forward without other
    ranks.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.kinds = list[LayerKind]()

    def uses_nano_batches(self, handle: AttentionHandle, training: bool) -> bool:
        """Return False: these layers run whole. See `WorkPlanner.uses_nano_batches`."""
        return False

    def plan_work(
        self,
        handle: AttentionHandle,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerWork:
        """See `WorkPlanner.plan_work`."""
        handle.is_local = True
        work = super().plan_work(handle, arguments, query, key, training=False)
        handle.layer_work[key] = replace(work, stage_attention=partial(self._attend, work, key))
        return handle.layer_work[key]

    def _attend(
        self, work: LayerWork, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: Scores
    ) -> torch.Tensor:
        self.kinds.append(LayerKind.of(key, inputs, scores))
        return self.session.compute_attention(
            work, self.session.make_server(work, inputs.q_THD, key.shape, scores), module, inputs
        )


class StageAttention(WorkPlanner):
    """Plans and computes a stage's attention while a schedule runs, and serves other stages.

    Attributes:
        group: the ranks of all stages.
        micro_batch: the micro-batch whose forward runs.
        nano_batches: whether the layers of this step run as two nano-batches.
    """

    def __init__(self, session: Session, group: AttentionGroup, device: torch.device) -> None:
        super().__init__(session)
        self.group, self.device = group, device
        self.micro_batch: MicroBatch | None = None
        self.nano_batches = False

    def uses_nano_batches(self, handle: AttentionHandle, training: bool) -> bool:
        """See `WorkPlanner.uses_nano_batches`."""
        if self.nano_batches and self.micro_batch is not None:
            handle.documents = self.micro_batch.documents.cut_into_chunks(handle.mask.chunk)
        return self.nano_batches

    def plan_work(
        self,
        handle: AttentionHandle,
        arguments: Mapping[str, Any],
        query: torch.Tensor,
        key: PlanKey,
        *,
        training: bool,
    ) -> LayerWork:
        """See `WorkPlanner.plan_work`; calls get their routes when they are made."""
        micro_batch = self.micro_batch
        if micro_batch is None:
            raise DistCADesyncError(
                "a stage of a pipeline ran a forward outside its schedule: let `Schedule.step`"
                " run it."
            )
        if not handle.nano:
            handle.documents = micro_batch.documents.cut_into_chunks(handle.mask.chunk)
        handle.check_documents(micro_batch.layouts[MicroBatchPart(key.chunk, key.nano)], key.window)
        kept = None if handle.documents is None else handle.documents.token_indices
        keep = None if kept is None else to_device(torch.from_numpy(kept), query.device)
        attend = partial(self._attend, micro_batch, key)
        work = LayerWork(
            self.group,
            _NO_ROUTE,
            keep,
            None,
            self.session.meter,
            key.nano,
            name=micro_batch.name,
            stage_attention=attend,
        )
        handle.layer_work[key] = work
        return handle.layer_work[key]

    def _attend(
        self,
        micro_batch: MicroBatch,
        key: PlanKey,
        module: torch.nn.Module,
        inputs: Inputs,
        scores: Scores,
    ) -> torch.Tensor:
        """Make a call of a micro-batch, in its forward or in a recompute."""
        self.group.raise_pending()
        again, kind = in_backward(), LayerKind.of(key, inputs, scores)
        which = micro_batch.identify_call(module, key.nano, again=again)
        if not again:
            micro_batch.forward.serve_until(*which)
        expected = micro_batch.parts[which].kind
        if kind != expected:
            raise DistCADesyncError(
                f"{micro_batch.name} has {kind} where the first step found {expected}: layers must"
                " stay as they are."
            )
        # Force a backward even if nothing before the layer is trained, because other stages expect
        # its rows.
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in inputs[:3]):
            inputs = inputs._replace(q_THD=inputs.q_THD.detach().requires_grad_())
        stored = micro_batch.outputs[key.nano].of(module, inputs) if micro_batch.outputs else None
        call = StageCall(self, micro_batch, which, stored)
        if again and call.recomputed_outputs is None:
            raise UnsupportedError(
                f"{type(module).__name__} computes attention in backward whose outputs were not"
                " kept."
            )
        return core_attention(inputs, call)

    def server(self, part: CallPart) -> AttentionServer:
        """Make the server that runs the tasks of a call."""
        shape, scores = part.kind.key.shape, Scores(part.kind.scale, part.window, part.kind.softcap)
        operands = part.kind.make_empty_operands(self.device)
        kernel = self.session.choose_kernel(operands.q_THD, shape, scores)
        reporting = partial(self.group.reporting, f"computing {part.name}")
        meter, trace = self.session.meter, self.session.trace
        return AttentionServer(
            kernel,
            scores,
            meter if trace is None else trace.meter(meter, part.kind.key.nano, part.number + 1),
            reporting,
        )

    def serve(self, parts: Sequence[CallPart], *, backward: bool) -> None:
        """Take part in a call, or in calls of two nano-batches in turns, without rows of this
        rank's own.
        """
        with torch.no_grad():
            begun = [self._begin_serving(part, backward=backward) for part in parts]
            for call in begun:
                call.serve()
            for call in begun:
                call.finish(Grads if backward else Outputs)

    def _begin_serving(self, part: CallPart, *, backward: bool) -> Call:
        """Launch the dispatch of a call."""
        exchanges = 0 if backward else part.route.forward_exchanges
        call = Call(part.route, self.group.at(part.name, exchanges), self.server(part))
        call.backward = backward
        call.begin_without_rows(part.kind.make_empty_operands(self.device))
        return call


# Of work whose calls have their routes from elsewhere. They may exchange, so that there is
# something to hide.
_NO_ROUTE = Route(TaskBatch((), (), (), ()), (), exchanges=True)


class StageCall(Call):
    """A call with rows of this rank's own."""

    def __init__(
        self,
        attention: StageAttention,
        micro_batch: MicroBatch,
        which: OwnCall,
        stored: LayerOutputs | None,
    ) -> None:
        part = micro_batch.parts[which]
        group = attention.group.at(part.name, part.route.forward_exchanges)
        super().__init__(part.route, group, attention.server(part), stored)
        self._attention, self._micro_batch, self._which = attention, micro_batch, which

    @property
    def exchanges(self) -> bool:
        """True if any rank moves anything, forward or backward; always True for nano-batches.

        So nano-batches take turns in the same places on all ranks, and launch their exchanges in
        one order.
        """
        return bool(self._which.nano) or self._which in self._micro_batch.moved

    def begin_backward(self) -> None:
        """Switch to the plan of the tick in which the backward runs."""
        super().begin_backward()
        part = self._micro_batch.backward_part(self._which)
        self.route, self.server = part.route, self._attention.server(part)
        self.group = self._attention.group.at(part.name, 0)
