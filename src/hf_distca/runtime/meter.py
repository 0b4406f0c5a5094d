"""Counts what core attention does: seconds in kernels, exchanges, bytes. Reading never stops the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = ["Meter"]

# Kernel calls and parts of exchanges on CUDA whose times are not known yet, at most. A stream takes about a thousand launches
# before it makes the host wait, and each of these is several of them: a host is hardly ever this far ahead.
_MOST_RUNNING = 1024


class _Call(NamedTuple):
    """Something on a CUDA stream that may not have finished."""

    meter: Meter
    exchange: bool
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Running:
    """Calls that may not have finished, oldest first. A meter and its parts share them, so that each is held once."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()

    def add(self, call: _Call) -> None:
        """Take in a call."""
        self._calls.append(call)
        self.read()
        if len(self._calls) > _MOST_RUNNING:  # the device has the others to go on with
            self._calls[0].end.synchronize()
            self.read()

    def read(self) -> None:
        """Tell the meters of calls that have finished."""
        while self._calls and self._calls[0].end.query():  # type: ignore[no-untyped-call]
            meter, exchange, begin, end = self._calls.popleft()
            meter.add(begin.elapsed_time(end) / 1e3, running=-1, exchange=exchange)


class Meter:
    """Counters of one rank that only grow. What a part counts, the whole counts too.

    Attributes:
        whole: another meter that counts the same and more.
        kernel_calls: batches of tasks handed to a kernel, empty ones included.
        backward_calls: those of them in backward.
        dispatches, returns: exchanges launched, forward and backward.
        sent_bytes: bytes sent to other ranks.
        calls: calls of core attention that computed it, which is layers times forward passes.
        recalls: calls in a recompute that found what the first forward computed.
        running: kernel calls and parts of exchanges of this meter, its parts and its whole whose times are not known yet.
    """

    def __init__(self, whole: Meter | None = None) -> None:
        self.whole = whole
        self.kernel_calls = self.backward_calls = self.dispatches = self.returns = self.sent_bytes = self.calls = self.recalls = 0
        self.running: _Running = _Running() if whole is None else whole.running
        self._seconds = self._exchange_seconds = 0.0
        self._unfinished = 0

    def count(
        self,
        *,
        kernel_calls: int = 0,
        backward_calls: int = 0,
        dispatches: int = 0,
        returns: int = 0,
        sent_bytes: int = 0,
        calls: int = 0,
        recalls: int = 0,
    ) -> None:
        """Add to the counters of this meter and of the whole."""
        self.kernel_calls += kernel_calls
        self.backward_calls += backward_calls
        self.dispatches += dispatches
        self.returns += returns
        self.sent_bytes += sent_bytes
        self.calls += calls
        self.recalls += recalls
        if self.whole is not None:
            self.whole.count(
                kernel_calls=kernel_calls,
                backward_calls=backward_calls,
                dispatches=dispatches,
                returns=returns,
                sent_bytes=sent_bytes,
                calls=calls,
                recalls=recalls,
            )

    @contextmanager
    def kernel(self, device: torch.device, *, backward: bool = False) -> Iterator[None]:
        """Times the kernel call inside: by the clock on the CPU, by events on the current CUDA stream.

        On CUDA the host waits here only where it is more than a thousand of these and parts of exchanges ahead of the
        device, for the oldest of them.
        """
        self.count(kernel_calls=1, backward_calls=int(backward))
        with self._timed(device, exchange=False):
            yield

    @contextmanager
    def exchanging(self, device: torch.device) -> Iterator[None]:
        """Times what an exchange takes of the rank's time inside: packing, waiting, unpacking. As `kernel`."""
        with self._timed(device, exchange=True):
            yield

    @contextmanager
    def _timed(self, device: torch.device, *, exchange: bool) -> Iterator[None]:
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self.add(0.0, running=1)
            self.running.add(_Call(self, exchange, begin, end))
        else:
            started = time.perf_counter()
            yield
            self.add(time.perf_counter() - started, exchange=exchange)

    def add(self, seconds: float, *, running: int = 0, exchange: bool = False) -> None:
        """Add seconds in kernels, or else in exchanges, and calls that run, to this meter and to the whole."""
        if exchange:
            self._exchange_seconds += seconds
        else:
            self._seconds += seconds
        self._unfinished += running
        if self.whole is not None:
            self.whole.add(seconds, running=running, exchange=exchange)

    @property
    def seconds(self) -> float:
        """Seconds in attention kernels. On CUDA, of those calls that have finished by now."""
        self.running.read()
        return self._seconds

    @property
    def exchange_seconds(self) -> float:
        """Seconds in packing for exchanges, waiting for them and unpacking. On CUDA, of those that have finished by now."""
        self.running.read()
        return self._exchange_seconds

    @property
    def finished(self) -> bool:
        """Whether nothing that is timed is running any more, so that `seconds` has all of it."""
        self.running.read()
        return not self._unfinished
