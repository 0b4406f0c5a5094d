"""Process groups of our own, and what all their ranks have least."""

from __future__ import annotations

import datetime
import hashlib
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hf_distca.schedule.layout import IntArray

__all__ = ["communicator", "least"]


def communicator(ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta, purpose: str) -> dist.ProcessGroup:
    """A process group that its members make by themselves, at any time.

    `dist.new_group` has two reasons to wait for ranks that need not come. If the world is bound to a device, it splits the
    communicator of the world, for which NCCL needs all its ranks: here the world is not bound meanwhile. And it names a group
    after the number of groups that a rank is in, so members in different numbers of groups wait for each other in vain.
    """
    world, taken = c10d._get_default_group(), set(c10d._world.pg_names.values())  # noqa: SLF001
    stem = f"{purpose} {hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    name = next(c10d.GroupName(one) for number in count(1) if (one := f"{stem} {number}") not in taken)
    device, world.bound_device_id = world.bound_device_id, None
    group: dist.ProcessGroup
    try:
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            c10d.Backend(backend),
            c10d._world.pg_map[world][1],  # noqa: SLF001
            name,
            timeout=timeout,
            group_desc=purpose,
        )
    finally:
        world.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}  # noqa: SLF001
    return group


def least(numbers: IntArray, control: dist.ProcessGroup) -> IntArray:
    """The least of all ranks at each place."""
    smallest = torch.from_numpy(numbers)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=control)
    return smallest.numpy()
