"""A stage's part in the attention of a tick: with the rows of its own micro-batch, or as a server only.

A call has a plan for its forward and another one for its backward, since other micro-batches are in the same tick then. The rows
travel in backward anyway, so nothing is lost by it: when its backward begins, a call exchanges its route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import in_backward
from hf_distca.errors import DistCADesyncError, UnsupportedError
from hf_distca.integration.handle import AttentionHandle, Work
from hf_distca.integration.session import Session
from hf_distca.kernels.base import Grads, Operands, Outputs, Saved, Scores, TaskBatch
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.call import AttentionServer, Call, Inputs, in_groups
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs, OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout

__all__ = ["DTYPES", "WHY_NOT_OTHERS", "CallFactory", "CallPart", "LayerKind", "MicroBatch", "StageAttention", "TickCalls"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16)  # ranks tell each other the index
WHY_NOT_OTHERS = (
    "Pipeline stages run in float64, float32 or bfloat16. float16 needs a GradScaler, which would skip the optimizer's step on "
    "the stages whose own gradients overflow and not on the others: use bfloat16."
)


class LayerKind(NamedTuple):
    """All that a server must know of a layer. Calls of one kind can be made together.

    Attributes:
        key: which plan its tasks are from.
        dtype: of q, k and v.
        scale, softcap: as in `Scores`.
    """

    key: PlanKey
    dtype: torch.dtype
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, key: PlanKey, inputs: Inputs, scores: Scores) -> LayerKind:
        """The kind of a call.

        Raises:
            UnsupportedError: if stages cannot run in its dtype.
        """
        dtype = inputs.q_THD.dtype
        if dtype not in DTYPES:
            raise UnsupportedError(f"attention of a pipeline stage is computed in {dtype}. {WHY_NOT_OTHERS}")
        return cls(key, dtype, scores.scale, scores.softcap)

    def __str__(self) -> str:
        shape, window = self.key.shape, self.key.window
        seen = "all keys" if window is None else f"the last {window} keys"
        return f"{shape.query_heads} heads of width {shape.head_dim} in {self.dtype} that see {seen} (scale {self.scale:g})"

    def row(self) -> list[int]:
        """The kind as int64 numbers."""
        shape, key = self.key.shape, self.key
        heads = [shape.query_heads, shape.key_value_heads, shape.head_dim, shape.value_head_dim, shape.element_bytes]
        floats = np.array([self.scale, self.softcap or 0.0]).view(np.int64).tolist()
        return [*heads, key.window or 0, key.chunk or 0, DTYPES.index(self.dtype), *floats]

    @classmethod
    def from_row(cls, row: Sequence[int], device: str) -> LayerKind:
        """The kind that numbers stand for, on devices of this type."""
        *heads, window, chunk, dtype, scale_bits, softcap_bits = (int(number) for number in row)
        scale, softcap = np.array([scale_bits, softcap_bits]).view(np.float64).tolist()
        return cls(PlanKey(AttentionShape(*heads), device, window or None, chunk or None), DTYPES[dtype], scale, softcap or None)

    def no_rows(self, device: torch.device) -> Operands:
        """Operands without rows."""
        shape = self.key.shape
        queries, keys = shape.query_heads, shape.key_value_heads
        widths = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.value_head_dim)
        return Operands(*(torch.empty((0, *width), dtype=self.dtype, device=device) for width in widths))


@dataclass(frozen=True, eq=False)
class CallPart:
    """One rank's part in a call of attention that stages make together.

    Attributes:
        number: which call of its tick it is, from 0.
        name: which call it is, in words that are the same on all ranks.
        kind: of the layers.
        own: which of its own calls it is to this rank's stage, in the order of its forward; None if it only serves.
        route: this rank's.
        window: of the plan.
    """

    number: int
    name: str
    kind: LayerKind
    own: int | None
    route: Route
    window: int | None


class TickCalls:
    """The calls of a tick in their order, as this rank comes to them.

    Args:
        parts: those of forward in the order of layers, those of backward the other way round.
        serve: takes part in a call without rows of this rank's own.
        doing: what this rank runs, for errors.
    """

    def __init__(self, parts: Sequence[CallPart], serve: Callable[[CallPart], None], doing: str) -> None:
        self._parts, self._serve, self._doing, self._next = parts, serve, doing, 0

    def reach(self, own: int) -> CallPart:
        """Serve until this rank's own call of that number is next.

        Raises:
            DistCADesyncError: if it is not: the stage runs other layers than it did before.
        """
        part = self._serve_until(own)
        if part is None:
            raise DistCADesyncError(f"{self._doing} came to its attention call {own} where it has none: {_SAME_LAYERS}.")
        return part

    def finish(self) -> None:
        """Serve in the calls that are left.

        Raises:
            DistCADesyncError: if one of them is this rank's own.
        """
        part = self._serve_until(None)
        if part is not None:
            raise DistCADesyncError(f"{self._doing} never came to its attention call {part.own}: {_SAME_LAYERS}.")

    def _serve_until(self, own: int | None) -> CallPart | None:
        while self._next < len(self._parts):
            part = self._parts[self._next]
            if part.own is not None and part.own != own:
                return None if own is not None else part
            self._next += 1
            if part.own is not None:
                return part
            if part.route.exchanges:
                self._serve(part)
        return None


_SAME_LAYERS = "every micro-batch must run the same layers, forward and backward, as the first step found them"


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way through this rank's stage.

    Attributes:
        name: for errors.
        documents: of this rank.
        layout: documents of this micro-batch on all copies of the model, by rank.
        forward, backward: its calls of attention among those of the tick; backward once that has begun.
        parts: this rank's own calls in forward, by number.
        exchanges: of each, whether anything is moved in its forward or backward.
        outputs: for activation checkpointing; None where no backward follows.
        numbers: of the modules that have called attention, which call it was.
    """

    name: str
    documents: Documents
    layout: Layout
    forward: TickCalls
    parts: Mapping[int, CallPart]
    exchanges: Mapping[int, bool]
    outputs: OutputStore | None
    backward: TickCalls | None = None
    numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, module: torch.nn.Module, *, again: bool) -> int:
        """Which call of the micro-batch a module makes, from 0, in its forward or `again` in a recompute.

        Raises:
            UnsupportedError: if the module computes attention twice in a forward, or in a recompute alone.
        """
        if again and id(module) not in self.numbers:
            raise UnsupportedError(f"{type(module).__name__} computes attention in backward that it did not in forward.")
        if not again and id(module) in self.numbers:
            name = type(module).__name__
            raise UnsupportedError(f"{name} computes attention twice in a forward, which stages of a pipeline cannot.")
        return self.numbers.setdefault(id(module), len(self.numbers))

    def backward_part(self, number: int) -> CallPart:
        """This rank's part in the backward of one of its calls, which begins now.

        Raises:
            DistCADesyncError: if the schedule does not run a backward of this micro-batch.
        """
        if self.backward is None:
            raise DistCADesyncError(f"the backward of {self.name} ran outside its schedule: let `Schedule.step` run it.")
        return self.backward.reach(number)


