"""An exchange between ranks, tried: those of a launcher, or else two processes that are started for it.

``python -m hf_distca.doctor.exchange RANK STORE SECONDS`` is one of the two.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.doctor.findings import Finding, State
from hf_distca.errors import DistCAError
from hf_distca.runtime.group import AttentionGroup

__all__ = ["Tried", "launched", "try_launched", "try_two", "tried"]

_BYTES = 2**22  # of a message
_ROUNDS = 5
_LOOK = 0.02  # seconds between looks at processes


@dataclass(frozen=True)
class Tried:
    """An exchange that went well, seen from one rank.

    Attributes:
        hosts: of each rank.
        backend: that messages travelled over.
        seconds: of the fastest exchange in which every rank sent `_BYTES` to every other.
        versions: that differ between ranks: what each rank has, by package.
    """

    hosts: tuple[str, ...]
    backend: str
    seconds: float
    versions: Mapping[str, tuple[str, ...]]

    @property
    def nodes(self) -> int:
        """How many machines the ranks are on."""
        return len(set(self.hosts))

    @property
    def gigabytes_per_second(self) -> float:
        """What each rank sent."""
        return _BYTES * (len(self.hosts) - 1) / self.seconds / 1e9


def launched() -> bool:
    """Whether a launcher started this process, and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def try_launched(found: Mapping[str, str], timeout_seconds: float) -> Tried:
    """Exchange between the ranks of a launcher; all of them must call it.

    Args:
        found: versions of this rank.
        timeout_seconds: how long to wait for the others.

    Raises:
        DistCAError, RuntimeError: if it fails.
    """
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true", "yes")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with _world("nccl" if cuda else "gloo", timeout_seconds):
        return _exchange(found, torch.device("cuda" if cuda else "cpu"), timeout_seconds)


@contextmanager
def _world(backend: str, timeout_seconds: float, **options: Any) -> Iterator[None]:
    """The process group of all ranks, where there is none yet."""
    if dist.is_initialized():
        yield
        return
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **options)
    except ValueError as error:  # the environment lacks what a launcher says
        raise RuntimeError(str(error)) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _exchange(found: Mapping[str, str], device: torch.device, timeout_seconds: float) -> Tried:
    """Through the communicators that training uses: every rank sends each other one a message that names them both."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (platform.node(), dict(found)))
    group = AttentionGroup.create(timeout_seconds=timeout_seconds)
    group.gather(np.array([group.rank], dtype=np.int64), doing="trying an exchange")
    size, data = group.size, group.data
    if data is None:
        raise RuntimeError("a group of one rank exchanges nothing")
    sizes = {rank: _BYTES for rank in range(size) if rank != group.rank}
    sent = torch.cat([torch.full((_BYTES,), _mark(group.rank, rank), dtype=torch.uint8, device=device) for rank in sizes])
    wanted = torch.cat([torch.full((_BYTES,), _mark(rank, group.rank), dtype=torch.uint8, device=device) for rank in sizes])
    fastest = float("inf")
    for _ in range(_ROUNDS):
        received = torch.empty_like(wanted)
        started = time.perf_counter()
        data.start(received, sent, sizes, sizes).wait()
        if not torch.equal(received, wanted):  # waits for the device, too
            raise RuntimeError("an exchange delivered other bytes than were sent")
        fastest = min(fastest, time.perf_counter() - started)
    seconds = max(float(row[0]) for row in group.gather(np.array([int(fastest * 1e9)]), doing="timing an exchange")) / 1e9
    names = sorted({name for _, versions in said for name in versions})
    has = {name: tuple(versions.get(name, "missing") for _, versions in said) for name in names}
    return Tried(tuple(host for host, _ in said), dist.get_backend(), seconds, {n: v for n, v in has.items() if len(set(v)) > 1})


def _mark(source: int, destination: int) -> int:
    return (source * 31 + destination) % 251


def try_two(timeout_seconds: float) -> str | None:
    """Start two processes that exchange over gloo.

    Returns:
        What the first of them says of it; None if this machine has no torch.distributed.

    Raises:
        RuntimeError: with what a process said last, or that they took too long. None is left behind.
    """
    if not dist.is_available():
        return None
    with TemporaryDirectory(prefix="hf-distca-") as folder:
        command = [sys.executable, "-m", __name__]
        # Not what a launcher or a test says of its own ranks.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(Path(folder, "store")), f"{timeout_seconds:g}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in (0, 1)
        ]
        try:
            return _outcome(processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _outcome(processes: list[subprocess.Popen[str]], timeout_seconds: float) -> str:
    """What the first process says. The first one to fail says why; the other one only misses it."""
    deadline = time.monotonic() + timeout_seconds
    while not any(codes := [process.poll() for process in processes]):
        if None not in codes:
            return processes[0].communicate()[0].strip().rpartition("\n")[2]
        if time.monotonic() > deadline:
            raise RuntimeError(f"they did not end within {timeout_seconds:.0f} s")
        time.sleep(_LOOK)
    code, failed = next(one for one in zip(codes, processes, strict=True) if one[0])
    lines = [line for line in failed.communicate()[1].splitlines() if line.strip()]
    raise RuntimeError(lines[-1] if lines else f"one ended with {code}")


def tried(outcome: Tried) -> Iterator[Finding]:
    """What an exchange between the ranks of a launcher says of them."""
    ranks, nodes = len(outcome.hosts), outcome.nodes
    each = sorted(set(Counter(outcome.hosts).values()))
    where = f"{nodes} node{'s' if nodes > 1 else ''}, {' or '.join(map(str, each))} on each"
    yield Finding("ranks", "attention group", f"{ranks} ranks on {where}")
    for name, has in outcome.versions.items():
        value = ", ".join(f"{version} on rank {has.index(version)}" for version in dict.fromkeys(has))
        todo = f"install one version of {name} on all nodes: ranks must make the same plans"
        yield Finding("ranks", name, f"differs: {value}", State.bad, todo)
    megabytes, rate = _BYTES / 1e6, outcome.gigabytes_per_second
    value = f"{outcome.seconds * 1e3:.3g} ms for {megabytes:.0f} MB from each rank to each other ({rate:.2g} GB/s a rank)"
    yield Finding("ranks", f"exchange over {outcome.backend}", value)


def _main(rank: int, store: str, timeout_seconds: float) -> None:
    try:
        with _world("gloo", timeout_seconds, init_method=f"file://{store}", rank=rank, world_size=2):
            outcome = _exchange({}, torch.device("cpu"), timeout_seconds)
    except (DistCAError, RuntimeError) as error:
        raise SystemExit(" ".join(str(error).split())) from None
    if rank == 0:
        sys.stdout.write(f"{outcome.seconds * 1e3:.3g} ms for {_BYTES / 1e6:.0f} MB each way\n")


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
