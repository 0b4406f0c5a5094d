"""`Planner`: makes the same plans of announced documents on all ranks.

Several plans can be requested at once, as for two nano-batches: they take the same two small
collectives as one plan.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from hf_distca.agreement.announce import PlanKey, Request, check_equal
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.agreement.dealt_share import DealtShare, PlanJob
from hf_distca.agreement.group_state import GroupState
from hf_distca.config import DistCAConfig
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import TransientBytes
from hf_distca.schedule.load import count_transient_bytes
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
        self._state = GroupState(meter, self.history)

    def current_state(self) -> GroupState:
        """Return the state of ranks in the current world of torch.distributed, or in the last one.

        In another world than before it begins anew. No other rank is asked.
        """
        world = get_current_world()
        if world is not None and world is not self._world:
            if self._world is not None:
                self.reset()
            self._world = world
        return self._state

    def reset(self) -> None:
        """Start again with other ranks. Plans that were made before may still be used."""
        self.history.reset()
        self._state = GroupState(self._meter, self.history)

    @mark_joint_step
    def gather_measurements(self, group: AttentionGroup) -> None:
        """Gather the measurements of all ranks up to here. Collective."""
        self.current_state().gather_measurements(group, self.config)

    def plan(self, requests: Sequence[Request], group: AttentionGroup) -> list[MicroBatchPlan]:
        """Plan this rank's documents together with those of the other ranks.

        All ranks must request the same plans. Collective, except for shares of dealt batches: their
        announcements are compared while ranks compute.

        Args:
            requests: documents, each with the key of a plan.
            group: the ranks.

        Returns:
            One plan for each request, in their order. The micro-batch uses them from now on.

        Raises:
            LayoutError: if a share is not for this rank of this group.
        """
        shares = [documents.dealt_share for documents, _ in requests if documents.dealt_share]
        activity = f"planning for micro-batch {self.current_state().number + 1}"
        with self.report_errors(group, activity):
            if len(shares) == len(requests):  # of one batch
                return self.plan_share(shares[0], requests, group)
            return self.plan_documents(requests, group)

    @mark_joint_step
    def plan_documents(
        self, requests: Sequence[Request], group: AttentionGroup
    ) -> list[MicroBatchPlan]:
        """Announce documents, plan them, and compare the plans between ranks: two collectives,
        however many plans there are.
        """
        started = time.perf_counter()
        keys = [key for _, key in requests]
        state = self.current_state()
        label = f"micro-batch {state.find_number(keys)}"
        announced = state.announce(requests, group, label, self.config)
        plans = []
        for documents, key in zip(announced, keys, strict=True):
            job = self._make_job(key, group.size, group.per_node)
            plans.append(balance(documents.build_layout(), job.cost, job.config, job.ranks))
        # Plans come from equal inputs, but an exchange with unequal plans would hang.
        digests = np.array([_shorten_digest(plan) for plan in plans], dtype=np.int64)
        doing = f"comparing plans of {label}"
        if not group.is_equal_on_all(digests, doing=doing):
            for column in np.stack(group.gather(digests, doing=doing)).T:
                check_equal(
                    group,
                    column,
                    "plans for the same documents",
                    label,
                    "use one version of hf_distca and numpy",
                )
        return self._use_plans(keys, plans, group, started, per_node=group.per_node)

    @mark_joint_step
    def plan_share(
        self, share: DealtShare, requests: Sequence[Request], group: AttentionGroup
    ) -> list[MicroBatchPlan]:
        """Make plans from the share of the requests, which need no other rank, and announce it
        without waiting.
        """
        started = time.perf_counter()
        keys = [key for _, key in requests]
        state = self.current_state()
        label = f"micro-batch {state.find_number(keys)} ({share})"
        share.check_group(group)
        self._warn_of_other_settings(share, keys[0], group)
        size, per_node = share.ranks, share.per_node
        if group.has_tokens is not None:  # then others have a part in the plan
            size, per_node = group.size, group.per_node
        jobs = [self._make_job(key, size, per_node, group.has_tokens) for key in keys]
        is_planned_again = bool(share.plans) and not share.plans.keys() >= set(jobs)
        plans = [share.plan(job) for job in jobs]
        share_numbers = [*share.batch_id, share.digest, *map(_shorten_digest, plans)]
        state.announce(requests, group, label, self.config, share_numbers)
        return self._use_plans(
            keys,
            plans,
            group,
            started,
            per_node=per_node,
            source=str(share),
            is_planned_again=is_planned_again,
            in_order_imbalance=share.in_order_imbalance,
        )

    def _use_plans(
        self,
        keys: Sequence[PlanKey],
        plans: Sequence[Plan],
        group: AttentionGroup,
        started: float,
        **facts: Any,
    ) -> list[MicroBatchPlan]:
        """Use plans that were begun at a time of `time.perf_counter`; `facts` are further
        attributes of them.
        """
        facts["planning_ms"] = (time.perf_counter() - started) * 1e3 / max(len(plans), 1)
        facts["has_tokens"] = group.has_tokens
        state = self.current_state()
        used = [state.use_plan(*pair, **facts) for pair in zip(keys, plans, strict=True)]
        for plan in used:
            self._warn_above_bound(plan, group)
        return used

    @staticmethod
    @contextmanager
    def report_errors(group: AttentionGroup, activity: str) -> Iterator[None]:
        """Add this rank's name to errors in its batch, and report them to the ranks that would wait
        for it.
        """
        try:
            with group.report_errors(activity):
                yield
        except (LayoutError, UnsupportedError) as error:
            raise type(error)(f"rank {group.ranks[group.rank]}: {error}") from error

    def _warn_above_bound(self, used: MicroBatchPlan, group: AttentionGroup) -> None:
        """Warn if documents over ranks need more memory than the bound; they are computed all the
        same, and most likely fit.
        """
        bound = self.config.max_transient_bytes
        if bound is None or not used.plan.moved:
            return
        transient = TransientBytes.from_shape(used.key.shape)
        held = count_transient_bytes(used.plan, transient)[group.rank]
        if held > bound:
            warnings.warn(
                f"rank {group.ranks[group.rank]} needs about {held} transient bytes for documents"
                f" that span ranks, more than max_transient_bytes={bound}; they are computed all"
                " the same. Raise the bound, or cut documents so that each lies on one rank.",
                stacklevel=2,
            )

    def _warn_of_other_settings(
        self, share: DealtShare, key: PlanKey, group: AttentionGroup
    ) -> None:
        """Warn if a loader's first plans do not fit the first ones that are needed."""
        state = self.current_state()
        reason = None if state.has_shares else share.replanning_reason(key, self.config)
        state.has_shares = True
        if reason is not None and group.rank == 0:
            _log.warning(
                "shares were planned for other settings than those of now, so this process plans "
                "each of them again: %s. Give document_shares the dtype that attention computes "
                "in, and the config of the run.",
                reason,
            )

    def _make_job(
        self,
        key: PlanKey,
        size: int,
        per_node: int | None,
        has_tokens: tuple[bool, ...] | None = None,
    ) -> PlanJob:
        """Make the current inputs of a plan with this key, for a group of this size."""
        costs = self.current_state().costs
        ranks = costs.make_ranks(size, per_node)
        return PlanJob.from_settings(key, costs.get_cost(key), self.config, ranks, has_tokens)


def get_current_world() -> object:
    """Return the world of torch.distributed; None before it starts and after it has ended."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


def _shorten_digest(plan: Plan) -> int:
    """Return the first 60 bits of a plan's digest as a number."""
    return int(plan.digest[:15], 16)
