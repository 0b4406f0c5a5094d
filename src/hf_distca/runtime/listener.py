"""A thread that listens whether a rank has left its attention group, and shows why on this rank's stderr.

A rank that waits in somebody else's collective, such as DDP's reduction of gradients, is not told of a rank that failed: it hears
later that a connection was closed, or nothing until a timeout. The cause is in the store by then, so it is looked for there.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from threading import Event, Thread
from typing import Protocol
from weakref import WeakSet

__all__ = ["LOOK_SECONDS", "Listening", "listen", "show"]

LOOK_SECONDS = 0.25  # between two looks at the store; longer where more than `_MANY` ranks look
_MANY = 512


class Listening(Protocol):
    """Something to be asked again and again."""

    ranks: tuple[int, ...]

    def look(self) -> bool:
        """Whether to look again."""

    def say_farewell(self) -> bool:
        """Let other ranks stop looking, if the store may end with this process. Returns whether that was so."""


class _Listener:
    """Looks in a thread of its own. A process has one."""

    def __init__(self) -> None:
        self._listening: WeakSet[Listening] = WeakSet()
        self._ended = Event()
        self._process = 0

    def add(self, listening: Listening) -> None:
        """Look for this, too."""
        self._listening.add(listening)
        if self._process != os.getpid():  # a fork has no threads
            self._process = os.getpid()
            Thread(target=self._run, name="distca listener", daemon=True).start()

    def end(self) -> None:
        """Stop, when the interpreter ends. A rank whose process may hold the store waits until the others have stopped, too."""
        self._ended.set()
        if self._process != os.getpid():
            return
        time.sleep(max((_pause(listening) for listening in tuple(self._listening) if listening.say_farewell()), default=0.0))

    def _run(self) -> None:
        while not self._ended.wait(max(map(_pause, tuple(self._listening)), default=LOOK_SECONDS)):
            for listening in tuple(self._listening):
                if not self._ended.is_set() and not listening.look():
                    self._listening.discard(listening)


def _pause(listening: Listening) -> float:
    return LOOK_SECONDS * max(1.0, len(listening.ranks) / _MANY)


def show(text: str) -> None:
    """Write a line to this rank's stderr at once, whatever is set up for logging."""
    sys.stderr.write(f"hf_distca: {text}\n")
    sys.stderr.flush()


_listener = _Listener()
listen = _listener.add
atexit.register(_listener.end)
