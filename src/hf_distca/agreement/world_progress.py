"""`Progress`: counts, comparisons and rates of ranks since torch.distributed started.

A rank announces its measurements with its next documents, and all ranks process announcements in
one order. With shares of dealt batches nobody waits for an announcement: it is compared by a
*meeting*, whose result is read when it is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from hf_distca.agreement.announce import (
    FIGURE_COUNT,
    HEADER_SIZE,
    AnnouncedBatch,
    Announcement,
    Announcements,
    PlanKey,
    Request,
    SharedSettings,
    check_agreement,
    collect_shared_settings,
    hash_settings,
)
from hf_distca.agreement.batch_plan import BatchPlan
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.history import History
from hf_distca.agreement.rates import Costs
from hf_distca.config import DistCAConfig
from hf_distca.errors import LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.rendezvous import Rendezvous
from hf_distca.schedule.layout import IntArray

__all__ = ["Progress"]

_log = logging.getLogger("hf_distca")

# Meetings that may go on at once: as many micro-batches a rank can be ahead of the slowest.
_MAX_MEETINGS = 8


class Progress:
    """Progress of the ranks in one world of torch.distributed.

    In the next world all ranks start from zero: each may have failed at another point of the last
    one, and some may be new.

    Args:
        meter: meter of this process, which may have counted before.
        history: receives plans and measurements.

    Attributes:
        is_leaving: True to announce that the others should go on without this rank.
        leaving_ranks: indices in the group of the ranks that leave, as all ranks know by now.
        costs: the cost models that plans are made with.
        number: number of the micro-batch that was planned last, from 1.
        share_kinds: keys of the plans of shares so far.
    """

    def __init__(self, meter: Meter, history: History) -> None:
        self.is_leaving = False
        self.leaving_ranks: list[int] = []
        self.costs = Costs()
        self.number = 0
        self.share_kinds: dict[PlanKey, None] = {}
        self._meter = meter
        self._history = history
        self._exchanges_before = meter.dispatches + meter.returns
        self._rank = self._announcement_count = self._meeting_count = 0
        self._recent_keys: dict[PlanKey, None] = {}  # since the last `pop_recent_keys`
        self._used_keys: set[PlanKey] = set()  # in the current micro-batch
        self._is_over = True  # the next plan begins another micro-batch
        # In the order of use; the same plans on all ranks.
        self._unannounced_plans: list[BatchPlan] = []
        # Number of the announcement with their figures, plans, and ranks that leave with it.
        self._measured_plans: deque[tuple[int, Sequence[BatchPlan], list[int]]] = deque()
        # Meetings, each with the plans whose figures it announces.
        self._meetings: deque[tuple[Rendezvous, list[BatchPlan]]] = deque()

    @property
    def next_number(self) -> int:
        """Number of the next micro-batch."""
        return self.number + 1

    def pop_recent_keys(self) -> list[PlanKey]:
        """Return the keys of plans used since the last call, in order of first use.

        They are the same on all ranks.
        """
        recent = list(self._recent_keys)
        self._recent_keys = {}
        return recent

    def find_number(self, keys: Iterable[PlanKey]) -> int:
        """Return the number of the micro-batch that plans with these keys are for.

        It is a new one if the last one is over, or has used a plan with such a key.
        """
        return self.number + (self._is_over or any(key in self._used_keys for key in keys))

    def use_plan(self, batch_plan: BatchPlan, documents: Documents) -> Meter:
        """Use a plan for the current micro-batch, and return the meter of its work.

        Raises:
            LayoutError: if the plan was made for other documents.
        """
        if not np.array_equal(batch_plan.runs, documents.runs):
            raise LayoutError(
                f"a micro-batch has documents of {documents.runs[:, 2].tolist()} tokens, but was "
                f"announced with documents of {batch_plan.runs[:, 2].tolist()} tokens: leave "
                "batches as they are after plan_ahead."
            )
        number = self.find_number([batch_plan.key])
        if number > self.number:
            self._used_keys.clear()
        self.number = number
        self._is_over = False
        self._used_keys.add(batch_plan.key)
        self._recent_keys[batch_plan.key] = None
        ranks = self.costs.make_ranks(batch_plan.plan.layout.world_size, batch_plan.per_node)
        batch_plan.start_use(
            self.number, self.costs.get_cost(batch_plan.key), ranks, Meter(self._meter)
        )
        self._history.record_plan(batch_plan)
        self._unannounced_plans.append(batch_plan)
        return batch_plan.meter

    def announce_requests(
        self, requests: Sequence[Request], group: AttentionGroup, place: str, config: DistCAConfig
    ) -> list[AnnouncedBatch]:
        """Exchange documents, settings and measurements. Collective.

        Returns:
            The announced documents of all ranks, for each request.
        """
        self.drain_meetings(at_most=0)  # in the order in which micro-batches ran
        self._learn_rates(self._meeting_count, config)
        keys = [key for _, key in requests]
        settings, plans, announcement = self._make_announcement(keys, group, config)
        row = replace(announcement, requests=requests).to_row()
        announced = Announcements.from_rows(group.gather(row, doing=f"planning {place}"))
        batches = check_agreement(announced, settings, group, place)
        self._unannounced_plans[:0] = self._store_figures(plans, announced.figures)
        self._measured_plans.append((self._meeting_count, plans, announced.leaving_ranks))
        self._learn_rates(self._meeting_count + 1, config)
        return batches

    def announce_share(
        self,
        share_numbers: Sequence[int],
        keys: Sequence[PlanKey],
        group: AttentionGroup,
        place: str,
        config: DistCAConfig,
    ) -> None:
        """Announce a share and this rank's measurements, without waiting for other ranks.

        Args:
            share_numbers: see `Announcement`.
            keys: keys of the share's plans.
            group: the ranks.
            place: description of the batch, for errors.
            config: settings.

        Raises:
            DistCADesyncError: if ranks did not agree in an earlier announcement.
        """
        self.drain_meetings(at_most=_MAX_MEETINGS)
        self._learn_rates(self._meeting_count - _MAX_MEETINGS, config)
        self._meeting_count += 1
        settings, plans, announcement = self._make_announcement(keys, group, config, share_numbers)

        def compare(rows: Sequence[IntArray]) -> None:
            check_agreement(Announcements.from_rows(rows), settings, group, place)

        doing = f"comparing shares of {place}"
        meeting = group.gather_async(announcement.to_row(), doing=doing, on_arrival=compare)
        self._meetings.append((meeting, plans))

    def drain_meetings(self, at_most: int) -> None:
        """Process the measurements of meetings that are over, and wait until few are left.

        Args:
            at_most: number of meetings that may be left.
        """
        while self._meetings:
            meeting, plans = self._meetings.popleft()  # also if `wait` raises an error
            if len(self._meetings) >= at_most:
                meeting.wait()
            if not meeting.is_done:
                self._meetings.appendleft((meeting, plans))
                return
            # Plans with running kernels are not announced again, as they are in
            # `announce_requests`: ranks come here at different times.
            announced = Announcements.from_rows(meeting.rows)
            self._store_figures(plans, announced.figures)
            self._measured_plans.append(
                (self._meeting_count - len(self._meetings) - 1, plans, announced.leaving_ranks)
            )

    def gather_measurements(self, group: AttentionGroup) -> None:
        """Gather the measurements of all ranks up to here, once the device is done. Collective."""
        if self._is_over:
            return
        self._is_over = True
        self.drain_meetings(at_most=0)
        self._history.end_micro_batch()
        while not self._meter.is_finished:
            self._meter.running[0].end.synchronize()
        plans = self._history.unmeasured_plans
        row = np.array([plan.own_figures for plan in plans], dtype=np.int64).reshape(-1)
        doing = f"gathering what ranks measured up to micro-batch {self.number}"
        rows = group.gather(row, doing=doing)
        if all(len(other) == len(row) for other in rows):
            self._store_figures(plans, np.stack(rows).reshape(len(rows), -1, FIGURE_COUNT))
            measured = [plan for plan in self._unannounced_plans if plan.is_measured]
            self._measured_plans.append((self._meeting_count, measured, []))
        self._unannounced_plans = []

    def _make_announcement(
        self,
        keys: Sequence[PlanKey],
        group: AttentionGroup,
        config: DistCAConfig,
        share_numbers: Sequence[int] = (),
    ) -> tuple[SharedSettings, list[BatchPlan], Announcement]:
        """Make the announcement of settings and figures, for plans with these keys.

        Returns:
            The settings that all ranks must share, the measured plans, and the announcement.
        """
        self._rank = group.rank
        self._announcement_count += 1
        kinds = dict.fromkeys((key.shape, key.device) for key in keys)
        dtypes = tuple(self.costs.dtypes[kind] for kind in kinds if kind in self.costs.dtypes)
        costs = tuple(dict.fromkeys(self.costs.get_cost(key) for key in keys))
        settings = collect_shared_settings(config, costs, dtypes)
        # All work of a plan is launched before the next plan of its key is used. On a GPU, kernels
        # of the newest plan may still have to run.
        newest = {plan.key: plan for plan in self._unannounced_plans if plan.key.device != "cpu"}
        plans = [
            plan
            for plan in self._unannounced_plans
            if plan.key in keys and newest.get(plan.key) is not plan
        ]
        self._unannounced_plans = [plan for plan in self._unannounced_plans if plan not in plans]
        if share_numbers:  # figures that do not fit are announced later, the same on all ranks
            room = (group.inline_row_capacity - HEADER_SIZE - len(share_numbers)) // FIGURE_COUNT
            self._unannounced_plans[:0] = plans[room:]
            plans = plans[:room]
        announcement = Announcement(
            count=self._announcement_count,
            settings=hash_settings(settings),
            exchanges=self._meter.dispatches + self._meter.returns - self._exchanges_before,
            checksum=0 if group.data is None else group.data.checksum,
            figures=[plan.own_figures for plan in plans],
            share_numbers=share_numbers,
            is_leaving=self.is_leaving,
        )
        return settings, plans, announcement

    def _store_figures(self, plans: Sequence[BatchPlan], figures: IntArray) -> list[BatchPlan]:
        """Store the (ranks, plans, 5) figures of all ranks.

        Return the plans with a kernel that still runs on some rank.
        """
        for plan, plan_figures in zip(plans, figures.transpose(1, 0, 2), strict=True):
            plan.figures = plan_figures
            self._history.count_if_measured(plan.number)
        return [plan for plan in plans if not plan.is_measured]

    def _learn_rates(self, before: int, config: DistCAConfig) -> None:
        """Correct rates by the announcements before this number, and log the changes.

        A rank may already have later announcements that others do not have yet, but all ranks must
        correct rates at the same micro-batch.
        """
        while self._measured_plans and self._measured_plans[0][0] < before:
            _, plans, leaving = self._measured_plans.popleft()
            self.leaving_ranks += [rank for rank in leaving if rank not in self.leaving_ranks]
            for change in self.costs.learn_from_plans(plans, config):
                if self._rank == 0:
                    _log.info(
                        "measured up to micro-batch %d: %s; plans are made accordingly",
                        self.number,
                        change,
                    )
