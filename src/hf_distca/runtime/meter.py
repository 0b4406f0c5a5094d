"""Counters and timers of core attention: kernels, exchanges, bytes.

Reading never stops the device.
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

# A moment: of the host's clock, or on a CUDA stream.
Mark = float | torch.Event

# Spans that count, and as which seconds: tasks that run; rows that are packed, waited for, put in
# their places.
_COUNTED = {"server": "_seconds", **dict.fromkeys(("pack", "wait", "unpack"), "_exchange_seconds")}

# Spans on CUDA whose times are not known yet, at most. A stream takes about a thousand launches
# before it makes the host wait, and each of these is several of them: a host is hardly ever this
# far ahead.
_MOST_RUNNING = 1024


@cache
def get_clock(device: torch.device) -> Callable[[], Mark]:
    """Return a function that returns the current time: of the host for the CPU; for CUDA an event
    recorded on the current stream.
    """
    return time.perf_counter if device.type != "cuda" else partial(_record_event, device)


def _record_event(device: torch.device) -> torch.Event:
    # `torch.cuda.Event` does the same, and takes several times as long to find the current stream.
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def show(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows what is done inside under this name in the timeline of
    torch's profiler, if one runs.
    """
    return record_function(f"hf_distca: {name}") if is_profiling() else _NOT_SHOWN


_NOT_SHOWN = nullcontext()


class _Running(NamedTuple):
    """A span on a CUDA stream that may not have finished."""

    meter: Meter
    counter: str
    begin: torch.Event
    end: torch.Event


class Meter:
    """Counters of one rank that only grow. Its parent counts the same and more.

    Attributes:
        parent: another meter that counts what this one counts.
        timed: whether kernels are timed; check it before taking a time for a span.
        kernel_calls: batches of tasks handed to a kernel, empty ones included.
        backward_calls: those of them in backward.
        dispatches, returns: exchanges launched, forward and backward.
        sent_bytes, between_bytes: bytes sent to other ranks, and those of them that go to other
            nodes.
        calls: calls that computed core attention: layers times forward passes.
        recomputed_calls: calls in a recompute that found the outputs of the first forward.
        state_exchanges, state_bytes: exchanges of recurrent layers launched, forward and backward;
            bytes sent in them.
        running: spans of this meter, and of all with the same parent, whose times are not known
            yet, oldest first: each is held once.
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
        """Add to counters, by their names, of this meter and its parents."""
        meter: Meter | None = self
        while meter is not None:
            counters = meter.__dict__
            for name in counts:
                counters[name] += counts[name]
            meter = meter.parent

    def span(self, name: str, begin: Mark, end: Mark, **counts: float) -> None:
        """Count a span between two times, "server", or "pack", "wait" and "unpack" of an exchange,
        and add to other counters.

        On CUDA the host waits here only where it is more than a thousand spans ahead of the device,
        for the oldest of them.
        """
        counter = _COUNTED[name]
        if isinstance(begin, float) and isinstance(end, float):
            self.count(**{counter: end - begin}, **counts)
        elif not isinstance(begin, float) and not isinstance(end, float):
            self.count(_unfinished=1, **counts)
            self.running.append(_Running(self, counter, begin, end))
            self._read()
            if len(self.running) > _MOST_RUNNING:  # the device has the others to go on with
                self.running[0].end.synchronize()
                self._read()

    def _read(self) -> None:
        """Count spans that have finished in their meters."""
        while self.running and self.running[0].end.query():
            meter, counter, begin, end = self.running.popleft()
            meter.count(_unfinished=-1, **{counter: begin.elapsed_time(end) / 1e3})

    @property
    def seconds(self) -> float:
        """Seconds in attention kernels; on CUDA, in calls that have finished by now."""
        self._read()
        return self._seconds

    @property
    def exchange_seconds(self) -> float:
        """Seconds in packing for exchanges, waiting for them and unpacking; on CUDA, of those that
        have finished by now.
        """
        self._read()
        return self._exchange_seconds

    @property
    def is_finished(self) -> bool:
        """True if no timed span is running any more, so that `seconds` is complete."""
        self._read()
        return not self._unfinished
