"""The ranks that share core attention: one communicator for tensors, one on the CPU for
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
    all_reduce_min,
    find_node_number,
    find_ranks_per_node,
    make_communicator,
)
from hf_distca.runtime.monitor import (
    NO_NAMES,
    AwaitedThread,
    FailureMonitor,
    compute_reserved_seconds,
)
from hf_distca.schedule.layout import IntArray

_log = logging.getLogger("hf_distca")

P = ParamSpec("P")
R = TypeVar("R")
Phase = Literal["begin", "serve", "finish"]

_UNEQUAL_NODES = (
    "%d ranks share attention on %d nodes, not equally many on each or not one node after another:"
    " links inside a node are taken to be as slow as those between nodes."
)


class GroupObserver(Protocol):
    """Observer of the steps that this rank takes together with others."""

    def make_group(
        self,
        members: dist.ProcessGroup | Members | None,
        size: int | None,
        timeout_seconds: float | None,
    ) -> AttentionGroup:
        """Make the group of a session; for arguments see `AttentionGroup.find_or_create`."""

    def take_step(self, step: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Take a step that is marked by `mark_joint_step`, and return its result."""

    def enter_phase(self, call: Any, phase: Phase, dtype: torch.dtype | None = None) -> None:
        """Hear that a `LayerExchange` enters a phase, in which it launches messages or waits for
        them; with the dtype of q when it begins.
        """


