"""Attention of a stage's micro-batches: each call is made together with those of the other stages in the same tick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import in_backward
from hf_distca.errors import DistCADesyncError, UnsupportedError
from hf_distca.integration.handle import AttentionHandle, Work
from hf_distca.integration.session import Session
from hf_distca.kernels.base import Scores, TaskBatch
from hf_distca.kernels.varlen import to_device
from hf_distca.pipeline.calls import Leg, Legs, StageCall, serve, serve_backward
from hf_distca.pipeline.kinds import Kind
from hf_distca.pipeline.pace import Before, Stopwatch
from hf_distca.runtime.call import AttentionServer, Call, Inputs
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.runtime.trace import Tracer
from hf_distca.schedule.layout import Layout

__all__ = ["Conductor", "MicroBatch", "Seat"]


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way through this rank's stage.

    Attributes:
        name: for errors.
        documents: of this rank.
        layout: documents of this micro-batch on all copies of the model, by rank.
        forward, backward: its calls of attention among those of the tick; backward once that has begun.
        legs: this rank's own calls in forward, by number.
        exchanges: of each, whether anything is moved in its forward or backward.
        outputs: for activation checkpointing; None where no backward follows.
        numbers: of the modules that have called attention, which call it was.
    """

    name: str
    documents: Documents
    layout: Layout
    forward: Legs
    legs: Mapping[int, Leg]
    exchanges: Mapping[int, bool]
    outputs: OutputStore | None
    backward: Legs | None = None
    numbers: dict[int, int] = field(default_factory=dict)


class Seat:
    """This rank among those that share attention: gives calls what they need besides their rows.

    Args:
        session: of the process.
        group: the ranks of all stages.
        device: of this rank.

    Attributes:
        stopwatch: times what this rank does between calls.
    """

    def __init__(self, session: Session, group: AttentionGroup, device: torch.device) -> None:
        self.session, self.group, self.device = session, group, device
        self.stopwatch = Stopwatch(device, session.meter)

    def group_at(self, leg: Leg, *, backward: bool) -> AttentionGroup:
        """The group, with a channel for a call."""
        data = self.group.data
        if data is None:
            return self.group
        return replace(self.group, data=data.at(leg.place, 0 if backward else 2 * len(leg.route.waves)))

    def begin(self, leg: Leg, *, backward: bool) -> AttentionServer:
        """What runs the tasks of a call, which begins now."""
        return self.server(leg, self.stopwatch.call(leg.call, Before(backward, leg.turn)))

    def server(self, leg: Leg, meter: Meter | None = None) -> AttentionServer:
        """What runs the tasks of a call, and the meter that counts them."""
        scores, shape = leg.kind.scores(leg.window), leg.kind.key.shape
        widths = shape.head_dim, shape.value_head_dim
        kernel = self.session.kernel(leg.kind.nothing(self.device).q_THD, widths, scores, shape.ratio)
        tracer = Tracer(self.session.trace, 0, leg.call.number + 1, self.device)
        reporting = partial(self.group.reporting, f"computing {leg.place}")
        return AttentionServer(kernel, scores, meter or self.session.meter, tracer, reporting)

    def serve(self, leg: Leg, *, backward: bool) -> None:
        """Take part in a call without rows of this rank's own."""
        server = self.begin(leg, backward=backward)
        server.tracer.backward = backward
        call = Call(leg.route, self.group_at(leg, backward=backward), server)
        with torch.no_grad():
            (serve_backward if backward else serve)(call, leg.kind.nothing(self.device))


