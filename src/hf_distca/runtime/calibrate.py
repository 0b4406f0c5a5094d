"""A cost model from timing the kernel on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hf_distca.kernels.base import Kernel, Scores, TaskBatch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import CostModel, KernelCost

__all__ = ["calibrate", "measure"]

# (query rows, keys): slivers to whole documents, with short and long prefixes.
_CASES = ((1, 1), (16, 16), (128, 128), (128, 2048), (512, 512), (512, 4096), (1024, 1024), (1024, 4096), (2048, 2048))


def calibrate(analytic: CostModel, kernel: Kernel, dtype: torch.dtype, device: torch.device, group: AttentionGroup) -> CostModel:
    """`analytic` with kernel coefficients measured on the first rank of the group, so that all ranks plan alike."""
    ours = np.zeros(6)
    if group.rank == 0:
        forward, backward = measure(analytic, kernel, dtype, device)
        ours[:3] = forward.task_seconds, forward.bytes_per_second, forward.flops_per_second
        ours[3:] = backward.task_seconds, backward.bytes_per_second, backward.flops_per_second
    values = group.gather(ours.view(np.int64), doing="waiting for rank 0 to time the attention kernel")[0].view(np.float64)
    forward, backward = KernelCost(*values[:3].tolist()), KernelCost(*values[3:].tolist())
    return replace(analytic, forward=forward, backward=backward, name=f"calibrated {kernel.name}")


def measure(
    model: CostModel, kernel: Kernel, dtype: torch.dtype, device: torch.device, *, repeats: int = 3
) -> tuple[KernelCost, KernelCost]:
    """Time the kernel on single tasks, forward and backward, and fit both directions."""
    times: list[tuple[float, float]] = []
    for rows, keys in _CASES:
        forward, backward = _calls(model, kernel, rows, keys, dtype, device)
        times.append((_seconds(forward, device, repeats), _seconds(backward, device, repeats)))
    counts = model.counts([rows for rows, _ in _CASES], [keys for _, keys in _CASES])
    seconds = np.array(times)
    return KernelCost.fit(counts, seconds[:, 0]), KernelCost.fit(counts * np.array([1.0, 2.0, 2.5]), seconds[:, 1])


def _calls(
    model: CostModel, kernel: Kernel, rows: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    shape = model.shape
    tasks = TaskBatch((0,), (rows,), (0,), (keys,))
    q_THD = torch.randn(rows, shape.query_heads, shape.head_dim, dtype=dtype, device=device)
    k_TKD = torch.randn(keys, shape.key_value_heads, shape.head_dim, dtype=dtype, device=device)
    v_TKV = torch.randn(keys, shape.key_value_heads, shape.value_head_dim, dtype=dtype, device=device)
    scores = Scores(shape.head_dim**-0.5)
    o_THV, lse_TH = kernel.forward(q_THD, k_TKD, v_TKV, tasks, scores)
    return (
        lambda: kernel.forward(q_THD, k_TKD, v_TKV, tasks, scores),
        lambda: kernel.backward(o_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH, tasks, scores),
    )


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, long enough for the clock."""
    call()
    taken = []
    for _ in range(repeats):
        _finish(device)
        started, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - started < 2e-3:
            call()
            calls += 1
            _finish(device)
        taken.append((time.perf_counter() - started) / calls)
    return statistics.median(taken)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
