"""Which kernel is the fastest on the GPU of the first rank, for all ranks of a group alike.

Each rank could choose for itself, since all kernels compute the same to rounding. But plans are made with one cost model for all
ranks, and two ranks with different kernels would not have the same rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from hf_distca.kernels import Kernel, Scores, TaskBatch, runnable
from hf_distca.runtime.calibrate import Stopwatch, times
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape

__all__ = ["fastest"]

# What kernels are compared by: a whole document, and a slice of a long one.
_TASKS = TaskBatch((0, 8192), (8192, 1024), (0, 8192), (8192, 32768))


def fastest(
    shape: AttentionShape,
    names: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    group: AttentionGroup,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> str | None:
    """The kernel that takes the fewest seconds on the first rank, among those that run on every rank. All ranks must call it.

    Args:
        shape: what the kernels are timed with.
        names: all kernels, in the same order on every rank; the first one of several with equal seconds is taken.
        dtype, device: of q, k and v.
        group: the ranks that agree.
        clock: seconds since any moment.

    Returns:
        Its name, None if there is no kernel that runs on all ranks.
    """
    case = (dtype, shape.head_dim, shape.value_head_dim, Scores(1.0), shape.ratio)
    kernels = {one.name: one for one in runnable(device, *case)}
    ours = np.array([0.0 if name in kernels else np.inf for name in names])
    if group.rank == 0 and len(kernels) > 1:
        for place, name in enumerate(names):
            if name in kernels:
                ours[place] = _seconds(shape, kernels[name], dtype, Stopwatch(device, clock))
    rows = group.gather(ours.view(np.int64), doing="waiting for rank 0 to compare attention kernels")
    total = np.sum([row.view(np.float64) for row in rows], axis=0)
    return names[int(np.argmin(total))] if np.isfinite(total).any() else None


def _seconds(shape: AttentionShape, kernel: Kernel, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """Seconds of the tasks that kernels are compared by, forward and backward."""
    times(shape, kernel, _TASKS, dtype, stopwatch)
    return sum(times(shape, kernel, _TASKS, dtype, stopwatch))
