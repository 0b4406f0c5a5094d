"""What all parts use: device and sizes, the time left, timing, and the file of figures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

Sized = TypeVar("Sized")


@dataclass
class Setting:
    """The settings of one part.

    Attributes:
        part: name of the part, and of its file in `out`.
        device: device of the measurement.
        quick: whether sizes are so small that they only show that the part works.
        out: folder of the figures.
        seconds: seconds after which the part starts nothing new.
        placements: folder of placements that `hf-distca plan` reads; None for made-up ones.
        started: time at which the part began, by the monotonic clock.
    """

    part: str
    device: torch.device
    quick: bool
    out: Path
    seconds: float
    placements: Path | None = None
    started: float = field(default_factory=time.monotonic)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which a model trains on this device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def size(self, *, quick: Sized, cpu: Sized, gpu: Sized) -> Sized:
        """Select the size for this run."""
        return quick if self.quick else gpu if self.device.type == "cuda" else cpu

    def put(self, **figures: Any) -> None:
        """Add figures to the part's file at once, so that they survive a crash."""
        self.figures.update(figures)
        text = json.dumps(
            {"part": self.part, "device": str(self.device), "quick": self.quick, **self.figures},
            indent=1,
        )
        temporary = self.out / f"{self.part}.json.part"
        temporary.write_text(text)
        temporary.rename(self.out / f"{self.part}.json")

    def left(self) -> float:
        """Return the seconds until the part must start nothing new."""
        return self.started + self.seconds - time.monotonic()

    def has_time_for(self, what: str, *, gpu: float = 0.0, cpu: float = 0.0) -> bool:
        """Return whether there is time for `what`, which takes about `gpu` or `cpu` seconds, or
        little with quick sizes. If not, record its name as left out.
        """
        if self.size(quick=0.0, cpu=cpu, gpu=gpu) < self.left():
            return True
        self.put(left_out=[*self.figures.get("left_out", []), what])
        return False

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to a list of the figures."""
        self.put(**{name: [*self.figures.get(name, []), row]})


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the mean seconds of successive calls, by events on the GPU, otherwise by the clock."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def time_call(
    call: Callable[[], object], device: torch.device, *, repeats: int = 3, least: float = 5e-3
) -> float:
    """Return the median seconds of a call, after two calls that are not counted. Short calls repeat
    for `least` seconds.
    """
    call()
    calls = max(1, min(50, int(least / max(time_calls(call, device), 1e-7))))
    return statistics.median(time_calls(call, device, calls) for _ in range(repeats))


def free(device: torch.device) -> None:
    """Release cached memory, so that one measurement does not leave less for the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
