"""A trial exchange between the ranks of a launcher."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.config import DistCAConfig
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup, mark_joint_step
from hf_distca.runtime.members import find_node_number
from hf_distca.tools.doctor import Finding

_BYTES = 2**22  # of a message
_ROUNDS = 5


def is_launched() -> bool:
    """Return whether a launcher started this process, and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def try_launched(has: Mapping[str, str], timeout_seconds: float) -> list[Finding]:
    """Exchange messages between the ranks of a launcher; all of them must call it.

    Args:
        has: versions of this rank, by package.
        timeout_seconds: how long to wait for the others.

    Raises:
        DistCAError, RuntimeError: if it fails.
    """
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in (
        "1",
        "true",
        "yes",
    )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    except ValueError as error:  # the environment lacks what a launcher says
        raise RuntimeError(str(error)) from error
    try:
        session = Session(DistCAConfig(timeout_seconds=timeout_seconds), dist.group.WORLD)
        return exchange(has, torch.device("cuda" if cuda else "cpu"), session.join_group())
    finally:
        dist.destroy_process_group()


@mark_joint_step
def exchange(has: Mapping[str, str], device: torch.device, group: AttentionGroup) -> list[Finding]:
    """Send one message from every rank to each other, which names both, through the communicators
    that training uses; compare the versions of all ranks.
    """
    # As JSON and not as objects, which would be unpickled: whoever sends a pickle runs code in the
    # process that reads it.
    text = json.dumps([find_node_number(), dict(has)]).encode()
    rows = group.gather(
        np.frombuffer(text, dtype=np.uint8).astype(np.int64), doing="telling node and versions"
    )
    said = [json.loads(row.astype(np.uint8).tobytes()) for row in rows]
    data = group.data
    if data is None:
        raise RuntimeError("a group of one rank exchanges nothing")
    sizes = {rank: _BYTES for rank in range(group.size) if rank != group.rank}
    others = torch.tensor(list(sizes), device=device)
    sent, wanted = (
        (numbers % 251).to(torch.uint8).repeat_interleave(_BYTES)
        for numbers in (group.rank * 31 + others, others * 31 + group.rank)
    )
    fastest = float("inf")
    for _ in range(_ROUNDS):
        received = torch.empty_like(wanted)
        started = time.perf_counter()
        data.start(received, sent, sizes, sizes).wait()
        if not torch.equal(received, wanted):  # waits for the device, too
            raise RuntimeError("an exchange delivered other bytes than were sent")
        fastest = min(fastest, time.perf_counter() - started)
    times = group.gather(np.array([int(fastest * 1e9)]), doing="timing an exchange")
    seconds = float(np.max(times)) / 1e9
    servers = (group.has_tokens or ()).count(False)
    return [
        Finding("ranks", "attention group", describe_ranks([node for node, _ in said], servers)),
        *_compare_versions([theirs for _, theirs in said]),
        Finding(
            "ranks",
            f"exchange over {data.process_group.name()}",
            f"{seconds * 1e3:.3g} ms for {_BYTES / 1e6:.0f} MB from each rank to each other"
            f" ({_BYTES * (group.size - 1) / seconds / 1e9:.2g} GB/s a rank)",
        ),
    ]


def describe_ranks(nodes: Sequence[int], servers: int) -> str:
    """Describe the ranks of a group, of which so many hold no tokens, by a number for the node of
    each.
    """
    counts = Counter(nodes)
    where = f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
    sizes = " or ".join(map(str, sorted(set(counts.values()))))
    serving = f", {servers} of them servers" if servers else ""
    return f"{len(nodes)} ranks on {where}, {sizes} on each{serving}"


def _compare_versions(versions: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each package of which ranks have different versions."""
    for package in sorted({package for has in versions for package in has}):
        by_rank = [str(has.get(package, "missing")) for has in versions]
        distinct = list(dict.fromkeys(by_rank))
        if len(distinct) > 1:
            yield Finding(
                "ranks",
                package,
                f"differs: {', '.join(f'{has} on rank {by_rank.index(has)}' for has in distinct)}",
                "bad",
                f"install one version of {package} on all nodes: ranks must make the same plans",
            )