def mark_joint_step(step: Callable[P, R]) -> Callable[P, R]:
    """Mark a step that all ranks of a group take at the same point; `AttentionGroup.observer` hears
    of it.
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
    """Return the world of torch.distributed; None before it starts and after it has ended."""
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """The ranks that share core attention, seen from one of them.

    Methods that all ranks call together take a description in `doing`, and raise
    `DistCADesyncError` if not every rank comes in time.

    Attributes:
        observer: observer of all groups of this process; None for none.
        inline_row_capacity: numbers of a row that travel in the first step of `gather`; a longer
            row takes a second step, which `gather_async` does not have.
        ranks: their global ranks. Everywhere else in the package, "rank" is an index into this
            tuple.
        rank: this process.
        data: communicator of dispatch and return, None in a group of one.
        control: gloo communicator on which layouts travel, None in a group of one.
        monitor: tells the others when this rank gives up, None in a group of one.
        has_tokens: for each rank, whether it trains and so holds tokens. None if all do.
        timeout_seconds: how long a rank waits for the others, where there are any.
        per_node: n, if ranks [0, n), [n, 2n), ... of the group are nodes; None if they are not, or
            if nodes are unknown.
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
    def is_near(self) -> range:
        """The ranks of this one's node, itself among them; none if nodes are not told apart."""
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
        """Return the group of these ranks: the one made before, if no rank has left it, or else a
        new one from `create`.

        Every member must call it at the same point, as for `create`, and errors are the same.
        Communicators cost threads and connections, and torch cannot replace one by another of the
        same ranks.

        Args:
            members, timeout_seconds: as for `create`. Groups that wait differently are different
                groups.
            size: ranks of a group, where these are cut into several: the first so many, the next,
                and so on.
        """
        world = get_current_world()
        # torch.distributed has stopped or started since.
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
        """Build the group of these ranks. Every member must call it at the same point; other ranks
        have no part in it.

        The group gets communicators of its own, so its exchanges never mix with those of DDP, FSDP
        or the user. Without torch.distributed, or in a world of one, the group is this process
        alone.

        Args:
            members: the ranks of a process group or those named, by default the world.
            timeout_seconds: how long a rank waits for the others; None for as long as collectives
                of the world may take.

        Raises:
            ConfigError: if this rank is not among them.
            DistCADesyncError: if not all of them come in time.
        """
        if get_current_world() is None:
            return cls()
        timeout_seconds = timeout_seconds or get_timeout(None).total_seconds()
        who = members if isinstance(members, Members) else Members.from_group(members)
        ranks = tuple(sorted(who.ranks))
        rank = dist.get_rank()
        if rank not in ranks:
            raise ConfigError(
                f"rank {rank} is not in its attention group {ranks}: pass each rank the group it"
                " belongs to."
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
        """Return the group with communicators. Every rank must call it; for errors see `create`.

        Args:
            connect: makes those for tensors and for planning, whose collectives may take so long.
            names: names in errors of ranks that are of no world of torch.distributed.
        """
        ranks, rank, seconds = self.ranks, self.rank, self.timeout_seconds
        try:
            data, control = connect(
                datetime.timedelta(seconds=seconds - compute_reserved_seconds(seconds))
            )
            nodes = torch.empty(len(ranks), dtype=torch.int64, device="cpu")
            dist.all_to_all_single(nodes, torch.full_like(nodes, find_node_number()), group=control)
            # A barrier: a rank that fails right after this must not break connections that others
            # are still making.
            all_reduce_min(np.zeros(1, dtype=np.int64), control)
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
        """True if this rank has left the group: it failed, or heard that another did."""
        return self.monitor is not None and self.monitor.has_left

    def report_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception inside to the other ranks, so that
        they do not wait for this one.
        """
        return nullcontext() if self.monitor is None else self.monitor.report_errors(doing)

    def gather(self, row: IntArray, *, doing: str) -> list[IntArray]:
        """Gather one row of integers, a flat int64 array, from every rank, in rank order.

        Rows may differ in length. Collective.
        """
        if self.monitor is None:
            return [row]
        with self.monitor.watch_collective(doing):
            first, work = self._start_gathering(row)
            if work is not None:
                work.wait()
        counts = first[:, 0].tolist()
        rows = [part[1 : 1 + count] for part, count in zip(first.numpy(), counts, strict=True)]
        more = [max(count - self.inline_row_capacity, 0) for count in counts]
        if not any(more):
            return rows
        rest = torch.tensor(row[self.inline_row_capacity :], dtype=torch.int64, device="cpu")
        rests = self.all_to_all(rest.repeat(self.size), [len(rest)] * self.size, more, doing=doing)
        return [
            np.concatenate(pair)
            for pair in zip(rows, np.split(rests.numpy(), np.cumsum(more)[:-1]), strict=True)
        ]

    def is_equal_on_all(self, numbers: IntArray, *, doing: str) -> bool:
        """Return whether every rank has equal numbers, a flat int64 array of one length.

        One collective of twice their size.
        """
        if self.control is None or self.monitor is None:
            return True
        with self.monitor.watch_collective(doing):
            # ~x = -x - 1 turns the order round.
            smallest = all_reduce_min(np.concatenate([numbers, ~numbers]), self.control)
        return bool((smallest[: len(numbers)] == ~smallest[len(numbers) :]).all())

    def gather_async(
        self, row: IntArray, *, doing: str, on_arrival: Callable[[Sequence[IntArray]], object]
    ) -> Rendezvous:
        """Start to gather a row of integers from every rank, without waiting.

        Args:
            row: flat int64 array of at most `inline_row_capacity`.
            doing: for errors.
            on_arrival: called with the rows of all ranks, in a thread of its own; see `Rendezvous`.
        """
        return Rendezvous(*self._start_gathering(row), on_arrival, self.monitor, doing)

    def all_to_all(
        self, sent: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, doing: str
    ) -> torch.Tensor:
        """Send rows of a CPU tensor to every rank, with row counts to and from each.

        Both tensors are in rank order. Collective.
        """
        if self.control is None or self.monitor is None:
            return sent
        received = sent.new_empty((sum(receive), *sent.shape[1:]))
        with self.monitor.watch_collective(doing):
            dist.all_to_all_single(
                received, sent.contiguous(), list(receive), list(send), group=self.control
            )
        return received

    def raise_pending(self) -> None:
        """Raise the error that another thread has found, if any; see
        `FailureMonitor.raise_pending`.

        Takes no time.
        """
        if self.monitor is not None:
            self.monitor.raise_pending()

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, in rank order; empty for ranks that give none in time.

        No collective, so possible at any time.
        """
        return [text] if self.monitor is None else self.monitor.gather_text(text)

    def _start_gathering(self, row: IntArray) -> tuple[torch.Tensor, dist.Work | None]:
        """Start to gather rows padded to (ranks, 1 + `inline_row_capacity`); the first number of
        each is its true length.
        """
        first = [len(row), *row[: self.inline_row_capacity].tolist()]
        first += [0] * (1 + self.inline_row_capacity - len(first))
        padded = torch.tensor(first, dtype=torch.int64, device="cpu")
        if self.control is None:
            return padded[None], None
        rows = torch.empty((self.size, len(padded)), dtype=torch.int64, device="cpu")
        # Over gloo an all-to-all is one step, an all-gather one a rank.
        return rows, dist.all_to_all_single(
            rows.view(-1), padded.repeat(self.size), group=self.control, async_op=True
        )


class Rendezvous:
    """Rows of integers on their way from all ranks, for which no rank waits while it computes.

    Args:
        rows: (ranks, width) tensor that receives them; the first number of a row is its length.
        work: the collective that fills it; None if it is done.
        on_arrival: called with the rows once they have arrived, in a thread of its own. It raises
            `DistCADesyncError` if they show that the ranks do different things; then `monitor`
            wakes this rank from its wait for the others.
        monitor: of the group; None for a group without messages.
        doing: description of what the ranks are doing, for errors.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        work: dist.Work | None,
        on_arrival: Callable[[Sequence[IntArray]], object],
        monitor: FailureMonitor | None,
        doing: str,
    ) -> None:
        self._rows, self._work, self._monitor, self._doing = rows, work, monitor, doing
        self._on_arrival = on_arrival
        self._lost: RuntimeError | None = None  # of the collective: others did not come
        self._failure: Exception | None = None  # of what was to be done with the rows
        self._thread = AwaitedThread(self._attend, "meeting")

    def wait(self) -> list[IntArray]:
        """Wait until it is over, and return the row of each rank; for errors see
        `raise_failure`.
        """
        self._thread.join()
        self.raise_failure()
        return self._list_rows()

    def raise_failure(self) -> None:
        """Raise the error that it ended with, if it has. Never waits.

        Raises:
            DistCADesyncError: if the ranks do not do the same, or not all came.
            Exception: any other error that `on_arrival` raised.
        """
        if self._thread.is_alive():
            return
        if self._lost is not None and self._monitor is not None:
            raise self._monitor.give_up(self._doing, self._lost)
        if (error := self._lost or self._failure) is not None:
            raise error

    def _list_rows(self) -> list[IntArray]:
        return [row[1 : 1 + row[0]] for row in self._rows.numpy()]

    def _attend(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            self._lost = error
            if self._monitor is not None:
                self._monitor.report_timeout(self._doing, error)
            return
        try:
            self._on_arrival(self._list_rows())
        except Exception as error:
            # A thread would drop it, and ranks that were never compared would pass for equal.
            self._failure = error
            if self._monitor is not None and isinstance(error, DistCADesyncError):
                self._monitor.abort_with(error)


# The groups that `AttentionGroup.find_or_create` made in the world of now.
_groups: dict[tuple[dist.ProcessGroup, Members, float], AttentionGroup] = {}


def _has_all_ranks(group: AttentionGroup) -> bool:
    """Return whether no rank has left the group. Collective."""
    if group.control is None or group.monitor is None:
        return True
    try:
        all_reduce_min(np.zeros(1, dtype=np.int64), group.control)
    except RuntimeError as error:
        if not group.monitor.leave_after_others():
            raise group.monitor.give_up("making the attention group again", error) from error
        return False
    return True
