"""Ticks of a step: the micro-batch of each stage, the calls of attention that stages make together,
and the plans of these calls.

A *tick* is a forward or a backward of one micro-batch on every stage that has one. All stages are
in a forward tick, or all in a backward tick, so that one plan holds the attention of all of them.
In round i, stage s of p runs forward micro-batch i - s and then backward micro-batch i - 2 (p - 1)
+ s. That is as many ticks as 1F1B takes; stage s holds the activations of at most 2 (p - s) - 1
micro-batches, where 1F1B holds p - s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.agreement.announce import AnnouncedBatch, PlanKey
from hf_distca.agreement.dealt_share import DealtShare
from hf_distca.agreement.documents import Documents, make_unknown_runs
from hf_distca.config import DistCAConfig
from hf_distca.pipeline.tick_calls import CallPart, LayerKind, MicroBatchPart
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.waves import Waves

__all__ = [
    "JointCall",
    "Pipeline",
    "Tick",
    "TickPlans",
    "read_shared_documents",
    "read_announced_documents",
    "merge_calls",
    "order_ticks",
]

Running = tuple[int | None, ...]  # which micro-batch each stage runs


class Tick(NamedTuple):
    """A forward or backward of one micro-batch on each stage that has one.

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
    """Return the ticks of a step in their order; without `backward` the ticks of an evaluation."""
    order: list[Tick] = []
    for round_ in range(micro_batches + 2 * (stages - 1)):
        forward_numbers = [round_ - stage for stage in range(stages)]
        backward_numbers = [round_ - 2 * (stages - 1) + stage for stage in range(stages)]
        for direction, numbers in ((False, forward_numbers), (True, backward_numbers)):
            running = tuple(number if 0 <= number < micro_batches else None for number in numbers)
            if (backward or not direction) and any(number is not None for number in running):
                order.append(Tick(len(order), direction, running))
    return order


@dataclass(frozen=True)
class JointCall:
    """A call of attention that stages make together.

    Attributes:
        kind: their common kind.
        calls: for each stage, the number of its own call, in the order of its forward; None for
            stages without a part in it.
    """

    kind: LayerKind
    calls: tuple[int | None, ...]


def merge_calls(stages: Sequence[Sequence[LayerKind]]) -> list[JointCall]:
    """Merge the calls of all stages into one order, with as many stages in each as possible.

    Only calls of one kind can be made together. The kind that most stages have next goes first.
    That gives the fewest joint calls where stages have the same kinds of layers in the same order,
    whatever their number; elsewhere it may give more.
    """
    done, calls = [0] * len(stages), list[JointCall]()
    while any(count < len(kinds) for count, kinds in zip(done, stages, strict=True)):
        following = [
            kinds[count] if count < len(kinds) else None
            for count, kinds in zip(done, stages, strict=True)
        ]
        kind = max(
            (candidate for candidate in dict.fromkeys(following) if candidate is not None),
            key=following.count,
        )
        joins = [candidate == kind for candidate in following]
        calls.append(
            JointCall(
                kind,
                tuple(
                    count if joining else None for count, joining in zip(done, joins, strict=True)
                ),
            )
        )
        done = [count + joining for count, joining in zip(done, joins, strict=True)]
    return calls


