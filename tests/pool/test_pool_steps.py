"""Servers receive only the steps that they need, and keep nothing of past sessions."""

from __future__ import annotations

import gc
import re
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from exact_training import LAYERS, build_model, compute_loss, draw_batch
from launches import Launch, Launcher, pooled, run_both_ways
from tiny import build

import hf_distca
from hf_distca.integration.current_session import balancing, use_session
from hf_distca.pool.observer import PoolObserver
from hf_distca.runtime.group import AttentionGroup
from tiny_runs import documents, settings

ATTENTION = ("begin", "serve", "finish")


def step(model: Any, rank: int, number: int = 0) -> float:
    loss = compute_loss(model, draw_batch(rank, number))
    loss.backward()
    return loss.item()


def work_alone(rank: int, what: str) -> None:
    hf_distca.configure(settings())
    model = build_model("full")
    step(model, rank)
    with patch.object(PoolObserver, "announce", side_effect=AssertionError("servers got a step")):
        if what == "evaluation" and rank == 0:
            with torch.no_grad():
                compute_loss(model.eval(), draw_batch(rank, 1))
        elif what == "generate" and rank == 0:
            model.generate(torch.tensor([[1, 5, 9, 3, 11, 4]]), max_new_tokens=3, do_sample=False)
    step(model.train(), rank)


@pytest.mark.parametrize("what", ["evaluation", "generate"])
def test_work_on_rank_0_alone_sends_no_steps_to_servers(launch: Launcher, what: str) -> None:
    ours = launch(2, 1)(pooled, work_alone, what)
    assert ours[0].told["begin"] == 2 * 2 * LAYERS


def train_unmoved(rank: int, how: str) -> None:
    hf_distca.configure(settings(min_gain=0.9 if how == "too little gain" else 0.0))
    model = build_model("full")
    with balancing(how != "not balanced"):
        step(model, rank)


@pytest.mark.parametrize("how", ["too little gain", "not balanced"])
def test_servers_get_no_attention_steps_if_nothing_moves(launch: Launcher, how: str) -> None:
    told = launch(2, 1)(pooled, train_unmoved, how)[0].told
    assert told["make_layer_plan"] == 1
    assert not any(told[step] for step in ATTENTION)


def alternate_sessions(rank: int) -> list[float]:
    """Train with alternating settings while graphs of the last session still exist."""
    model, losses, kept = build_model("full"), list[float](), list[torch.Tensor]()
    hf_distca.configure(settings())
    for number, config in enumerate(
        (None, settings(ping_pong=True), None, settings(ping_pong=True, tile=16), None)
    ):
        use_session(config)
        for micro_batch in range(2):
            loss = compute_loss(model, draw_batch(rank, 2 * number + micro_batch))
            loss.backward(retain_graph=True)
            losses.append(loss.item())
            kept.append(loss)
        del kept[:2]  # of the previous session
        gc.collect()
    return losses


def test_alternating_sessions_have_the_same_losses_with_servers(launch: Launcher) -> None:
    ours, theirs = run_both_ways(launch(2, 1), alternate_sessions)
    for here, there in zip(ours, theirs, strict=True):
        assert here.value == pytest.approx(there.value, rel=1e-12)
    assert ours[0].told["begin"] == 2 * LAYERS * (3 * 2 + 2 * 2 * 2)


def run_late_backward(rank: int) -> list[torch.Tensor]:
    hf_distca.configure(settings())
    model = build_model("full")
    loss = compute_loss(model, draw_batch(rank, 0))
    hf_distca.configure(settings(tile=16))
    step(model, rank, 1)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_backward_after_new_settings_has_the_same_gradients(launch: Launcher) -> None:
    ours, theirs = run_both_ways(launch(2, 1), run_late_backward)
    for here, there in zip(ours, theirs, strict=True):
        torch.testing.assert_close(here.value, there.value, rtol=1e-12, atol=1e-14)


def learn_costs(rank: int) -> tuple[list[float], bool]:
    """Train with costs that measurements of all ranks correct."""
    hf_distca.configure(settings(cost_model="analytic"))
    model = build_model("full")
    losses = [step(model, rank, number) for number in range(4)]
    return losses, bool(hf_distca.metrics(gather=True).figures()["distca/imbalance_measured_after"])


def test_costs_learned_with_servers_change_no_losses(launch: Launcher) -> None:
    ours, theirs = run_both_ways(launch(2, 1), learn_costs)
    for here, there in zip(ours, theirs, strict=True):
        assert here.value[0] == pytest.approx(there.value[0], rel=1e-12)
        assert here.value[1]
    assert ours[0].told["gather_measurements"] == 1


def count_lookups(rank: int) -> list[int]:
    """Count the lookups of the training group in each micro-batch of a hybrid model."""
    hf_distca.configure(settings())
    model = build("nemotron_h", "distca", torch.float64)
    data = datasets.Dataset.from_dict({"input_ids": documents(150, 20, 90, 33, 60, 31)})
    shares = hf_distca.document_shares(data, 64, model=model, ranks=2, dtype=torch.float64)
    counts = list[int]()
    for number in range(3):
        batch = hf_distca.PackingCollator()([shares[2 * number + rank]])
        with patch.object(
            AttentionGroup, "find_or_create", side_effect=AttentionGroup.find_or_create
        ) as made:
            compute_loss(model, batch).backward()
        counts.append(made.call_count)
    return counts


def test_training_group_of_a_hybrid_model_is_looked_up_once(launch: Launcher) -> None:
    for trained in launch(2, 1)(pooled, count_lookups):
        assert trained.value == [1, 0, 0]


def test_servers_end_with_the_training_ranks_and_report() -> None:
    started = Launch(2, 1)
    try:
        told, *_ = (trained.told for trained in started(pooled, alternate_sessions))
        assert started.end() == [0]
        (said,) = started.read_outputs()
    finally:
        started.close()
    assert "is rank 2 of 3, and serves the 2 that train" in said
    done = re.search(
        r"served (\d+) calls of attention in (\d+) micro-batches: .* s in kernels of .* ended: the"
        r" run is over",
        said,
    )
    assert done is not None, said
    assert [int(number) for number in done.groups()] == [told["begin"], 10]
