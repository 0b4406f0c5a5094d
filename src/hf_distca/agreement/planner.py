"""`Planner`: ranks tell each other their documents and measurements, and make the same plans.

Before a micro-batch, each rank announces its measurements of earlier micro-batches, and either its
documents or its share of a dealt batch. A share holds the documents of all ranks, so each rank
makes the plan alone, and announces only a digest of the plan, in one small collective. Without
shares, ranks can plan only after all of them have announced their documents, and a second
collective compares the plans. Several plans can be requested at once, for example for two
nano-batches. They take no more collectives than one plan.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hf_distca.agreement.announce import (
    FIGURE_COUNT,
    AnnouncedDocuments,
    Announcement,
    Announcements,
    PlanKey,
    Request,
    check_agreement,
    check_equal,
    collect_shared_settings,
    hash_settings,
)
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.agreement.dealt_share import DealtShare, PlanJob
from hf_distca.agreement.rates import LearnedCosts
from hf_distca.config import DistCAConfig
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.runtime.group import AttentionGroup, get_current_world, mark_joint_step
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import MarginalCost, TransientBytes
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import count_transient_bytes
from hf_distca.schedule.plan import Plan

_log = logging.getLogger("hf_distca")

# An announcement holds the measurements of at most this many plans. With the header, they fit into
# the first step of `AttentionGroup.gather`.
_MOST_MEASURED = 16


class Planner:
    """Plans micro-batches together with the other ranks, and collects measurements.

    Collective methods raise `DistCADesyncError` if ranks do not agree, or do not all take part.

    Attributes:
        config: the settings; they may change between micro-batches, on all ranks at once.
        history: estimates and measurements of micro-batches.
        costs: the cost models for plans.
        number: number of the micro-batch that was planned last, from 1.
    """

    def __init__(self, config: DistCAConfig, meter: Meter) -> None:
        self.config = config
        self.history = History()
        self._meter = meter
        self._world = get_current_world()
        self.reset()

    def reset(self) -> None:
        """Forget learned costs and uncounted micro-batches, because other ranks may take part from
        now on. Earlier plans stay valid.
        """
        self.history.reset()
        self.costs = LearnedCosts()
        self.number = 0
        self._exchanges_before = self._meter.dispatches + self._meter.returns
        self._announcement_count = 0
        self._used_keys: set[PlanKey] = set()  # Keys of the current micro-batch's plans.
        self._is_over = True  # Whether the next plan begins another micro-batch.

    def join_world(self) -> None:
        """Reset this planner if torch.distributed has been initialized again.

        Ranks may have failed at different points before, and some ranks may be new.
        """
        world = get_current_world()
        if world is not None and world is not self._world:
            if self._world is not None:
                self.reset()
            self._world = world

    def plan(self, requests: Sequence[Request], group: AttentionGroup) -> list[MicroBatchPlan]:
        """Plan this rank's documents together with those of the other ranks.

        All ranks must request the same plans. Collective.

        Args:
            requests: documents, each with the key of a plan.
            group: the ranks.

        Returns:
            One plan for each request, in their order. The micro-batch uses them from now on.

        Raises:
            LayoutError: if a share is not for this rank of this group.
        """
        shares = [documents.dealt_share for documents, _ in requests if documents.dealt_share]
        with self.report_errors(group, f"planning for micro-batch {self.number + 1}"):
            if len(shares) == len(requests):  # all documents belong to one dealt batch
                return self.plan_share(shares[0], requests, group)
            return self.plan_documents(requests, group)

    @mark_joint_step
    def plan_documents(
        self, requests: Sequence[Request], group: AttentionGroup
    ) -> list[MicroBatchPlan]:
        """Announce documents, plan them, and compare the plans between ranks.

        This takes two collectives, however many plans there are.
        """
        started = time.perf_counter()
        label = f"micro-batch {self._find_number(requests)}"
        announced = self.announce(requests, group, label)
        plans = []
        for documents, (_, key) in zip(announced, requests, strict=True):
            job = self._make_job(key, group.size, group.per_node)
            ranks, pairs = job.ranks, documents.header[:, 4]
            if pairs.any():
                seconds = pairs * MarginalCost.from_cost_model(job.cost).pair
                ranks = replace(ranks, fixed_seconds=tuple(seconds.tolist()))
            plans.append(balance(documents.build_layout(), job.cost, job.config, ranks))
        # Equal inputs should give equal plans. Compare the plans, because ranks with different
        # plans would wait for each other forever.
        digests = np.array([_shorten_digest(plan) for plan in plans], dtype=np.int64)
        digests_of_ranks = group.gather_same_length(digests, activity=f"comparing plans of {label}")
        for column in np.stack(digests_of_ranks).T:
            check_equal(
                group,
                column,
                "plans for the same documents",
                label,
                "use one version of hf_distca and numpy",
            )
        planning_ms = (time.perf_counter() - started) * 1e3 / len(plans)
        return self._use_plans(requests, plans, group, group.per_node, planning_ms=planning_ms)

    @mark_joint_step
    def plan_share(
        self, share: DealtShare, requests: Sequence[Request], group: AttentionGroup
    ) -> list[MicroBatchPlan]:
        """Make plans from a share without communication, then announce their digests in one
        collective.
        """
        started = time.perf_counter()
        share.check_group(group)
        # `share.per_node` does not count ranks without tokens, but these ranks take part in the
        # plan.
        per_node = share.per_node if group.has_tokens is None else group.per_node
        jobs = [self._make_job(key, group.size, per_node, group.has_tokens) for _, key in requests]
        is_planned_again = bool(share.plans) and not share.plans.keys() >= set(jobs)
        plans = [share.plan(job) for job in jobs]
        share_numbers = [*share.batch_id, share.digest, *map(_shorten_digest, plans)]
        label = f"micro-batch {self._find_number(requests)} ({share})"
        self.announce(requests, group, label, share_numbers)
        return self._use_plans(
            requests,
            plans,
            group,
            per_node,
            planning_ms=(time.perf_counter() - started) * 1e3 / len(plans),
            source=str(share),
            is_planned_again=is_planned_again,
            in_order_imbalance=share.in_order_imbalance,
        )

    def announce(
        self,
        requests: Sequence[Request],
        group: AttentionGroup,
        label: str,
        share_numbers: Sequence[int] = (),
    ) -> list[AnnouncedDocuments]:
        """Announce settings, measurements and documents (or a share), and compare them with those
        of the other ranks. Collective.

        Args:
            requests: documents, each with the key of a plan.
            group: the ranks.
            label: text that names the micro-batch in errors.
            share_numbers: `Announcement.share_numbers`; empty without shares.

        Returns:
            The documents of all ranks for each request; empty for shares.

        Raises:
            DistCADesyncError: if ranks do not agree.
        """
        self._announcement_count += 1
        keys = dict.fromkeys(key for _, key in requests)
        dtypes = tuple(self.costs.dtypes.get((key.shape, key.device), "") for key in keys)
        costs = tuple(map(self.costs.get_cost, keys))
        settings = collect_shared_settings(self.config, costs, dtypes)
        # Announce only earlier micro-batches, because this one is still running.
        number = self._find_number(requests)
        earlier = [plan for plan in self.history.unmeasured_plans if plan.number < number]
        plans = earlier[:_MOST_MEASURED]
        row = Announcement(
            count=self._announcement_count,
            settings=hash_settings(settings),
            exchanges=self._meter.dispatches + self._meter.returns - self._exchanges_before,
            checksum=0 if group.data is None else group.data.checksum,
            figures=[plan.own_measurement for plan in plans],
            documents=[] if share_numbers else [(batch, key.nano) for batch, key in requests],
            share_numbers=share_numbers,
        ).to_row()

        announced = Announcements.from_rows(group.gather(row, activity=f"planning {label}"))
        documents = check_agreement(announced, settings, group, label)
        self._learn(announced.figures, plans, group)
        return documents

    @mark_joint_step
    def gather_measurements(self, group: AttentionGroup) -> None:
        """Wait for the device, and gather the measurements of all ranks so far. Collective."""
        if self._is_over:
            return
        self._is_over = True
        self.history.end_micro_batch()
        while not self._meter.is_finished:
            self._meter.running[0].end.synchronize()
        plans = self.history.unmeasured_plans
        row = np.array([plan.own_measurement for plan in plans], dtype=np.int64).reshape(-1)
        activity = f"gathering what ranks measured up to micro-batch {self.number}"
        rows = group.gather(row, activity=activity)
        counts = [len(other) // FIGURE_COUNT for other in rows]
        if len(set(counts)) == 1:
            figures = np.stack(rows).reshape(len(rows), -1, FIGURE_COUNT)
            self._learn(figures, plans, group)
        elif group.rank == 0:
            _log.warning(
                "measurements up to micro-batch %d are ignored, because ranks used different"
                " numbers of plans (%s). Every rank must run the same layers in each micro-batch.",
                self.number,
                ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)),
            )

    @staticmethod
    @contextmanager
    def report_errors(group: AttentionGroup, activity: str) -> Iterator[None]:
        """Return a context manager that reports errors to ranks that would otherwise wait.

        Errors about the batch of this rank also name the rank.
        """
        try:
            with group.report_errors(activity):
                yield
        except (LayoutError, UnsupportedError) as error:
            raise type(error)(f"rank {group.ranks[group.rank]}: {error}") from error

    def _find_number(self, requests: Sequence[Request]) -> int:
        """Return the number of the micro-batch that the requested plans are for.

        This is the next number if the last micro-batch is over, or if the last micro-batch already
        uses a plan with one of these keys.
        """
        is_next = self._is_over or not self._used_keys.isdisjoint(key for _, key in requests)
        return self.number + is_next

    def _make_job(
        self,
        key: PlanKey,
        size: int,
        per_node: int | None,
        has_tokens: tuple[bool, ...] | None = None,
    ) -> PlanJob:
        """Make the inputs of a plan, from its key and the current settings and rates."""
        ranks = self.costs.make_ranks(size, per_node)
        return PlanJob.from_settings(key, self.costs.get_cost(key), self.config, ranks, has_tokens)

    def _use_plans(
        self,
        requests: Sequence[Request],
        plans: Sequence[Plan],
        group: AttentionGroup,
        per_node: int | None,
        **facts: Any,
    ) -> list[MicroBatchPlan]:
        """Begin to use plans in a micro-batch, and record them.

        Args:
            requests: the requests that the plans answer.
            plans: one plan for each request.
            group: the ranks.
            per_node: number of ranks per node that the plans assume; None if the plans treat all
                ranks alike.
            facts: further attributes of each `MicroBatchPlan`.
        """
        number = self._find_number(requests)
        if number > self.number:
            self._used_keys.clear()
        self.number, self._is_over = number, False
        used = []
        for (_, key), plan in zip(requests, plans, strict=True):
            self._used_keys.add(key)
            cost = self.costs.get_cost(key)
            planned = MicroBatchPlan(
                key,
                plan,
                number,
                cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads),
                self.costs.make_ranks(plan.layout.world_size, per_node),
                Meter(self._meter),
                has_tokens=group.has_tokens,
                **facts,
            )
            self._warn_above_bound(planned, group)
            self.history.record_plan(planned)
            used.append(planned)
        return used

    def _learn(
        self, figures: IntArray, plans: Sequence[MicroBatchPlan], group: AttentionGroup
    ) -> None:
        """Record the measurements of all ranks, correct rates with them, and log the changes.

        `figures` is (ranks, plans, 5). If kernels of a plan were still running on some rank, the
        plan is left out, and the ranks announce its measurements again later.
        """
        measured = []
        for plan, of_ranks in zip(plans, figures.swapaxes(0, 1), strict=True):
            if of_ranks[:, 0].min() >= 0:
                self.history.record_figures(plan, of_ranks)
                measured.append(plan)
        for change in self.costs.learn_from_plans(measured, self.config):
            if group.rank == 0:
                _log.info(
                    "measured up to micro-batch %d: %s; plans are made accordingly",
                    self.number,
                    change,
                )

    def _warn_above_bound(self, used: MicroBatchPlan, group: AttentionGroup) -> None:
        """Warn if documents that span ranks need more memory than `max_transient_bytes`.

        The documents are computed anyway, because they most likely fit.
        """
        bound = self.config.max_transient_bytes
        if bound is None or not used.plan.moved:
            return
        transient = TransientBytes.from_shape(used.key.shape)
        held = count_transient_bytes(used.plan, transient)[group.rank]
        if held > bound:
            warnings.warn(
                f"rank {group.ranks[group.rank]} needs about {held} transient bytes for documents"
                f" that span ranks, more than max_transient_bytes={bound}. These documents"
                " are computed anyway. Raise the bound, or cut documents so that each lies on one"
                " rank.",
                stacklevel=2,
            )


def _shorten_digest(plan: Plan) -> int:
    """Return the first 60 bits of a plan's digest as a number."""
    return int(plan.digest[:15], 16)
