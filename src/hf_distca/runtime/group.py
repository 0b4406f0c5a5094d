"""The ranks that share core attention, with a communicator for tensors and a CPU communicator for
planning.
"""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.borrowed import get_timeout
from hf_distca.errors import ConfigError, DistCADesyncError
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.listener import start_polling
from hf_distca.runtime.members import (
    NOT_ALL_CAME,
    Members,
    find_node_number,
    find_ranks_per_node,
    make_communicator,
)
from hf_distca.runtime.monitor import (
    NO_NAMES,
    FailureMonitor,
    compute_reserved_seconds,
)
from hf_distca.schedule.layout import IntArray

_log = logging.getLogger("hf_distca")

P = ParamSpec("P")
R = TypeVar("R")
Phase = Literal["begin", "serve", "finish"]

_UNEQUAL_NODES = (
    "%d ranks share attention on %d nodes, but nodes differ in size or their ranks do not follow"
    " each other. Links inside nodes are therefore assumed to be as slow as links between nodes."
)


class GroupObserver(Protocol):
    """Observer of the steps that all ranks of a group take at the same point."""

    def make_group(
        self,
        members: dist.ProcessGroup | Members | None,
        size: int | None,
        timeout_seconds: float | None,
    ) -> AttentionGroup:
        """Make an attention group. For the arguments see `AttentionGroup.find_or_create`."""

    def take_step(self, step: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Run a step that is marked by `mark_joint_step`, and return its result."""

    def enter_phase(self, call: Any, phase: Phase, dtype: torch.dtype | None = None) -> None:
        """React when a `LayerExchange` is about to launch messages, or to wait for them.

        In phase "begin", `dtype` is the dtype of q.
        """


def mark_joint_step(step: Callable[P, R]) -> Callable[P, R]:
    """Mark a step that all ranks of a group take at the same point.

    If `AttentionGroup.observer` is set, the observer runs the step.
    """

    @wraps(step)
    def take(*args: P.args, **options: P.kwargs) -> R:
        observer = AttentionGroup.observer
        return (
            step(*args, **options)
            if observer is None
            else observer.take_step(step, *args, **options)
        )

    return take


def get_current_world() -> dist.ProcessGroup | None:
    """Return the default process group of torch.distributed; None if it is not initialized."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """The ranks that share core attention, seen from one of them.

    Collective methods raise `DistCADesyncError` if a rank does not call them in time. Their
    argument `activity` says in errors what the ranks were doing.

    Attributes:
        observer: observer of all groups of this process, or None.
        inline_row_capacity: number of integers of a row that the first step of `gather` sends. If a
            row is longer, a second step sends the rest.
        ranks: global ranks of the group. Everywhere else in the package, "rank" is an index into
            this tuple.
        rank: index of this process in `ranks`.
        data: communicator of dispatch and return; None in a group of one.
        control: gloo communicator for planning; None in a group of one.
        monitor: tells the other ranks when this rank gives up; None in a group of one.
        has_tokens: for each rank, whether it trains and holds tokens. None if all ranks do.
        timeout_seconds: how long a rank waits for other ranks.
        per_node: number n of ranks per node, if the nodes are the ranks [0, n), [n, 2n), ... of the
            group; None if they are not, or if the nodes are unknown.
    """

    observer: ClassVar[GroupObserver | None] = None
    inline_row_capacity: ClassVar[int] = 128
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    data: Channel | None = None
    control: dist.ProcessGroup | None = None
    monitor: FailureMonitor | None = None
    has_tokens: tuple[bool, ...] | None = None
    timeout_seconds: float = math.inf
    per_node: int | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def node_ranks(self) -> range:
        """The ranks on this rank's node, including itself; empty if `per_node` is None."""
        first = self.rank - self.rank % (self.per_node or 1)
        return range(first, first + (self.per_node or 0))

    @classmethod
    def find_or_create(
        cls,
        members: dist.ProcessGroup | Members | None = None,
        *,
        timeout_seconds: float | None = None,
        size: int | None = None,
    ) -> AttentionGroup:
        """Return the group of these ranks. Create it if it does not exist, or if a rank has left
        it.

        Every member must call this at the same point. Raises the errors of `create`. Groups are
        reused because communicators cost threads and connections, and because torch cannot replace
        a communicator with another one of the same ranks.

        Args:
            members, timeout_seconds: as for `create`. A different timeout makes a different group.
            size: number of ranks of a group, if the members are divided into several groups of
                neighbours.
        """
        world = get_current_world()
        # Forget the groups of earlier worlds: torch.distributed may have been initialized again.
        for key in [key for key in _groups if key[0] is not world]:
            del _groups[key]
        if world is None:
            return cls()
        timeout_seconds = timeout_seconds or get_timeout(world).total_seconds()
        who = (members if isinstance(members, Members) else Members.from_group(members)).subset(
            size
        )
        group = _groups.get((world, who, timeout_seconds))
        if group is None or group.has_left or not _has_all_ranks(group):
            group = _groups[world, who, timeout_seconds] = cls.create(
                who, timeout_seconds=timeout_seconds
            )
        return group

    @classmethod
    def create(
        cls,
        members: dist.ProcessGroup | Members | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> AttentionGroup:
        """Build the group of these ranks.

        Every member, and no other rank, must call this at the same point. The group gets separate
        communicators, so its exchanges never mix with those of DDP, FSDP or the user. Without
        torch.distributed, or in a world of one, the group has only this process.

        Args:
            members: a process group, or `Members` that names ranks; by default the world.
            timeout_seconds: how long a rank waits for the others; by default the timeout of the
                world's collectives.

        Raises:
            ConfigError: if this rank is not a member.
            DistCADesyncError: if a member does not come in time.
        """
        if get_current_world() is None:
            return cls()
        timeout_seconds = timeout_seconds or get_timeout(None).total_seconds()
        who = members if isinstance(members, Members) else Members.from_group(members)
        ranks = tuple(sorted(who.ranks))
        rank = dist.get_rank()
        if rank not in ranks:
            raise ConfigError(
                f"rank {rank} is not in its attention group {ranks}. Pass each rank the group that"
                " it belongs to."
            )
        if len(ranks) == 1:
            return cls(ranks)
        group = cls(ranks, ranks.index(rank), timeout_seconds=timeout_seconds)
        return group.with_communicators(
            lambda timeout: (
                make_communicator(ranks, who.backend, timeout, "distca-data"),
                make_communicator(ranks, "gloo", timeout, "distca-control"),
            )
        )

    def with_communicators(
        self,
        connect: Callable[[datetime.timedelta], tuple[dist.ProcessGroup, dist.ProcessGroup]],
        names: Mapping[int, str] = NO_NAMES,
    ) -> AttentionGroup:
        """Return this group with communicators. Every rank of the group must call this.

        Raises the errors of `create`.

        Args:
            connect: makes the communicators for tensors and for planning with a given timeout.
            names: names, for errors, of ranks outside the world of torch.distributed.
        """
        ranks, rank, seconds = self.ranks, self.rank, self.timeout_seconds
        try:
            data, control = connect(
                datetime.timedelta(seconds=seconds - compute_reserved_seconds(seconds))
            )
            nodes = torch.empty(len(ranks), dtype=torch.int64, device="cpu")
            dist.all_to_all_single(nodes, torch.full_like(nodes, find_node_number()), group=control)
            # Without this barrier, a rank that fails right after it connected would break
            # connections that other ranks are still making.
            _wait_for_all(control)
        except RuntimeError as error:
            raise DistCADesyncError(
                f"rank {ranks[rank]} waited up to {seconds:g} s for ranks {ranks} while making"
                f" their attention group, and not all came ({error}). {NOT_ALL_CAME}"
            ) from error
        start_polling(monitor := FailureMonitor(ranks, rank, seconds, (data, control), names))
        per_node = find_ranks_per_node(nodes.tolist())
        if per_node is None and rank == 0:
            _log.warning(_UNEQUAL_NODES, len(ranks), len(set(nodes.tolist())))
        return replace(
            self,
            data=Channel(data, monitor, seconds),
            control=control,
            monitor=monitor,
            per_node=per_node,
        )

    @property
    def has_left(self) -> bool:
        """True if this rank has left the group, because it or another rank failed."""
        return self.monitor is not None and self.monitor.has_left

    def report_errors(self, activity: str) -> AbstractContextManager[None]:
        """Return a context manager that reports exceptions, so that other ranks do not wait."""
        return nullcontext() if self.monitor is None else self.monitor.report_errors(activity)

    def gather(self, row: IntArray, *, activity: str) -> list[IntArray]:
        """Gather one row of integers, a flat int64 array, from every rank, in rank order.

        Rows may differ in length. Collective.
        """
        inline, rest = np.split(row, [self.inline_row_capacity])
        padded = np.zeros(1 + self.inline_row_capacity, dtype=np.int64)
        padded[0] = len(row)
        padded[1 : 1 + len(inline)] = inline
        first = self._send_to_all(padded, [len(padded)] * self.size, activity)
        rows = [numbers[1 : 1 + numbers[0]] for numbers in first]
        more = [max(int(numbers[0]) - self.inline_row_capacity, 0) for numbers in first]
        if not any(more):
            return rows
        rests = self._send_to_all(rest, more, activity)
        return [np.concatenate(pair) for pair in zip(rows, rests, strict=True)]

    def gather_text(self, text: str, *, activity: str) -> list[str]:
        """Gather a text from every rank, in rank order. Collective."""
        row = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        return [
            numbers.astype(np.uint8).tobytes().decode()
            for numbers in self.gather(row, activity=activity)
        ]

    def gather_same_length(self, row: IntArray, *, activity: str) -> list[IntArray]:
        """Gather a row of integers that has the same length on all ranks. See `gather`."""
        return self._send_to_all(row, [len(row)] * self.size, activity)

    def _send_to_all(self, row: IntArray, receive: Sequence[int], activity: str) -> list[IntArray]:
        """Send a row to every rank, and return every rank's row. `receive` has the lengths of these
        rows.
        """
        if self.control is None or self.monitor is None:
            return [row]
        received = torch.empty(sum(receive), dtype=torch.int64, device="cpu")
        sent = torch.from_numpy(row).repeat(self.size)
        with self.monitor.watch_collective(activity):
            # Over gloo an all-to-all takes one step, but an all-gather takes a step for each rank.
            dist.all_to_all_single(
                received, sent, list(receive), [len(row)] * self.size, group=self.control
            )
        return np.split(received.numpy(), np.cumsum(receive)[:-1])


# The groups that `AttentionGroup.find_or_create` made in the current world.
_groups: dict[tuple[dist.ProcessGroup, Members, float], AttentionGroup] = {}


def _wait_for_all(control: dist.ProcessGroup) -> None:
    """Wait until all ranks have called this function."""
    dist.all_reduce(torch.zeros(1, device="cpu"), group=control)


def _has_all_ranks(group: AttentionGroup) -> bool:
    """Return whether all ranks are still in the group. Collective."""
    if group.control is None or group.monitor is None:
        return True
    try:
        _wait_for_all(group.control)
    except RuntimeError as error:
        if not group.monitor.leave_after_others():
            raise group.monitor.give_up("making the attention group again", error) from error
        return False
    return True
