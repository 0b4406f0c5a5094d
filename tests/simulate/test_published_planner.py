"""The published DistCA planner, as benchmarks compare it with hf-distca."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_distca.schedule.cost import AttentionShape, causal_pairs
from hf_distca.schedule.deal import in_order
from hf_distca.simulate.document_lengths import distribution, from_list
from hf_distca.simulate.predict import ideal_seconds, simulate
from hf_distca.simulate.setting import Setting


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield import_module("published_planner")


def test_ranks_below_the_mean_are_filled_only(benchmark: Any) -> None:
    layout = in_order(np.array([65536, *[2048] * 224]), 8, 65536)
    shape = AttentionShape(32, 8, 128, 128, 2)
    plan = benchmark.plan_published(layout, shape, tolerance=0.05)
    pairs = np.bincount(plan.server, weights=causal_pairs(plan.end - plan.start, plan.end), minlength=8)
    assert pairs.min() >= 0.9 * pairs.mean()
    assert pairs.max() < 1.4 * pairs.mean()
    loose = benchmark.plan_published(layout, shape, tolerance=1.0)
    assert (loose.home == loose.server).all()


@pytest.mark.parametrize("lengths", [[131072], [131071, 1], [65536, 65533, 3]])
def test_a_document_may_fill_a_batch_and_a_nano_batch_be_empty(benchmark: Any, setting: Setting, lengths: list[int]) -> None:
    (step,) = simulate(setting, from_list(lengths, "few"), [benchmark.PUBLISHED], batches=2)
    assert (step.strategy, step.title) == ("published", "published DistCA planner")
    assert math.isfinite(step.step_seconds)
    assert step.attention_share == pytest.approx(1)


def test_it_is_no_faster_than_the_ideal(benchmark: Any, setting: Setting) -> None:
    documents = distribution("prolong", 65536)
    (step,) = simulate(setting, documents, [benchmark.PUBLISHED], batches=1)
    (lengths,) = documents.steps(setting.tokens, setting.micro_batches, 1)
    assert step.step_seconds >= 0.999 * ideal_seconds(setting, lengths)
