"""`Planner`: the plans that all ranks make of what they announced, and what became of them.

Several plans can be asked for at once, those of two nano-batches or of the micro-batches of an optimizer step: they take the
same two small collectives as one. Making them, which is most of the work, may go on beside training.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Thread

import numpy as np
import torch.distributed as dist

from hf_distca.agreement.announce import (
    FIGURES,
    Announcement,
    Announcements,
    Common,
    PlanKey,
    Stated,
    agree,
    check_equal,
    fingerprint,
    layout_of,
    room_for_figures,
)
from hf_distca.agreement.costs import Costs
from hf_distca.agreement.dealt import Dealt, plan_fetched
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.figures import Estimate, History
from hf_distca.agreement.measured import Measured, Measurements, record
from hf_distca.agreement.planned import Planned, Planning, Request
from hf_distca.config import DistCAConfig
from hf_distca.errors import LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meeting import Meeting
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

__all__ = ["Planner"]

_log = logging.getLogger("hf_distca")

# Meetings that may go on at once: as many micro-batches a rank can be ahead of the slowest.
_MEETINGS = 8


@dataclass(eq=False)
class _Progress:
    """How far ranks came together since torch.distributed started: what all of them count, and what they have learned.

    Ranks of another start begin at nothing: each may have failed elsewhere in the last one, and some may be new.

    Attributes:
        exchanges_before: dispatches and returns of this process before.
        costs: the cost models that plans are made with.
        number: of the micro-batch that was planned last, from 1.
        announced: announcements.
        collected: the micro-batch up to which measurements were collected.
        used: plans of this micro-batch.
        recent: plans since `Planner.recent_keys` was called.
        kinds_of_shares: plans of shares so far.
        measurements: those that were not announced yet.
        meetings: those that were not looked at, each with the plans whose measurements it tells.
        met, looked_at: how many meetings have begun, and how many were looked at.
    """

    exchanges_before: int
    costs: Costs = field(default_factory=Costs)
    number: int = 0
    announced: int = 0
    collected: int = 0
    used: set[PlanKey] = field(default_factory=set)
    recent: dict[PlanKey, None] = field(default_factory=dict)
    kinds_of_shares: dict[PlanKey, None] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    meetings: deque[tuple[Meeting, list[Measured]]] = field(default_factory=deque)
    met: int = 0
    looked_at: int = 0


class Planner:
    """Plans micro-batches together with the other ranks, and collects what was planned and measured.

    Attributes:
        config: the settings; they may change between micro-batches, on all ranks at once.
        history: planned and measured figures.
    """

    def __init__(self, config: DistCAConfig, meter: Meter) -> None:
        self.config = config
        self.history = History()
        self._meter = meter
        self._rank = 0
        self._world = _world()
        self._progress = _Progress(0)

    @property
    def _now(self) -> _Progress:
        """The progress of the ranks in the world of torch.distributed that there is, or that was there last."""
        world = _world()
        if world is not None and world is not self._world:
            if self._world is not None:
                self._progress = _Progress(self._exchanges)
                self.history.drop_all()
            self._world = world
        return self._progress

    @property
    def _exchanges(self) -> int:
        return self._meter.dispatches + self._meter.returns

    @property
    def costs(self) -> Costs:
        """The cost models that plans are made with."""
        return self._now.costs

    @property
    def number(self) -> int:
        """Number of the micro-batch that was planned last, from 1; it begins anew when torch.distributed does."""
        return self._now.number

    @property
    def next_number(self) -> int:
        """Number of a micro-batch that has not begun."""
        return self.number + 1

    def recent_keys(self) -> list[PlanKey]:
        """The plans that micro-batches had since the last call, in order of first use; the same on all ranks."""
        now = self._now
        recent, now.recent = list(now.recent), {}
        return recent

    def plan(self, requests: Sequence[Request], group: AttentionGroup, place: str | None = None) -> list[Planned]:
        """Plan this rank's documents together with those of the other ranks, which must ask for the same plans.

        Args:
            requests: documents, and which plan; plans that were made ahead and travel with them are taken. With shares of a
                dealt batch no rank waits for another: what ranks announce is compared while they compute.
            group: the ranks.
            place: what is planned, for errors; the micro-batch at hand if None.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
            LayoutError: if a share is not for this rank of this group.
        """
        ahead = [planned for documents, key in requests if (planned := self._ahead(documents, key)) is not None]
        if len(ahead) == len(requests):
            return ahead
        shares = [documents.dealt for documents, _ in requests if documents.dealt is not None]
        if len(shares) == len(requests):
            return self._of_shares(shares, requests, group)
        return self.finish(self.begin(requests, group, place), group)

    def begin(
        self, requests: Sequence[Request], group: AttentionGroup, place: str | None = None, *, beside: bool = False
    ) -> Planning:
        """Announce documents, with one collective, and start to plan them: `beside` what this thread does, or before it goes on.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
        """
        started = time.perf_counter()
        place = place or f"micro-batch {self._number_of(key for _, key in requests)}"
        layouts = [layout_of(one) for one in self.announce(requests, group, place)]
        ranks, costs = self.costs.ranks(group.size, group.per_node), self.costs.of_plans([key for _, key in requests])
        jobs = [
            (layout, cost, self._settings_for(key), ranks)
            for layout, cost, (_, key) in zip(layouts, costs, requests, strict=True)
        ]
        plans: Future[tuple[list[Plan], float]] = Future()
        milliseconds = (time.perf_counter() - started) * 1e3
        if beside:
            Thread(target=_make, args=(jobs, plans), name="distca plans", daemon=True).start()
        else:
            _make(jobs, plans)
        return Planning(requests, self.config, place, milliseconds, plans)

    def finish(self, planning: Planning, group: AttentionGroup) -> list[Planned]:
        """The plans, in the order of their requests, once they are made and all ranks have the same: one collective.

        Raises:
            DistCADesyncError: if the ranks do not have the same plans, or do not all come.
        """
        plans, making = planning.plans.result()
        started, requests = time.perf_counter(), planning.requests
        self.compare(plans, group, planning.place)
        taken = planning.milliseconds + making + (time.perf_counter() - started) * 1e3
        return [
            Planned(key, plan, planning.config, documents.rows, taken / len(requests), per_node=group.per_node)
            for (documents, key), plan in zip(requests, plans, strict=True)
        ]

    def use(self, planned: Planned, documents: Documents) -> Meter:
        """Count a plan as one of the micro-batch at hand.

        Returns:
            The meter for what is done by it.

        Raises:
            LayoutError: if it was made for other documents.
        """
        if not np.array_equal(planned.rows, documents.rows):
            raise LayoutError(
                f"a micro-batch has documents of {documents.rows[:, 2].tolist()} tokens, and was announced with documents of "
                f"{planned.rows[:, 2].tolist()}: leave batches as they are after plan_ahead."
            )
        key, now = planned.key, self._now
        now.number = self._number_of([key])
        if key in now.used:
            now.used.clear()
        now.used.add(key)
        now.recent[key] = None
        ranks = self.costs.ranks(planned.plan.layout.world_size, planned.per_node)
        estimate = Estimate.of(planned.plan, self.costs.of(key), planned.milliseconds, ranks, key.nano)
        meter = Meter(self._meter)
        self.history.planned(estimate, now.number, planned.planned_here)
        now.measurements.add(Measured(key, now.number, estimate, meter, planned.plan))
        return meter

    def collect(self, group: AttentionGroup) -> None:
        """Compare what was done since the last announcement, with one collective: at the end, when no next one will tell.

        All ranks must call it at the same point; again has no effect. What a kernel that still runs belongs to is left out.

        Raises:
            DistCADesyncError: if ranks turned out not to do the same, or do not all come.
        """
        now = self._now
        if now.collected == now.number:
            return
        now.collected = now.number
        self.look(at_most=0)
        self.history.end()
        measured = now.measurements.take_all()
        own = np.array([one.figures for one in measured], dtype=np.int64).reshape(-1)
        rows = group.gather(own, doing="comparing what ranks measured up to the end of training")
        if all(len(row) == len(own) for row in rows):
            record(measured, np.stack(rows).reshape(len(rows), -1, FIGURES), self.history, group.rank)

    def _of_shares(self, shares: Sequence[Dealt], requests: Sequence[Request], group: AttentionGroup) -> list[Planned]:
        """Plans that need no other rank."""
        started, keys = time.perf_counter(), [key for _, key in requests]
        for dealt, key in zip(shares, keys, strict=True):
            dealt.check_is_for(group)
            self._meet_kind(dealt, key, group)
        plans = [
            dealt.plan(key, cost, self._settings_for(key), self.costs.ranks(group.size, dealt.per_node))
            for dealt, cost, key in zip(shares, self.costs.of_plans(keys), keys, strict=True)
        ]
        place = f"micro-batch {self._number_of(key for _, key in requests)} ({shares[0]})"
        self.meet(group, place, keys, [*shares[0].batch, shares[0].rank, shares[0].documents, *map(_number, plans)])
        taken = (time.perf_counter() - started) * 1e3 / len(plans)
        return [
            Planned(
                key,
                plan,
                self.config,
                documents.rows,
                taken,
                f"{dealt}, plan {plan.digest[:8]}",
                dealt.per_node,
                dealt.take_planned_here(),
            )
            for (documents, key), plan, dealt in zip(requests, plans, shares, strict=True)
        ]

    def _meet_kind(self, dealt: Dealt, key: PlanKey, group: AttentionGroup) -> None:
        """Plan shares for a kind of layer when they are fetched, from its first one on, and say if their loader cannot."""
        kinds = self._now.kinds_of_shares
        if key in kinds:
            return
        other = dealt.other_settings(key, self.config)
        if other is not None and not kinds and group.rank == 0:
            _log.warning(
                "shares were planned for other settings than those of now, so this process plans each of them again when it is "
                "fetched: %s. Give document_shares the dtype that attention computes in, and the config of the run.",
                other,
            )
        kinds[key] = None
        plan_fetched(self._plan_fetched)

    def _plan_fetched(self, dealt: Dealt) -> None:
        """Start to plan a share for the kinds of layers that there are, where its plans are for other rates or settings."""
        ranks = self.costs.ranks(dealt.ranks, dealt.per_node)
        whole = dealt.first_tokens is None
        keys = dict.fromkeys(key._replace(nano=0) if whole else key for key in tuple(self._now.kinds_of_shares))
        dealt.plan_beside([(key, self.costs.of(key), self._settings_for(key), ranks) for key in keys])

    def meet(self, group: AttentionGroup, place: str, keys: Sequence[PlanKey], dealt: list[int]) -> None:
        """Announce what this rank measured and has, to be compared while it goes on; nothing waits for it.

        Args:
            group, place, keys: as for `plan`.
            dealt: of shares: epoch and number of the global batch, the rank of the group, and digests of what must be the same
                on all: the documents first, then plans.
        """
        now = self._now
        self.look(at_most=_MEETINGS)
        self._learn(before=now.met - _MEETINGS)
        now.met += 1
        now.announced += 1
        common, measured = self._common(keys), now.measurements.take(keys)
        room = room_for_figures(group.most_numbers, dealt)  # what does not fit is announced later; on all ranks the same
        now.measurements.put_back(measured[room:])
        own = self._announcement(group, common, measured[:room], dealt=dealt)

        def compare(rows: Sequence[IntArray]) -> None:
            agree(Announcements.read(rows), common, group, place)

        self._rank = group.rank
        meeting = group.meet(own.row(), doing=f"comparing shares of {place}", agree=compare)
        now.meetings.append((meeting, measured[:room]))

    def look(self, at_most: int | None = None) -> None:
        """Take what ranks measured from the meetings that are over.

        Args:
            at_most: how many may be left that are not; without, none is waited for.

        Raises:
            DistCADesyncError: if ranks turned out not to do the same.
        """
        now = self._now
        while now.meetings:
            meeting, measured = now.meetings.popleft()  # one that failed is not looked at again
            if at_most is not None and len(now.meetings) >= at_most:
                meeting.wait()
            if not meeting.done:
                now.meetings.appendleft((meeting, measured))
                return
            figures = Announcements.read(meeting.rows).measured
            now.costs.hear(now.looked_at, measured, figures)
            now.looked_at += 1
            for one in record(measured, figures, self.history, self._rank):
                self.history.drop(one.number)  # ranks are here at different times: they cannot announce it again together

    def _learn(self, before: int) -> None:
        """Correct rates by what meetings told before this one, and say so."""
        now = self._now
        for change in now.costs.learn(before, self.config):
            if self._rank == 0:
                _log.info("measured up to micro-batch %d: %s; plans are made accordingly", now.number, change)

    def _ahead(self, documents: Documents, key: PlanKey) -> Planned | None:
        """The plan that was made ahead under the settings of now."""
        planned: Planned | None = documents.ahead.take(key)
        return planned if planned is not None and planned.config == self.config else None

    def _number_of(self, keys: Iterable[PlanKey]) -> int:
        """Number of the micro-batch that these plans are for: a new one if such a plan was used in the last one."""
        now = self._now
        return now.number + (now.number == 0 or any(key in now.used for key in keys))

    def announce(self, requests: Sequence[Request], group: AttentionGroup, place: str) -> list[Stated]:
        """Exchange documents; on the way, compare settings and collect what each rank measured.

        Returns:
            What all ranks state for each request.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
        """
        self._rank, now = group.rank, self._now
        self.look(at_most=0)  # in the order in which micro-batches ran
        self._learn(before=now.met)
        now.announced += 1
        keys = [key for _, key in requests]
        common, measured = self._common(keys), now.measurements.take(keys)
        own = self._announcement(group, common, measured, requests)
        announced = Announcements.read(group.gather(own.row(), doing=f"planning {place}"))
        stated = agree(announced, common, group, place)
        unfinished = record(measured, announced.measured, self.history, group.rank)
        now.measurements.put_back(unfinished)
        now.costs.hear(now.met, measured, announced.measured)
        self._learn(before=now.met + 1)
        return stated

    def _settings_for(self, key: PlanKey) -> DistCAConfig:
        """The settings for a plan: layers that are left whole hide nothing, whatever the settings are."""
        return replace(self.config, ping_pong=key.nano > 0)

    def _common(self, keys: Iterable[PlanKey]) -> Common:
        kinds = dict.fromkeys((key.shape, key.device) for key in keys)
        dtypes = tuple(self.costs.dtypes[kind] for kind in kinds if kind in self.costs.dtypes)
        return Common(self.config, tuple(dict.fromkeys(self.costs.of(key) for key in keys)), dtypes)

    def _announcement(
        self,
        group: AttentionGroup,
        common: Common,
        measured: Sequence[Measured],
        requests: Sequence[Request] = (),
        dealt: Sequence[int] = (),
    ) -> Announcement:
        return Announcement(
            count=self._now.announced,
            settings=fingerprint(common),
            exchanges=self._exchanges - self._now.exchanges_before,
            checksum=group.checksum,
            figures=[one.figures for one in measured],
            requests=requests,
            dealt=dealt,
        )

    def compare(self, plans: Sequence[Plan], group: AttentionGroup, place: str) -> None:
        """Plans come from equal inputs, but an exchange with unequal plans would hang: compare before using them.

        Raises:
            DistCADesyncError: if the ranks do not have the same plans, or do not all come.
        """
        digests = np.array([_number(plan) for plan in plans], dtype=np.int64)
        doing = f"comparing plans of {place}"
        if not group.same(digests, doing=doing):
            for column in np.stack(group.gather(digests, doing=doing)).T:
                check_equal(group, column, "plans for the same documents", place, "use one version of hf_distca and numpy")


def _world() -> object:
    """The world of torch.distributed, None before it starts and after it has ended."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


def _number(plan: Plan) -> int:
    """The digest of a plan, or enough of it, as a number of 64 bits."""
    return int(plan.digest[:15], 16)


def _make(jobs: Sequence[tuple[Layout, CostModel, DistCAConfig, Ranks]], plans: Future[tuple[list[Plan], float]]) -> None:
    """Make plans, or keep the exception for whoever takes them."""
    started = time.perf_counter()
    try:
        made = [balance(*job) for job in jobs]
    except BaseException as error:
        plans.set_exception(error)
    else:
        plans.set_result((made, (time.perf_counter() - started) * 1e3))
