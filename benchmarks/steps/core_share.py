"""Limits each of several processes to a fixed share of a processor core, as if each had a slower
core to itself.

Four processes on two cores can then be timed by the clock: each has 0.45 of a core, however little
the others use. Linux sets the limit (control groups, CPU bandwidth:
https://docs.kernel.org/scheduler/sched-bwc.html), which needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
# A process that has used its share waits for the next period. Periods of 5 ms would give it a tenth
# less.
PERIOD_US = 10_000


@contextmanager
def core_shares(count: int, share: float) -> Iterator[list[Path]]:
    """Make control groups for `count` processes, each limited to `share` of a core.

    Args:
        count: number of processes.
        share: share of a core, above 0.

    Yields:
        The folder of each group. A process enters with `join`, and must end before this does.

    Raises:
        RuntimeError: if this machine has no control groups, or this user may not make them.
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
    """Put this process and all its threads into a group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def measure_share() -> float:
    """Measure the share of a core that this process gets, during one second without pauses."""
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
            f"shares of a core need Linux control groups and root: {error}"
        ) from error
