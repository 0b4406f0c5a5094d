"""What a command is at, for those who wait for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

__all__ = ["PLANNING", "said_if_long"]

PLANNING = "planning; the first time after an installation the scheduler's loops are compiled, which takes up to a minute"
_LONG_SECONDS = 1.0


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Say on a terminal what a command is at, once that has taken more than a second."""
    timer = Timer(_LONG_SECONDS, print, [f"{what} ..."], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
