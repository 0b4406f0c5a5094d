"""Who is in an attention group, before there is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hf_distca.errors import ConfigError

__all__ = ["Members"]


@dataclass(frozen=True)
class Members:
    """Who is in a group, where no process group of these ranks exists.

    Attributes:
        ranks: global ranks.
        backend: what tensors travel over, as `torch.distributed` names it.
    """

    ranks: tuple[int, ...]
    backend: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Members:
        """Those of a process group, the world if None."""
        return cls(tuple(dist.get_process_group_ranks(group or dist.GroupMember.WORLD)), dist.get_backend(group))

    def subset(self, size: int | None) -> Members:
        """The part of so many neighbours that this rank is in; all if None.

        Raises:
            ConfigError: if parts would not be equally large.
        """
        ranks, rank = sorted(self.ranks), dist.get_rank()
        if size is None or rank not in ranks:
            return self
        if len(ranks) % size:
            raise ConfigError(
                f"group_size={size} does not divide the {len(ranks)} ranks that could share core attention: groups are equally "
                "large, best of whole nodes."
            )
        first = ranks.index(rank) // size * size
        return Members(tuple(ranks[first : first + size]), self.backend)
