"""Counts what core attention does: seconds in kernels, exchanges, bytes. Reading never stops the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Meter"]


@dataclass
class Meter:
    """Counters of one rank that only grow. What a part counts, the whole counts too.

    Attributes:
        whole: another meter that counts the same and more.
        kernel_calls: batches of tasks handed to a kernel, empty ones included.
        dispatches, returns: exchanges launched, forward and backward.
        sent_bytes: bytes sent to other ranks.
        calls: calls of core attention, which is layers times forward passes.
    """

    whole: Meter | None = None
    kernel_calls: int = 0
    dispatches: int = 0
    returns: int = 0
    sent_bytes: int = 0
    calls: int = 0
    _seconds: float = 0.0
    _pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    def count(self, *, kernel_calls: int = 0, dispatches: int = 0, returns: int = 0, sent_bytes: int = 0, calls: int = 0) -> None:
        """Add to the counters of this meter and of the whole."""
        self.kernel_calls += kernel_calls
        self.dispatches += dispatches
        self.returns += returns
        self.sent_bytes += sent_bytes
        self.calls += calls
        if self.whole is not None:
            self.whole.count(
                kernel_calls=kernel_calls, dispatches=dispatches, returns=returns, sent_bytes=sent_bytes, calls=calls
            )

    @contextmanager
    def kernel(self, device: torch.device) -> Iterator[None]:
        """Times the kernel call inside: by the clock on the CPU, by events on the current CUDA stream."""
        self.count(kernel_calls=1)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self.add_seconds(0.0, (begin, end))
        else:
            started = time.perf_counter()
            yield
            self.add_seconds(time.perf_counter() - started)

    def add_seconds(self, seconds: float, events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None) -> None:
        """Add kernel seconds, or events on CUDA that will tell them."""
        self._seconds += seconds
        if events is not None:
            self._pending.append(events)
        if self.whole is not None:
            self.whole.add_seconds(seconds, events)

    @property
    def seconds(self) -> float:
        """Seconds in attention kernels. On CUDA, of those calls that have finished by now."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds

    @property
    def finished(self) -> bool:
        """Whether no kernel of it is still running."""
        return not self._pending
