"""Losses and gradient norms under every engine are those of sdpa, and the engine that ran is the one that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from matrix import compare, world_of

from engines import Case, cases
from ranks import RankPool

QUICK = [
    Case("DDP"),
    Case("DDP, Trainer", "non-reentrant", peft=True),
    Case("DDP, Trainer", accumulation=2),
    Case("DDP, Trainer", bf16=True),
    Case("DDP, TRL SFT with packing"),
    Case("DDP, torch.compile"),
    Case("FSDP1"),
    Case("FSDP2, fully_shard", "reentrant"),
    Case("FSDP2, transformers", "non-reentrant"),
    Case("FSDP2, accelerate", "non-reentrant"),
    Case("ZeRO-1"),
    Case("ZeRO-2"),
    Case("ZeRO-3", "non-reentrant"),
]


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[Callable[[Case], RankPool]]:
    """Processes of their own for each kind of engine: libraries patch torch and keep state."""
    pools: dict[str, RankPool] = {}

    def pool(case: Case) -> RankPool:
        kind = case.engine[:4]
        if kind not in pools or not pools[kind].alive:
            for other in pools.values():
                other.close()
            pools.clear()
            pools[kind] = RankPool(world_of(case))
        return pools[kind]

    yield pool
    for started in pools.values():
        started.close()


def check(pool: RankPool, case: Case) -> None:
    outcome = compare(pool, case, timeout=200)
    tolerance = 2e-2 if case.bf16 else 1e-4
    assert outcome.loss_difference is not None
    assert outcome.loss_difference <= tolerance
    assert outcome.grad_norm_difference is not None
    assert outcome.grad_norm_difference <= 4 * tolerance


@pytest.mark.timeout(420)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equal_to_sdpa(engine_pool: Callable[[Case], RankPool], case: Case) -> None:
    check(engine_pool(case), case)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("case", [case for case in cases() if case not in QUICK], ids=str)
def test_whole_matrix(engine_pool: Callable[[Case], RankPool], case: Case) -> None:
    check(engine_pool(case), case)
