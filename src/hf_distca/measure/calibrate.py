"""Timings of kernels on this machine, on batches of tasks as servers run them: a cost model, and
the fastest kernel. Before anything is timed, the shipped profile of the GPU and the kernel.

A task that is alone in its call pays the launch and, on a GPU, leaves most of the device idle.
Among others it pays neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from operator import add

import numpy as np
import torch

from hf_distca.kernels import Case, list_runnable
from hf_distca.kernels.base import Kernel, Operands, Saved, Scores, TaskBatch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.profiles import Profile

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


# What kernels are compared by: a whole document, and a slice of a long one.
_COMPARED = TaskBatch((0, 8192), (8192, 1024), (0, 8192), (8192, 32768))


def calibrate(
    analytic: CostModel,
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    group: AttentionGroup,
) -> CostModel:
    """Return `analytic` with kernel coefficients measured on the first rank of the group, so that
    all ranks plan alike.
    """
    ours = np.zeros((2, len(fields(KernelCost))))
    if group.rank == 0:
        ours[:] = [astuple(cost) for cost in measure(analytic, kernel, dtype, device)]
    rows = group.gather(
        ours.ravel().view(np.int64), doing="waiting for rank 0 to time the attention kernel"
    )
    forward, backward = (
        KernelCost(*cost) for cost in rows[0].view(np.float64).reshape(ours.shape).tolist()
    )
    return replace(analytic, forward=forward, backward=backward, name=f"calibrated {kernel.name}")


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
        KernelCost.fit, *measure_batches(model, kernel, dtype, device, BATCHES, clock=clock)
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


def find_fastest_kernel(
    shape: AttentionShape,
    names: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    group: AttentionGroup,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> str | None:
    """Find the kernel that takes the fewest seconds on the first rank, among those that run on
    every rank. Collective.

    Each rank could choose for itself, since all kernels compute the same to rounding. But plans are
    made with one cost model for all ranks, and two ranks with different kernels would not have the
    same rates.

    Args:
        shape: shape of q, k and v to time the kernels with.
        names: all kernels, in the same order on every rank; the first one of several with equal
            seconds is taken.
        dtype, device: of q, k and v.
        group: the ranks that agree.
        clock: returns seconds since an arbitrary moment.

    Returns:
        Its name, None if there is no kernel that runs on all ranks.
    """
    case = Case(
        device, dtype, shape.head_dim, shape.value_head_dim, Scores(1.0), shape.heads_per_key_head
    )
    kernels = {kernel.name: kernel for kernel in list_runnable(case)}
    ours = np.array([0.0 if name in kernels else np.inf for name in names])
    if group.rank == 0 and len(kernels) > 1:
        for place, name in enumerate(names):
            if name in kernels:
                ours[place] = _time_kernel(shape, kernels[name], dtype, _Timer(device, clock))
    rows = group.gather(
        ours.view(np.int64), doing="waiting for rank 0 to compare attention kernels"
    )
    total = np.sum([row.view(np.float64) for row in rows], axis=0)
    return names[int(np.argmin(total))] if np.isfinite(total).any() else None


def find_shipped_profile(
    device: torch.device, kernel: Kernel, group: AttentionGroup
) -> Profile | None:
    """Return the shipped profile, equal on all ranks; None if there is none, or if GPUs or kernels
    differ. Collective.

    All ranks must plan with one cost model. If their GPUs differ, they use the built-in figures,
    and learn speeds in training.
    """
    profile = (
        None  # not torch's own kernel
        if kernel.name == "cuda" and torch.nn.attention.current_flash_attention_impl() is not None
        else Profile.find_gpu_profile(torch.cuda.get_device_name(device), kernel.name)
    )
    names = Profile.list_shipped()
    place = -1 if profile is None else names.index(profile)
    same = group.is_equal_on_all(np.array([place]), doing="comparing GPUs and attention kernels")
    return Profile.load(names[place]) if same and place >= 0 else None


def _time_kernel(shape: AttentionShape, kernel: Kernel, dtype: torch.dtype, timer: _Timer) -> float:
    """Time the tasks that kernels are compared by, forward and backward."""
    time_tasks(shape, kernel, _COMPARED, dtype, timer)
    return sum(time_tasks(shape, kernel, _COMPARED, dtype, timer))


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
