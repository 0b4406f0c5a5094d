"""`Progress`: counts, comparisons and rates of ranks since torch.distributed started.

A rank announces its measurements with its next documents, and all ranks process announcements in
one order. With shares of dealt batches nobody waits for an announcement: it is compared by a
*meeting*, whose result is read when it is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress

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
from hf_distca.agreement.batch_plan import BatchPlan, PlanMeasurement, PlanUse
from hf_distca.agreement.history import History
from hf_distca.agreement.rates import Costs
from hf_distca.config import DistCAConfig
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.rendezvous import Rendezvous
from hf_distca.schedule.layout import IntArray

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
        share_kinds: keys of the plans of shares so far, and the group that each is planned for.
    """

    def __init__(self, meter: Meter, history: History) -> None:
        self.is_leaving = False
        self.leaving_ranks: list[int] = []
        self.costs = Costs()
        self.number = 0
        self.share_kinds: dict[PlanKey, AttentionGroup] = {}
        self._meter = meter
        self._history = history
        self._exchanges_before = meter.dispatches + meter.returns
        self._announcement_count = 0
        self._meeting_count = 0
        self._used_keys: set[PlanKey] = set()  # in the current micro-batch
        self._is_over = True  # the next plan begins another micro-batch
        # In their order; of the same plans on all ranks.
        self._unannounced_uses: list[PlanUse] = []
        # By number of the announcement: measurements that nothing was learned from yet, the ranks
        # that leave after them, and uses with kernels that still ran, to be announced again.
        self._measured: deque[tuple[int, list[PlanMeasurement], list[int], list[PlanUse]]] = deque()
        # Meetings, each with the uses whose figures it announces.
        self._meetings: deque[tuple[Rendezvous, list[PlanUse]]] = deque()

    @property
    def next_number(self) -> int:
        """Number of the next micro-batch."""
        return self.number + 1

    def find_number(self, keys: Iterable[PlanKey]) -> int:
        """Return the number of the micro-batch that plans with these keys are for.

        It is a new one if the last one is over, or has used a plan with such a key.
        """
        return self.number + (self._is_over or any(key in self._used_keys for key in keys))

    def use_plan(self, batch_plan: BatchPlan) -> Meter:
        """Use a plan for the current micro-batch, and return the meter of its work."""
        number = self.find_number([batch_plan.key])
        if number > self.number:
            self._used_keys.clear()
        self.number = number
        self._is_over = False
        self._used_keys.add(batch_plan.key)
        ranks = self.costs.make_ranks(batch_plan.plan.layout.world_size, batch_plan.per_node)
        cost = self.costs.get_cost(batch_plan.key)
        use = PlanUse.start(batch_plan, number, cost, ranks, Meter(self._meter))
        self._history.record_use(use)
        self._unannounced_uses.append(use)
        return use.meter

    def announce_requests(
        self, requests: Sequence[Request], group: AttentionGroup, place: str, config: DistCAConfig
    ) -> list[AnnouncedBatch]:
        """Exchange documents, settings and measurements. Collective.

        Returns:
            The announced documents of all ranks, for each request.
        """
        self.drain_meetings(at_most=0)  # in the order in which micro-batches ran
        self._learn_rates(self._meeting_count, config, group)
        settings, uses, announcement = self._make_announcement(requests, group, config)
        announced = Announcements.from_rows(
            group.gather(announcement.to_row(), doing=f"planning {place}")
        )
        batches = check_agreement(announced, settings, group, place)
        self._store_figures(announced.figures, uses, self._meeting_count, announced.leaving_ranks)
        self._learn_rates(self._meeting_count + 1, config, group)
        return batches

    def announce_share(
        self,
        share_numbers: Sequence[int],
        requests: Sequence[Request],
        group: AttentionGroup,
        place: str,
        config: DistCAConfig,
    ) -> None:
        """Announce a share and this rank's measurements, without waiting for other ranks.

        Args:
            share_numbers: see `Announcement`.
            requests: requests for the share's plans.
            group: the ranks.
            place: description of the batch, for errors.
            config: settings.

        Raises:
            DistCADesyncError: if ranks did not agree in an earlier announcement.
        """
        self.drain_meetings(at_most=_MAX_MEETINGS)
        self._learn_rates(self._meeting_count - _MAX_MEETINGS, config, group)
        self._meeting_count += 1
        settings, uses, announcement = self._make_announcement(
            requests, group, config, share_numbers
        )

        def compare(rows: Sequence[IntArray]) -> None:
            check_agreement(Announcements.from_rows(rows), settings, group, place)

        meeting = group.gather_async(
            announcement.to_row(), doing=f"comparing shares of {place}", on_arrival=compare
        )
        self._meetings.append((meeting, uses))

    def drain_meetings(self, at_most: int) -> None:
        """Process the measurements of meetings that are over, and wait until few are left.

        Args:
            at_most: number of meetings that may be left.
        """
        while self._meetings:
            meeting, uses = self._meetings.popleft()  # also if `wait` raises an error
            if len(self._meetings) >= at_most:
                meeting.wait()
            if not meeting.is_done:
                self._meetings.appendleft((meeting, uses))
                return
            number = self._meeting_count - len(self._meetings) - 1
            announced = Announcements.from_rows(meeting.rows)
            self._store_figures(announced.figures, uses, number, announced.leaving_ranks)

    def gather_measurements(self, group: AttentionGroup) -> None:
        """Gather the measurements of all ranks up to here, once the device is done. Collective."""
        if self._is_over:
            return
        self._is_over = True
        self.drain_meetings(at_most=0)
        self._history.end_micro_batch()
        while not self._meter.is_finished:
            self._meter.running[0].end.synchronize()
        uses = self._history.unmeasured_uses
        row = np.array([use.own_figures for use in uses], dtype=np.int64).reshape(-1)
        rows = group.gather(
            row, doing=f"gathering what ranks measured up to micro-batch {self.number}"
        )
        self._unannounced_uses = []
        for *_, running in self._measured:
            running.clear()
        counts = [len(other) // FIGURE_COUNT for other in rows]
        if len(set(counts)) == 1:
            figures = np.stack(rows).reshape(len(rows), -1, FIGURE_COUNT)
            self._store_figures(figures, uses, self._meeting_count, [])
        elif group.rank == 0:
            _log.warning(
                "no figures up to micro-batch %d, and nothing learned from it: ranks used different"
                " numbers of plans (%s). Every rank must run the same layers in each micro-batch.",
                self.number,
                ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            )

    def _make_announcement(
        self,
        requests: Sequence[Request],
        group: AttentionGroup,
        config: DistCAConfig,
        share_numbers: Sequence[int] = (),
    ) -> tuple[SharedSettings, list[PlanUse], Announcement]:
        """Make the announcement of settings and figures, and of a share or else documents.

        Returns:
            The settings that all ranks must share, the announced uses, and the announcement.
        """
        self._announcement_count += 1
        keys = dict.fromkeys(key for _, key in requests)
        dtypes = tuple(self.costs.dtypes.get((key.shape, key.device), "") for key in keys)
        settings = collect_shared_settings(config, tuple(map(self.costs.get_cost, keys)), dtypes)
        # All work of a plan is launched before the next plan of its key is used. On a GPU, kernels
        # of the newest plan may still have to run.
        pairs = [(use.batch_plan.key, use) for use in self._unannounced_uses]
        newest = {key: use for key, use in pairs if key.device != "cpu"}
        uses = [use for key, use in pairs if key in keys and newest.get(key) is not use]
        if share_numbers:  # figures that do not fit are announced later, the same on all ranks
            room = (group.inline_row_capacity - HEADER_SIZE - len(share_numbers)) // FIGURE_COUNT
            uses = uses[:room]
        self._unannounced_uses = [use for _, use in pairs if use not in uses]
        announcement = Announcement(
            count=self._announcement_count,
            settings=hash_settings(settings),
            exchanges=self._meter.dispatches + self._meter.returns - self._exchanges_before,
            checksum=0 if group.data is None else group.data.checksum,
            figures=[use.own_figures for use in uses],
            documents=[] if share_numbers else [(batch, key.nano) for batch, key in requests],
            share_numbers=share_numbers,
            is_leaving=self.is_leaving,
        )
        return settings, uses, announcement

    def _store_figures(
        self, figures: IntArray, uses: Sequence[PlanUse], number: int, leaving: list[int]
    ) -> None:
        """Store the (ranks, uses, 5) figures of all ranks in an announcement of this number, and
        the ranks that leave with it.
        """
        is_finished = figures[:, :, 0].min(axis=0) >= 0
        measured = list(
            compress(map(PlanMeasurement, uses, figures.transpose(1, 0, 2)), is_finished)
        )
        for measurement in measured:
            self._history.record_measurement(measurement)
        running = list(compress(uses, ~is_finished))
        self._measured.append((number, measured, leaving, running))

    def _learn_rates(self, before: int, config: DistCAConfig, group: AttentionGroup) -> None:
        """Correct rates by the announcements before this number, and log the changes; announce
        again what they could not measure.

        A rank may already have later announcements that others do not have yet, but all ranks must
        correct rates at the same micro-batch.
        """
        while self._measured and self._measured[0][0] < before:
            _, measured, leaving, running = self._measured.popleft()
            self._unannounced_uses[:0] = running
            self.leaving_ranks += [rank for rank in leaving if rank not in self.leaving_ranks]
            for change in self.costs.learn_from_plans(measured, config):
                if group.rank == 0:
                    _log.info(
                        "measured up to micro-batch %d: %s; plans are made accordingly",
                        self.number,
                        change,
                    )
