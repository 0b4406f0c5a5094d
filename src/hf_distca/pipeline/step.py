"""One step of a pipeline: its ticks, what travels between stages in them, and what this rank did in each."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from hf_distca.agreement.documents import Documents
from hf_distca.errors import DistCAError
from hf_distca.pipeline.calls import Leg, Legs
from hf_distca.pipeline.conductor import MicroBatch
from hf_distca.pipeline.crew import Crew
from hf_distca.pipeline.pace import Before
from hf_distca.pipeline.plans import StepPlans
from hf_distca.pipeline.ticks import Tick
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.watch import patience

if TYPE_CHECKING:
    from hf_distca.pipeline.schedule import Schedule

__all__ = ["Mail", "Step", "TickFigures"]

_Ops = Callable[[int], list[dist.P2POp]]  # of a micro-batch


class TickFigures(NamedTuple):
    """What one rank did in a tick.

    Attributes:
        tick: which one; says which stages had which micro-batches.
        seconds: how long it took.
        busy_seconds: of the processor, in all threads of this process.
        attention_seconds: in attention kernels, for its own micro-batch and for others. On CUDA, of those that have finished.
        sent_bytes: of rows sent to other ranks for their attention.
    """

    tick: Tick
    seconds: float
    busy_seconds: float
    attention_seconds: float
    sent_bytes: int


class Step:
    """The micro-batches of a step on this rank's stage.

    Args:
        schedule: that runs them.
        crew: the ranks of all stages.
        plans: of all ticks.
        order: the ticks.
        documents: of each micro-batch on this rank.
        forward: runs the forward of a micro-batch, and its loss.
        backward: runs the backward of a micro-batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        crew: Crew,
        plans: StepPlans,
        order: Sequence[Tick],
        documents: Sequence[Documents],
        forward: Callable[[int], None],
        backward: Callable[[int], None],
    ) -> None:
        self._schedule, self._crew, self._plans, self._order, self._documents = schedule, crew, plans, order, documents
        self._run = {False: forward, True: backward}
        self._back = {at: tick for tick in order if tick.backward and (at := tick.micro_batches[self._stage]) is not None}
        self._live: dict[int, MicroBatch] = {}
        self._arriving: dict[tuple[bool, int], Mail] = {}
        self._last = Mail([])

    @property
    def _stage(self) -> int:
        return self._crew.pipeline.stage

    def run(self) -> list[TickFigures]:
        """Run all ticks."""
        figures = []
        self._crew.seat.stopwatch.step()
        for tick in self._order:
            before = self._clocks()
            end = Before(tick.backward, len(self._crew.pipeline.turns))
            with (
                self._crew.group.reporting(f"running {self._named(tick)}"),
                self._crew.seat.stopwatch.tick(end, tick.busy[self._stage]),
            ):
                self._tick(tick)
            took, busy, attention, sent = (after - earlier for after, earlier in zip(self._clocks(), before, strict=True))
            figures.append(TickFigures(tick, took, busy, attention, int(sent)))
        self._wait(self._last, f"sending to other stages at the end of {self._plans.name}")
        return figures

    def _clocks(self) -> tuple[float, float, float, int]:
        meter = self._crew.seat.session.meter
        return time.perf_counter(), time.process_time(), meter.seconds, meter.sent_bytes

    def _named(self, tick: Tick) -> str:
        return f"{tick} of {self._plans.name}, as stage {self._stage}"

    def _tick(self, tick: Tick) -> None:
        at, legs = tick.micro_batches[self._stage], self._plans.legs(tick)
        own = Legs(legs, partial(self._crew.seat.serve, backward=tick.backward), self._named(tick))
        if at is not None:
            if (tick.backward, at) in self._arriving:
                self._wait(self._arriving.pop((tick.backward, at)), f"waiting for what {self._named(tick)} begins with")
            if tick.backward:
                self._live[at].backward = own
            else:
                self._live[at] = self._crew.conductor.micro_batch = self._begin(at, tick, legs, own)
            try:
                self._run[tick.backward](at)
            except RuntimeError as error:
                if isinstance(error.__cause__, DistCAError):  # which torch has put into an error of its own
                    raise error.__cause__ from None
                raise
            finally:
                self._crew.conductor.micro_batch = None
            if tick.backward:
                del self._live[at]
        own.finish()
        self._travel(tick)

    def _begin(self, at: int, tick: Tick, legs: Sequence[Leg], own: Legs) -> MicroBatch:
        back = self._plans.legs(self._back[at]) if at in self._back else []
        moved = {leg.own for leg in (*legs, *back) if leg.route.exchanges}
        mine = {leg.own: leg for leg in legs if leg.own is not None}
        name = f"micro-batch {at} of {self._plans.name} on stage {self._stage}"
        outputs = OutputStore() if back else None
        held = tuple(at if stage == self._stage else None for stage in range(len(tick.micro_batches)))
        layout = self._plans.layout(held, None)
        return MicroBatch(name, self._documents[at], layout, own, mine, {number: number in moved for number in mine}, outputs)

    def _travel(self, tick: Tick) -> None:
        """Send what this stage made in a tick, and begin to receive what its neighbour made."""
        stage, way = self._schedule.stage, -1 if tick.backward else 1
        at, source = tick.micro_batches[self._stage], self._stage - way
        coming = tick.micro_batches[source] if 0 <= source < len(tick.micro_batches) else None
        back = tick.backward
        send: _Ops = stage.get_bwd_send_ops if back else stage.get_fwd_send_ops
        receive: _Ops = stage.get_bwd_recv_ops if back else stage.get_fwd_recv_ops
        ops = [*(send(at) if at is not None else []), *(receive(coming) if coming is not None else [])]
        self._wait(self._last, f"sending what was made before {self._named(tick)}")
        self._last = Mail(ops)
        if coming is not None:
            self._arriving[tick.backward, coming] = self._last

    def _wait(self, mail: Mail, doing: str) -> None:
        with self._crew.seat.stopwatch.mail():
            mail.wait(self._crew.group, doing)


class Mail:
    """Messages between neighbouring stages, which travel from now on."""

    def __init__(self, ops: Sequence[dist.P2POp]) -> None:
        self._ops = list(ops)  # what is sent must stay until it has left
        self._works = dist.batch_isend_irecv(self._ops) if ops else []

    def wait(self, group: AttentionGroup, doing: str) -> None:
        """Wait until all have arrived and left; over gloo no longer than the ranks of the group wait for each other.

        Raises:
            DistCADesyncError: if they do not in time.
        """
        try:
            self._wait(group.timeout_seconds - patience(group.timeout_seconds))
        except RuntimeError as error:
            raise error if group.watch is None else group.watch.give_up(doing, error) from error

    def _wait(self, seconds: float) -> None:
        bound = bool(self._ops) and self._ops[0].group.name() == "gloo"
        while self._works:
            work = self._works.pop(0)  # to be waited for once only
            if bound:
                work.wait(datetime.timedelta(seconds=seconds))
            else:
                work.wait()
        self._ops.clear()
