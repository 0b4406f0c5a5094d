"""Lines for whoever watches a run: what takes long before the first step, and the summary at its end.

They go to standard error, past progress bars. `transformers.utils.logging.disable_progress_bar()` switches the former off,
``summary=False`` the latter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch.distributed as dist
from tqdm import tqdm
from transformers.utils.logging import is_progress_bar_enabled

__all__ = ["said_if_long", "say"]

_LONG_SECONDS = 1.0


def say(text: str) -> None:
    """Write a line, or several."""
    tqdm.write(text, file=sys.stderr)


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Say on rank 0 what a run is at, once that has taken more than a second, and at its end how long it took."""
    if not is_progress_bar_enabled() or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        yield
        return
    started, timer = time.perf_counter(), Timer(_LONG_SECONDS, say, [f"distca: {what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - started
    if seconds > _LONG_SECONDS:
        say(f"distca: {what} took {seconds:.1f} s")
