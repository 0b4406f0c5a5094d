"""Members of an attention group, their nodes, and their process groups.

All ranks derive the nodes from announcements. Each rank announces its host. If torchrun or
`accelerate launch` started several ranks per node, the rank also announces ``GROUP_RANK``, the
index of its launcher. With ``LOCAL_WORLD_SIZE`` 1, each rank has a separate launcher, so
``GROUP_RANK`` does not identify nodes. Ranks started by SLURM, MPI or DeepSpeed announce only
hosts.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hf_distca.borrowed import group_of_members, list_group_names, store_of_world
from hf_distca.errors import ConfigError, DistCADesyncError

NOT_ALL_CAME = (
    "Every rank must reach this point, through a training forward, hf_distca.prepare or a"
    " DistCACallback that all ranks have. Look at the logs of the other ranks. If ranks could not"
    " connect, set GLOO_SOCKET_IFNAME to the network interface that connects the nodes. Plans"
    " travel over gloo even on GPUs."
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Members:
    """Ranks of a group that has no process group yet.

    Attributes:
        ranks: global ranks.
        backend: backend for tensors, as `torch.distributed` names it.
    """

    ranks: tuple[int, ...]
    backend: str

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> Members:
        """Return the members of a process group, or of the world if `group` is None."""
        return cls(
            tuple(dist.get_process_group_ranks(group or dist.GroupMember.WORLD)),
            dist.get_backend(group),
        )

    def subset(self, size: int | None) -> Members:
        """Return the group of `size` neighbouring ranks that includes this rank.

        Return all members if `size` is None, or if this rank is not a member.

        Raises:
            ConfigError: if `size` does not divide the number of members.
        """
        ranks = sorted(self.ranks)
        rank = dist.get_rank()
        if size is None or rank not in ranks:
            return self
        if len(ranks) % size:
            raise ConfigError(
                f"group_size={size} does not divide the {len(ranks)} ranks that could share core"
                " attention. Groups must be equally large, and should be whole nodes."
            )
        first = ranks.index(rank) // size * size
        return Members(tuple(ranks[first : first + size]), self.backend)


# Number of times that each tuple of ranks has compared group sizes, for each world.
_comparisons: WeakKeyDictionary[dist.ProcessGroup | None, Counter[tuple[int, ...]]] = (
    WeakKeyDictionary()
)


def check_group_size(members: Members, size: int | None, seconds: float) -> None:
    """Raise an error on all members if they were given different group sizes.

    All members must call this function. They wait up to `seconds` for each other.

    A rank with a smaller `size` would not join the group that the other ranks make, and a rank with
    size 1 would compute alone. Members therefore write their sizes to the store of the world, where
    the first member compares them.

    Raises:
        DistCADesyncError: if sizes differ, or a member does not come in time.
    """
    ranks, store, this_rank = tuple(sorted(members.ranks)), store_of_world(), dist.get_rank()
    if len(ranks) == 1 or this_rank not in ranks:
        return
    counts = _comparisons.setdefault(dist.GroupMember.WORLD, Counter())
    stem = f"distca-size {hash_ranks(ranks)} {counts[ranks]}"
    keys = [f"{stem} {rank}" for rank in ranks]
    timeout = datetime.timedelta(seconds=seconds)
    try:
        store.set(f"{stem} {this_rank}", str(size))
        if this_rank == ranks[0]:
            store.wait(keys, timeout)
            sizes = [store.get(key).decode() for key in keys]
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in zip(ranks, sizes, strict=True))
            store.set(f"{stem} found", by_rank if len(set(sizes)) > 1 else "")
        store.wait([f"{stem} found"], timeout)
        unequal = store.get(f"{stem} found").decode()
    except RuntimeError as error:
        raise DistCADesyncError(
            f"rank {this_rank} waited up to {seconds:g} s for ranks {ranks} while making their"
            f" attention group, and not all came ({error}). {NOT_ALL_CAME}"
        ) from error
    counts[ranks] += 1
    if unequal:
        raise DistCADesyncError(
            f"ranks have different group_size: {unequal}. Give every rank the same settings."
        )


def hash_ranks(ranks: tuple[int, ...]) -> str:
    """Return a short name for these ranks."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def make_communicator(
    ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta, purpose: str
) -> dist.ProcessGroup:
    """Make a process group. Its members call this function, without the other ranks of the world.

    `dist.new_group` cannot replace this function, for two reasons:

    - `dist.new_group` derives the name of a group from the number of groups that the calling rank
      is in. Members in different numbers of groups would not find each other. This function derives
      the name from `ranks`.
    - If the world is bound to a device, `dist.new_group` splits the world's communicator, and NCCL
      then waits for all ranks of the world. This function unbinds the world while it makes the
      group.

    If a member fails, it records the name as failed in the store of the world. The next attempt
    takes another name on all members.
    """
    taken, store = list_group_names(), store_of_world()
    stem = f"{purpose} {hash_ranks(ranks)}"
    names = (f"{stem} {number}" for number in count(1))
    name = next(name for name in names if name not in taken and not store.check([f"{name} failed"]))
    try:
        return group_of_members(ranks, backend, timeout, name, purpose)
    except RuntimeError:
        with suppress(RuntimeError):
            store.set(f"{name} failed", "")
        raise


def find_node_number() -> int:
    """Return a number of 56 bits that identifies the node of this process."""
    # Several machines may have the same host name, such as "localhost", but their boot ids differ.
    # Containers on one machine have the same boot id.
    boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    words = [socket.gethostname(), boot, os.environ.get("GROUP_RANK", "") if several else ""]
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7], "big")


def find_launched_per_node(ranks: int) -> int | None:
    """Return the number of ranks that the launcher started per node, at most `ranks`.

    Return None if the number is unknown or does not divide `ranks`.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_of_node = min(int(launched), ranks) if launched.isdecimal() else 0
    return ranks_of_node if ranks_of_node and ranks % ranks_of_node == 0 else None


def find_ranks_per_node(nodes: Sequence[int]) -> int | None:
    """Return n if the nodes are the ranks [0, n), [n, 2n), ...; else None.

    `nodes` holds, for each rank, a number that identifies its node.
    """
    first = [rank for rank, node in enumerate(nodes) if rank == 0 or node != nodes[rank - 1]]
    sizes = {after - rank for rank, after in zip(first, [*first[1:], len(nodes)], strict=True)}
    # If there are as many runs of ranks as nodes, each node has one run.
    return sizes.pop() if len(sizes) == 1 and len(first) == len(set(nodes)) else None
