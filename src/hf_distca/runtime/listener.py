"""A thread that polls all failure monitors of a process, and announces the end of the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from weakref import WeakSet

from hf_distca.runtime.monitor import (
    ANSWER_SECONDS,
    LATE_SECONDS,
    AwaitedThread,
    FailureMonitor,
)

# Seconds between two queries of the store. The pause is longer if more than `_MANY` ranks query it.
_LOOK_SECONDS = 0.25
_MANY = 512
# A process that ends waits at most this many seconds for its report to reach the store.
_FAREWELL_SECONDS = 5.0


class _MonitorPoller:
    """A thread that polls all failure monitors of a process for ranks that have left."""

    def __init__(self) -> None:
        self._monitors: WeakSet[FailureMonitor] = WeakSet()
        self._polled: WeakSet[FailureMonitor] = WeakSet()  # monitors that know of no failure yet
        self._ended = threading.Event()
        self._process = 0
        self._thread: AwaitedThread | None = None
        self._last_pause = LATE_SECONDS

    def add(self, monitor: FailureMonitor) -> None:
        """Begin to poll a monitor."""
        self._monitors.add(monitor)
        self._polled.add(monitor)
        if self._process != os.getpid():  # a forked process does not have the thread
            self._process = os.getpid()
            self._thread = AwaitedThread(self._run, "listener")

    def end(self) -> None:
        """Stop the package's threads when the interpreter ends.

        A process that may hold the store of failure reports waits until other ranks have stopped
        polling the store.

        Every rank of a group also gives gloo's threads time to free the tensors of the last
        collective. A gloo thread that frees them later aborts the process, even without distca
        (https://github.com/pytorch/pytorch/issues/190489). If a script ends after `train()`, the
        Trainer's last collective is only about a millisecond old.
        """
        self._ended.set()
        deadline = time.monotonic() + ANSWER_SECONDS
        for thread in (
            thread for thread in threading.enumerate() if isinstance(thread, AwaitedThread)
        ):
            with suppress(RuntimeError):  # the thread has not started yet
                thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(_FAREWELL_SECONDS)
            time.sleep(self._last_pause)

    def _run(self) -> None:
        while not self._ended.wait(
            max(map(_poll_pause, tuple(self._polled)), default=_LOOK_SECONDS)
        ):
            for monitor in tuple(self._polled):
                if not self._ended.is_set() and not monitor.poll():
                    self._polled.discard(monitor)
        # Announce the end here and not in `end`, because an announcement needs new threads, and
        # Python 3.12 starts no threads at exit.
        error = getattr(sys, "last_value", None)
        # Without an error, announce the end only to monitors that are still polled, because the
        # stores of other monitors may have ended.
        monitors = self._monitors if error is not None else self._polled
        pauses = [
            _poll_pause(monitor) for monitor in tuple(monitors) if monitor.announce_exit(error)
        ]
        self._last_pause = max([LATE_SECONDS, *pauses])


def _poll_pause(monitor: FailureMonitor) -> float:
    return _LOOK_SECONDS * max(1.0, monitor.pollers / _MANY)


_listener = _MonitorPoller()
start_polling = _listener.add
atexit.register(_listener.end)
