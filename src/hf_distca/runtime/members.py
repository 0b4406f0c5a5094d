"""Members of an attention group, their nodes, and their process groups.

Each rank announces its host. If torchrun or `accelerate launch` started several ranks a node, it
also announces the launcher's number of the node (``GROUP_RANK``). All ranks derive the nodes from
these announcements. With ``LOCAL_WORLD_SIZE`` 1, each rank has a separate launcher, so that number
does not identify nodes. For ranks started by SLURM, MPI or DeepSpeed, only the hosts count.
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
    """Ranks of a group for which no process group exists.

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
        """Return the `size` neighbours that include this rank; all members if `size` is None.

        Raises:
            ConfigError: if parts would not be equally large.
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


# For each world and tuple of ranks, how often these ranks have compared sizes.
_comparisons: WeakKeyDictionary[dist.ProcessGroup | None, Counter[tuple[int, ...]]] = (
    WeakKeyDictionary()
)


def check_group_size(members: Members, size: int | None, seconds: float) -> None:
    """Raise on all ranks if they would divide these members into groups of different sizes.

    All members must call it. They wait up to `seconds` for each other.

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
    """Return a short name of these ranks."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def make_communicator(
    ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta, purpose: str
) -> dist.ProcessGroup:
    """Make a process group at any time. Only its members call this.

    `dist.new_group` has two problems here. If the world is bound to a device, it splits the world's
    communicator, and NCCL then waits for all ranks of the world. This function therefore unbinds
    the world meanwhile. `dist.new_group` also names a group by the number of groups that a rank is
    in, so members that are in different numbers of groups do not find each other.

    If a member fails, it records the failed name in the store of the world, and all members take
    another name at the next attempt.
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
    """Return a number that identifies the node that this process runs on: 56 bits."""
    # Several machines may have the same host name, such as "localhost", but their boot ids differ.
    # Containers on one machine have the same boot id.
    boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    words = [socket.gethostname(), boot, os.environ.get("GROUP_RANK", "") if several else ""]
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7], "big")


def find_launched_per_node(ranks: int) -> int | None:
    """Return the launcher's number of ranks a node, at most `ranks`; None if it is unknown or does
    not divide `ranks`.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_of_node = min(int(launched), ranks) if launched.isdecimal() else 0
    return ranks_of_node if ranks_of_node and ranks % ranks_of_node == 0 else None


def find_ranks_per_node(nodes: Sequence[int]) -> int | None:
    """Return n if the nodes are the ranks [0, n), [n, 2n), ...; else None.

    `nodes` holds the number of each rank's node.
    """
    first = [rank for rank, node in enumerate(nodes) if rank == 0 or node != nodes[rank - 1]]
    sizes = {after - rank for rank, after in zip(first, [*first[1:], len(nodes)], strict=True)}
    # If there are as many runs of ranks as nodes, each node has one run.
    return sizes.pop() if len(sizes) == 1 and len(first) == len(set(nodes)) else None
