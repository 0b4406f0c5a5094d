"""Training with servers has the results of training without, and servers do a part of it."""

from __future__ import annotations

import pytest
import torch
from exact_training import LAYERS, Exact, train
from launches import Launch, Launcher, run_both_ways

from turns import in_turn

DEFAULT = [
    Exact(),
    Exact(changes={"ping_pong": True}),
    Exact(checkpointing=True, changes={"ping_pong": True}),
    Exact("windows", changes={"ping_pong": True}),
    Exact(documents="dealt", changes={"ping_pong": True}),
]


SLOW = [
    Exact("windows", "dealt"),
    Exact("windows", checkpointing=True),
    Exact("sinks", changes={"ping_pong": True}),
    Exact(checkpointing=True, accumulation=3, steps=3, changes={"ping_pong": True}),
    Exact(documents="dealt", checkpointing=True),
    Exact("windows", "dealt", checkpointing=True, changes={"ping_pong": True}),
    Exact(documents="spanning", changes={"documents_span_ranks": True}),
    Exact(
        documents="spanning", changes={"documents_span_ranks": True, "max_transient_bytes": 800_000}
    ),
    Exact(documents="dealt", changes={"max_transient_bytes": 400_000, "ping_pong": True}),
    Exact(changes={"head_groups": 1}),
    Exact(evaluated="together"),
    Exact(evaluated="together", changes={"balance_evaluation": True, "ping_pong": True}),
    Exact(evaluated="alone"),
]
WORLDS = [(2, 1), (3, 1), (2, 2)]


def check(launch: Launch, case: Exact) -> None:
    """Compare a case with and without servers, which must receive no unnecessary steps."""
    ours, theirs = run_both_ways(launch, train, case)
    for here, there in zip(ours, theirs, strict=True):
        assert here.value.losses == pytest.approx(there.value.losses, rel=1e-12)
        assert here.value.evaluated == pytest.approx(there.value.evaluated, rel=1e-12)
        torch.testing.assert_close(here.value.weights, there.value.weights, rtol=1e-12, atol=1e-14)
    assert ours[0].share > 0.05
    for server in launch.ask_servers():
        assert server.steps == ours[0].told
        assert server.kernel_calls > 0
        assert server.sent_bytes > 0
    evaluated = case.steps * (
        case.evaluated == "together" and case.changes.get("balance_evaluation", False)
    )
    # Forward and backward; recomputes add no calls.
    calls = LAYERS * case.halves * (2 * case.micro_batches + evaluated)
    assert [ours[0].told[step] for step in ("begin", "serve", "finish")] == [calls] * 3


@pytest.mark.parametrize(
    "case", in_turn(DEFAULT, 8, [Exact(documents="dealt", changes={"ping_pong": True})]), ids=str
)
def test_losses_and_weights_are_the_same_with_servers(launch: Launcher, case: Exact) -> None:
    check(launch(2, 1), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DEFAULT, *SLOW], ids=str)
@pytest.mark.parametrize(("trainers", "servers"), WORLDS)
def test_every_case_has_the_same_losses_and_weights_with_servers(
    launch: Launcher, trainers: int, servers: int, case: Exact
) -> None:
    check(launch(trainers, servers), case)
