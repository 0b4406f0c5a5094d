"""The plans of a step: what every tick shares, worked out at its start from the documents of all micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hf_distca.agreement.announce import PlanKey, Stated
from hf_distca.agreement.dealt import Dealt
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.rates import Correction
from hf_distca.config import DistCAConfig
from hf_distca.errors import UnsupportedError
from hf_distca.pipeline.calls import Leg
from hf_distca.pipeline.kinds import Kind
from hf_distca.pipeline.pace import CallId, Estimate, Pace, ranks_at
from hf_distca.pipeline.ticks import Tick, Turn
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel, rank_seconds
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.waves import Waves

__all__ = ["Pipeline", "StepPlans", "documents_of_shares", "documents_of_stated"]

Held = tuple[int | None, ...]  # which micro-batch each stage has
_Shared = tuple[Held, PlanKey, Ranks, Correction]


class Shared(NamedTuple):
    """A call of attention that stages make together in a tick.

    Attributes:
        turn: which one of a forward it is.
        held: the micro-batches that have a part in it.
        key: which kind of plan it needs.
        ranks: what ranks are like in it.
        correction: of the cost model, in its direction.
    """

    turn: int
    held: Held
    key: PlanKey
    ranks: Ranks
    correction: Correction

    @property
    def plan(self) -> _Shared:
        """All that its plan depends on."""
        return self.held, self.key, self.ranks, self.correction


@dataclass(frozen=True)
class Pipeline:
    """Who has which stage, and the calls of attention that stages make together.

    Attributes:
        stages: of each rank of the attention group, which stage it has.
        lanes: of each rank, whose micro-batches it has: ranks of one lane are the stages of one copy of the model.
        rank: this one.
        turns: the calls of a forward, in their order.
    """

    stages: tuple[int, ...]
    lanes: tuple[int, ...]
    rank: int
    turns: tuple[Turn[Kind], ...]

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.stages[self.rank]

    @property
    def depth(self) -> int:
        """How many stages there are."""
        return 1 + max(self.stages)


def documents_of_stated(stated: Sequence[Stated]) -> list[list[Documents]]:
    """The documents of each micro-batch by rank, from what all ranks state for each micro-batch.

    Raises:
        UnsupportedError: if documents span ranks without numbers.
    """
    found = []
    for one in stated:
        offsets, spans = np.concatenate([[0], np.cumsum(one.counts)]), bool(one.spans.any())
        rows = one.numbers if spans else _whole(one.numbers)
        if spans and (rows[:, 0] < 0).any():
            raise UnsupportedError(
                "documents of a pipeline may span its data-parallel ranks only with numbers (PackedDocuments, or shares of "
                "hf_distca.document_shares): unset documents_span_ranks in DistCAConfig."
            )
        bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        found.append([Documents(rows[begin:end], spans) for begin, end in bounds])
    return found


def documents_of_shares(shares: Sequence[Dealt], lanes: Sequence[int]) -> list[list[Documents]]:
    """As `documents_of_stated`, from this rank's shares of dealt batches, which know those of all lanes."""
    by_lane = [[Documents(_rows(dealt.whole, lane), spans=True) for lane in range(dealt.ranks)] for dealt in shares]
    return [[documents[lane] for lane in lanes] for documents in by_lane]


