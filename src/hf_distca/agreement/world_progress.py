"""`Progress`: counts, comparisons and learned rates of ranks that share
attention, since torch.distributed started.

A rank announces its measurements with its next documents, and all ranks process announcements in
one order. With shares of dealt batches nobody waits for an announcement: it is compared by a
*meeting*, whose result is read when it is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

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
        leaves: whether this process is a server that the others should continue without, once they
            know.
        leaving: servers that announced it, as all ranks know by now: indices in the group.
        costs: the cost models that plans are made with.
        number: number of the micro-batch that was planned last, from 1.
        kinds_of_shares: plans of shares so far.
    """

    is_leaving: ClassVar[bool] = False

    def __init__(self, meter: Meter, history: History) -> None:
        self.leaving_ranks: list[int] = []
        self.costs = Costs()
        self.number = 0
        self.share_kinds: dict[PlanKey, None] = {}
        self._meter, self._history = meter, history
        self._exchanges_before = meter.dispatches + meter.returns
        self._rank = self._announcement_count = self._meeting_count = 0
        self._recent_keys: dict[PlanKey, None] = {}  # plans that were used since somebody asked
        self._used_keys: set[PlanKey] = set()  # in this micro-batch
        self._is_over = True  # whether the next plan begins another one
        self._unannounced_plans: list[
            BatchPlan
        ] = []  # in the order of use; the same plans on all ranks
        # With the numbers of the announcements that told figures, and the ranks that left then.
        self._measured_plans: deque[tuple[int, Sequence[BatchPlan], list[int]]] = deque()
        self._meetings: deque[tuple[Rendezvous, list[BatchPlan]]] = (
            deque()
        )  # with the plans whose measurements they tell

    @property
    def next_number(self) -> int:
        """Number of the next micro-batch."""
        return self.number + 1

    def pop_recent_keys(self) -> list[PlanKey]:
        """Return the plans that micro-batches had since the last call, in
        order of first use; the same on all ranks.
        """
        recent, self._recent_keys = list(self._recent_keys), {}
        return recent

    def find_number(self, keys: Iterable[PlanKey]) -> int:
        """Return the number of the micro-batch that these plans are for: a new one if
        the last one is over, or used such a plan.
        """
        return self.number + (self._is_over or any(key in self._used_keys for key in keys))

    def use_plan(self, planned: BatchPlan, documents: Documents) -> Meter:
        """Count a plan as part of the current micro-batch, and return the meter for its work.

        Raises:
            LayoutError: if it was made for other documents.
        """
        if not np.array_equal(planned.runs, documents.runs):
            raise LayoutError(
                f"a micro-batch has documents of {documents.runs[:, 2].tolist()} tokens, but was "
                f"announced with documents of {planned.runs[:, 2].tolist()} tokens: leave batches "
                "as they are after plan_ahead."
            )
        number = self.find_number([planned.key])
        if number > self.number:
            self._used_keys.clear()
        self.number, self._is_over = number, False
        self._used_keys.add(planned.key)
        self._recent_keys[planned.key] = None
        ranks = self.costs.make_ranks(planned.plan.layout.world_size, planned.per_node)
        planned.start_use(self.number, self.costs.get_cost(planned.key), ranks, Meter(self._meter))
        self._history.record_plan(planned)
        self._unannounced_plans.append(planned)
        return planned.meter

    def announce_requests(
        self, requests: Sequence[Request], group: AttentionGroup, place: str, config: DistCAConfig
    ) -> list[AnnouncedBatch]:
        """Exchange documents, settings and measurements.

        Return the announced documents of all ranks for each request. Collective.
        """
        self.drain_meetings(at_most=0)  # in the order in which micro-batches ran
        self._learn_rates(self._meeting_count, config)
        facts, plans, announcement = self._make_announcement(
            [key for _, key in requests], group, config
        )
        row = replace(announcement, requests=requests).to_row()
        announced = Announcements.from_rows(group.gather(row, doing=f"planning {place}"))
        stated = check_agreement(announced, facts, group, place)
        self._unannounced_plans[:0] = self._store_figures(plans, announced.figures)
        self._measured_plans.append((self._meeting_count, plans, announced.leaving_ranks))
        self._learn_rates(self._meeting_count + 1, config)
        return stated

    def announce_share(
        self,
        dealt: Sequence[int],
        keys: Sequence[PlanKey],
        group: AttentionGroup,
        place: str,
        config: DistCAConfig,
    ) -> None:
        """Announce `dealt`, as in `Announcement`, and this rank's measurements, without
        waiting: ranks compare announcements meanwhile.

        Raises the error of an earlier announcement if ranks did not agree.
        """
        self.drain_meetings(at_most=_MAX_MEETINGS)
        self._learn_rates(self._meeting_count - _MAX_MEETINGS, config)
        self._meeting_count += 1
        facts, plans, announcement = self._make_announcement(keys, group, config, dealt)
        row, doing = announcement.to_row(), f"comparing shares of {place}"
        meeting = group.gather_async(
            row,
            doing=doing,
            on_arrival=lambda rows: check_agreement(
                Announcements.from_rows(rows), facts, group, place
            ),
        )
        self._meetings.append((meeting, plans))

    def drain_meetings(self, at_most: int) -> None:
        """Process the measurements from meetings that are over; wait
        until at most `at_most` are left.
        """
        while self._meetings:
            meeting, plans = self._meetings.popleft()  # one that failed is not looked at again
            if len(self._meetings) >= at_most:
                meeting.wait()
            if not meeting.is_done:
                self._meetings.appendleft((meeting, plans))
                return
            # Ranks are here at different times, so they cannot announce those again together whose kernels still run.
            announced = Announcements.from_rows(meeting.rows)
            self._store_figures(plans, announced.figures)
            self._measured_plans.append(
                (self._meeting_count - len(self._meetings) - 1, plans, announced.leaving_ranks)
            )

    def gather_measurements(self, group: AttentionGroup) -> None:
        """Gather the measurements of all ranks up to here, once the device is done. Collective."""
        if self._is_over:
            return
        group.notify_servers("gather")
        self._is_over = True
        self.drain_meetings(at_most=0)
        self._history.end_micro_batch()
        while not self._meter.is_finished:
            self._meter.running[0].end.synchronize()
        plans = self._history.unmeasured_plans
        row = np.array([planned.own_figures for planned in plans], dtype=np.int64).reshape(-1)
        rows = group.gather(
            row, doing=f"gathering what ranks measured up to micro-batch {self.number}"
        )
        if all(len(other) == len(row) for other in rows):
            self._store_figures(plans, np.stack(rows).reshape(len(rows), -1, FIGURE_COUNT))
            self._measured_plans.append(
                (
                    self._meeting_count,
                    [planned for planned in self._unannounced_plans if planned.is_measured],
                    [],
                )
            )
        self._unannounced_plans = []

    def _make_announcement(
        self,
        keys: Sequence[PlanKey],
        group: AttentionGroup,
        config: DistCAConfig,
        dealt: Sequence[int] = (),
    ) -> tuple[SharedSettings, list[BatchPlan], Announcement]:
        """Return all that must be equal on all ranks for plans of these keys, the
        measured plans, and the announcement of both.
        """
        self._rank = group.rank
        self._announcement_count += 1
        kinds = dict.fromkeys((key.shape, key.device) for key in keys)
        dtypes = tuple(self.costs.dtypes[kind] for kind in kinds if kind in self.costs.dtypes)
        facts = collect_shared_settings(
            config, tuple(dict.fromkeys(self.costs.get_cost(key) for key in keys)), dtypes
        )
        # All of a plan was launched before the next one of its key. On a GPU the kernels of the newest may still have to run.
        newest = {plan.key: plan for plan in self._unannounced_plans if plan.key.device != "cpu"}
        plans = [
            plan
            for plan in self._unannounced_plans
            if plan.key in keys and newest.get(plan.key) is not plan
        ]
        self._unannounced_plans = [plan for plan in self._unannounced_plans if plan not in plans]
        if dealt:  # what does not fit is announced later; on all ranks the same
            room = (group.inline_row_capacity - HEADER_SIZE - len(dealt)) // FIGURE_COUNT
            self._unannounced_plans[:0], plans = plans[room:], plans[:room]
        exchanges = self._meter.dispatches + self._meter.returns - self._exchanges_before
        exchanged = 0 if group.data is None else group.data.checksum
        figures = [planned.own_figures for planned in plans]
        announced = Announcement(
            self._announcement_count, hash_settings(facts), exchanges, exchanged, figures
        )
        return facts, plans, replace(announced, share_numbers=dealt, is_leaving=self.is_leaving)

    def _store_figures(self, plans: Sequence[BatchPlan], figures: IntArray) -> list[BatchPlan]:
        """Store the (ranks, plans, 5) figures of all ranks.

        Return the plans with a kernel that still runs on some rank.
        """
        for planned, theirs in zip(plans, figures.transpose(1, 0, 2), strict=True):
            planned.figures = theirs
            self._history.count_if_measured(planned.number)
        return [planned for planned in plans if not planned.is_measured]

    def _learn_rates(self, before: int, config: DistCAConfig) -> None:
        """Correct rates by announcements before this number, and log the changes.

        A rank may know later announcements that others do not know yet, but all must correct at the
        same micro-batch.
        """
        while self._measured_plans and self._measured_plans[0][0] < before:
            _, plans, leaving = self._measured_plans.popleft()
            self.leaving_ranks += [rank for rank in leaving if rank not in self.leaving_ranks]
            for change in self.costs.learn(plans, config):
                if self._rank == 0:
                    _log.info(
                        "measured up to micro-batch %d: %s; plans are made accordingly",
                        self.number,
                        change,
                    )
