"""Counters and timers of the kernels and exchanges of core attention.

Reading them never makes the device wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from hf_distca.borrowed import is_profiling

# A time: seconds of the host's clock, or an event on a CUDA stream.
Mark = float | torch.Event

# The counter to which each kind of span adds its seconds. Tasks run in "server" spans. "pack",
# "wait" and "unpack" spans are the parts of an exchange.
_COUNTED = {"server": "_seconds", **dict.fromkeys(("pack", "wait", "unpack"), "_exchange_seconds")}

# At most this many CUDA spans may be unfinished. The host is rarely this far ahead of the device,
# because it must wait after about a thousand queued launches, and a span has several launches.
_MOST_RUNNING = 1024


@cache
def get_clock(device: torch.device) -> Callable[[], Mark]:
    """Return a function that returns the current time of a device.

    The time of a CPU is the host's time. The time of a CUDA device is an event recorded on the
    current stream.
    """
    return time.perf_counter if device.type != "cuda" else partial(_record_event, device)


def _record_event(device: torch.device) -> torch.Event:
    # `torch.cuda.Event` takes several times longer than this class to find the current stream.
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def show(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that gives its block a name in the timeline of torch's profiler."""
    return record_function(f"hf_distca: {name}") if is_profiling() else _NOT_SHOWN


_NOT_SHOWN = nullcontext()


class _Running(NamedTuple):
    """A span on a CUDA stream that may not have finished."""

    meter: Meter
    counter: str
    begin: torch.Event
    end: torch.Event


class Meter:
    """Counters of one rank that only grow.

    Attributes:
        parent: another meter. All counts are also added to it.
        timed: whether kernels are timed. Callers check this before they read the clock for a span.
        kernel_calls: batches of tasks that ran in a kernel, including empty batches.
        backward_calls: batches of tasks that ran in backward.
        dispatches, returns: exchanges launched in forward and backward.
        sent_bytes, between_bytes: bytes sent to other ranks, and bytes sent to other nodes.
        calls: calls that computed core attention, one for each layer and forward pass.
        recomputed_calls: calls in a recompute that found the outputs of the first forward.
        state_exchanges, state_bytes: exchanges launched for recurrent layers in forward and
            backward, and the bytes sent in them.
        running: spans that may be unfinished, oldest first. A meter and its parent share this
            queue.
    """

    def __init__(self, parent: Meter | None = None, *, timed: bool = True) -> None:
        self.parent, self.timed = parent, timed
        self.kernel_calls = self.backward_calls = self.dispatches = self.returns = (
            self.sent_bytes
        ) = self.calls = self.recomputed_calls = 0
        self.between_bytes = self.state_exchanges = self.state_bytes = 0
        self.running: deque[_Running] = deque() if parent is None else parent.running
        self._seconds = self._exchange_seconds = 0.0
        self._unfinished = 0

    def count(self, **counts: float) -> None:
        """Add to the named counters of this meter and its parents."""
        meter: Meter | None = self
        while meter is not None:
            counters = meter.__dict__
            for name in counts:
                counters[name] += counts[name]
            meter = meter.parent

    def span(self, name: str, begin: Mark, end: Mark, **counts: float) -> None:
        """Count the seconds between two times, and add `counts` to the named counters.

        `name` is "server", or "pack", "wait" or "unpack" for a part of an exchange. On CUDA, if
        more than a thousand spans are unfinished, the host waits for the oldest span.
        """
        counter = _COUNTED[name]
        if isinstance(begin, float) and isinstance(end, float):
            self.count(**{counter: end - begin}, **counts)
        elif not isinstance(begin, float) and not isinstance(end, float):
            self.count(_unfinished=1, **counts)
            self.running.append(_Running(self, counter, begin, end))
            self._read()
            # Waiting for the oldest span does not idle the device: newer spans are queued.
            if len(self.running) > _MOST_RUNNING:
                self.running[0].end.synchronize()
                self._read()

    def _read(self) -> None:
        """Add the seconds of finished spans to their meters."""
        while self.running and self.running[0].end.query():
            meter, counter, begin, end = self.running.popleft()
            meter.count(_unfinished=-1, **{counter: begin.elapsed_time(end) / 1e3})

    @property
    def seconds(self) -> float:
        """Seconds in attention kernels. On CUDA, only finished calls count."""
        self._read()
        return self._seconds

    @property
    def exchange_seconds(self) -> float:
        """Seconds of packing, waiting and unpacking. On CUDA, only finished spans count."""
        self._read()
        return self._exchange_seconds

    @property
    def is_finished(self) -> bool:
        """True if all timed spans have finished, so that `seconds` is complete."""
        self._read()
        return not self._unfinished
