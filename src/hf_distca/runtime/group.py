"""The ranks that share core attention: one communicator for tensors, one on the CPU for planning."""

from __future__ import annotations

import atexit
import datetime
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.errors import ConfigError, DistCADesyncError
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.watch import Watch, patience
from hf_distca.schedule.layout import IntArray

__all__ = ["AttentionGroup"]

# Integers a rank can announce in one collective; longer rows need a second one. 512 of them are about 250 documents.
_CAPACITY = 512

# How late a thread of gloo may be when the interpreter ends: what one has to do takes it microseconds, once it has a processor.
_LATE_SECONDS = 0.1

_made: dict[tuple[tuple[int, ...], str, float], AttentionGroup] = {}  # by ranks, backend and timeout
_made_in: object = None  # the world they are part of


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """The ranks that share core attention, seen from one of them.

    Attributes:
        ranks: their global ranks. Everywhere else in the package, "rank" is an index into this tuple.
        rank: this process.
        data: communicator of dispatch and return, None in a group of one.
        control: gloo communicator on which layouts travel, None in a group of one.
        watch: tells the others when this rank gives up, None in a group of one.
        timeout_seconds: how long a rank waits for the others.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    data: Channel | None = None
    control: dist.ProcessGroup | None = None
    watch: Watch | None = None
    timeout_seconds: float = 600.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @classmethod
    def of(cls, members: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> AttentionGroup:
        """The group of the ranks in `members`, as `create` makes it; the one made before, if no rank has left it.

        Communicators cost threads and connections, and torch cannot replace one by another of the same ranks.
        """
        global _made_in
        world = dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is not _made_in:
            _made.clear()
            _made_in = world
        if world is None:
            return cls(timeout_seconds=timeout_seconds)
        key = tuple(dist.get_process_group_ranks(members or world)), dist.get_backend(members), timeout_seconds
        made = _made.get(key)
        if made is None or (made.watch is not None and made.watch.anyone_left()):
            made = _made[key] = cls.create(members, timeout_seconds=timeout_seconds)
        return made

    @classmethod
    def create(cls, members: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> AttentionGroup:
        """Build the group of the ranks in `members` (default: the world). Every member must call it at the same point.

        The group gets communicators of its own, so its exchanges never mix with those of DDP, FSDP or the user.
        Without torch.distributed, or in a world of one, the group is this process alone.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(timeout_seconds=timeout_seconds)
        ranks = tuple(dist.get_process_group_ranks(members or dist.GroupMember.WORLD))
        own = dist.get_rank()
        if own not in ranks:
            raise ConfigError(f"rank {own} is not in its attention group {ranks}: pass each rank the group it belongs to.")
        if len(ranks) == 1:
            return cls(ranks, 0, timeout_seconds=timeout_seconds)
        timeout = datetime.timedelta(seconds=timeout_seconds - patience(timeout_seconds))
        backend = dist.get_backend(members)
        # Local synchronization: only members take part, so groups of different ranks may be built at different times.
        try:
            data = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, group_desc="distca-data")
            control = dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=True, group_desc="distca-control")
        except RuntimeError as error:
            raise DistCADesyncError(
                f"rank {own} waited up to {timeout_seconds:g} s for ranks {ranks} while making their attention group, and not "
                f"all came ({error}). Every rank must run a training forward: look at the logs of the other ranks."
            ) from error
        watch = Watch(ranks, ranks.index(own), timeout_seconds, (data, control))
        return cls(ranks, ranks.index(own), Channel(data, watch, timeout_seconds), control, watch, timeout_seconds)

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
        try:
            rows = self._gather_rows(row, self.control)
        except RuntimeError as error:
            raise self.watch.give_up(doing, error) from error
        self.watch.met = doing
        return rows

    @property
    def checksum(self) -> int:
        return 0

    def same(self, numbers: IntArray, *, doing: str) -> bool:
        return all(np.array_equal(numbers, row) for row in self.gather(numbers, doing=doing))

    def _gather_rows(self, row: IntArray, control: dist.ProcessGroup) -> list[IntArray]:
        first = self._gather_fixed(np.concatenate([[len(row)], row])[: _CAPACITY + 1], _CAPACITY + 1, control)
        longest = int(first[:, 0].max())
        rows = first[:, 1:]
        if longest > _CAPACITY:
            rest = self._gather_fixed(row[_CAPACITY:], longest - _CAPACITY, control)
            rows = np.concatenate([rows, rest], axis=1)
        return [rows[r, : first[r, 0]] for r in range(self.size)]

    def _gather_fixed(self, row: IntArray, width: int, control: dist.ProcessGroup) -> IntArray:
        padded = torch.zeros(width, dtype=torch.int64)
        padded[: len(row)] = torch.from_numpy(np.ascontiguousarray(row))
        rows = torch.empty(self.size, width, dtype=torch.int64)
        dist.all_gather(list(rows.unbind()), padded, group=control)
        return rows.numpy()


@atexit.register
def _wait_for_threads() -> None:
    """Let gloo's threads drop the tensors of the last collective, ours or the user's, before the interpreter ends.

    One that does it later aborts the process, under any attention (https://github.com/pytorch/pytorch/issues/190489), and the
    Trainer's own last collective comes about a millisecond before a script ends that stops after `train()`.
    """
    if any(group.control is not None for group in _made.values()):
        time.sleep(_LATE_SECONDS)
