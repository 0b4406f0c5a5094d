"""Predictions of several global batches, by this process alone or by several where that pays. Results are the same, in order."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from time import perf_counter
from typing import TypeVar

from hf_distca.errors import ConfigError

__all__ = ["Told", "cores", "predict_each", "processes", "submit"]

Told = Callable[[], object]
Batch = TypeVar("Batch")
Found = TypeVar("Found")

# Seconds that processes must save: starting one, which imports numpy, takes about half a second.
_START_SECONDS = 1.0
# Batches that are drawn ahead, for each process.
_AHEAD = 2


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predict_each(
    predict: Callable[[Batch, Told], Found], batches: Iterator[Batch], count: int, jobs: int, told: Told, times: int
) -> Iterator[Found]:
    """`predict` of each batch, in order.

    The first one is predicted here. If it took so long that it pays for the others, they go to `jobs` processes.

    Args:
        predict: what can be pickled, and calls what it is given after each of its parts.
        batches, count: batches, and how many they are, at least 1.
        jobs: processes; 1 for none but this one.
        told: is called `times` times for each batch.
        times: parts of a prediction.

    Raises:
        ConfigError: if a process is killed. What a process raises is raised here.
    """
    began = perf_counter()
    yield predict(next(batches), told)
    workers = min(jobs, count - 1)
    saved = (perf_counter() - began) * (count - 1) * (1 - 1 / max(workers, 1))
    if workers < 2 or saved < _START_SECONDS:
        for batch in batches:
            yield predict(batch, told)
        return
    running: deque[Future[Found]] = deque()

    def first() -> Found:
        result = running.popleft().result()
        for _ in range(times):
            told()
        return result

    with processes(workers) as pool:
        for batch in batches:
            running.append(submit(pool, predict, batch, _nobody))
            if len(running) >= _AHEAD * workers:
                yield first()
        while running:
            yield first()


def _nobody() -> None:
    """What a process tells: whoever waits counts whole batches."""


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """New processes, not copies of this one, which may have threads. If anything goes wrong, they end at once.

    Raises:
        ConfigError: if one of them is killed.
    """
    others = set(active_children())
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"one of {count} processes that predict was killed, perhaps for memory: use fewer (jobs, --jobs)."
            ) from error
        raise


def submit(pool: ProcessPoolExecutor, task: Callable[..., Found], *given: object) -> Future[Found]:
    """Give a pool something to do.

    A process that is started for it never sees an interrupt from the keyboard, which is for this one to answer.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return pool.submit(task, *given)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(task, *given)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """A process whose parent is killed would wait for work forever."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
