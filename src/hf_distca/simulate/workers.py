"""Work by this process alone, or by several where that pays. Results are the same, in order."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from time import perf_counter
from typing import TypeVar

from hf_distca.errors import ConfigError

__all__ = ["cores", "map_in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")

# Seconds that processes must save: starting one, which imports numpy, takes about half a second.
_START_SECONDS = 1.0
# Items that are drawn ahead, for each process.
_AHEAD = 2


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(
    function: Callable[[Item], Result], items: Iterator[Item], jobs: int, *, count: int, sample: int
) -> Iterator[Result]:
    """`function` of each item, in order. What the first ones take here decides whether processes compute the others.

    If anything goes wrong, processes end at once.

    Args:
        function: what can be pickled, as items and results can.
        items: drawn as they are needed.
        jobs: processes; 1 for none but this one.
        count: number of items.
        sample: how many of them are computed here first.

    Raises:
        ConfigError: if a process is killed. What a process raises is raised here.
    """
    began = perf_counter()
    yield from map(function, islice(items, sample))
    workers = min(jobs, count - sample)
    if workers < 2 or (perf_counter() - began) / sample * (count - sample) * (1 - 1 / workers) < _START_SECONDS:
        yield from map(function, items)
        return
    others, running = set(active_children()), deque[Future[Result]]()
    # New processes, not copies of this one, which may have threads.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        for item in items:
            running.append(_submit(pool, function, item))
            if len(running) >= _AHEAD * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
        pool.shutdown()
    except BaseException as error:
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"one of {workers} processes that predict was killed, perhaps for memory: use fewer (jobs, --jobs)."
            ) from error
        raise


def _submit(pool: ProcessPoolExecutor, function: Callable[[Item], Result], item: Item) -> Future[Result]:
    """Give a pool something to do. Processes that start for it never see interrupts from the keyboard: this one answers them."""
    if not hasattr(signal, "pthread_sigmask"):
        return pool.submit(function, item)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """A process whose parent is killed would wait for work forever."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()
