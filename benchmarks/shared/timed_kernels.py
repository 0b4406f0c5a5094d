"""Kernels that sleep for the time that a cost model predicts, as if each rank had a processor to
itself, whatever else runs on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs, ScoreOptions, TaskBatch
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost

# The built-in figures of a CPU.
BUILT_IN = CostModel.make_analytic(AttentionShape(1, 1, 64, 64, 4), device_type="cpu")


def make_slower(heads: int, *, task: float = 1.0, flop: float = 1.0) -> CostModel:
    """Make a CPU's cost model with tasks and flops slower by these factors."""
    forward, backward = (
        KernelCost(one.task_seconds * task, one.bytes_per_second, one.flops_per_second / flop)
        for one in (BUILT_IN.forward, BUILT_IN.backward)
    )
    shape = AttentionShape(heads, max(heads // 2, 1), 64, 64, 4)
    return replace(BUILT_IN, shape=shape, forward=forward, backward=backward)


@contextmanager
def timed_kernels(cost: CostModel | None, slowness: float = 1.0) -> Iterator[None]:
    """Replace kernels by sleep: `slowness` times the seconds that the cost model predicts.

    Without a cost model, kernels compute, and then sleep until they took `slowness` times as long.
    """
    forward, backward = CpuKernel.forward, CpuKernel.backward

    def late(tasks: TaskBatch, pools: Operands | BackwardInputs, started: float) -> None:
        taken = time.perf_counter() - started
        if cost is None:
            time.sleep((slowness - 1) * taken)
        else:
            # A task may have only some of the heads.
            shape = replace(
                cost.shape, query_heads=pools.q_THD.shape[1], key_value_heads=pools.k_TKD.shape[1]
            )
            priced = replace(cost, shape=shape)
            way = int(isinstance(pools, BackwardInputs))
            seconds = (
                float(priced.estimate_directions(tasks.query_length, tasks.key_length)[way].sum())
                * slowness
            )
            time.sleep(max(0.0, seconds - taken))

    def slow_forward(
        self: CpuKernel, pools: Operands, tasks: TaskBatch, scores: ScoreOptions
    ) -> Outputs:
        started = time.perf_counter()
        q_THD, _, v_TKV = pools
        empty = Outputs(
            q_THD.new_zeros(*q_THD.shape[:2], v_TKV.shape[-1]), q_THD.new_zeros(q_THD.shape[:2])
        )
        outputs = forward(self, pools, tasks, scores) if cost is None else empty
        late(tasks, pools, started)
        return outputs

    def slow_backward(
        self: CpuKernel, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions
    ) -> Grads:
        started = time.perf_counter()
        zeros = Grads(*map(torch.zeros_like, (pools.q_THD, pools.k_TKD, pools.v_TKV)))
        grads = backward(self, pools, tasks, scores) if cost is None else zeros
        late(tasks, pools, started)
        return grads

    with (
        patch.object(CpuKernel, "forward", slow_forward),
        patch.object(CpuKernel, "backward", slow_backward),
    ):
        yield
