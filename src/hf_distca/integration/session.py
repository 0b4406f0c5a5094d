"""`Session`: state that a process keeps between micro-batches.

A `LayerPlanner` uses the session to make plans and routes. Plans and routes are kept in the
`ForwardBatch` of each forward, not here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hf_distca.agreement.planner import Planner
from hf_distca.borrowed import get_mesh, get_timeout
from hf_distca.config import DistCAConfig, show_value
from hf_distca.errors import ConfigError
from hf_distca.integration.processes import (
    choose_group_size,
    find_data_parallel_ranks,
    find_members,
    print_if_slow,
)
from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.group import AttentionGroup, get_current_world
from hf_distca.runtime.members import Members, check_group_size
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape


class Session:
    """State of core attention in one process.

    `current_session` returns the session in use; `configure` makes a new one.

    Attributes:
        meter: counts the work of the process.
        planner: makes the plans, and keeps their settings and figures.
        start_time: time at which the session was made, from `time.perf_counter`.
        given_group: the group that the user gave; None if distca finds it.
        kernel_names: names of the attention kernels that were used, in the order of their first
            use.
        has_summary: whether the summary of the run was printed.
        times_local_work: whether kernels are timed on CUDA even if no other rank takes part. It
            becomes True when a user reads figures.
    """

    def __init__(
        self, config: DistCAConfig, members: dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        if members is not None and not isinstance(members, (dist.ProcessGroup, DeviceMesh)):
            raise ConfigError(
                f"group={show_value(members)}: give a process group (torch.distributed.new_group)"
                " or a device mesh, or leave group out."
            )
        self.meter = Meter()
        self.planner = Planner(config, self.meter)
        self.start_time = time.perf_counter()
        self.given_group = members
        self.kernel_names: dict[str, None] = {}
        self.has_summary = self.times_local_work = False
        self._members = members
        self._group: AttentionGroup | None = None
        self._trainers: AttentionGroup | None = None  # made by `join_trainers`
        self._world: object = None

    @property
    def config(self) -> DistCAConfig:
        """Settings in use."""
        return self.planner.config

    @config.setter
    def config(self, config: DistCAConfig) -> None:
        self.planner.config = config

    def join_group(self) -> AttentionGroup:
        """Join the attention group, and return it. The group is made at the first call, and again
        at the first call after torch.distributed starts or restarts. So all ranks of the group must
        call this.
        """
        world = get_current_world()
        if self._group is None or world is not self._world:
            members = (
                find_data_parallel_ranks(self._members)
                if isinstance(self._members, DeviceMesh)
                else self._members
            )
            if members is None and world is not None:
                members = find_members()
            with print_if_slow("making the attention group, which waits for all its ranks,"):
                size = None if world is None else choose_group_size(members, self.config)
                self._group = self._make_group(members, size)
            self._trainers, self._world = None, world
            self.planner.join_world()
        return self._group

    def join_trainers(self) -> AttentionGroup:
        """Join the group of the ranks that hold tokens, and return it. All these ranks must call
        this, because the first call makes the group.
        """
        group = self.join_group()
        if group.has_tokens is None:
            return group
        if self._trainers is None:
            self._trainers = AttentionGroup.find_or_create(
                timeout_seconds=self.config.timeout_seconds
            )
        return self._trainers

    def _make_group(
        self, members: dist.ProcessGroup | Members | None, size: int | None
    ) -> AttentionGroup:
        observer, seconds = AttentionGroup.observer, self.config.timeout_seconds
        if observer is None:
            if get_current_world() is not None:
                who = members if isinstance(members, Members) else Members.from_group(members)
                check_group_size(who, size, seconds or get_timeout(None).total_seconds())
            return AttentionGroup.find_or_create(members, timeout_seconds=seconds, size=size)
        return observer.make_group(members, size, seconds)

    def adopt_group(self, group: AttentionGroup) -> None:
        """Use a group that was made elsewhere, and reset the counts."""
        self._group = group
        self._world = get_current_world()
        self.planner.reset()

    @property
    def rank_count(self) -> int:
        """Number of ranks of the attention group; 1 if the group was not made. The number stays the
        same after torch.distributed ends.
        """
        return 1 if self._group is None else self._group.size

    @property
    def node_count(self) -> int:
        """Number of nodes of the attention group; 0 if the number is not known, for example because
        nodes have different numbers of ranks.
        """
        group = self._group
        if group is None or group.size == 1:
            return 1
        return 0 if group.per_node is None else group.size // group.per_node

    @property
    def is_first_rank(self) -> bool:
        """True on global rank 0, which alone reports facts that are the same on all ranks."""
        if self._group is None:
            return get_current_world() is None or dist.get_rank() == 0
        return self._group.ranks[self._group.rank] == 0

    def report_errors(self, activity: str) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception to the other ranks of the group, which
        may already wait for this rank. It does nothing if the group was not made.
        """
        return nullcontext() if self._group is None else self._group.report_errors(activity)

    def gather_measurements(self) -> None:
        """Exchange all measurements so far between the ranks of the group. Collective."""
        group = self._group
        if (
            group is not None
            and group.size > 1
            and not group.has_left
            and self._world is get_current_world()
        ):
            self.planner.gather_measurements(group)

    def find_mesh(self, models: Iterator[PreTrainedModel]) -> None:
        """If the ranks of the attention group are not known yet, take the ranks in the mesh of the
        first model that has a mesh.
        """
        if self._members is None and self._group is None:
            self._members = next(
                (mesh for model in models if (mesh := get_mesh(model)) is not None), None
            )

    def choose_kernel(
        self, query: torch.Tensor, shape: AttentionShape, scores: ScoreOptions
    ) -> Kernel:
        """Choose the kernel for layers of this shape, on the device and in the dtype of `query`."""
        widths = shape.head_dim, shape.value_head_dim
        case = KernelRequest(query.device, query.dtype, *widths, scores, shape.heads_per_key_head)
        kernel = select_kernel(self.config.kernel, case)
        self.kernel_names[kernel.name] = None
        return kernel
