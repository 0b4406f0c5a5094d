"""The group of ranks that train and their servers, which share no world of torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hf_distca.borrowed import PrefixStore, Store, group_in_store
from hf_distca.errors import UnsupportedError
from hf_distca.runtime.group import AttentionGroup, Members

__all__ = ["PoolRanks", "check_members", "launch_store"]


@dataclass(frozen=True, eq=False)
class PoolRanks:
    """Members of a group of training ranks and servers, seen from one of them.

    Attributes:
        ranks: global ranks of those that train, then numbers of the servers, which follow these; in
            the order of the group.
        holds: for each, whether it trains.
        names: names of the servers in errors, by the numbers in `ranks`.
        rank: index of this process.
        backend: backend for tensors, as `torch.distributed` names it.
        store: store in which only these meet.
    """

    ranks: tuple[int, ...]
    holds: tuple[bool, ...]
    names: Mapping[int, str]
    rank: int
    backend: str
    store: Store

    @classmethod
    def read(cls, invitation: Mapping[str, Any], store: Store, number: int) -> PoolRanks:
        """Read the members from rank 0's invitation, for the process of this number."""
        ranks = tuple(invitation["ranks"])
        names = {int(number): name for number, name in invitation["names"].items()}
        meeting = PrefixStore(invitation["meeting"], launch_store(store))
        holds, backend = tuple(invitation["holds"]), invitation["backend"]
        return cls(ranks, holds, names, ranks.index(number), backend, meeting)

    def without(self, leaving: Sequence[int]) -> PoolRanks:
        """Return the others, once those of these indices have left; this process is none of
        them.
        """
        stay = [index for index in range(len(self.ranks)) if index not in leaving]
        ranks, holds = (
            tuple(self.ranks[index] for index in stay),
            tuple(self.holds[index] for index in stay),
        )
        meeting = PrefixStore(f"distca pool of {len(stay)}", self.store)
        return PoolRanks(ranks, holds, self.names, stay.index(self.rank), self.backend, meeting)

    def join(self, seconds: float) -> AttentionGroup:
        """Build their group, whose members wait so long for each other. Every one of them must call
        it; for errors see `AttentionGroup.create`.
        """
        group = AttentionGroup(self.ranks, self.rank, holds=self.holds, timeout_seconds=seconds)
        place = self.ranks, self.rank

        def connect(timeout: datetime.timedelta) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            data, control = (
                group_in_store(place, self.store, backend, timeout, f"{purpose} of {group.size}")
                for purpose, backend in (("distca-data", self.backend), ("distca-control", "gloo"))
            )
            return data, control

        return group.connected(connect, self.names)


def check_members(members: dist.ProcessGroup | Members | None, size: int | None) -> None:
    """Raise if not all ranks would be in one group with the servers.

    Raises:
        UnsupportedError: names the number of ranks that would be.
    """
    world = tuple(
        range(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
    )
    if isinstance(members, dist.ProcessGroup):
        members = Members.of(members)
    ranks = world if members is None else members.ranks
    if size is not None or tuple(sorted(ranks)) != world:
        raise UnsupportedError(
            f"servers take part in one attention group of all ranks, and of {len(world)} ranks"
            f" {size or len(ranks)} are to share attention. Train without servers, or without"
            " group_size, tensor parallelism and stages."
        )


def launch_store(store: Store) -> Any:
    """Return the store of a launch, without the prefixes that a world has put around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store
