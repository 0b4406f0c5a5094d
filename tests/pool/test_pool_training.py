"""Training with servers computes what the ranks that train compute alone, and servers do a part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact_training import LAYERS, Exact, train
from launches import Launch, Served, Trained, pooled, unpooled

DEFAULT = [
    Exact(),
    Exact(changes={"ping_pong": True}),
    Exact(checkpointing=True, changes={"ping_pong": True}),
    Exact("windows", "ahead", changes={"ping_pong": True}),
    Exact(documents="dealt", changes={"ping_pong": True}),
]


def compare(launch: Launch, case: Exact) -> tuple[list[Trained], list[Served]]:
    """Train a case with servers and without. Returns what was seen with servers."""
    theirs = launch(unpooled, train, case)
    ours, served = launch(pooled, train, case), launch.served()
    close = {"rtol": 1e-12, "atol": 1e-14}
    for here, there in zip(ours, theirs, strict=True):
        assert here.value.losses == pytest.approx(there.value.losses, rel=1e-12)
        assert here.value.evaluated == pytest.approx(there.value.evaluated, rel=1e-12)
        for name, weight in there.value.weights.items():
            torch.testing.assert_close(here.value.weights[name], weight, **close, msg=lambda text, name=name: f"{name}: {text}")
    assert ours[0].share > 0.05
    for server in served:
        assert server.steps == ours[0].told
        assert server.kernel_calls > 0
        assert server.sent_bytes > 0
    return ours, served


@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_losses_and_weights_are_those_without_servers(launch: Callable[[int, int], Launch], case: Exact) -> None:
    ours, _ = compare(launch(2, 1), case)
    told = ours[0].told
    calls = 2 * LAYERS * case.halves * case.micro_batches  # forward and backward, whatever is recomputed
    assert [told[step] for step in ("begin", "serve", "finish")] == [calls] * 3
