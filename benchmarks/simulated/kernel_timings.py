"""Timings of kernels on this machine, on batches of tasks as servers run them, and the costs that
are fitted to them.

A task that is alone in its call pays the launch and, on a GPU, leaves most of the device idle.
Among others it pays neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

import numpy as np
import torch

from hf_distca.kernels.base import Kernel, Operands, Saved, Scores, TaskBatch
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import FloatArray
from simulator.fits import fit_kernel

# The documents of a batch: of each the slices [start, end) that are tasks, in shares of the batch's
# size in tokens.
Documents = Sequence[Sequence[tuple[float, float]]]

# Few and many documents, slices with a long context, and both together. No slivers: the model
# counts their rows in whole tiles and a CPU does not, so that in batches as small as these they
# spoil the rates of everything else.
BATCHES: tuple[Documents, ...] = (
    [[(0, 1)]],
    [[(0, 0.55)], [(0, 0.45)]],
    [[(0, share)] for share in (0.6, 0.2, 0.1, 0.06, 0.04)],
    [[(0, share / 100)] for share in range(2, 14)],
    [[(0, share / 200)] for share in range(5, 20)],
    [[(0.125, 0.25), (0.625, 0.75), (0.875, 1)]],
    [[(0.75, 1)], [(0, 0.3)], [(0, 0.2)], [(0, 0.1)]],
    [[(0.875, 1)]],
)

# A batch grows through these sizes until it takes `_ENOUGH` seconds, forward and backward, and only
# its largest size counts: the smaller a batch, the less it is like those of training. Where even
# the first takes that long, larger ones take too long.
_SIZES = (128, 1024, 2048, 4096, 8192, 16384)
_ENOUGH = 0.04


def measure(
    model: CostModel,
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[KernelCost, KernelCost]:
    """Time the kernel on batches of tasks, forward and backward, and fit both directions.

    Args:
        model: gives the shape of q, k and v and the counts of a batch's tasks.
        kernel, dtype, device: the kernel to time, and its inputs' dtype and device.
        clock: returns seconds since an arbitrary moment.
    """
    forward, backward = map(
        fit_kernel, *measure_batches(model, kernel, dtype, device, BATCHES, clock=clock)
    )
    return forward, backward


def measure_batches(
    model: CostModel,
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    batches: Sequence[Documents],
    *,
    enough: float = _ENOUGH,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[FloatArray, FloatArray]:
    """Time batches of tasks, each of the size that takes long enough.

    Args:
        model, kernel, dtype, device, clock: as for `measure`.
        batches: the documents of each.
        enough: seconds that a batch should take.

    Returns:
        (2, batches, 3) counts of each batch, see `CostModel.counts`, and (2, batches) seconds,
        forward and backward.
    """
    timer = _Timer(device, clock)
    # The first call of a process loads code.
    time_tasks(model.shape, kernel, _make_batch(batches[0], _SIZES[0]), dtype, timer)
    counts, taken = [], []
    for documents in batches:
        for size in _SIZES:
            tasks = _make_batch(documents, size)
            seconds = time_tasks(model.shape, kernel, tasks, dtype, timer)
            if sum(seconds) >= enough:
                break
        counts.append(model.count_work(tasks.query_length, tasks.key_length).sum(axis=1))
        taken.append(seconds)
    return np.stack(counts, axis=1), np.array(taken).T


def _make_batch(documents: Documents, size: int) -> TaskBatch:
    """Make the tasks of a batch of so many tokens. Slices of one document share its keys."""
    tasks: list[tuple[int, int, int, int]] = []
    row = key = 0
    for slices in documents:
        for start, end in slices:
            rows = int(end * size) - int(start * size)
            keys = int(end * size)
            tasks.append((row, rows, key, keys))
            row += rows
        key += keys
    return TaskBatch(*zip(*tasks, strict=True))


def time_tasks(
    shape: AttentionShape, kernel: Kernel, tasks: TaskBatch, dtype: torch.dtype, timer: _Timer
) -> tuple[float, float]:
    """Time a batch, forward and backward.

    The first batch of a kernel may load or compile code, so its time does not count.
    """
    rows = sum(tasks.query_length)
    keys = max(map(add, tasks.key_start, tasks.key_length))
    random = partial(torch.randn, dtype=dtype, device=timer.device)
    q_THD = random(rows, shape.query_heads, shape.head_dim)
    k_TKD, v_TKV = (
        random(keys, shape.key_value_heads, width)
        for width in (shape.head_dim, shape.value_head_dim)
    )
    scores = Scores(shape.head_dim**-0.5)
    forward = partial(kernel.forward, Operands(q_THD, k_TKD, v_TKV), tasks, scores)
    o_THV, lse_TH = forward()
    backward = partial(
        kernel.backward, Saved(o_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV), tasks, scores
    )
    return timer.time_call(forward), timer.time_call(backward)


@dataclass(frozen=True)
class _Timer:
    """Timer of calls on a device."""

    device: torch.device
    clock: Callable[[], float]

    def time_call(self, call: Callable[[], object]) -> float:
        """Time a call: the minimum of up to three rounds, because anything else that runs on the
        machine only adds time.
        """
        taken = [self._round(call, 1)]
        while len(taken) < 3 and sum(taken) < _ENOUGH / 2:
            taken.append(self._round(call, max(1, int(2e-3 / taken[0]))))
        return min(taken)

    def _round(self, call: Callable[[], object], calls: int) -> float:
        """Time one call as the mean of so many."""
        self._finish()
        started = self.clock()
        for _ in range(calls):
            call()
        self._finish()
        # No call is shorter; a coarse clock may say 0.
        return max((self.clock() - started) / calls, 1e-6)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
