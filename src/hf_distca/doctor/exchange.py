"""A trial exchange between the ranks of a launcher."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.config import DistCAConfig
from hf_distca.doctor import Finding, State
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup, joint_step
from hf_distca.runtime.members import node_number

__all__ = [
    "ExchangeResult",
    "exchange",
    "is_launched",
    "findings_from_exchange",
    "try_launched",
    "versions",
]

_BYTES = 2**22  # of a message
_ROUNDS = 5
_PACKAGES = (
    "hf-distca",
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "numba",
    "flash-attn",
    "deepspeed",
    "peft",
    "trl",
)


@dataclass(frozen=True)
class ExchangeResult:
    """Result of a successful exchange, seen from one rank.

    Attributes:
        nodes: a number for the node of each rank, as training tells nodes apart.
        backend: backend that messages travelled over.
        seconds: time of the fastest exchange in which every rank sent `_BYTES` to every other.
        versions: versions on each rank, by package, of packages whose versions differ.
        without_tokens: number of ranks that will hold no tokens.
    """

    nodes: tuple[int, ...]
    backend: str
    seconds: float
    versions: Mapping[str, tuple[str, ...]]
    without_tokens: int = 0


def is_launched() -> bool:
    """Return whether a launcher started this process, and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def versions() -> dict[str, str]:
    """Return the versions of installed packages that ranks must have in common, by package."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def try_launched(has: Mapping[str, str], timeout_seconds: float) -> ExchangeResult:
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
    started = not dist.is_initialized()
    if started:
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
        if started:
            dist.destroy_process_group()


@joint_step
def exchange(has: Mapping[str, str], device: torch.device, group: AttentionGroup) -> ExchangeResult:
    """Send one message from every rank to each other, which names both, through the communicators
    that training uses.
    """
    # As JSON and not as objects, which would be unpickled: whoever sends a pickle runs code in the
    # process that reads it.
    text = json.dumps([node_number(), dict(has)]).encode()
    rows = group.gather(
        np.frombuffer(text, dtype=np.uint8).astype(np.int64), doing="telling node and versions"
    )
    said = [json.loads(row.astype(np.uint8).tobytes()) for row in rows]
    size, data = group.size, group.data
    if data is None:
        raise RuntimeError("a group of one rank exchanges nothing")
    sizes = {rank: _BYTES for rank in range(size) if rank != group.rank}
    sent = torch.cat(
        [
            torch.full((_BYTES,), _test_value(group.rank, rank), dtype=torch.uint8, device=device)
            for rank in sizes
        ]
    )
    wanted = torch.cat(
        [
            torch.full((_BYTES,), _test_value(rank, group.rank), dtype=torch.uint8, device=device)
            for rank in sizes
        ]
    )
    fastest = float("inf")
    for _ in range(_ROUNDS):
        received = torch.empty_like(wanted)
        started = time.perf_counter()
        data.start(received, sent, sizes, sizes).wait()
        if not torch.equal(received, wanted):  # waits for the device, too
            raise RuntimeError("an exchange delivered other bytes than were sent")
        fastest = min(fastest, time.perf_counter() - started)
    seconds = (
        max(
            float(row[0])
            for row in group.gather(np.array([int(fastest * 1e9)]), doing="timing an exchange")
        )
        / 1e9
    )
    names = sorted({name for _, theirs in said for name in theirs})
    by_package = {
        name: tuple(str(theirs.get(name, "missing")) for _, theirs in said) for name in names
    }
    differing = {name: by_rank for name, by_rank in by_package.items() if len(set(by_rank)) > 1}
    return ExchangeResult(
        tuple(int(node) for node, _ in said),
        data.process_group.name(),
        seconds,
        differing,
        group.holds.count(False) if group.holds else 0,
    )


def _test_value(source: int, destination: int) -> int:
    return (source * 31 + destination) % 251


def findings_from_exchange(outcome: ExchangeResult) -> Iterator[Finding]:
    """Yield the findings of an exchange between the ranks of a launcher."""
    ranks, nodes = len(outcome.nodes), len(set(outcome.nodes))
    sizes = sorted(set(Counter(outcome.nodes).values()))
    where = f"{nodes} node{'s' if nodes > 1 else ''}, {' or '.join(map(str, sizes))} on each"
    serving = f", {outcome.without_tokens} of them servers" if outcome.without_tokens else ""
    yield Finding("ranks", "attention group", f"{ranks} ranks on {where}{serving}")
    for package, by_rank in outcome.versions.items():
        value = ", ".join(f"{has} on rank {by_rank.index(has)}" for has in dict.fromkeys(by_rank))
        todo = f"install one version of {package} on all nodes: ranks must make the same plans"
        yield Finding("ranks", package, f"differs: {value}", State.bad, todo)
    megabytes, rate = _BYTES / 1e6, _BYTES * (ranks - 1) / outcome.seconds / 1e9
    value = (
        f"{outcome.seconds * 1e3:.3g} ms for {megabytes:.0f} MB from each rank to each other"
        f" ({rate:.2g} GB/s a rank)"
    )
    yield Finding("ranks", f"exchange over {outcome.backend}", value)
