"""The planner with simulated ranks: its collectives, and the measurements that it gathers."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import torch
from stand_ins import MadeUpGroup, pack

from device_events import Device
from hf_distca.agreement import batch_plan as history_module
from hf_distca.agreement.announce import FIGURE_COUNT, HEADER_SIZE, PlanKey
from hf_distca.agreement.batch_plan import MicroBatchPlan
from hf_distca.agreement.planner import Planner
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.meter import Meter, get_clock
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS

SHAPE = AttentionShape(4, 2, 16, 16, 2)
KEY = PlanKey(SHAPE, "cpu")


def make_planner(device: str = "cpu", **settings: float) -> Planner:
    made = Planner(DistCAConfig(tile=1, min_gain=0.0, **settings), Meter())
    made.costs[SHAPE, device] = CostModel.make_of_pairs(SHAPE)
    return made


def test_any_number_of_plans_takes_two_collectives() -> None:
    for count in (1, 5):
        group = MadeUpGroup(2)
        plans = make_planner().plan([(pack(96), KEY)] * count, group)
        assert len(plans) == count
        assert group.gathered == ["planning micro-batch 1", "comparing plans of micro-batch 1"]


def test_different_plans_are_named_by_rank() -> None:
    def others(row: np.ndarray) -> list[np.ndarray]:
        return [row, row] if len(row) > 1 else [row, row + 1]  # only digests are single numbers

    with pytest.raises(
        DistCADesyncError, match="different plans for the same documents in micro-batch 1: rank 0: "
    ):
        make_planner().plan([(pack(96), KEY)], MadeUpGroup(2, others))


def run(ours: Planner, group: MadeUpGroup, key: PlanKey, seconds: float) -> Meter:
    """Plan a micro-batch and pretend to compute it."""
    (planned,) = ours.plan([(pack(96), key)], group)
    planned.meter.span("server", 0.0, seconds)
    return planned.meter


def test_only_gathering_measurements_waits_for_the_device() -> None:
    """Announcements leave out the newest micro-batch, so they do not wait."""
    device, ours, group = Device(), make_planner("cuda"), MadeUpGroup(2)
    key = KEY._replace(device="cuda")
    with device.installed():
        for number in (1, 2, 3):
            (planned,) = ours.plan([(pack(96), key)], group)
            begin = get_clock(torch.device("cuda"))()
            device.launch(float(number))
            planned.meter.span("server", begin, get_clock(torch.device("cuda"))())
        assert (device.waits, ours.history.total.micro_batches) == ([], 0)
        ours.gather_measurements(group)
        assert ours.history.total.micro_batches == 3
        assert ours.history.total.measured_mean == pytest.approx(6.0)
        assert device.waits[-1] == 6.0
        gathered = list(group.gathered)
        ours.gather_measurements(group)
        assert group.gathered == gathered, "no measurement is new"


def test_a_limited_number_of_unfinished_micro_batches_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of the other rank still run at every announcement."""
    monkeypatch.setattr(history_module, "_MAX_RUNNING", 3)
    running = True

    def others(row: np.ndarray) -> list[np.ndarray]:
        other = row.copy()
        if running and len(row) > HEADER_SIZE + 2:
            other[HEADER_SIZE : HEADER_SIZE + FIGURE_COUNT * row[5] : FIGURE_COUNT] = -1
        return [row, other]

    ours, group = make_planner(), MadeUpGroup(2, others)
    for _ in range(8):
        run(ours, group, KEY, 1.0)
    assert ours.history.total.micro_batches == 0
    running = False
    ours.gather_measurements(group)
    assert ours.history.total.micro_batches == 3


def test_measurements_with_running_kernels_are_skipped_on_all_ranks() -> None:
    unfinished = []

    def others(row: np.ndarray) -> list[np.ndarray]:
        other = row.copy()
        # One measured plan: this rank is done, the other is not.
        if len(row) > HEADER_SIZE + 2 and row[5]:
            other[HEADER_SIZE] = -1
            unfinished.append(row[HEADER_SIZE])
        return [row, other]

    ours, group = make_planner(), MadeUpGroup(2, others)
    run(ours, group, KEY, 1.0)
    run(ours, group, KEY, 1.0)
    assert len(unfinished) == 1
    assert ours.history.total.measured_mean == 0.0


@pytest.mark.parametrize("other", [0, 2])
def test_different_numbers_of_measured_plans_are_logged(
    other: int, caplog: pytest.LogCaptureFixture
) -> None:
    gathering = False

    def others(row: np.ndarray) -> list[np.ndarray]:
        return [row, np.tile(row, other)] if gathering else [row, row]

    ours, group = make_planner(), MadeUpGroup(2, others)
    run(ours, group, KEY, 1.0)
    gathering = True
    ours.gather_measurements(group)
    assert "up to micro-batch 1" in caplog.text
    assert f"different numbers of plans (rank 0: 1, rank 1: {other})" in caplog.text
    gathering = False
    run(ours, group, KEY, 1.0)
    ours.gather_measurements(group)
    assert ours.history.total.micro_batches >= 1, "later micro-batches are measured"


def test_memory_of_measurements_is_not_quadratic_in_ranks() -> None:
    ranks = 4096
    layout = Layout.from_lengths([[64, 64, 128]] * ranks)
    plan, cost = Plan.make_local(layout), CostModel.make_of_pairs(SHAPE)
    tracemalloc.start()
    seconds = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
    measured = MicroBatchPlan(KEY, plan, 1, seconds, UNIFORM_RANKS, Meter())
    measured.figures = np.ones((ranks, 5), dtype=np.int64)
    _ = measured.measured_before
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * ranks * ranks / 20
    started = time.perf_counter()
    _ = measured.measured_before
    assert time.perf_counter() - started < 0.05


def test_measured_seconds_are_assigned_to_home_ranks_in_proportion() -> None:
    layout = Layout.from_lengths([[8, 4], [4]])
    plan = Plan.from_tasks(layout, [(0, 0, 8, 0, 0), (1, 0, 4, 0, 1), (2, 0, 4, 1, 1)])
    used = MicroBatchPlan(KEY, plan, 1, np.array([2.0, 1.0, 1.0]), UNIFORM_RANKS, Meter())
    assert used.estimated_before.tolist() == [3.0, 1.0]
    assert used.estimated_after.tolist() == [2.0, 2.0]
    used.figures = np.array([[2 * 10**9, 0, 0, 1, 0], [3 * 10**9, 0, 0, 1, 0]])
    assert used.measured_before.tolist() == [3.5, 1.5]
