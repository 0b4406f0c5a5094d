from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import RankPool

# Imported modules are no garbage, and looking for garbage takes a third of the time, so the
# collector stays off until all tests are collected.
gc.disable()

# The most calls of a pool before it is closed, and of a pool that the next file may not need. Each
# call leaves communicators whose threads wake up a hundred times a second: after some hundred
# calls, they used half of two cores.
_CALLS, _CALLS_OF_OTHERS = 15, 5
_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Create pools of gloo ranks by size. A pool starts when a test first asks for it, and again
    after it died or had many calls.
    """
    from ranks import RankPool

    def pool(world_size: int) -> RankPool:
        known = _POOLS.get(world_size)
        if known is not None and not known.alive:
            known.close()
            known = None
        _POOLS[world_size] = known or RankPool(world_size)
        return _POOLS[world_size]

    yield pool
    for started in _POOLS.values():
        started.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close pools only between tests: two calls in one test must see equally used ranks."""
    calls = _CALLS if nextitem is not None and nextitem.path == item.path else _CALLS_OF_OTHERS
    for size in [size for size, pool in _POOLS.items() if pool.calls >= calls]:
        _POOLS.pop(size).close()


def pytest_configure(config: pytest.Config) -> None:
    """Import hypothesis only in the processes that run tests: under xdist, workers start later."""
    if config.getoption("dist") != "no":
        gc.enable()
        return
    from hypothesis import settings

    # Hypothesis times examples by the wall clock. On a busy machine, any of them may exceed the
    # default deadline.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects stay: collections need not look at them
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
