"""Engines have the same losses and gradient norms with servers as without servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from case import Case
from launches import Launch, run_both_ways
from tiny_llama import LAYERS

from engines import train

ENGINES = (
    "DDP, Trainer",
    "FSDP2, fully_shard",
    "FSDP2, transformers",
    "FSDP2, accelerate",
    "ZeRO-2",
)
WAYS = [
    {},
    {"ping_pong": True},
    {"checkpointing": "non-reentrant", "ping_pong": True},
    {"checkpointing": "reentrant"},
    {"peft": True, "ping_pong": True},
    {"checkpointing": "non-reentrant", "accumulation": 2},
    {"checkpointing": "non-reentrant", "accumulation": 2, "ping_pong": True},
]
HALVED = [  # in bfloat16
    Case("DDP, Trainer", ping_pong=True),
    Case("FSDP2, fully_shard", "non-reentrant", precision="mixed", accumulation=2),
]
WORLDS = [(2, 1), (3, 1), (2, 2)]
TIMEOUT = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Launches:
    """Keeps one launch; DeepSpeed has its own, because it patches torch."""

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._kind: object = None

    def get(self, case: Case, servers: int) -> Launch:
        kind = case.engine.startswith("ZeRO"), case.ranks, servers
        if self._launch is None or not self._launch.alive or kind != self._kind:
            self.close()
            self._launch, self._kind = Launch(case.ranks, servers), kind
        return self._launch

    def close(self) -> None:
        if self._launch is not None:
            self._launch.close()


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    made = Launches()
    yield made
    made.close()


def check(launches: Launches, case: Case, servers: int) -> None:
    launch = launches.get(case, servers)
    ours, theirs = run_both_ways(launch, train, case, "distca", timeout=TIMEOUT)
    tolerance = 1e-6 if case.precision == "float32" else 1e-3
    for here, there in zip(ours, theirs, strict=True):
        assert len(here.value.losses) == case.steps
        assert here.value.losses == pytest.approx(there.value.losses, rel=tolerance)
        assert here.value.grad_norms == pytest.approx(there.value.grad_norms, rel=4 * tolerance)
        assert here.value.engine == there.value.engine
        assert here.value.calls == there.value.calls == case.calls
        assert here.value.gathers == there.value.gathers
    told, calls = ours[0].told, case.calls * (1 if case.checkpointing != "off" else 2)
    assert [told[step] for step in ("begin", "serve", "finish")] == [calls] * 3, (
        "recomputes are no steps"
    )
    assert ours[0].share > 0.1
    for server in launch.ask_servers():
        assert server.steps == told
        assert server.kernel_calls >= calls
        assert server.kept["_UsedPlan"] <= 2 * case.accumulation * (2 if case.ping_pong else 1)
    assert calls == case.steps * case.accumulation * LAYERS * 2 * (2 if case.ping_pong else 1)


@pytest.mark.parametrize(
    "way",
    WAYS,
    ids=lambda way: " ".join(f"{name}={value}" for name, value in way.items()) or "plain",
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("trainers", "servers"), WORLDS)
def test_engines_train_the_same_with_and_without_servers(
    launches: Launches, trainers: int, servers: int, engine: str, way: dict[str, object]
) -> None:
    check(launches, replace(Case(engine, precision="float32", ranks=trainers), **way), servers)


@pytest.mark.parametrize("case", HALVED, ids=str)
def test_bfloat16_training_is_the_same_with_servers(launches: Launches, case: Case) -> None:
    check(launches, case, 1)