class CallFactory:
    """Gives calls what they need besides their rows, and takes part in those of other stages.

    Args:
        session: of the process.
        group: the ranks of all stages.
        device: of this rank.
    """

    def __init__(self, session: Session, group: AttentionGroup, device: torch.device) -> None:
        self.session, self.group, self.device = session, group, device

    def group_of(self, part: CallPart, *, backward: bool) -> AttentionGroup:
        """The group, with a channel for a call."""
        data = self.group.data
        if data is None:
            return self.group
        return replace(self.group, data=data.at(part.name, 0 if backward else 2 * len(part.route.waves)))

    def server(self, part: CallPart) -> AttentionServer:
        """What runs the tasks of a call."""
        shape, scores = part.kind.key.shape, Scores(part.kind.scale, part.window, part.kind.softcap)
        widths = shape.head_dim, shape.value_head_dim
        kernel = self.session.kernel(part.kind.no_rows(self.device).q_THD, widths, scores, shape.ratio)
        reporting = partial(self.group.reporting, f"computing {part.name}")
        meter, trace = self.session.meter, self.session.trace
        return AttentionServer(kernel, scores, meter if trace is None else trace.meter(meter, 0, part.number + 1), reporting)

    def serve(self, part: CallPart, *, backward: bool) -> None:
        """Take part in a call without rows of this rank's own."""
        call = Call(part.route, self.group_of(part, backward=backward), self.server(part))
        call.backward = backward
        # Rows of head groups travel if documents are split by heads.
        q_THD, k_TKD, v_TKV = no_rows = in_groups(part.kind.no_rows(self.device), part.route.groups)
        # Kernels put log-sum-exps out in float32 at least.
        lse_TH = q_THD.new_empty((0, q_THD.shape[1]), dtype=torch.promote_types(q_THD.dtype, torch.float32))
        outputs = Outputs(q_THD.new_empty((0, q_THD.shape[1], v_TKV.shape[2])), lse_TH)
        home: Operands | Saved = no_rows
        results: Outputs | Grads = outputs
        if backward:
            home = Saved(torch.empty_like(outputs.o_THV), q_THD, *outputs, k_TKD, v_TKV)
            results = Grads(*(torch.empty_like(tensor) for tensor in no_rows))
        with torch.no_grad():
            for wave in part.route.waves:
                dispatch = call.send_queries_and_keys(wave, home)
                results = call.collect(wave, *call.run_arrived(wave, home, results, dispatch))


