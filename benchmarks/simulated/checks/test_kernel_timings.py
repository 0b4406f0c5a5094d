"""Timings of kernels that only pass time, by a clock of their own, and fits to them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hf_distca.kernels import Scores, TaskBatch
from hf_distca.kernels.base import Operands, Outputs, Saved
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from kernel_timings import measure
from simulator.fits import FittedCost, add_call_overhead, fit_coefficients, fit_kernel

SHAPE = AttentionShape(
    query_heads=2, key_value_heads=1, head_dim=8, value_head_dim=4, element_bytes=4
)
MODEL = CostModel.make_analytic(SHAPE, device_type="cpu")
CPU = torch.device("cpu")
FAST = KernelCost(2e-6, 5e10, 1e12), KernelCost(0.0, 3e10, 8e11)
MEDIUM = KernelCost(1e-4, 2e9, 1.5e9), KernelCost(2e-4, 1e9, 1.2e9)
SLOW = KernelCost(1e-3, 1e7, 1e7), KernelCost(2e-3, 1e7, 1e7)


class Passing:
    """Takes what a model says, and `launch` seconds a call."""

    name: ClassVar[str] = "passing"

    def __init__(self, costs: tuple[KernelCost, KernelCost], launch: float = 0.0) -> None:
        self.model = CostModel(SHAPE, *costs, np.inf, tile=MODEL.tile)
        self.launch, self.now = launch, 0.0
        self.batches: list[TaskBatch] = []

    def unsupported_reason(self, *_: Any) -> str | None:
        return None

    def forward(self, pools: Operands, tasks: TaskBatch, scores: Scores) -> Outputs:
        q_THD, k_TKD, v_TKV = pools
        assert q_THD.shape == (sum(tasks.query_length), 2, 8)
        ends = [
            start + length for start, length in zip(tasks.key_start, tasks.key_length, strict=True)
        ]
        assert (k_TKD.shape, v_TKV.shape) == ((max(ends), 1, 8), (max(ends), 1, 4))
        assert all(
            keys >= rows >= 1
            for rows, keys in zip(tasks.query_length, tasks.key_length, strict=True)
        )
        self.batches.append(tasks)
        self.now += self.launch + float(
            self.model.estimate_directions(tasks.query_length, tasks.key_length)[0].sum()
        )
        return Outputs(q_THD[..., :4], q_THD[..., 0])

    def backward(self, pools: Saved, tasks: TaskBatch, scores: Scores) -> Any:
        self.now += self.launch + float(
            self.model.estimate_directions(tasks.query_length, tasks.key_length)[1].sum()
        )

    def measured(self) -> tuple[KernelCost, KernelCost]:
        return measure(MODEL, self, torch.float32, CPU, clock=lambda: self.now)


@pytest.mark.parametrize("costs", [FAST, MEDIUM], ids=["fast", "medium"])
def test_coefficients_come_back(costs: tuple[KernelCost, KernelCost]) -> None:
    for found, true in zip(Passing(costs).measured(), costs, strict=True):
        assert found.task_seconds == pytest.approx(true.task_seconds, rel=1e-5, abs=1e-11)
        assert found.bytes_per_second == pytest.approx(true.bytes_per_second, rel=1e-5)
        assert found.flops_per_second == pytest.approx(true.flops_per_second, rel=1e-5)


def test_timings_of_one_tile_come_back_as_they_were() -> None:
    """Where only tasks of a tile were timed, their seconds come back."""
    # Rows of such tasks are as many tiles as there are tasks, so that the two cannot be told apart.
    found, true = (
        CostModel(SHAPE, *Passing(SLOW).measured(), np.inf),
        CostModel(SHAPE, *SLOW, np.inf),
    )
    tasks = [1, 16, 64, 128], [1, 100, 64, 128]
    assert found.estimate_directions(*tasks) == pytest.approx(
        true.estimate_directions(*tasks), rel=1e-5
    )


def test_a_launch_is_not_paid_by_every_task() -> None:
    forward, _ = Passing(FAST, launch=2e-5).measured()
    found = (
        CostModel(SHAPE, forward, forward, np.inf)
        .estimate_directions([512] * 64, [512] * 64)[0]
        .sum()
    )
    true = CostModel(SHAPE, *FAST, np.inf).estimate_directions([512] * 64, [512] * 64)[0].sum()
    assert 0 <= found - true < 0.1 * 64 * 2e-5


def test_batches_are_those_of_servers() -> None:
    kernel = Passing(FAST)
    kernel.measured()
    documents = [batch for batch in kernel.batches if batch.query_length == batch.key_length]
    assert {len(batch) for batch in documents} >= {1, 2, 15}
    assert max(max(batch.key_length) for batch in documents) == 16384
    slices = [batch for batch in kernel.batches if batch not in documents]
    assert any(batch.shares_keys for batch in slices)
    assert any(max(batch.key_length) >= 8 * rows for batch in slices for rows in batch.query_length)


@pytest.mark.parametrize(
    ("flops_per_second", "most"),
    [(4.5e7, 7.0), (3e8, 3.0), (1e9, 2.0), (1e12, 1.0)],
)
def test_calibration_is_bounded_in_time(flops_per_second: float, most: float) -> None:
    rates = KernelCost(0.0, np.inf, flops_per_second)
    kernel = Passing((rates, rates))
    kernel.measured()
    assert kernel.now < most


def test_batches_do_not_grow_where_they_take_long() -> None:
    kernel = Passing(SLOW)
    kernel.measured()
    assert max(max(batch.key_length) for batch in kernel.batches) == 128


@pytest.mark.parametrize("truth", [(3e-5, 5e9, 3e10), (0.0, 2e12, 4e14)])
def test_fit_recovers_coefficients(truth: tuple[float, float, float]) -> None:
    rows, keys = (
        np.array([1, 64, 128, 512, 4096, 128, 8192]),
        np.array([64, 64, 4096, 512, 4096, 65536, 65536]),
    )
    counts = MODEL.count_work(rows, keys)[1]
    seconds = counts @ np.array([truth[0], 1 / truth[1], 1 / truth[2]])
    fitted = fit_kernel(counts, seconds)
    assert fitted.task_seconds == pytest.approx(truth[0], rel=1e-6, abs=1e-12)
    assert fitted.bytes_per_second == pytest.approx(truth[1], rel=1e-6)
    assert fitted.flops_per_second == pytest.approx(truth[2], rel=1e-6)


def test_fit_is_never_negative() -> None:
    generator = np.random.default_rng(0)
    counts = MODEL.count_work(generator.integers(1, 5000, 20), np.full(20, 5000))[0]
    fitted = fit_kernel(counts, generator.random(20) + 0.1)
    assert fitted.task_seconds >= 0
    assert fitted.bytes_per_second > 0
    assert fitted.flops_per_second > 0


@pytest.mark.parametrize("seed", range(6))
def test_no_coefficients_fit_better(seed: int) -> None:
    """Of three, the best are those of some columns alone: without bounds, and not negative by
    themselves.
    """
    generator = np.random.default_rng(seed)
    counts = generator.random((12, 3)) ** 3 * [1.0, 1e9, 1e13]
    seconds = np.abs(counts @ (generator.normal(0.3, 1, 3) / [1e4, 1e13, 1e16])) + 1e-6
    scaled, errors = counts / seconds[:, None], []
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        sizes = np.linalg.norm(scaled[:, columns], axis=0)
        some = np.linalg.lstsq(scaled[:, columns] / sizes, np.ones(12), rcond=None)[0]
        if some.min() >= 0:
            errors.append(np.square(scaled[:, columns] / sizes @ some - 1).sum())
    assert np.square(scaled @ fit_coefficients(counts, seconds) - 1).sum() == pytest.approx(
        min(errors)
    )


def test_call_takes_at_least_its_launch_beside_its_tasks() -> None:
    """A call takes something besides its tasks and no less than its launch."""
    kernel = FittedCost(0.0, 1e12, 1e14, call_seconds=1e-5, least_seconds=5e-5)
    assert add_call_overhead(kernel, [0.0, 1e-5, 1e-4]).tolist() == pytest.approx(
        [0.0, 5e-5, 1.1e-4]
    )
    assert add_call_overhead(kernel, [1e-5, 1e-3], 3).tolist() == pytest.approx([1.5e-4, 1.03e-3])
    assert add_call_overhead(KernelCost(0.0, 1e12, 1e14), [0.0, 1e-5]).tolist() == [0.0, 1e-5]
