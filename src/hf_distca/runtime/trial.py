"""A trial exchange between the ranks of a group, through the communicators that training uses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.members import find_node_number

TRIAL_BYTES = 2**22  # bytes of a message
_ROUNDS = 5


@dataclass(frozen=True)
class Trial:
    """Result of a trial exchange: each rank's node and versions, and the slowest rank's seconds."""

    nodes: list[int]
    versions: list[Mapping[str, str]]
    seconds: float


@mark_joint_step
def exchange(has: Mapping[str, str], device: torch.device, group: AttentionGroup) -> Trial:
    """Exchange messages between all ranks, check their contents, and gather versions.

    `has` maps names of packages to their versions on this rank.
    """
    # JSON is safe to read. A pickled object could run code in the process that reads it.
    texts = group.gather_text(
        json.dumps([find_node_number(), dict(has)]), activity="telling node and versions"
    )
    nodes, versions = zip(*map(json.loads, texts), strict=True)
    data = group.data
    if data is None:
        raise RuntimeError("a trial exchange needs two or more ranks, but the group has one")
    sizes = {rank: TRIAL_BYTES for rank in range(group.size) if rank != group.rank}
    others = torch.tensor(list(sizes), device=device)
    sent, wanted = (
        (numbers % 251).to(torch.uint8).repeat_interleave(TRIAL_BYTES)
        for numbers in (group.rank * 31 + others, others * 31 + group.rank)
    )
    fastest = float("inf")
    for _ in range(_ROUNDS):
        received = torch.empty_like(wanted)
        started = time.perf_counter()
        data.start(received, sent, sizes, sizes).wait()
        if not torch.equal(received, wanted):  # the comparison waits for the device
            raise RuntimeError("an exchange delivered bytes that differ from those sent")
        fastest = min(fastest, time.perf_counter() - started)
    times = group.gather(np.array([int(fastest * 1e9)]), activity="timing an exchange")
    return Trial(list(nodes), list(versions), float(np.max(times)) / 1e9)
