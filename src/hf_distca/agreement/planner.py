"""`Planner`: makes the plans of announced documents, on all ranks
alike, and collects their measurements.

Several plans can be requested at once, for two nano-batches or for the micro-batches of an
optimizer step: they take the same two small collectives as one. Making them, which is most of the
work, can run in the background of training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from hf_distca.agreement.announce import PlanKey, Request, check_equal, layout_of
from hf_distca.agreement.dealt import Dealt, PlanJob, plan_fetched
from hf_distca.agreement.history import History
from hf_distca.agreement.planned import Planned
from hf_distca.agreement.world_progress import Progress
from hf_distca.config import DistCAConfig
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.monitor import AwaitedThread
from hf_distca.schedule.balance import balance
from hf_distca.schedule.plan import Plan

__all__ = ["Planner", "Planning", "current_world"]

_log = logging.getLogger("hf_distca")


@dataclass(eq=False)
class Planning:
    """Plans that are being made.

    Attributes:
        place: description of the plans, for errors.
        group: the ranks that make the plans.
        plans: the plans, in the order of requests.
        serial: number by which servers of a pool identify it.
    """

    place: str
    group: AttentionGroup
    plans: Future[list[Planned]] = field(default_factory=Future)
    serial: int = 0


class Planner:
    """Plans micro-batches together with the other ranks, and
    collects their estimates and measurements.

    Methods that need other ranks raise `DistCADesyncError` if ranks do not agree or do not all
    come.

    Attributes:
        config: the settings; they may change between micro-batches, on all ranks at once.
        history: planned and measured figures.
    """

    def __init__(self, config: DistCAConfig, meter: Meter) -> None:
        self.config = config
        self.history = History()
        self._meter = meter
        self._world = current_world()
        self._progress = Progress(meter, self.history)
        self._pooled: AttentionGroup | None = None  # a group with servers, once shares were planned for it

    def resume_progress(self) -> Progress:
        """Return the progress of ranks in the current world of torch.distributed, or in the last one.

        In another world than before it begins anew. No other rank is asked.
        """
        world = current_world()
        if world is not None and world is not self._world:
            if self._world is not None:
                self.begin_anew()
            self._world = world
        return self._progress

    def begin_anew(self) -> None:
        """Start again with other ranks. Plans that were made before may still be used."""
        self.history.begin_anew()
        self._progress = Progress(self._meter, self.history)

    def plan(self, requests: Sequence[Request], group: AttentionGroup) -> list[Planned]:
        """Plan this rank's documents together with those of the other
        ranks, which must request the same plans.

        Args:
            requests: documents, each with the key of a plan; plans made ahead that travel with
                documents are used. With shares of a dealt batch no rank waits for another:
                announcements are compared while ranks compute.
            group: the ranks.

        Raises:
            LayoutError: if a share is not for this rank of this group.
        """
        plans: list[Planned | None] = [documents.ahead.pop(key, None) for documents, key in requests]
        ahead = [planned for planned in plans if planned is not None and planned.config == self.config]
        ahead = [planned for planned in ahead if planned.plan.layout.world_size == group.size]  # a server may have left since
        if len(ahead) == len(requests):
            return ahead
        shares = [documents.dealt for documents, _ in requests if documents.dealt is not None]
        if len(shares) == len(requests):
            return self._of_shares(shares, requests, group)
        return self.finish(self.begin(requests, group))

    def begin(
        self, requests: Sequence[Request], group: AttentionGroup, place: str | None = None, *, beside: bool = False
    ) -> Planning:
        """Announce documents, with one collective, and plan them: before this thread
        continues, or in the background (`beside`).
        """
        started, config, keys = time.perf_counter(), self.config, [key for _, key in requests]
        place = place or f"micro-batch {self.resume_progress().number_of(keys)}"
        planning = Planning(place, group)
        planning.serial = group.number(planning)
        group.notify_servers("begin_plans", planning=planning.serial, requests=requests, place=place, beside=beside)
        layouts = [layout_of(stated) for stated in self.resume_progress().announce(requests, group, place, config)]
        jobs = self._jobs(keys, group.size, group.per_node)

        def make() -> list[Planned]:
            plans = [balance(layout, job.cost, job.config, job.ranks) for layout, job in zip(layouts, jobs, strict=True)]
            taken = (time.perf_counter() - started) * 1e3 / max(len(plans), 1)
            asked = zip(requests, plans, strict=True)
            return [
                Planned(key, plan, config, documents.rows, taken, per_node=group.per_node, holds=group.holds)
                for (documents, key), plan in asked
            ]

        if beside:
            AwaitedThread(lambda: _fulfil(planning.plans, make), "plans")
        else:
            _fulfil(planning.plans, make)
        return planning

    def finish(self, planning: Planning) -> list[Planned]:
        """Return the plans in the order of their requests, once they are made and
        all ranks have the same. One collective.
        """
        plans, group, place, started = planning.plans.result(), planning.group, planning.place, time.perf_counter()
        group.notify_servers("finish_plans", planning=planning.serial, plans=_serials(plans, group))
        # Plans come from equal inputs, but an exchange with unequal plans would hang.
        digests, doing = np.array([_number(planned.plan) for planned in plans], dtype=np.int64), f"comparing plans of {place}"
        if not group.all_equal(digests, doing=doing):
            for column in np.stack(group.gather(digests, doing=doing)).T:
                check_equal(group, column, "plans for the same documents", place, "use one version of hf_distca and numpy")
        for planned in plans:
            planned.planning_ms += (time.perf_counter() - started) * 1e3 / len(plans)
        return plans

    def _of_shares(self, shares: Sequence[Dealt], requests: Sequence[Request], group: AttentionGroup) -> list[Planned]:
        """Make plans from shares, which need no other rank."""
        started, keys = time.perf_counter(), [key for _, key in requests]
        self._pooled = group if group.holds is not None else None
        for dealt, key in zip(shares, keys, strict=True):
            dealt.check_is_for(group)
            self._meet_kind(dealt, key, group)
        jobs = self._jobs_of_shares(keys, shares[0])
        plans = [dealt.plan(job) for dealt, job in zip(shares, jobs, strict=True)]
        taken = (time.perf_counter() - started) * 1e3 / len(plans)
        per_node = shares[0].per_node if self._pooled is None else group.per_node
        planned = [
            Planned(key, plan, self.config, documents.rows, taken, str(dealt), per_node, group.holds, dealt.take_planned_here())
            for (documents, key), plan, dealt in zip(requests, plans, shares, strict=True)
        ]
        group.notify_servers("plan_shares", plans=_serials(planned, group), shares=shares, requests=requests)
        place = f"micro-batch {self.resume_progress().number_of(keys)} ({shares[0]})"
        dealt_numbers = [*shares[0].batch, shares[0].documents, *map(_number, plans)]
        self.resume_progress().announce_async(dealt_numbers, keys, group, place, self.config)
        return planned

    def _meet_kind(self, dealt: Dealt, key: PlanKey, group: AttentionGroup) -> None:
        """Note a kind of layer, so that fetched shares are planned for it, and
        warn if the loader's plans do not fit.
        """
        kinds = self.resume_progress().kinds_of_shares
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
        """Start to plan a fetched share for the known kinds of layers, if its
        plans are for other rates or settings.
        """
        whole = dealt.first_tokens is None
        keys = dict.fromkeys(key._replace(nano=0) if whole else key for key in tuple(self.resume_progress().kinds_of_shares))
        dealt.plan_beside(self._jobs_of_shares(keys, dealt))

    def _jobs_of_shares(self, keys: Iterable[PlanKey], dealt: Dealt) -> list[PlanJob]:
        """Return the current inputs of plans of a share, for the ranks it is dealt to
        and the servers of a pool, if there is one.
        """
        if self._pooled is None:
            return self._jobs(keys, dealt.ranks, dealt.per_node)
        return self._jobs(keys, self._pooled.size, self._pooled.per_node, self._pooled.holds)

    def _jobs(
        self, keys: Iterable[PlanKey], size: int, per_node: int | None, holds: tuple[bool, ...] | None = None
    ) -> list[PlanJob]:
        """Return the current inputs of plans with these keys, for a group of this size."""
        costs = self.resume_progress().costs
        ranks = costs.ranks(size, per_node)
        return [PlanJob.of(key, costs.of(key), self.config, ranks, holds) for key in keys]


def current_world() -> object:
    """Return the world of torch.distributed; None before it starts and after it has ended."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


def _serials(plans: Iterable[Planned], group: AttentionGroup) -> list[int]:
    """Give plans numbers by which the servers of a pool identify them."""
    serials = []
    for planned in plans:
        planned.serial = group.number(planned)
        serials.append(planned.serial)
    return serials


def _number(plan: Plan) -> int:
    """Return the first 60 bits of a plan's digest as a number."""
    return int(plan.digest[:15], 16)


def _fulfil(plans: Future[list[Planned]], make: Callable[[], list[Planned]]) -> None:
    """Make plans, or store the exception for the thread that reads them."""
    try:
        plans.set_result(make())
    except BaseException as error:
        plans.set_exception(error)
