"""Which ranks of a group are in one node.

Each rank says where it runs, and all ranks find the same from what all said: the host, and, where torchrun or `accelerate launch`
started several ranks a node, the number that they gave to the node (``GROUP_RANK``). With ``LOCAL_WORLD_SIZE`` 1, each rank has a
launcher of its own, and that number says nothing of nodes. Of ranks that SLURM, MPI or DeepSpeed started, the hosts tell.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["launched_per_node", "node_number", "ranks_per_node"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node_number() -> int:
    """A number for the node that this process runs on: 56 bits that tell it from others."""
    # A host's name may be that of several machines, as "localhost" is; their boots differ. Containers on one have the same boot.
    boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    words = [socket.gethostname(), boot, os.environ.get("GROUP_RANK", "") if several else ""]
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7], "big")


def launched_per_node(ranks: int) -> int | None:
    """Ranks of a node among so many neighbours, as a launcher says; None if it does not, or they are no whole nodes."""
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_of_node = min(int(launched), ranks) if launched.isdecimal() else 0
    return ranks_of_node if ranks_of_node and ranks % ranks_of_node == 0 else None


def ranks_per_node(nodes: Sequence[int]) -> int | None:
    """Ranks of every node, if ranks [0, n), [n, 2n), ... are the nodes; None if some have more than others, or are not in order.

    Args:
        nodes: the number of the node of each rank, in rank order.
    """
    first = [rank for rank, node in enumerate(nodes) if rank == 0 or node != nodes[rank - 1]]
    sizes = {after - rank for rank, after in zip(first, [*first[1:], len(nodes)], strict=True)}
    # As many runs as nodes: no node has a second run.
    return sizes.pop() if len(sizes) == 1 and len(first) == len(set(nodes)) else None
