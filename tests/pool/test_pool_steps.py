"""What servers are told and what they keep: nothing of what does not concern them, and nothing of
what is over.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from exact_training import LAYERS, drawn, loss_of, model_for
from launches import Launch, pooled, unpooled
from tiny import build

import hf_distca
from hf_distca.integration.current_session import balancing, use_session
from hf_distca.pool.observer import PoolObserver
from hf_distca.runtime.group import AttentionGroup
from tiny_runs import documents, settings

ATTENTION = ("begin", "serve", "finish")


def step(model: Any, rank: int, number: int = 0) -> float:
    loss = loss_of(model, drawn(rank, number))
    loss.backward()
    return loss.item()


def nothing_to_serve(rank: int, what: str) -> None:
    hf_distca.configure(settings())
    model = model_for("full")
    step(model, rank)
    with patch.object(PoolObserver, "announce", side_effect=AssertionError("servers are told")):
        if what == "evaluation" and rank == 0:
            with torch.no_grad():
                loss_of(model.eval(), drawn(rank, 1))
        elif what == "generate" and rank == 0:
            model.generate(torch.tensor([[1, 5, 9, 3, 11, 4]]), max_new_tokens=3, do_sample=False)
    step(model.train(), rank)


@pytest.mark.parametrize("what", ["evaluation", "generate"])
def test_what_rank_0_does_alone_is_not_told(
    launch: Callable[[int, int], Launch], what: str
) -> None:
    ours = launch(2, 1)(pooled, nothing_to_serve, what)
    assert ours[0].told["begin"] == 2 * 2 * LAYERS


def nothing_moves(rank: int, how: str) -> None:
    hf_distca.configure(settings(min_gain=0.9 if how == "too little gain" else 0.0))
    model = model_for("full")
    with balancing(how != "not balanced"):
        step(model, rank)


@pytest.mark.parametrize("how", ["too little gain", "not balanced"])
def test_layers_tell_nothing_where_nothing_moves(
    launch: Callable[[int, int], Launch], how: str
) -> None:
    told = launch(2, 1)(pooled, nothing_moves, how)[0].told
    assert told["make_layer_plan"] == 1
    assert not any(told[step] for step in ATTENTION)


def sessions_in_turn(rank: int) -> list[float]:
    """Settings of a callback in place of those of the process, and back, while something of both is
    still there.
    """
    model, losses, kept = model_for("full"), list[float](), list[torch.Tensor]()
    hf_distca.configure(settings())
    for number, config in enumerate(
        (None, settings(ping_pong=True), None, settings(ping_pong=True, tile=16), None)
    ):
        use_session(config)
        for micro_batch in range(2):
            loss = loss_of(model, drawn(rank, 2 * number + micro_batch))
            loss.backward(retain_graph=True)
            losses.append(loss.item())
            kept.append(loss)
        del kept[:2]  # of the session before
        gc.collect()
    return losses


def test_sessions_in_turn(launch: Callable[[int, int], Launch]) -> None:
    started = launch(2, 1)
    theirs, ours = started(unpooled, sessions_in_turn), started(pooled, sessions_in_turn)
    for here, there in zip(ours, theirs, strict=True):
        assert here.value == pytest.approx(there.value, rel=1e-12)
    assert ours[0].told["begin"] == 2 * LAYERS * (3 * 2 + 2 * 2 * 2)


def backward_in_another_session(rank: int) -> list[torch.Tensor]:
    hf_distca.configure(settings())
    model = model_for("full")
    loss = loss_of(model, drawn(rank, 0))
    hf_distca.configure(settings(tile=16))
    step(model, rank, 1)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_backward_after_new_settings(launch: Callable[[int, int], Launch]) -> None:
    started = launch(2, 1)
    theirs, ours = (
        started(unpooled, backward_in_another_session),
        started(pooled, backward_in_another_session),
    )
    for here, there in zip(ours, theirs, strict=True):
        torch.testing.assert_close(here.value, there.value, rtol=1e-12, atol=1e-14)


def corrected(rank: int) -> tuple[list[float], bool]:
    """Rates are corrected by what all ranks measure."""
    hf_distca.configure(settings(cost_model="analytic"))
    model = model_for("full")
    losses = [step(model, rank, number) for number in range(4)]
    return losses, bool(hf_distca.metrics(gather=True).figures()["distca/imbalance_measured_after"])


def test_costs_are_corrected(launch: Callable[[int, int], Launch]) -> None:
    started = launch(2, 1)
    theirs, ours = started(unpooled, corrected), started(pooled, corrected)
    for here, there in zip(ours, theirs, strict=True):
        assert here.value[0] == pytest.approx(there.value[0], rel=1e-12)
        assert here.value[1]
    assert ours[0].told["gather_measurements"] == 1


def run_states(rank: int) -> list[int]:
    """How often the group of those that train was looked for, in each micro-batch of a hybrid
    model.
    """
    hf_distca.configure(settings())
    model = build("nemotron_h", "distca", torch.float64)
    data = datasets.Dataset.from_dict({"input_ids": documents(150, 20, 90, 33, 60, 31)})
    shares, counts = (
        hf_distca.document_shares(data, 64, model=model, ranks=2, dtype=torch.float64),
        [],
    )
    for number in range(3):
        batch = hf_distca.PackingCollator()([shares[2 * number + rank]])
        with patch.object(
            AttentionGroup, "find_or_create", side_effect=AttentionGroup.find_or_create
        ) as made:
            loss_of(model, batch).backward()
        counts.append(made.call_count)
    return counts


def test_ranks_that_train_look_for_their_group_once(launch: Callable[[int, int], Launch]) -> None:
    for trained in launch(2, 1)(pooled, run_states):
        assert trained.value == [1, 0, 0]


def test_servers_end_with_the_trainers_and_report() -> None:
    """Servers end with the ranks that train and say what they did."""
    started = Launch(2, 1)
    try:
        told, *_ = (trained.told for trained in started(pooled, sessions_in_turn))
        assert started.end() == [0]
        (said,) = started.said()
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
