"""A trial exchange between the ranks that a launcher has started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_distca.config import DistCAConfig
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.trial import TRIAL_BYTES, Trial, exchange
from hf_distca.tools.doctor import Finding


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def try_launched(has: Mapping[str, str], timeout_seconds: float) -> list[Finding]:
    """Exchange messages between the ranks that a launcher has started. All of these ranks must call
    it.

    Args:
        has: versions of this rank, by package.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        DistCAError, RuntimeError: if the exchange fails.
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
    except ValueError as error:  # a variable that launchers set is missing
        raise RuntimeError(str(error)) from error
    try:
        session = Session(DistCAConfig(timeout_seconds=timeout_seconds), dist.group.WORLD)
        group = session.join_group()
        return describe_trial(exchange(has, torch.device("cuda" if cuda else "cpu"), group), group)
    finally:
        dist.destroy_process_group()


def describe_trial(trial: Trial, group: AttentionGroup) -> list[Finding]:
    """Describe a trial exchange, and compare the package versions of all ranks."""
    servers = (group.has_tokens or ()).count(False)
    backend = "" if group.data is None else group.data.process_group.name()
    return [
        Finding("ranks", "attention group", describe_ranks(trial.nodes, servers)),
        *_compare_versions(trial.versions),
        Finding(
            "ranks",
            f"exchange over {backend}",
            f"{trial.seconds * 1e3:.3g} ms for {TRIAL_BYTES / 1e6:.0f} MB from each rank to each"
            f" other ({TRIAL_BYTES * (group.size - 1) / trial.seconds / 1e9:.2g} GB/s a rank)",
        ),
    ]


def describe_ranks(nodes: Sequence[int], servers: int) -> str:
    """Describe the ranks of a group.

    Args:
        nodes: index of each rank's node.
        servers: number of ranks without tokens.
    """
    counts = Counter(nodes)
    where = f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
    sizes = " or ".join(map(str, sorted(set(counts.values()))))
    serving = f", {servers} of them servers" if servers else ""
    return f"{len(nodes)} ranks on {where}, {sizes} on each{serving}"


def _compare_versions(versions: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each package that has different versions on different ranks."""
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
