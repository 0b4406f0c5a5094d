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
    """Cumulative counters of one rank since the process started.

    Attributes:
        kernel_calls: kernel calls that had at least one task or pool row.
        dispatches, returns: exchanges launched, forward and backward.
        sent_bytes: bytes sent to other ranks.
    """

    kernel_calls: int = 0
    dispatches: int = 0
    returns: int = 0
    sent_bytes: int = 0
    _seconds: float = 0.0
    _pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    @contextmanager
    def kernel(self, device: torch.device) -> Iterator[None]:
        """Times the kernel calls inside: by the clock on the CPU, by events on the current CUDA stream."""
        self.kernel_calls += 1
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._pending.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """Seconds in attention kernels. On CUDA, of those calls that have finished by now."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds
