"""`Planner`: makes the same plans of announced documents on all ranks.

Several plans can be requested at once, as for two nano-batches: they take the same two small
collectives as one plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from hf_distca.agreement.announce import PlanKey, Request, build_layout, check_equal
from hf_distca.agreement.batch_plan import BatchPlan
from hf_distca.agreement.dealt_share import DealtShare, PlanJob, register_share_planner
from hf_distca.agreement.history import History
from hf_distca.agreement.world_progress import Progress
from hf_distca.config import DistCAConfig
from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.plan import Plan

_log = logging.getLogger("hf_distca")


class Planner:
    """Plans micro-batches together with the other ranks, and collects measurements.

    Collective methods raise `DistCADesyncError` if ranks do not agree, or do not all take part.

    Attributes:
        config: the settings; they may change between micro-batches, on all ranks at once.
        history: estimates and measurements of micro-batches.
    """

    def __init__(self, config: DistCAConfig, meter: Meter) -> None:
        self.config = config
        self.history = History()
        self._meter = meter
        self._world = get_current_world()
        self._progress = Progress(meter, self.history)

    def resume_progress(self) -> Progress:
        """Return the progress of ranks in the current world of torch.distributed, or in the last
        one.

        In another world than before it begins anew. No other rank is asked.
        """
        world = get_current_world()
        if world is not None and world is not self._world:
            if self._world is not None:
                self.reset()
            self._world = world
        return self._progress

    def reset(self) -> None:
        """Start again with other ranks. Plans that were made before may still be used."""
        self.history.reset()
        self._progress = Progress(self._meter, self.history)

    @mark_joint_step
    def gather_measurements(self, group: AttentionGroup) -> None:
        """Gather the measurements of all ranks up to here. Collective."""
        self.resume_progress().gather_measurements(group)

    def plan(self, requests: Sequence[Request], group: AttentionGroup) -> list[BatchPlan]:
        """Plan this rank's documents together with those of the other ranks.

        All ranks must request the same plans. Collective, except for shares of dealt batches: their
        announcements are compared while ranks compute.

        Args:
            requests: documents, each with the key of a plan.
            group: the ranks.

        Returns:
            One plan for each request, in their order.

        Raises:
            LayoutError: if a share is not for this rank of this group.
        """
        shares = [documents.dealt_share for documents, _ in requests if documents.dealt_share]
        if len(shares) == len(requests):
            return self.plan_shares(shares, requests, group)
        return self.plan_documents(requests, group)

    @mark_joint_step
    def plan_documents(self, requests: Sequence[Request], group: AttentionGroup) -> list[BatchPlan]:
        """Announce documents, plan them, and compare the plans between ranks: two collectives,
        however many plans there are.
        """
        started = time.perf_counter()
        keys = [key for _, key in requests]
        progress = self.resume_progress()
        place = f"micro-batch {progress.find_number(keys)}"
        announced = progress.announce_requests(requests, group, place, self.config)
        plans = []
        for batch, key in zip(announced, keys, strict=True):
            job = self._make_job(key, group.size, group.per_node)
            plans.append(balance(build_layout(batch), job.cost, job.config, job.ranks))
        # Plans come from equal inputs, but an exchange with unequal plans would hang.
        digests = np.array([_shorten_digest(plan) for plan in plans], dtype=np.int64)
        doing = f"comparing plans of {place}"
        if not group.is_equal_on_all(digests, doing=doing):
            for column in np.stack(group.gather(digests, doing=doing)).T:
                check_equal(
                    group,
                    column,
                    "plans for the same documents",
                    place,
                    "use one version of hf_distca and numpy",
                )
        planning_ms = (time.perf_counter() - started) * 1e3 / max(len(plans), 1)
        return [
            BatchPlan(key, plan, planning_ms, group.per_node, group.holds)
            for key, plan in zip(keys, plans, strict=True)
        ]

    @mark_joint_step
    def plan_shares(
        self, shares: Sequence[DealtShare], requests: Sequence[Request], group: AttentionGroup
    ) -> list[BatchPlan]:
        """Make plans from the shares of the requests, which need no other rank, and announce them
        without waiting.
        """
        started = time.perf_counter()
        keys = [key for _, key in requests]
        pairs = list(zip(shares, keys, strict=True))
        for share, key in pairs:
            share.check_group(group)
            self._register_kind(share, key, group)
        plans = [share.plan(self._make_share_job(key, share, group)) for share, key in pairs]
        planning_ms = (time.perf_counter() - started) * 1e3 / len(plans)
        per_node = shares[0].per_node if group.holds is None else group.per_node
        batch_plans = [
            BatchPlan(
                key,
                plan,
                planning_ms,
                per_node,
                group.holds,
                str(share),
                share.pop_local_plan_count(),
                share.in_order,
            )
            for key, plan, share in zip(keys, plans, shares, strict=True)
        ]
        progress = self.resume_progress()
        place = f"micro-batch {progress.find_number(keys)} ({shares[0]})"
        share_numbers = [*shares[0].batch_id, shares[0].digest, *map(_shorten_digest, plans)]
        progress.announce_share(share_numbers, requests, group, place, self.config)
        return batch_plans

    def _register_kind(self, share: DealtShare, key: PlanKey, group: AttentionGroup) -> None:
        """Register a kind of layer, so that fetched shares are planned for it.

        Warn if the loader's plans do not fit the first one.
        """
        kinds = self.resume_progress().share_kinds
        reason = None if kinds else share.replanning_reason(key, self.config)
        if reason is not None and group.rank == 0:
            _log.warning(
                "shares were planned for other settings than those of now, so this process plans "
                "each of them again when it is fetched: %s. Give document_shares the dtype that "
                "attention computes in, and the config of the run.",
                reason,
            )
        kinds[key] = group
        register_share_planner(self._plan_fetched_share)

    def _plan_fetched_share(self, share: DealtShare) -> None:
        """Start to plan a fetched share for the registered kinds of layers.

        Nothing is left to do where the loader's plans are for the current rates and settings.
        """
        is_whole = share.first_nano_tokens is None
        kinds = tuple(self.resume_progress().share_kinds.items())
        groups = {key._replace(nano=0) if is_whole else key: group for key, group in kinds}
        share.plan_in_background(
            [self._make_share_job(key, share, group) for key, group in groups.items()]
        )

    def _make_share_job(self, key: PlanKey, share: DealtShare, group: AttentionGroup) -> PlanJob:
        """Make the current inputs of a plan of a share.

        It is for all ranks of the group, if this has others than those that it is dealt to.
        """
        if group.holds is None:
            return self._make_job(key, share.ranks, share.per_node)
        return self._make_job(key, group.size, group.per_node, group.holds)

    def _make_job(
        self,
        key: PlanKey,
        size: int,
        per_node: int | None,
        holds: tuple[bool, ...] | None = None,
    ) -> PlanJob:
        """Make the current inputs of a plan with this key, for a group of this size."""
        costs = self.resume_progress().costs
        ranks = costs.make_ranks(size, per_node)
        return PlanJob.from_settings(key, costs.get_cost(key), self.config, ranks, holds)


def get_current_world() -> object:
    """Return the world of torch.distributed; None before it starts and after it has ended."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


def _shorten_digest(plan: Plan) -> int:
    """Return the first 60 bits of a plan's digest as a number."""
    return int(plan.digest[:15], 16)
