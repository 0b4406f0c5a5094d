"""Process groups of our own, and what all their ranks have least."""

from __future__ import annotations

import datetime
import hashlib
from itertools import count

import torch
import torch.distributed as dist

from hf_distca.borrowed import group_of_members, names_of_groups
from hf_distca.schedule.layout import IntArray

__all__ = ["communicator", "least"]


def communicator(ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta, purpose: str) -> dist.ProcessGroup:
    """A process group that its members make by themselves, at any time.

    `dist.new_group` has two reasons to wait for ranks that need not come. If the world is bound to a device, it splits the
    communicator of the world, for which NCCL needs all its ranks: here the world is not bound meanwhile. And it names a group
    after the number of groups that a rank is in, so members in different numbers of groups wait for each other in vain.
    """
    taken = names_of_groups()
    stem = f"{purpose} {hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    name = next(candidate for number in count(1) if (candidate := f"{stem} {number}") not in taken)
    return group_of_members(ranks, backend, timeout, name, purpose)


def least(numbers: IntArray, control: dist.ProcessGroup) -> IntArray:
    """The least of all ranks at each place."""
    smallest = torch.from_numpy(numbers)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=control)
    return smallest.numpy()
