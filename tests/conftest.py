from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import RankPool

# Nothing that is imported is garbage, and looking for it takes a third of the time. Until all tests
# are collected.
gc.disable()

# Of one pool, and of one that the next file may not need. Calls leave communicators, and each of
# their threads wakes up a hundred times a second: after some hundred calls that was half of what
# two cores did.
_CALLS, _CALLS_OF_OTHERS = 15, 5
_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Pools of real gloo ranks by size, started when first asked for, and again after one died or
    had many calls.
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
    """Not within a test: new ranks do what others have done before, which would make a difference
    between two calls.
    """
    calls = _CALLS if nextitem is not None and nextitem.path == item.path else _CALLS_OF_OTHERS
    for size in [size for size, pool in _POOLS.items() if pool.calls >= calls]:
        _POOLS.pop(size).close()


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis is not imported where other processes run the tests: they start after that."""
    if config.getoption("dist") != "no":
        gc.enable()
        return
    from hypothesis import settings

    # Examples are timed by the wall clock: on a busy machine any of them may take longer than the
    # default deadline.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is for ever: no collection has to look at it
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
