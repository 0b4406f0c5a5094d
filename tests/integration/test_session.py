"""Settings, errors that ranks catch, evaluation and figures of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_parity import build_model

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from ranks import RankPools
from tiny_runs import pack, settings


def make_batch(rank: int) -> dict[str, Any]:
    return pack(*([96], [16, 16])[rank])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tolerance": 1.5}, "tolerance=1.5"),
        ({"tolerance": -0.1}, "tolerance=-0.1"),
        ({"min_gain": 1.0}, "min_gain=1.0"),
        ({"tile": 0}, "tile=0"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 1.5}, "group_size=1.5"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"kernel": "flash"}, "kernel='flash' must be one of 'auto'"),
        ({"cost_model": "measured"}, "cost_model='measured' must be 'analytic'"),
    ],
)
def test_settings_with_wrong_values_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(hf_distca.ConfigError, match=named):
        hf_distca.DistCAConfig(**changes)


def apply_callback(*given: Any, **options: Any) -> None:
    hf_distca.DistCACallback(*given, **options).apply_settings()


@pytest.mark.parametrize("take", [hf_distca.configure, apply_callback])
@pytest.mark.parametrize(
    "given", [{"tolerance": 0.1}, {}, hf_distca.DistCAConfig, "distca", 0, np.zeros(2)]
)
def test_settings_of_other_types_are_refused(take: Callable[..., object], given: Any) -> None:
    with pytest.raises(hf_distca.ConfigError, match="give it a DistCAConfig"):
        take(given)


@pytest.mark.parametrize("take", [hf_distca.configure, apply_callback])
@pytest.mark.parametrize("given", ["dp", [0, 1], -100])
def test_groups_of_other_types_are_refused(take: Callable[..., object], given: Any) -> None:
    with pytest.raises(hf_distca.ConfigError, match="give a process group"):
        take(group=given)


def test_balancing_context_switches_balance_off_and_back_on() -> None:
    hf_distca.configure(hf_distca.DistCAConfig(tile=64))
    with hf_distca.balancing(False):
        assert not current_session().config.balance
        assert current_session().config.tile == 64
    assert current_session().config.balance


def go_on_after_an_error(rank: int) -> tuple[str, int]:
    """Catch an error on all ranks, and go on: first without `configure`, then after `configure`."""
    config = settings(timeout_seconds=20.0)
    hf_distca.configure(config)
    model = build_model(2, "distca", torch.float32)
    given = make_batch(rank)
    model(**given, use_cache=False)
    wrong = {"cu_seq_lens_q": torch.tensor([0, -3, given["input_ids"].shape[1]])}
    with pytest.raises(LayoutError):
        model(input_ids=given["input_ids"], **wrong, use_cache=False)
    with pytest.raises(hf_distca.DistCADesyncError) as caught:
        model(**given, use_cache=False)
    hf_distca.configure(config)
    before = current_session().meter.dispatches
    model(**given, use_cache=False)
    return str(caught.value), current_session().meter.dispatches - before


def test_step_after_a_caught_error_names_that_error_and_configure(rank_pool: RankPools) -> None:
    for rank, (said, dispatches) in enumerate(rank_pool(2)(go_on_after_an_error, timeout=60)):
        assert said.startswith(f"rank {rank} had left the group of ranks (0, 1) before"), said
        assert "it raised LayoutError while reading documents" in said
        assert "Call hf_distca.configure on all ranks for a new group" in said
        assert "waited up to" not in said
        assert ".." not in said.replace("...", "")
        assert dispatches > 0


def evaluate_alone(rank: int) -> int:
    hf_distca.configure(settings())
    model = build_model(2, "distca", torch.float32).eval()
    if rank == 0:  # only one rank evaluates and generates: nothing may wait for the other
        model(**make_batch(rank), use_cache=False)
        model.generate(
            input_ids=torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, pad_token_id=0
        )
    return current_session().meter.dispatches


def test_evaluation_and_generation_on_one_rank_exchange_nothing(rank_pool: RankPools) -> None:
    assert rank_pool(2)(evaluate_alone, timeout=60) == [0, 0]


def train_with_a_frozen_layer(rank: int, frozen: int | None) -> int:
    hf_distca.configure(settings())
    model = build_model(2, "distca", torch.float32).train()
    if frozen is not None:
        model.get_decoder().layers[frozen].eval().requires_grad_(False)
    model(**make_batch(rank), use_cache=False).logits.sum().backward()
    return current_session().meter.dispatches


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_layers_in_evaluation_mode_are_balanced(rank_pool: RankPools, frozen: int) -> None:
    """The model itself is in training mode, so all ranks run the frozen layer."""
    pool = rank_pool(2)
    assert pool(train_with_a_frozen_layer, frozen) == pool(train_with_a_frozen_layer, None)
    assert pool(train_with_a_frozen_layer, frozen)[0] > 0


def evaluate_together(rank: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    config = settings(balance_evaluation=True)
    hf_distca.configure(config)
    model = build_model(2, "distca", torch.float32).eval()
    together = model(**make_batch(rank), use_cache=False).logits.detach()
    with hf_distca.balancing(False):
        alone = model(**make_batch(rank), use_cache=False).logits.detach()
    return current_session().meter.dispatches, together, alone


def test_evaluation_is_shared_if_balance_evaluation_is_on(rank_pool: RankPools) -> None:
    for dispatches, together, alone in rank_pool(2)(evaluate_together):
        assert dispatches == 2  # one per layer, and none without balancing
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_history_figures_count_only_measured_micro_batches() -> None:
    history, layout = History(), Layout.from_lengths([[8, 4], [4]])
    plan = Plan.from_tasks(layout, [(0, 0, 8, 0, 0), (1, 0, 4, 0, 1), (2, 0, 4, 1, 1)])
    key = PlanKey(AttentionShape(4, 2, 16, 16, 4), "cpu")
    # Only the second plan has nodes, with one rank on each.
    tasks, node = np.array([2.0, 1.0, 1.0]), {1: None, 2: 1}
    first, second = (
        MicroBatchPlan(key, plan, n, tasks, Ranks(per_node=node[n]), Meter(), planning_ms=5.0)
        for n in node
    )
    history.record_plan(first)
    measured = np.array(
        [[2 * 10**9, 4_000_000, 0, 2, 4_000_000], [3 * 10**9, 1_000_000, 0, 2, 1_000_000]]
    )
    first.meter.count(calls=2)
    history.record_figures(first, measured)
    assert history.total.compute_figures() == {}, "the micro-batch is not over"
    history.record_plan(second)
    before = history.total
    figures = before.compute_figures()
    assert figures["distca/imbalance_estimated_before"] == pytest.approx(3 / 2)
    assert figures["distca/imbalance_estimated_after"] == pytest.approx(1.0)
    # Rank 1 spent 3 s, half of it for rank 0: 2 + 1.5 against a mean of 2.5.
    assert figures["distca/imbalance_measured_before"] == pytest.approx(3.5 / 2.5)
    assert figures["distca/imbalance_measured_after"] == pytest.approx(3 / 2.5)
    assert figures["distca/exchanged_mb_per_layer"] == pytest.approx(2.0)
    assert figures["distca/planning_ms"] == pytest.approx(5.0)
    assert (history.total - before).compute_figures() == {}
    history.end_micro_batch()
    assert (history.total - before).compute_figures() == {}, "micro-batch 2 is not measured yet"
    measured = np.array([[10**9, 0, 0, 2, 0], [10**9, 6_000_000, 0, 2, 6_000_000]])
    second.meter.count(calls=2)
    history.record_figures(second, measured)
    after = (history.total - before).compute_figures()
    assert after.keys() == figures.keys() | {"distca/between_nodes_mb_per_layer"}
    assert (
        after["distca/exchanged_mb_per_layer"] == after["distca/between_nodes_mb_per_layer"] == 3.0
    )
    whole = history.total.compute_figures()
    assert whole["distca/exchanged_mb_per_layer"] == 2.5
    assert whole["distca/between_nodes_mb_per_layer"] == 3.0, "a mean over micro-batches with nodes"
    assert after["distca/imbalance_measured_after"] == pytest.approx(1.0)
    assert (before.micro_batches, history.total.micro_batches) == (
        1,
        2,
    ), "later micro-batches do not change an earlier total"
