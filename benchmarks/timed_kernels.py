"""Kernels that take as long as a cost model says: a rank then has a processor to itself, whatever else runs on the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hf_distca.kernels.base import TaskBatch
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.schedule.cost import CostModel


@contextmanager
def timed_kernels(cost: CostModel | None, slowness: float = 1.0) -> Iterator[None]:
    """Let kernels sleep for so many times the seconds of a cost model, and compute nothing.

    Without a cost model they compute, and sleep until they took so many times as long.
    """
    forward, backward = CpuKernel.forward, CpuKernel.backward

    def late(tasks: TaskBatch, q: torch.Tensor, k: torch.Tensor, started: float, backwards: bool) -> None:
        taken = time.perf_counter() - started
        if cost is None:
            time.sleep((slowness - 1) * taken)
        else:
            shape = replace(cost.shape, query_heads=q.shape[1], key_value_heads=k.shape[1])  # tasks may be of some heads only
            one = replace(cost, shape=shape)
            each = one.backward_seconds if backwards else one.forward_seconds
            seconds = float(each(tasks.query_length, tasks.key_length).sum()) * slowness
            time.sleep(max(0.0, seconds - taken))

    def slow_forward(self: CpuKernel, q: Any, k: Any, v: Any, tasks: TaskBatch, scores: Any) -> Any:
        started = time.perf_counter()
        empty = (q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[:2]))
        found = forward(self, q, k, v, tasks, scores) if cost is None else empty
        late(tasks, q, k, started, backwards=False)
        return found

    def slow_backward(self: CpuKernel, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, tasks: TaskBatch, scores: Any) -> Any:
        started = time.perf_counter()
        zeros = tuple(map(torch.zeros_like, (q, k, v)))
        found = backward(self, do, q, k, v, o, lse, tasks, scores) if cost is None else zeros
        late(tasks, q, k, started, backwards=True)
        return found

    with patch.object(CpuKernel, "forward", slow_forward), patch.object(CpuKernel, "backward", slow_backward):
        yield