@dataclass(frozen=True)
class Pipeline:
    """The stage of each rank, and the calls of attention that stages make together.

    Attributes:
        stages: stage of each rank of the attention group.
        copies: for each rank, the number of its copy of the model. The ranks of a copy have the
            same micro-batches.
        rank: this rank.
        calls: calls of a forward, in their order.
        dtypes: dtypes of the hidden states that each stage hands on, and of their gradients.
    """

    stages: tuple[int, ...]
    copies: tuple[int, ...]
    rank: int
    calls: tuple[JointCall, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.stages[self.rank]

    @property
    def depth(self) -> int:
        """Number of stages."""
        return 1 + max(self.stages)

    @property
    def keys(self) -> list[PlanKey]:
        """Keys of the plans that a tick may need."""
        return list(dict.fromkeys(call.kind.key for call in self.calls))


def read_announced_documents(stated: Sequence[AnnouncedBatch]) -> list[list[Documents]]:
    """Return the documents of each micro-batch, or of a nano-batch of each, by rank, from the
    announcements of all ranks.
    """
    documents = []
    for micro_batch in stated:
        spans = bool(micro_batch.span_ranks.any())
        rows = micro_batch.numbers if spans else make_unknown_runs(micro_batch.numbers)
        of_ranks = [
            Documents(of_rank, spans)
            for of_rank in np.split(rows, np.cumsum(micro_batch.counts)[:-1])
        ]
        # Its first document goes on in its second row.
        for rank in np.flatnonzero(micro_batch.has_context).tolist():
            of_ranks[rank] = replace(of_ranks[rank], context_tokens=int(of_ranks[rank].runs[0, 2]))
            of_ranks[rank].runs[1, 1] = of_ranks[rank].context_tokens
        documents.append(of_ranks)
    return documents


def read_shared_documents(
    shares: Sequence[DealtShare], copies: Sequence[int], part: MicroBatchPart
) -> list[list[Documents]]:
    """Return the documents like `read_announced_documents`, from this rank's shares of dealt
    batches, which hold the documents of all copies.
    """
    documents = []
    for dealt in shares:
        layout = dealt.layouts[part.nano - 1] if part.nano else dealt.whole_layout
        rows = [
            np.array(layout.list_segments(copy), dtype=np.int64).reshape(-1, 3)
            for copy in range(dealt.ranks)
        ]
        documents.append(
            [Documents(rows[copy], span_ranks=True).cut_into_chunks(part.chunk) for copy in copies]
        )
    return documents


class _PlanInputs(NamedTuple):
    """Everything that the plan of a joint call depends on: the micro-batches that have a part in
    it, and the kind of plan.
    """

    running: Running
    key: PlanKey


@dataclass(frozen=True, eq=False)
class TickPlans:
    """Plans and this rank's routes for the ticks of a step.

    Attributes:
        order: the ticks.
        pipeline: the stage of each rank.
        documents: documents of each part of each micro-batch, by rank.
        costs: cost model of each plan of whole micro-batches.
        config: the settings; with `ping_pong`, layers run as two nano-batches, which have plans of
            their own.
        name: name of the step, for errors.
    """

    order: Sequence[Tick]
    pipeline: Pipeline
    documents: Mapping[MicroBatchPart, Sequence[Sequence[Documents]]]
    costs: dict[PlanKey, CostModel]
    config: DistCAConfig
    name: str
    _layouts: dict[tuple[Running, MicroBatchPart], Layout] = field(default_factory=dict)
    _plans: dict[_PlanInputs, Plan] = field(default_factory=dict)
    _routes: dict[_PlanInputs, Route] = field(default_factory=dict)

    def make(self) -> int:
        """Make the plans of all ticks, in their order. Return a 60-bit digest of all of them."""
        digest = hashlib.sha256()
        for tick in self.order:
            for _, plan_of in self._calls(tick):
                digest.update(self._plan(plan_of).digest.encode())
        return int(digest.hexdigest()[:15], 16)

    def parts(self, tick: Tick) -> list[CallPart]:
        """Return this rank's part in the calls of a tick, in their order."""
        stage, parts = self.pipeline.stage, []
        for number, (call, plan_of) in enumerate(self._calls(tick)):
            config, plan, nano = self.config, self._plan(plan_of), plan_of.key.nano
            if plan_of not in self._routes:
                waves = Waves.of(
                    plan,
                    plan_of.key.shape,
                    config.tile,
                    config.max_transient_bytes,
                    config.head_groups,
                )
                self._routes[plan_of] = Route.build(plan, self.pipeline.rank, waves)
            stage_call = None if plan_of.running[stage] is None else call.calls[stage]
            kind = call.kind._replace(key=plan_of.key)
            number //= 2 if nano else 1
            name = (
                f"attention call {number}{f', nano-batch {nano},' if nano else ''} of {tick} of"
                f" {self.name}"
            )
            parts.append(
                CallPart(number, name, kind, stage_call, self._routes[plan_of], plan.window)
            )
        return parts

    def backward_parts(self, micro_batch: int) -> list[CallPart]:
        """Return this rank's part in the calls of the tick in which its stage runs the
        backward of a micro-batch; empty without a backward.
        """
        for tick in self.order:
            if tick.backward and tick.micro_batches[self.pipeline.stage] == micro_batch:
                return self.parts(tick)
        return []

    def layouts_of(self, micro_batch: int) -> dict[MicroBatchPart, Layout]:
        """Return the documents of each part of a micro-batch on the ranks of this rank's stage."""
        running = tuple(
            micro_batch if stage == self.pipeline.stage else None
            for stage in range(self.pipeline.depth)
        )
        return {part: self.layout(running, part) for part in self.documents}

    def layout(self, running: Running, part: MicroBatchPart) -> Layout:
        """Return the documents of these micro-batches on the ranks that run them.

        Each micro-batch is on at most one stage.
        """
        if (running, part) in self._layouts:
            return self._layouts[running, part]
        numbers: dict[tuple[int, int], int] = {}
        ranks, context = list[list[tuple[int, int, int]]](), [0] * len(self.pipeline.stages)
        for rank, stage in enumerate(self.pipeline.stages):
            micro_batch, segments = running[stage], list[tuple[int, int, int]]()
            if micro_batch is not None:
                documents = self.documents[part][micro_batch][rank]
                context[rank] = int(documents.context_tokens > 0)
                for index, (document, start, length) in enumerate(documents.runs.tolist()):
                    # Documents that span ranks have a number in their micro-batch; others are told
                    # apart by where they are. With context, the first two rows are of one document.
                    identity = (
                        (stage, document)
                        if documents.span_ranks
                        else (-1 - rank, max(index, context[rank]))
                    )
                    segments.append((numbers.setdefault(identity, len(numbers)), start, length))
            ranks.append(segments)
        layout = self._layouts[running, part] = Layout.from_segments(ranks, context)
        return layout

    def _calls(self, tick: Tick) -> Iterator[tuple[JointCall, _PlanInputs]]:
        """Yield the joint calls of a tick in their order, if a stage with a micro-batch has a part.

        In backward the second nano-batch goes first, as in autograd.
        """
        nanos = (1, 2) if self.config.ping_pong else (0,)
        for call in reversed(self.pipeline.calls) if tick.backward else self.pipeline.calls:
            parts = zip(tick.micro_batches, call.calls, strict=True)
            running = tuple(
                None if number is None else micro_batch for micro_batch, number in parts
            )
            if any(micro_batch is not None for micro_batch in running):
                for nano in reversed(nanos) if tick.backward else nanos:
                    yield call, _PlanInputs(running, call.kind.key._replace(nano=nano))

    def _plan(self, plan_of: _PlanInputs) -> Plan:
        """Return the plan of a call, made once for calls whose plans depend on the same things."""
        if plan_of not in self._plans:
            layout = self.layout(
                plan_of.running, MicroBatchPart(plan_of.key.chunk, plan_of.key.nano)
            )
            cost = self.costs[plan_of.key._replace(nano=0)]
            self._plans[plan_of] = balance(layout, cost, self.config)
        return self._plans[plan_of]