@dataclass(frozen=True, eq=False)
class StepPlans:
    """Plans and this rank's routes for the ticks of a step.

    Attributes:
        pipeline: who has which stage.
        documents: of each micro-batch, by rank.
        costs: cost model of each plan.
        config: the settings.
        name: of the step, for errors.
        pace: what stages do beside attention.
    """

    pipeline: Pipeline
    documents: Sequence[Sequence[Documents]]
    costs: dict[PlanKey, CostModel]
    config: DistCAConfig
    name: str
    pace: Pace = field(default_factory=Pace)
    _layouts: dict[tuple[Held, int | None], Layout] = field(default_factory=dict)
    _calls: dict[Tick, list[Shared]] = field(default_factory=dict)
    _plans: dict[_Shared, Plan] = field(default_factory=dict)
    _routes: dict[_Shared, Route] = field(default_factory=dict)

    def make(self, ticks: Sequence[Tick]) -> int:
        """Make the plans of all ticks, in their order.

        Returns:
            A number of 60 bits that differs where any of the plans does.
        """
        digest = hashlib.sha256()
        for earlier, tick in zip((None, *ticks), ticks, strict=False):
            self._calls[tick] = list(self._find_shared(tick, earlier))
            for shared in self._calls[tick]:
                digest.update(self.plan(shared).digest.encode())
        return int(digest.hexdigest()[:15], 16)

    def plan(self, shared: Shared) -> Plan:
        """The plan of a call; made once for calls that differ in nothing that it depends on."""
        found = self._plans.get(shared.plan)
        if found is None:
            layout, cost = self.layout(shared.held, shared.key.chunk), shared.correction.of(self.costs[shared.key])
            found = self._plans[shared.plan] = balance(layout, cost, self.config, shared.ranks, relayed=False)
        return found

    def estimates(self, ticks: Sequence[Tick]) -> list[Estimate]:
        """What the cost model says of all calls, on all ranks."""
        found = []
        for tick in ticks:
            for number, shared in enumerate(self._calls[tick]):
                plan = self.plan(shared)
                cost = replace(self.costs[shared.key], window=plan.window)
                each = cost.parts(plan.end - plan.start, plan.end, plan.heads).T
                count = plan.layout.world_size
                parts = np.stack([np.bincount(plan.server, weights=one, minlength=count).astype(np.float64) for one in each], 1)
                found.append(Estimate(CallId(tick.number, number), tick.backward, shared.key, parts))
        return found

    def layout(self, held: Held, chunk: int | None) -> Layout:
        """The documents of these micro-batches on the ranks that have them. Each micro-batch is on one stage at most."""
        found = self._layouts.get((held, chunk))
        if found is None:
            found = self._layouts[held, chunk] = self._make_layout(held, chunk)
        return found

    def _make_layout(self, held: Held, chunk: int | None) -> Layout:
        numbers: dict[tuple[int, int], int] = {}
        ranks: list[list[tuple[int, int, int]]] = []
        for rank, stage in enumerate(self.pipeline.stages):
            at, rows = held[stage], list[tuple[int, int, int]]()
            documents = None if at is None else self.documents[at][rank].in_chunks(chunk)
            for place, (document, start, length) in enumerate([] if documents is None else documents.rows.tolist()):
                # Documents that span ranks have a number in their micro-batch; others are told apart by where they are.
                own = (stage, document) if documents is not None and documents.spans else (-1 - rank, place)
                rows.append((numbers.setdefault(own, len(numbers)), start, length))
            ranks.append(rows)
        return Layout.from_segments(ranks)

    def legs(self, tick: Tick) -> list[Leg]:
        """This rank's part in the calls of a tick, in their order."""
        found = []
        for number, shared in enumerate(self._calls[tick]):
            stage, turn, plan = self.pipeline.stage, self.pipeline.turns[shared.turn], self.plan(shared)
            route = self._routes.get(shared.plan)
            if route is None:
                waves = Waves.of(
                    plan, shared.key.shape, self.config.tile, self.config.max_transient_bytes, self.config.head_groups
                )
                route = self._routes[shared.plan] = Route.build(plan, self.pipeline.rank, waves)
            own = None if shared.held[stage] is None else turn.calls[stage]
            place = f"attention call {number} of {tick} of {self.name}"
            found.append(Leg(CallId(tick.number, number), shared.turn, place, turn.kind, own, route, plan.window))
        return found

    def _find_shared(self, tick: Tick, earlier: Tick | None) -> Iterator[Shared]:
        """The calls of a tick, in their order."""
        turns, pace, stages = list(enumerate(self.pipeline.turns)), self.pace, self.pipeline.stages
        for number, turn in reversed(turns) if tick.backward else turns:
            each = zip(tick.micro_batches, turn.calls, strict=True)
            held = tuple(None if call is None else at for at, call in each)
            if any(at is not None for at in held):
                key = turn.kind.key
                correction = pace.corrections.get((tick.backward, key), Correction())
                arrival = pace.arrival(tick, number, earlier, len(turns), stages)
                seconds = rank_seconds(self.layout(held, key.chunk), correction.of(self.costs[key]))
                ranks = ALIKE if arrival is None else ranks_at(seconds.tolist(), arrival)
                yield Shared(number, held, key, ranks, correction)
                earlier = None


def _whole(lengths: IntArray) -> IntArray:
    """Rows of documents that are each in one piece on one rank."""
    return np.stack([np.full_like(lengths, -1), np.zeros_like(lengths), lengths], axis=1)


def _rows(layout: Layout, rank: int) -> IntArray:
    return np.array(layout.segments(rank), dtype=np.int64).reshape(-1, 3)