class Conductor:
    """Stands in the session's place while a schedule runs a stage.

    Before the first step it learns which kinds of attention the stage has, from a forward that no other rank takes part in. Then
    it gives every call of a micro-batch its place among those of the tick.

    Attributes:
        learned: the kinds of the stage's calls, in their order, while it learns; None afterwards.
        micro_batch: the one whose forward runs.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.learned: list[Kind] | None = []
        self.micro_batch: MicroBatch | None = None
        self.seat: Seat | None = None

    def work_for(self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey) -> Work:
        """Plan one kind of layer of a micro-batch, as `Session.work_for`."""
        if self.learned is not None:
            work = self._alone(handle, arguments, query, key)
        else:
            work = self._together(handle, query, key)
        handle.work[key] = work
        return work

    def _alone(self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey) -> Work:
        handle.alone, self.session.conductor = True, None
        try:
            work = self.session.work_for(handle, arguments, query, key, training=False)
        finally:
            self.session.conductor = self
        return replace(work, attend=partial(self._learn, work, key))

    def _learn(self, work: Work, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: Scores) -> torch.Tensor:
        if self.learned is not None:
            self.learned.append(Kind.of(key, inputs, scores))
        return self.session.attend(work, module, *inputs[:3], scores, inputs.sink_H, inputs.context)

    def _together(self, handle: AttentionHandle, query: torch.Tensor, key: PlanKey) -> Work:
        micro_batch, seat = self.micro_batch, self.seat
        if micro_batch is None or seat is None:
            raise DistCADesyncError("a stage of a pipeline ran a forward outside its schedule: let `Schedule.step` run it.")
        handle.documents = micro_batch.documents.in_chunks(handle.mask.chunk)
        handle.check(micro_batch.layout)
        keep = None if handle.documents.keep is None else to_device(torch.from_numpy(handle.documents.keep), query.device)
        attend = partial(_attend, seat, micro_batch, key)
        return Work(seat.group, _NOWHERE, keep, None, seat.session.meter, name=micro_batch.name, attend=attend)


# Of work whose calls have their routes from elsewhere.
_NOWHERE = Route(TaskBatch((), (), (), ()), (), exchanges=False)


def _attend(
    seat: Seat, micro_batch: MicroBatch, key: PlanKey, module: torch.nn.Module, inputs: Inputs, scores: Scores
) -> torch.Tensor:
    """One call of a micro-batch, in its forward or in a recompute."""
    seat.group.raise_pending()
    again = in_backward()
    number = micro_batch.numbers.get(id(module)) if again else _number(micro_batch, module)
    if number is None:
        raise UnsupportedError(f"{type(module).__name__} computes attention in backward that it did not in forward.")
    leg = micro_batch.legs[number] if again else micro_batch.forward.reach(number)
    if (kind := Kind.of(key, inputs, scores)) != leg.kind:
        raise DistCADesyncError(
            f"{micro_batch.name} has {kind} where the first step found {leg.kind}: layers must stay as they are."
        )
    inputs = _with_gradient(inputs)
    kept = None if micro_batch.outputs is None else micro_batch.outputs.of(module, inputs.tensors)
    call = StageCall(
        leg.route,
        seat.group_at(leg, backward=False),
        seat.server(leg) if again else seat.begin(leg, backward=False),
        kept,
        exchanges=micro_batch.exchanges[number],
        turn=partial(_turn, seat, micro_batch, number),
    )
    if again and call.recalled is None:
        raise UnsupportedError(f"{type(module).__name__} computes attention in backward whose outputs were not kept.")
    return core_attention(inputs, call)


def _turn(seat: Seat, micro_batch: MicroBatch, number: int) -> tuple[Route, AttentionGroup, AttentionServer]:
    """What a call goes on with when its backward begins."""
    if micro_batch.backward is None:
        raise DistCADesyncError(f"the backward of {micro_batch.name} ran outside its schedule: let `Schedule.step` run it.")
    leg = micro_batch.backward.reach(number)
    return leg.route, seat.group_at(leg, backward=True), seat.begin(leg, backward=True)


def _number(micro_batch: MicroBatch, module: torch.nn.Module) -> int:
    """Which call this is, in forward."""
    if id(module) in micro_batch.numbers:
        raise UnsupportedError(
            f"{type(module).__name__} computes attention twice in a forward, which stages of a pipeline cannot."
        )
    return micro_batch.numbers.setdefault(id(module), len(micro_batch.numbers))


def _with_gradient(inputs: Inputs) -> Inputs:
    """Inputs of which backward is called also where nothing before the layer is trained: other stages count on its rows."""
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in inputs[:3]):
        return inputs
    return inputs._replace(q_THD=inputs.q_THD.detach().requires_grad_())
