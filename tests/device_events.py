"""Fake CUDA events on a device that works only on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


class Device:
    """A device that works only in `finish`, or when the host waits for an event."""

    def __init__(self) -> None:
        self.launched = 0.0  # seconds of work that the host has launched
        self.done = 0.0
        self.waits: list[float] = []
        self.events = 0

    def launch(self, seconds: float) -> None:
        """Launch work that takes this time."""
        self.launched += seconds

    def finish(self, until: float | None = None) -> None:
        """Let the device work until this many seconds of work are done, by default all."""
        self.done = max(self.done, self.launched if until is None else until)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let `torch.Event` make events of this device."""
        device = self

        class Event:
            def __init__(self, place: torch.device, enable_timing: bool = False) -> None:
                assert place.type == "cuda"
                assert enable_timing
                device.events += 1
                self.at: float | None = None

            def __del__(self) -> None:
                device.events -= 1

            def record(self) -> None:
                self.at = device.launched

            def query(self) -> bool:
                return self.at is not None and self.at <= device.done

            def synchronize(self) -> None:
                assert self.at is not None
                device.waits.append(self.at)
                device.finish(self.at)

            def elapsed_time(self, end: Event) -> float:
                assert self.query()
                assert end.query()
                return (end.at - self.at) * 1e3

        with patch("torch.Event", Event):
            yield
