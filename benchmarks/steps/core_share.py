"""Gives each of several processes a fixed part of a processor core, as if each had a slower core of
its own.

A machine with two cores can then time four processes by the clock: each with 0.45 of a core,
however little the others do. Linux does it (control groups, CPU bandwidth:
https://docs.kernel.org/scheduler/sched-bwc.html); it takes root's rights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # of version 1 and of version 2
# A process that has used its part waits until the next one; with 5 ms it gets a tenth less than its
# part.
PERIOD_US = 10_000


@contextmanager
def core_shares(count: int, share: float) -> Iterator[list[Path]]:
    """Groups for so many processes, each of which may use that part of a core.

    Args:
        count: of processes.
        share: of a core, above 0.

    Yields:
        The folder of each. A process joins with `join`, and has ended before this does.

    Raises:
        RuntimeError: if this machine has no such groups, or this user may not make any.
    """
    root = next((one for one in ROOTS if (one / "cgroup.procs").exists()), ROOTS[-1])
    folders = [root / f"part_of_a_core_{os.getpid()}_{at}" for at in range(count)]
    try:
        for folder in folders:
            _make(folder, round(share * PERIOD_US))
        yield folders
    finally:
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def join(folder: Path) -> None:
    """Put this process and all of its threads into a group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def used() -> float:
    """The part of a core that this process gets, from a second in which it does not pause."""
    began, before = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < 1:
        pass
    return (time.process_time() - before) / passed


def _make(folder: Path, quota_us: int) -> None:
    try:
        folder.mkdir()
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    except OSError as error:
        raise RuntimeError(
            f"parts of a core need Linux with control groups, and root: {error}"
        ) from error
