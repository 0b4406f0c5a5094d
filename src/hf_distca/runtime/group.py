"""The ranks that share core attention: one communicator for tensors, one on the CPU for planning."""

from __future__ import annotations

import atexit
import datetime
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.borrowed import timeout_of
from hf_distca.errors import ConfigError, DistCADesyncError
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.meeting import Meeting
from hf_distca.runtime.members import Members, communicator, least, node_number, ranks_per_node
from hf_distca.runtime.watch import Watch, listen, patience
from hf_distca.schedule.layout import IntArray

__all__ = ["AttentionGroup", "Members"]

_log = logging.getLogger("hf_distca")

# Numbers of a row that travel in the first step of `gather`, whether a rank has them or not; those beyond need a second.
_FIRST = 128
_WIDTH = 1 + _FIRST  # with their number

_UNEQUAL_NODES = (
    "%d ranks share attention on %d nodes, not equally many on each or not one node after another: links inside a node are taken "
    "to be as slow as those between nodes."
)

# How late a thread of gloo may be when the interpreter ends: what one has to do takes it microseconds, once it has a processor.
_LATE_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """The ranks that share core attention, seen from one of them.

    Attributes:
        ranks: their global ranks. Everywhere else in the package, "rank" is an index into this tuple.
        rank: this process.
        data: communicator of dispatch and return, None in a group of one.
        control: gloo communicator on which layouts travel, None in a group of one.
        watch: tells the others when this rank gives up, None in a group of one.
        timeout_seconds: how long a rank waits for the others, where there are any.
        per_node: ranks [0, n), [n, 2n), ... of the group are nodes; None if they are not in such order, or not told apart.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    data: Channel | None = None
    control: dist.ProcessGroup | None = None
    watch: Watch | None = None
    timeout_seconds: float = math.inf
    per_node: int | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def checksum(self) -> int:
        """Of what was exchanged so far: equal on ranks that exchanged the same things. 0 in a group of one."""
        return 0 if self.data is None else self.data.checksum

    @classmethod
    def of(
        cls,
        members: dist.ProcessGroup | Members | None = None,
        *,
        timeout_seconds: float | None = None,
        size: int | None = None,
    ) -> AttentionGroup:
        """The group of these ranks, as `create` makes it; the one made before, if no rank has left it.

        Every member asks at the same point, as for `create`. Communicators cost threads and connections, and torch cannot replace
        one by another of the same ranks.

        Args:
            members: as for `create`.
            timeout_seconds: how long a rank waits for the others; None for as long as collectives of the world may take. Groups
                that wait differently are different groups.
            size: ranks of a group, where these are cut into several: the first so many, the next, and so on.

        Raises:
            ConfigError, DistCADesyncError: as `create`.
        """
        known = _made.of_this_world()
        if known.world is None:
            return cls()
        timeout_seconds = timeout_seconds or timeout_of(known.world).total_seconds()
        who = (members if isinstance(members, Members) else Members.of(members)).subset(size)
        group = known.groups.get((who, timeout_seconds))
        if group is None or group.left or not _stands(group):
            group = known.groups[who, timeout_seconds] = cls.create(who, timeout_seconds=timeout_seconds)
        return group

    @classmethod
    def create(
        cls, members: dist.ProcessGroup | Members | None = None, *, timeout_seconds: float | None = None
    ) -> AttentionGroup:
        """Build the group of these ranks. Every member must call it at the same point; other ranks have no part in it.

        The group gets communicators of its own, so its exchanges never mix with those of DDP, FSDP or the user.
        Without torch.distributed, or in a world of one, the group is this process alone.

        Args:
            members: the ranks of a process group or those named, by default the world.
            timeout_seconds: how long a rank waits for the others; None for as long as collectives of the world may take.

        Raises:
            ConfigError: if this rank is not among them.
            DistCADesyncError: if not all of them come in time.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        timeout_seconds = timeout_seconds or timeout_of(None).total_seconds()
        who = members if isinstance(members, Members) else Members.of(members)
        ranks, rank = tuple(sorted(who.ranks)), dist.get_rank()
        if rank not in ranks:
            raise ConfigError(f"rank {rank} is not in its attention group {ranks}: pass each rank the group it belongs to.")
        if len(ranks) == 1:
            return cls(ranks)
        timeout = datetime.timedelta(seconds=timeout_seconds - patience(timeout_seconds))
        try:
            data = communicator(ranks, who.backend, timeout, "distca-data")
            control = communicator(ranks, "gloo", timeout, "distca-control")
            nodes = torch.empty(len(ranks), dtype=torch.int64, device="cpu")
            dist.all_to_all_single(nodes, torch.full_like(nodes, node_number()), group=control)
            # A barrier: a rank that fails right after this must not break connections that others are still making.
            least(np.zeros(1, dtype=np.int64), control)
        except RuntimeError as error:
            raise DistCADesyncError(
                f"rank {rank} waited up to {timeout_seconds:g} s for ranks {ranks} while making their attention group, and not "
                f"all came ({error}). Every rank must come here, by a training forward, hf_distca.prepare or a "
                "DistCACallback that all of them have: look at the logs of the other ranks."
            ) from error
        watch = Watch(ranks, ranks.index(rank), timeout_seconds, (data, control))
        listen(watch)
        per_node, channel = ranks_per_node(nodes.tolist()), Channel(data, watch, timeout_seconds)
        if per_node is None and rank == ranks[0]:
            _log.warning(_UNEQUAL_NODES, len(ranks), len(set(nodes.tolist())))
        return cls(ranks, ranks.index(rank), channel, control, watch, timeout_seconds, per_node)

    @property
    def left(self) -> bool:
        """Whether this rank has left the group: it failed, or heard that another did."""
        return self.watch is not None and self.watch.left

    def reporting(self, doing: str) -> AbstractContextManager[None]:
        """A context that tells the other ranks of an exception inside, so that they do not wait for this one."""
        return nullcontext() if self.watch is None else self.watch.reporting(doing)

    def gather(self, row: IntArray, *, doing: str) -> list[IntArray]:
        """One row of integers from every rank, in rank order. Rows may differ in length.

        Args:
            row: flat int64 array.
            doing: what the ranks are doing, for the error if one of them does not come.

        Raises:
            DistCADesyncError: if not every rank comes in time.
        """
        if self.control is None or self.watch is None:
            return [row]
        with self.watch.together(doing):
            return self._gather_rows(row, self.control)

    def all_equal(self, numbers: IntArray, *, doing: str) -> bool:
        """Whether every rank has equal numbers, in one collective of twice their size.

        Args:
            numbers: flat int64 array, of one length on all ranks.
            doing: as for `gather`.

        Raises:
            DistCADesyncError: if not every rank comes in time.
        """
        if self.control is None or self.watch is None:
            return True
        with self.watch.together(doing):
            smallest = least(np.concatenate([numbers, ~numbers]), self.control)  # ~x = -x - 1 turns the order round
        return bool((smallest[: len(numbers)] == ~smallest[len(numbers) :]).all())

    def gather_async(self, row: IntArray, *, doing: str, agree: Callable[[Sequence[IntArray]], None]) -> Meeting:
        """Start to gather a row of integers from every rank, for which nobody waits.

        Args:
            row: flat int64 array of at most `most_numbers`.
            doing: what the ranks are doing, for the error if one of them does not come.
            agree: what to do with the rows of all ranks, in a thread of its own; see `Meeting`.
        """
        sent = torch.tensor([len(row), *row], dtype=torch.int64, device="cpu")
        if self.control is None:
            return Meeting(sent[None], None, agree, None, doing)
        rows, work = self._start_padded(sent, _WIDTH, self.control)
        return Meeting(rows, work, agree, self.watch, doing)

    def all_to_all(self, sent: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, doing: str) -> torch.Tensor:
        """Send rows of a CPU tensor to every rank.

        Args:
            sent: rows for rank 0, then those for rank 1, and so on.
            send, receive: rows to and from each rank.
            doing: as for `gather`.

        Returns:
            The rows from rank 0, then those from rank 1, and so on.

        Raises:
            DistCADesyncError: if not every rank comes in time.
        """
        if self.control is None or self.watch is None:
            return sent
        received = sent.new_empty((sum(receive), *sent.shape[1:]))
        with self.watch.together(doing):
            dist.all_to_all_single(received, sent.contiguous(), list(receive), list(send), group=self.control)
        return received

    @property
    def most_numbers(self) -> int:
        """The longest row of `gather_async`."""
        return _FIRST

    def raise_pending(self) -> None:
        """Raise what a `Meeting` has found. Takes no time.

        Raises:
            DistCADesyncError: if ranks do not do the same.
        """
        if self.watch is not None:
            self.watch.raise_pending()

    def gather_text(self, text: str) -> list[str]:
        """What every rank says, in rank order; empty for those that say nothing in time. No collective, so at any time."""
        return [text] if self.watch is None else self.watch.gather_text(text)

    def _gather_rows(self, row: IntArray, control: dist.ProcessGroup) -> list[IntArray]:
        first = self._gather_padded(torch.tensor([len(row), *row[:_FIRST]], dtype=torch.int64, device="cpu"), _WIDTH, control)
        rows, more = [part[1 : 1 + part[0]] for part in first], np.maximum(first[:, 0] - _FIRST, 0)
        longest, rest = int(more.max()), torch.tensor(row[_FIRST:], dtype=torch.int64, device="cpu")
        if not longest:
            return rows
        if self.size * longest <= 2 * int(more.sum()):  # of about one length
            rests = self._gather_padded(rest, longest, control)
            return [np.concatenate([rows[r], rests[r, :length]]) for r, length in enumerate(more)]
        for rank in np.flatnonzero(more).tolist():
            part = rest if rank == self.rank else torch.empty(more[rank], dtype=torch.int64, device="cpu")
            dist.broadcast(part, group=control, group_src=rank)
            rows[rank] = np.concatenate([rows[rank], part.numpy()])
        return rows

    def _gather_padded(self, row: torch.Tensor, width: int, control: dist.ProcessGroup) -> IntArray:
        """Rows of at most `width` numbers, as (ranks, width)."""
        rows, work = self._start_padded(row, width, control)
        work.wait()
        return rows.numpy()

    def _start_padded(self, row: torch.Tensor, width: int, control: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        """Start to gather them. Over gloo an all-to-all is one step, an all-gather one a rank."""
        padded = torch.zeros(width, dtype=torch.int64, device="cpu")
        padded[: len(row)] = row
        rows = torch.empty((self.size, width), dtype=torch.int64, device="cpu")
        work = dist.all_to_all_single(rows.view(-1), padded.repeat(self.size), group=control, async_op=True)
        return rows, work


@dataclass(eq=False)
class _Made:
    """The groups that `AttentionGroup.of` made in one world."""

    world: dist.ProcessGroup | None = None
    groups: dict[tuple[Members, float], AttentionGroup] = field(default_factory=dict)

    def of_this_world(self) -> _Made:
        """This object, empty if torch.distributed has stopped or started since."""
        world = dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is not self.world:
            self.world, self.groups = world, {}
        return self


_made = _Made()


def _stands(group: AttentionGroup) -> bool:
    """Whether no rank has left the group, which all ranks ask at once."""
    if group.control is None or group.watch is None:
        return True
    try:
        least(np.zeros(1, dtype=np.int64), group.control)
    except RuntimeError as error:
        if not group.watch.anyone_left():
            raise group.watch.give_up("making the attention group again", error) from error
        group.watch.follow()
        return False
    return True


@atexit.register
def _wait_for_threads() -> None:
    """Let gloo's threads drop the tensors of the last collective, ours or the user's, before the interpreter ends.

    One that does it later aborts the process, under any attention (https://github.com/pytorch/pytorch/issues/190489), and the
    Trainer's own last collective comes about a millisecond before a script ends that stops after `train()`.
    """
    if any(group.control is not None for group in _made.groups.values()):
        time.sleep(_LATE_SECONDS)
