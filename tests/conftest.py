from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ranks import RankPool

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


# Of one pool. Calls leave communicators, and each of their threads wakes up a hundred times a second: after some hundred calls
# that was half of what two cores did.
_CALLS = 50


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Pools of real gloo ranks by size, started when first asked for, and again after one died or had many calls."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        known = pools.get(world_size)
        if known is not None and (not known.alive or known.calls >= _CALLS):
            known.close()
            known = None
        pools[world_size] = known or RankPool(world_size)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is for ever: no collection has to look at it


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
