"""The thread of a process that polls its failure monitors for ranks that have left, and tells the
others when the process ends.
"""

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

_LOOK_SECONDS = 0.25  # between two looks at the store; longer where more than `_MANY` ranks look
_MANY = 512
_FAREWELL_SECONDS = 5.0  # for a store to record that a rank ends


class _MonitorPoller:
    """A thread that polls all monitors of a process for ranks that have left."""

    def __init__(self) -> None:
        self._monitors: WeakSet[FailureMonitor] = WeakSet()
        self._polled: WeakSet[FailureMonitor] = WeakSet()  # those that may still hear a first word
        self._ended = threading.Event()
        self._process = 0
        self._thread: AwaitedThread | None = None
        self._last_pause = LATE_SECONDS

    def add(self, monitor: FailureMonitor) -> None:
        """Poll this monitor, too."""
        self._monitors.add(monitor)
        self._polled.add(monitor)
        if self._process != os.getpid():  # a fork has no threads
            self._process = os.getpid()
            self._thread = AwaitedThread(self._run, "listener")

    def end(self) -> None:
        """Stop at the end of the interpreter, like all threads.

        A rank whose process may hold the store waits until others have stopped.

        Every rank of a group lets gloo's threads drop the tensors of the last collective, ours or
        the user's: one that does it later aborts the process, under any attention
        (https://github.com/pytorch/pytorch/issues/190489), and the Trainer's own last collective
        comes about a millisecond before a script ends that stops after `train()`.
        """
        self._ended.set()
        deadline = time.monotonic() + ANSWER_SECONDS
        for thread in (
            thread for thread in threading.enumerate() if isinstance(thread, AwaitedThread)
        ):
            with suppress(RuntimeError):  # it is about to start
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
        # Not in `end`: stores are asked in a thread, and Python 3.12 starts no threads at exit.
        error = getattr(sys, "last_value", None)
        # Where another rank has ended well, the store may be gone.
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
