"""Runs with equal data repeat to the last bit where that is asked for, whatever the clock says; a
record has the rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import hf_distca
from hf_distca.agreement.batch_plan import Measurement, MicroBatchPlan
from hf_distca.agreement.record_rows import StepsRow
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import KernelCost
from hf_distca.tools.report.folder import RunFolder
from ranks import RankPool
from tiny_runs import COMMON, documents, settings, tiny_llama

STEPS = 20  # rates of dealt batches change after 8 micro-batches at the earliest
KERNEL = KernelCost(1e-7, np.inf, 1e9)
# As `PAIRS`, whose rates would not be corrected, in place of the built-in figures.
FIGURES = KERNEL, KERNEL, 1e13, 0.0, None


def train(
    rank: int, folder: str, slower: float, deterministic: bool, changes: dict[str, Any]
) -> tuple[Any, ...]:
    """Weights after a run in which kernels of rank 1 seem `slower`; the number of exchanges, and
    what was learned.
    """
    own_measurement = MicroBatchPlan.own_measurement.fget

    def timed(used: MicroBatchPlan) -> Measurement:
        nanoseconds, sent, exchanging, calls, between = own_measurement(used)
        if calls > 0:
            estimated = float(used.task_seconds[used.plan.server == rank].sum())
            nanoseconds, exchanging = (
                int(1e9 * calls * estimated * (slower if rank else 1.0)),
                calls,
            )
        return Measurement(nanoseconds, sent, exchanging, calls, between)

    ids = documents(*([180, 12, 20, 33, 90, 64, 7, 150] * 6), seed=1)
    arguments = {
        **COMMON,
        "output_dir": folder,
        "max_steps": STEPS,
        "full_determinism": deterministic,
        "seed": 7,
    }
    callback = hf_distca.DistCACallback(settings(**{"cost_model": "analytic", **changes}))
    with (
        patch.dict(os.environ),
        patch.dict("hf_distca.schedule.cost._BUILT_IN", cpu=FIGURES),
        patch.object(MicroBatchPlan, "own_measurement", property(timed)),
    ):
        trainer = Trainer(
            tiny_llama("distca"),
            TrainingArguments(**arguments),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            callbacks=[callback],
        )
        try:
            hf_distca.deal(trainer, 96).train()
        finally:
            torch.use_deterministic_algorithms(False)
    costs = current_session().planner.costs
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return weights, current_session().meter.dispatches, costs.learned_corrections


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "full_determinism": (True, {}),
    "full_determinism, ping-pong": (True, {"ping_pong": True}),
    "measured_rates=False": (False, {"measured_rates": False}),
}


@pytest.mark.parametrize(
    "way",
    [
        way if way == "full_determinism" else pytest.param(way, marks=pytest.mark.slow)
        for way in WAYS
    ],
)
def test_runs_repeat_to_the_bit_where_that_is_asked_for(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, way: str
) -> None:
    deterministic, changes = WAYS[way]
    runs = [
        rank_pool(2)(train, str(tmp_path / str(slower)), slower, deterministic, changes)
        for slower in (1.0, 3.0)
    ]
    for (weights, exchanges, learned), (again, exchanges_again, _) in zip(*runs, strict=True):
        assert exchanges == exchanges_again
        assert exchanges > STEPS, "work is moved"
        assert learned == {}
        assert torch.equal(weights, again)
    assert all(row.rates == {} for row in RunFolder.read(tmp_path / "3.0").select_rows(StepsRow))


def test_default_plans_follow_the_clock_and_record_rates(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """The guard's other side, without which the test above would show nothing."""
    runs = [
        rank_pool(2)(train, str(tmp_path / str(slower)), slower, False, {}) for slower in (1.0, 3.0)
    ]
    assert not torch.equal(runs[0][0][0], runs[1][0][0])
    learned = runs[1][0][2]
    assert learned["speeds"][0] > 1.5 * learned["speeds"][1]
    rates = [row.rates for row in RunFolder.read(tmp_path / "3.0").select_rows(StepsRow)]
    assert (rates[0], rates[-1]) == ({}, learned)
