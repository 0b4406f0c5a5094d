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
from dataclasses import replace
from threading import Thread

import numpy as np

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
from hf_distca.agreement.dealt import Dealt
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


class Planner:
    """Plans micro-batches together with the other ranks, and collects what was planned and measured.

    Attributes:
        config: the settings; they may change between micro-batches, on all ranks at once.
        costs: the cost models that plans are made with.
        history: planned and measured figures.
        number: of the micro-batch that was planned last, from 1.
    """

    def __init__(self, config: DistCAConfig, meter: Meter) -> None:
        self.config = config
        self.costs = Costs()
        self.history = History()
        self.number = 0
        self._meter = meter
        self._asked = self._collected = self._rank = 0
        self._used: set[PlanKey] = set()  # in this micro-batch
        self._recent: dict[PlanKey, None] = {}  # since `recent_keys` was asked
        self._measurements = Measurements()
        self._meetings: deque[tuple[Meeting, list[Measured]]] = deque()
        self._met = self._taken = 0  # meetings begun, and looked at

    @property
    def next_number(self) -> int:
        """Number of a micro-batch that has not begun."""
        return self.number + 1

    def recent_keys(self) -> list[PlanKey]:
        """The plans that micro-batches had since the last call, in order of first use; the same on all ranks."""
        recent, self._recent = list(self._recent), {}
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
        key = planned.key
        self.number = self._number_of([key])
        if key in self._used:
            self._used.clear()
        self._used.add(key)
        self._recent[key] = None
        ranks = self.costs.ranks(planned.plan.layout.world_size, planned.per_node)
        estimate = Estimate.of(planned.plan, self.costs.of(key), planned.milliseconds, ranks, key.nano)
        meter = Meter(self._meter)
        self.history.planned(estimate, self.number)
        self._measurements.add(Measured(key, self.number, estimate, meter, planned.plan))
        return meter

    def collect(self, group: AttentionGroup) -> None:
        """Compare what was done since the last announcement, with one collective: at the end, when no next one will tell.

        All ranks must call it at the same point; again has no effect. What a kernel that still runs belongs to is left out.

        Raises:
            DistCADesyncError: if ranks turned out not to do the same, or do not all come.
        """
        if self._collected == self.number:
            return
        self._collected = self.number
        self.look(at_most=0)
        self.history.end()
        measured = self._measurements.take_all()
        own = np.array([one.figures for one in measured], dtype=np.int64).reshape(-1)
        rows = group.gather(own, doing="comparing what ranks measured up to the end of training")
        if all(len(row) == len(own) for row in rows):
            record(measured, np.stack(rows).reshape(len(rows), -1, FIGURES), self.history, group.rank)

    def _of_shares(self, shares: Sequence[Dealt], requests: Sequence[Request], group: AttentionGroup) -> list[Planned]:
        """Plans that need no other rank."""
        started = time.perf_counter()
        for dealt in shares:
            dealt.check_is_for(group)
        keys = [key for _, key in requests]
        plans = [
            dealt.plan(key, cost, self._settings_for(key), self.costs.ranks(group.size, dealt.per_node))
            for dealt, cost, key in zip(shares, self.costs.of_plans(keys), keys, strict=True)
        ]
        place = f"micro-batch {self._number_of(key for _, key in requests)} ({shares[0]})"
        self.meet(group, place, keys, [*shares[0].batch, shares[0].rank, *(_number(plan) for plan in plans)])
        taken = (time.perf_counter() - started) * 1e3 / len(plans)
        return [
            Planned(key, plan, self.config, documents.rows, taken, f"{dealt}, plan {plan.digest[:8]}", dealt.per_node)
            for (documents, key), plan, dealt in zip(requests, plans, shares, strict=True)
        ]

    def meet(self, group: AttentionGroup, place: str, keys: Sequence[PlanKey], dealt: list[int]) -> None:
        """Announce what this rank measured and has, to be compared while it goes on; nothing waits for it.

        Args:
            group, place, keys: as for `plan`.
            dealt: of shares: epoch and number of the global batch, the rank of the group, and what must be the same on all.
        """
        self.look(at_most=_MEETINGS)
        self._learn(before=self._met - _MEETINGS)
        self._met += 1
        self._asked += 1
        common, measured = self._common(keys), self._measurements.take(keys)
        room = room_for_figures(group.most_numbers, dealt)  # what does not fit is announced later; on all ranks the same
        self._measurements.put_back(measured[room:])
        own = self._announcement(group, common, measured[:room], dealt=dealt)

        def compare(rows: Sequence[IntArray]) -> None:
            agree(Announcements.read(rows), common, group, place)

        self._rank = group.rank
        meeting = group.meet(own.row(), doing=f"comparing shares of {place}", agree=compare)
        self._meetings.append((meeting, measured[:room]))

    def look(self, at_most: int | None = None) -> None:
        """Take what ranks measured from the meetings that are over.

        Args:
            at_most: how many may be left that are not; without, none is waited for.

        Raises:
            DistCADesyncError: if ranks turned out not to do the same.
        """
        while self._meetings:
            meeting, measured = self._meetings[0]
            if at_most is not None and len(self._meetings) > at_most:
                meeting.wait()
            if not meeting.done:
                return
            self._meetings.popleft()
            figures = Announcements.read(meeting.rows).measured
            self.costs.hear(self._taken, measured, figures)
            self._taken += 1
            for one in record(measured, figures, self.history, self._rank):
                self.history.drop(one.number)  # ranks are here at different times: they cannot announce it again together

    def _learn(self, before: int) -> None:
        """Correct rates by what meetings told before this one, and say so."""
        for change in self.costs.learn(before, self.config):
            if self._rank == 0:
                _log.info("measured up to micro-batch %d: %s; plans are made accordingly", self.number, change)

    def _ahead(self, documents: Documents, key: PlanKey) -> Planned | None:
        """The plan that was made ahead under the settings of now."""
        planned: Planned | None = documents.ahead.take(key)
        return planned if planned is not None and planned.config == self.config else None

    def _number_of(self, keys: Iterable[PlanKey]) -> int:
        """Number of the micro-batch that these plans are for: a new one if such a plan was used in the last one."""
        return self.number + (self.number == 0 or any(key in self._used for key in keys))

    def announce(self, requests: Sequence[Request], group: AttentionGroup, place: str) -> list[Stated]:
        """Exchange documents; on the way, compare settings and collect what each rank measured.

        Returns:
            What all ranks state for each request.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
        """
        self._rank = group.rank
        self.look(at_most=0)  # in the order in which micro-batches ran
        self._learn(before=self._met)
        self._asked += 1
        keys = [key for _, key in requests]
        common, measured = self._common(keys), self._measurements.take(keys)
        own = self._announcement(group, common, measured, requests)
        announced = Announcements.read(group.gather(own.row(), doing=f"planning {place}"))
        stated = agree(announced, common, group, place)
        unfinished = record(measured, announced.measured, self.history, group.rank)
        self._measurements.put_back(unfinished)
        self.costs.hear(self._met, measured, announced.measured)
        self._learn(before=self._met + 1)
        return stated

    def _settings_for(self, key: PlanKey) -> DistCAConfig:
        """The settings for a plan: layers that are left whole hide nothing, whatever the settings are."""
        return replace(self.config, ping_pong=key.nano > 0)

    def _common(self, keys: Iterable[PlanKey]) -> Common:
        return self.config, tuple(dict.fromkeys(self.costs.of(key) for key in keys))

    def _announcement(
        self,
        group: AttentionGroup,
        common: Common,
        measured: Sequence[Measured],
        requests: Sequence[Request] = (),
        dealt: Sequence[int] = (),
    ) -> Announcement:
        return Announcement(
            count=self._asked,
            settings=fingerprint(common),
            exchanges=self._meter.dispatches + self._meter.returns,
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
