"""Servers that are told to end while others train: these go on without them, and compute the
same.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import exact_training
import pytest
import torch
from exact_training import Exact, Outcome, train
from launches import Launch, pooled, unpooled

from hf_distca.integration.current_session import current_session
from turns import in_turn


class Leaving(NamedTuple):
    """A server that is to end: its process number, and where it says what it was told."""

    process: int
    output: Path

    def be_told(self) -> None:
        os.kill(self.process, signal.SIGTERM)
        deadline = time.monotonic() + 20.0
        while "was told to end by SIGTERM" not in self.output.read_text():
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)


def train_while_servers_leave(
    rank: int, case: Exact, servers: dict[int, Leaving]
) -> tuple[Outcome, int]:
    """Train, and tell servers to end before the micro-batches of these numbers. Returns the size of
    the group in the end.
    """
    numbers, loss_of = count(), exact_training.loss_of

    def leaving(model: Any, batch: Any) -> torch.Tensor:
        number = next(numbers)
        if rank == 0 and number in servers:
            servers[number].be_told()
        return loss_of(model, batch)

    with patch.object(exact_training, "loss_of", leaving):
        return train(rank, case), current_session().join_group().size


@pytest.fixture
def launch() -> Iterator[Launch]:
    started = Launch(2, 2)
    yield started
    started.close()


@pytest.mark.parametrize(
    "case",
    in_turn(
        [
            Exact(steps=8, changes={"ping_pong": True}),
            Exact(steps=8, checkpointing=True),
            Exact("windows", "dealt", steps=8),
            Exact("windows", "dealt", steps=8, checkpointing=True, changes={"ping_pong": True}),
            Exact("sinks", steps=8),
            Exact(documents="spanning", steps=8, changes={"documents_span_ranks": True}),
        ],
        12,
    ),
    ids=str,
)
def test_training_goes_on_without_servers_that_leave(case: Exact, launch: Launch) -> None:
    alone = launch(unpooled, train, case)
    first, second = (
        Leaving(server.pid, output)
        for server, output in zip(launch._servers, launch.outputs, strict=True)
    )
    here = launch(pooled, train_while_servers_leave, case, {3: first, 6: second})
    for ours, theirs in zip(here, alone, strict=True):
        outcome, size = ours.value
        assert size == 2
        assert outcome.losses == pytest.approx(theirs.value.losses, rel=1e-12)
        for name, weight in theirs.value.weights.items():
            torch.testing.assert_close(outcome.weights[name], weight, rtol=1e-12, atol=1e-14)
    for server in launch._servers:
        server.join(20.0)
        assert server.exitcode == 0
    for said in launch.said():
        assert said.endswith("; ended: training goes on without it\n")
