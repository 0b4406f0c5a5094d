"""Ways to run a step that only benchmarks compare with hf-distca: the published DistCA planner, and
even ticks of stages.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmark_modules import import_benchmark
from hf_distca.schedule.cost import AttentionShape, count_causal_pairs
from hf_distca.schedule.deal import deal_in_order
from hf_distca.tools.advise.document_lengths import find_distribution, from_list
from simulator.loader_rules import draw_steps
from simulator.predict import simulate
from simulator.setting import Setting

even_ticks, published_planner = (
    import_benchmark("even_ticks"),
    import_benchmark("published_planner"),
)
ideal_seconds = import_benchmark("ideal").ideal_seconds


def test_attention_in_even_ticks_ends_where_linear_layers_do() -> None:
    """Three seconds each, of 3 + 6 on three ranks; but a rank whose linear layers take longer gets
    next to none.
    """
    linear = np.array([0.0, 3.0, 0.0])
    attention = even_ticks.attention_beside(linear, 6.0)
    assert attention.sum() == pytest.approx(3)
    assert linear + 2 * attention == pytest.approx(np.full(3, 3.0), abs=0.1)
    assert even_ticks.attention_beside(np.array([0.0, 100.0, 0.0]), 6.0) == pytest.approx(
        [1.5, 0.0, 1.5], abs=0.03
    )


def test_even_ticks_are_faster_if_messages_take_no_time(setting: Setting) -> None:
    fast = replace(
        setting.hardware, node_rate=1e15, link_gbps=1e7, exchange_seconds=0.0, peer_seconds=0.0
    )
    staged = replace(setting, ranks=16, stages=2, micro_batches=2, sharding="zero1", hardware=fast)
    documents = find_distribution("prolong", 65536)
    built, even = simulate(staged, documents, ("dealt-ping-pong", even_ticks.EVEN_TICKS), batches=1)
    (lengths,) = draw_steps(documents, staged.tokens, staged.micro_batches, 1)
    assert ideal_seconds(staged, lengths) <= even.step_seconds < built.step_seconds


def test_ranks_below_the_mean_are_filled_only() -> None:
    layout = deal_in_order(np.array([65536, *[2048] * 224]), 8, 65536)
    shape = AttentionShape(32, 8, 128, 128, 2)
    plan = published_planner.plan_published(layout, shape, tolerance=0.05)
    pairs = np.bincount(
        plan.server, weights=count_causal_pairs(plan.end - plan.start, plan.end), minlength=8
    )
    assert pairs.min() >= 0.9 * pairs.mean()
    assert pairs.max() < 1.4 * pairs.mean()
    loose = published_planner.plan_published(layout, shape, tolerance=1.0)
    assert (loose.home == loose.server).all()


@pytest.mark.parametrize("lengths", [[131072], [131071, 1], [65536, 65533, 3]])
def test_a_document_may_fill_a_batch_and_a_nano_batch_be_empty(
    setting: Setting, lengths: list[int]
) -> None:
    (step,) = simulate(setting, from_list(lengths, "few"), [published_planner.PUBLISHED], batches=2)
    assert (step.strategy, step.title) == ("published", "published DistCA planner")
    assert math.isfinite(step.step_seconds)
    assert step.attention_share == pytest.approx(1)


def test_it_is_no_faster_than_the_ideal(setting: Setting) -> None:
    documents = find_distribution("prolong", 65536)
    (step,) = simulate(setting, documents, [published_planner.PUBLISHED], batches=1)
    (lengths,) = draw_steps(documents, setting.tokens, setting.micro_batches, 1)
    assert step.step_seconds >= 0.999 * ideal_seconds(setting, lengths)
