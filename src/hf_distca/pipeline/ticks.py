"""Ticks of a step: the micro-batch of each stage, the attention calls that stages make together,
and the plans of these calls.

A *tick* is a forward or a backward of one micro-batch on every stage that has a micro-batch. In a
tick, all stages run a forward or all run a backward, so that one plan covers their attention.
A round is a forward tick and then a backward tick. In round i, stage s of p runs the forward of
micro-batch i - s, and the backward of micro-batch i - 2 (p - 1) + s. A step has as many ticks as in
1F1B. Stage s holds the activations of at most 2 (p - s) - 1 micro-batches, instead of p - s in
1F1B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.config import DistCAConfig
from hf_distca.pipeline.tick_calls import CallPart, LayerKind, MicroBatchPart, OwnCall
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout, Segment
from hf_distca.schedule.plan import Plan

Running = tuple[int | None, ...]  # micro-batch of each stage, or None


class Tick(NamedTuple):
    """A forward or a backward of one micro-batch on each stage that has a micro-batch.

    Attributes:
        number: number of the tick in its step, from 0.
        backward: whether it is a backward tick.
        micro_batches: micro-batch of each stage, None for stages without one.
    """

    number: int
    backward: bool
    micro_batches: Running

    def __str__(self) -> str:
        running = [
            f"micro-batch {number} on stage {stage}"
            for stage, number in enumerate(self.micro_batches)
            if number is not None
        ]
        return (
            f"{'backward' if self.backward else 'forward'} tick {self.number}"
            f" ({', '.join(running)})"
        )


def order_ticks(stages: int, micro_batches: int, *, backward: bool = True) -> list[Tick]:
    """Return the ticks of a step in order. Without `backward`, return only its forward ticks."""
    order: list[Tick] = []
    for round_ in range(micro_batches + 2 * (stages - 1)):
        forward_numbers = [round_ - stage for stage in range(stages)]
        backward_numbers = [round_ - 2 * (stages - 1) + stage for stage in range(stages)]
        for direction, numbers in ((False, forward_numbers), (True, backward_numbers)):
            running = tuple(number if 0 <= number < micro_batches else None for number in numbers)
            if (backward or not direction) and running.count(None) < stages:
                order.append(Tick(len(order), direction, running))
    return order


@dataclass(frozen=True)
class JointCall:
    """A call of attention that stages make together.

    Attributes:
        kind: kind of the call on all of these stages.
        calls: for each stage, the index of the call in the stage's own forward; None for stages
            that do not make this call.
    """

    kind: LayerKind
    calls: tuple[int | None, ...]


def merge_calls(stages: Sequence[Sequence[LayerKind]]) -> list[JointCall]:
    """Merge the calls of all stages into one order of joint calls, in which as many stages as
    possible make each call together.

    Only calls of one kind can be made together. Each joint call takes the kind that is next on the
    most stages. If all stages have the same kinds of layers in the same order, this gives the
    fewest joint calls, even if stages have different numbers of layers. Otherwise, fewer might be
    possible.
    """
    done = [0] * len(stages)
    calls = list[JointCall]()
    while any(count < len(kinds) for count, kinds in zip(done, stages, strict=True)):
        following = [
            kinds[count] if count < len(kinds) else None
            for count, kinds in zip(done, stages, strict=True)
        ]
        kind = max(filter(None, following), key=following.count)
        numbers = [
            count if candidate == kind else None
            for count, candidate in zip(done, following, strict=True)
        ]
        calls.append(JointCall(kind, tuple(numbers)))
        done = [
            count + (candidate == kind) for count, candidate in zip(done, following, strict=True)
        ]
    return calls


@dataclass(frozen=True)
class Pipeline:
    """The stage of each rank, and the calls of attention that stages make together.

    Attributes:
        stages: stage of each rank of the attention group.
        copies: for each rank, the index of its copy of the model. The ranks of a copy have the same
            micro-batches.
        rank: this rank.
        calls: calls of a forward, in their order.
        dtypes: for each stage, dtype of the hidden states that it hands on, and of their gradients.
    """

    stages: tuple[int, ...]
    copies: tuple[int, ...]
    rank: int
    calls: tuple[JointCall, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def keys(self) -> list[PlanKey]:
        """Keys of all plans that a tick may need."""
        return list(dict.fromkeys(call.kind.key for call in self.calls))


class _PlanInputs(NamedTuple):
    """Everything that the plan of a joint call depends on: the micro-batch of each stage that makes
    the call, and the key of the plan.
    """

    running: Running
    key: PlanKey


@dataclass(frozen=True, eq=False)
class TickPlans:
    """Plans and this rank's routes for the ticks of a step.

    Attributes:
        order: the ticks.
        pipeline: the stage of each rank.
        layouts: layout of each part of each micro-batch. In a layout, each copy of the model counts
            as one rank.
        costs: cost model of each kind of layer, by its plan key for whole micro-batches.
        config: the settings. With `ping_pong`, layers run as two nano-batches, each with its own
            plan.
        name: name of the step, for errors.
    """

    order: Sequence[Tick]
    pipeline: Pipeline
    layouts: Mapping[MicroBatchPart, Layout]
    costs: dict[PlanKey, CostModel]
    config: DistCAConfig
    name: str
    _layouts: dict[tuple[MicroBatchPart | None, ...], Layout] = field(default_factory=dict)
    _plans: dict[_PlanInputs, Plan] = field(default_factory=dict)
    _routes: dict[_PlanInputs, Route] = field(default_factory=dict)

    def make(self) -> int:
        """Make the plans of all ticks in order. Return a 60-bit digest of all plans."""
        digest = hashlib.sha256()
        for tick in self.order:
            for *_, inputs in self._iterate_calls(tick):
                digest.update(self._plan(inputs).digest.encode())
        return int(digest.hexdigest()[:15], 16)

    def list_parts(self, tick: Tick) -> list[CallPart]:
        """Return this rank's part in each call of a tick, in the order of the calls."""
        parts = []
        for number, call, inputs in self._iterate_calls(tick):
            nano = inputs.key.nano
            stage = self.pipeline.stages[self.pipeline.rank]
            own_number = None if inputs.running[stage] is None else call.calls[stage]
            name = (
                f"attention call {number}{f', nano-batch {nano},' if nano else ''} of {tick} of"
                f" {self.name}"
            )
            parts.append(
                CallPart(
                    number,
                    name,
                    call.kind._replace(key=inputs.key),
                    None if own_number is None else OwnCall(own_number, nano),
                    self._route(inputs),
                    self._plan(inputs).window,
                )
            )
        return parts

    def _iterate_calls(self, tick: Tick) -> Iterator[tuple[int, JointCall, _PlanInputs]]:
        """Yield the joint calls of a tick in order, each with its index in a forward and the inputs
        of its plan. Skip calls in which no stage has a micro-batch.

        In backward, calls and nano-batches come in reverse order, because autograd reverses them.
        """
        nanos = (1, 2) if self.config.ping_pong else (0,)
        calls = product(enumerate(self.pipeline.calls), nanos)
        for (number, call), nano in reversed(list(calls)) if tick.backward else calls:
            running = tuple(
                None if stage_call is None else micro_batch
                for micro_batch, stage_call in zip(tick.micro_batches, call.calls, strict=True)
            )
            if running.count(None) < len(running):
                yield number, call, _PlanInputs(running, call.kind.key._replace(nano=nano))

    def _plan(self, inputs: _PlanInputs) -> Plan:
        """Return the plan of a call. Calls with the same inputs share one plan."""
        if inputs not in self._plans:
            cost = self.costs[inputs.key._replace(nano=0)]
            parts = tuple(
                None
                if number is None
                else MicroBatchPart(number, inputs.key.chunk, inputs.key.nano)
                for number in inputs.running
            )
            self._plans[inputs] = balance(self._build_layout(parts), cost, self.config)
        return self._plans[inputs]

    def _build_layout(self, parts: tuple[MicroBatchPart | None, ...]) -> Layout:
        """Build the layout of a call on all ranks. `parts` has each stage's part of a micro-batch.

        Each micro-batch is on at most one stage.
        """
        if parts not in self._layouts:
            ranks = list[list[tuple[int, int, int]]]()
            context = list[int]()
            for stage, copy in zip(self.pipeline.stages, self.pipeline.copies, strict=True):
                part = parts[stage]
                segments = list[Segment]()
                context.append(0)
                if part is not None:
                    segments = self.layouts[part].list_segments(copy)
                    context[-1] = int(self.layouts[part].context[copy])
                ranks.append(
                    [
                        (document * len(parts) + stage, start, length)
                        for document, start, length in segments
                    ]
                )
            self._layouts[parts] = Layout.from_segments(ranks, context)
        return self._layouts[parts]

    def _route(self, inputs: _PlanInputs) -> Route:
        """Return this rank's route of a call. Calls with the same inputs share one route."""
        if inputs not in self._routes:
            self._routes[inputs] = Route.build(self._plan(inputs), self.pipeline.rank)
        return self._routes[inputs]
