"""`GroupState`: counts, comparisons and rates of ranks since torch.distributed started.

Before a micro-batch each rank announces its documents, or the share of a dealt batch, and what it
has measured of earlier ones. Nobody can plan documents before all ranks have announced theirs.
Shares hold the documents of all ranks, so nobody waits for an announcement of them: it is looked at
some micro-batches later, and compared meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hf_distca.agreement.announce import (
    FIGURE_COUNT,
    HEADER_SIZE,
    AnnouncedDocuments,
    Announcement,
    Announcements,
    PlanKey,
    Request,
    check_agreement,
    collect_shared_settings,
    hash_settings,
)
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.agreement.rates import Costs
from hf_distca.config import DistCAConfig
from hf_distca.runtime.group import AttentionGroup, Rendezvous
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import Plan

_log = logging.getLogger("hf_distca")

# Micro-batches with shares that a rank may be ahead of the slowest. All ranks take measurements
# from an announcement after as many more, so that they correct rates at the same micro-batch.
_MOST_AHEAD = 8


class GroupState:
    """State of the ranks in one world of torch.distributed.

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
        has_shares: whether shares were planned.
    """

    def __init__(self, meter: Meter, history: History) -> None:
        self.is_leaving = self.has_shares = False
        self.leaving_ranks: list[int] = []
        self.costs = Costs()
        self.number = 0
        self._meter = meter
        self._history = history
        self._exchanges_before = meter.dispatches + meter.returns
        self._announcement_count = 0
        self._used_keys: set[PlanKey] = set()  # in the current micro-batch
        self._is_over = True  # the next plan begins another micro-batch
        # In their order; of the same plans on all ranks.
        self._unannounced: list[MicroBatchPlan] = []
        # Announcements on their way, each with the plans whose figures it has.
        self._under_way: deque[tuple[Rendezvous, list[MicroBatchPlan]]] = deque()

    def find_number(self, keys: Iterable[PlanKey]) -> int:
        """Return the number of the micro-batch that plans with these keys are for.

        It is a new one if the last one is over, or has used a plan with such a key.
        """
        return self.number + (self._is_over or not self._used_keys.isdisjoint(keys))

    def use_plan(self, key: PlanKey, plan: Plan, **facts: Any) -> MicroBatchPlan:
        """Use a plan for the current micro-batch; `facts` are further attributes of it."""
        number = self.find_number([key])
        if number > self.number:
            self._used_keys.clear()
        self.number = number
        self._is_over = False
        self._used_keys.add(key)
        cost = self.costs.get_cost(key)
        seconds = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
        ranks = self.costs.make_ranks(plan.layout.world_size, facts.get("per_node"))
        used = MicroBatchPlan(key, plan, number, seconds, ranks, Meter(self._meter), **facts)
        self._history.record_plan(used)
        self._unannounced.append(used)
        return used

    def announce(
        self,
        requests: Sequence[Request],
        group: AttentionGroup,
        label: str,
        config: DistCAConfig,
        share_numbers: Sequence[int] = (),
    ) -> list[AnnouncedDocuments]:
        """Announce documents, settings and measurements, and wait for those of all ranks; or a
        share, without waiting. Collective.

        Args:
            requests: documents, each with the key of a plan.
            group: the ranks.
            label: text that names the micro-batch in errors.
            config: settings.
            share_numbers: for shares, see `Announcement`; else empty.

        Returns:
            The documents of all ranks, for each request; none for shares.

        Raises:
            DistCADesyncError: if ranks do not agree, or did not in an earlier announcement.
        """
        self._await_announcements(_MOST_AHEAD if share_numbers else 0, config, group)
        self._announcement_count += 1
        keys = dict.fromkeys(key for _, key in requests)
        dtypes = tuple(self.costs.dtypes.get((key.shape, key.device), "") for key in keys)
        settings = collect_shared_settings(config, tuple(map(self.costs.get_cost, keys)), dtypes)
        plans = self._pop_measured(keys)
        if share_numbers:  # figures that do not fit are announced later, the same on all ranks
            room = (group.inline_row_capacity - HEADER_SIZE - len(share_numbers)) // FIGURE_COUNT
            self._unannounced[:0] = plans[room:]
            plans = plans[:room]
        row = Announcement(
            count=self._announcement_count,
            settings=hash_settings(settings),
            exchanges=self._meter.dispatches + self._meter.returns - self._exchanges_before,
            checksum=0 if group.data is None else group.data.checksum,
            figures=[plan.own_measurement for plan in plans],
            documents=[] if share_numbers else [(batch, key.nano) for batch, key in requests],
            share_numbers=share_numbers,
            is_leaving=self.is_leaving,
        ).to_row()

        def compare(rows: Sequence[IntArray]) -> list[AnnouncedDocuments]:
            return check_agreement(Announcements.from_rows(rows), settings, group, label)

        if share_numbers:
            doing = f"comparing shares of {label}"
            self._under_way.append(
                (group.gather_async(row, doing=doing, on_arrival=compare), plans)
            )
            return []
        rows = group.gather(row, doing=f"planning {label}")
        documents = compare(rows)
        self._take_measurements(Announcements.from_rows(rows), plans, config, group)
        return documents

    def gather_measurements(self, group: AttentionGroup, config: DistCAConfig) -> None:
        """Gather the measurements of all ranks up to here, once the device is done. Collective."""
        if self._is_over:
            return
        self._is_over = True
        self._await_announcements(0, config, group)
        self._history.end_micro_batch()
        while not self._meter.is_finished:
            self._meter.running[0].end.synchronize()
        plans = self._history.unmeasured_plans
        row = np.array([plan.own_measurement for plan in plans], dtype=np.int64).reshape(-1)
        rows = group.gather(
            row, doing=f"gathering what ranks measured up to micro-batch {self.number}"
        )
        self._unannounced = []
        counts = [len(other) // FIGURE_COUNT for other in rows]
        if len(set(counts)) == 1:
            figures = np.stack(rows).reshape(len(rows), -1, FIGURE_COUNT)
            self._learn(figures, plans, config, group)
        elif group.rank == 0:
            _log.warning(
                "no figures up to micro-batch %d, and nothing learned from it: ranks used different"
                " numbers of plans (%s). Every rank must run the same layers in each micro-batch.",
                self.number,
                ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            )

    def _await_announcements(self, left: int, config: DistCAConfig, group: AttentionGroup) -> None:
        """Wait until so many announcements are left on their way, and take the measurements of the
        others, in the order in which micro-batches ran.
        """
        while len(self._under_way) > left:
            rendezvous, plans = self._under_way.popleft()  # also if `wait` raises an error
            rows = rendezvous.wait()
            self._take_measurements(Announcements.from_rows(rows), plans, config, group)

    def _pop_measured(self, keys: Iterable[PlanKey]) -> list[MicroBatchPlan]:
        """Return the plans with such keys whose work is launched, and announce no others yet.

        All work of a plan is launched before the next plan of its key is used. On a GPU, kernels of
        the newest plan may still have to run.
        """
        newest = {plan.key: plan for plan in self._unannounced if plan.key.device != "cpu"}
        plans = [
            plan
            for plan in self._unannounced
            if plan.key in keys and newest.get(plan.key) is not plan
        ]
        self._unannounced = [plan for plan in self._unannounced if plan not in plans]
        return plans

    def _take_measurements(
        self,
        announced: Announcements,
        plans: Sequence[MicroBatchPlan],
        config: DistCAConfig,
        group: AttentionGroup,
    ) -> None:
        """Take what all ranks announced that they measured of plans, and which ranks leave."""
        leaving = announced.leaving_ranks
        self.leaving_ranks += [rank for rank in leaving if rank not in self.leaving_ranks]
        self._learn(announced.figures, plans, config, group)

    def _learn(
        self,
        figures: IntArray,
        plans: Sequence[MicroBatchPlan],
        config: DistCAConfig,
        group: AttentionGroup,
    ) -> None:
        """Record the (ranks, plans, 5) figures of all ranks, correct rates by them, and log the
        changes. Plans whose kernels still ran on some rank are announced again.
        """
        is_running = figures[:, :, 0].min(axis=0) < 0
        for index in np.flatnonzero(~is_running).tolist():
            self._history.record_figures(plans[index], figures[:, index])
        self._unannounced[:0] = [plans[index] for index in np.flatnonzero(is_running).tolist()]
        measured = [plan for plan in plans if plan.is_measured]
        for change in self.costs.learn_from_plans(measured, config):
            if group.rank == 0:
                _log.info(
                    "measured up to micro-batch %d: %s; plans are made accordingly",
                    self.number,
                    change,
                )