class StageCall(Call):
    """A call with rows of this rank's own.

    Args:
        factory: of this rank.
        part: this rank's, in the tick of the forward.
        stored: where outputs are kept for a recompute, as for `Call`.
        exchanges: whether any rank moves anything in its forward or backward.
        backward_part: gives this rank's part in the tick of the backward, once that begins.
    """

    def __init__(
        self,
        factory: CallFactory,
        part: CallPart,
        stored: LayerOutputs | None,
        *,
        exchanges: bool,
        backward_part: Callable[[], CallPart],
    ) -> None:
        super().__init__(part.route, factory.group_of(part, backward=False), factory.server(part), stored)
        self._factory, self._exchanges, self._backward_part = factory, exchanges, backward_part

    @property
    def exchanges(self) -> bool:
        """Whether any rank moves anything, forward or backward."""
        return self._exchanges

    def begin_backward(self) -> None:
        """Go over to the plan of the tick in which the backward runs."""
        super().begin_backward()
        part = self._backward_part()
        self.route, self.server = part.route, self._factory.server(part)
        self.group = self._factory.group_of(part, backward=True)


class StageAttention:
    """Plans the attention of a stage's forwards in the session's place, while a schedule runs them.

    Before the first step it learns which kinds of attention the stage has, from a forward that no other rank takes part in. Then
    it gives every call of a micro-batch its part in those of the tick.

    Attributes:
        factory: of this rank.
        learned: the kinds of the stage's calls, in their order, while it learns; None afterwards.
        micro_batch: the one whose forward runs.
    """

    def __init__(self, factory: CallFactory) -> None:
        self.factory, self.session = factory, factory.session
        self.learned: list[LayerKind] | None = []
        self.micro_batch: MicroBatch | None = None

    def work_for(self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey) -> Work:
        """Plan one kind of layer of a micro-batch, as `Session.work_for`."""
        if self.learned is not None:
            work = self._work_alone(handle, arguments, query, key)
        else:
            work = self._work_together(handle, query, key)
        handle.work[key] = work
        return work

    def _work_alone(self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey) -> Work:
        handle.alone, self.session.conductor = True, None
        try:
            work = self.session.work_for(handle, arguments, query, key, training=False)
        finally:
            self.session.conductor = self
        return replace(work, attend=partial(self._learn, work, key))

    def _learn(self, work: Work, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: Scores) -> torch.Tensor:
        if self.learned is not None:
            self.learned.append(LayerKind.of(key, inputs, scores))
        return self.session.attend(work, module, inputs, scores)

    def _work_together(self, handle: AttentionHandle, query: torch.Tensor, key: PlanKey) -> Work:
        micro_batch = self.micro_batch
        if micro_batch is None:
            raise DistCADesyncError("a stage of a pipeline ran a forward outside its schedule: let `Schedule.step` run it.")
        handle.documents = micro_batch.documents.in_chunks(handle.mask.chunk)
        handle.check(micro_batch.layout)
        keep = None if handle.documents.keep is None else to_device(torch.from_numpy(handle.documents.keep), query.device)
        attend = partial(self._attend, micro_batch, key)
        return Work(self.factory.group, _NO_ROUTE, keep, None, self.session.meter, name=micro_batch.name, attend=attend)

    def _attend(
        self, micro_batch: MicroBatch, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: Scores
    ) -> torch.Tensor:
        """One call of a micro-batch, in its forward or in a recompute."""
        self.factory.group.raise_pending()
        again, kind = in_backward(), LayerKind.of(key, inputs, scores)
        number = micro_batch.number_of(module, again=again)
        part = micro_batch.parts[number] if again else micro_batch.forward.reach(number)
        if kind != part.kind:
            raise DistCADesyncError(
                f"{micro_batch.name} has {kind} where the first step found {part.kind}: layers must stay as they are."
            )
        inputs = _with_gradient(inputs)
        stored = None if micro_batch.outputs is None else micro_batch.outputs.of(module, inputs)
        backward_part = partial(micro_batch.backward_part, number)
        call = StageCall(self.factory, part, stored, exchanges=micro_batch.exchanges[number], backward_part=backward_part)
        if again and call.recalled is None:
            raise UnsupportedError(f"{type(module).__name__} computes attention in backward whose outputs were not kept.")
        return core_attention(inputs, call)


# Of work whose calls have their routes from elsewhere.
_NO_ROUTE = Route(TaskBatch((), (), (), ()), (), exchanges=False)


def _with_gradient(inputs: Inputs) -> Inputs:
    """Force a backward even if nothing before the layer is trained, because other stages expect its rows."""
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in inputs[:3]):
        return inputs
    return inputs._replace(q_THD=inputs.q_THD.detach().requires_grad_())
