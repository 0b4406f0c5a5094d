"""What the parts share: device and sizes, the time that is left, timing, and where figures go."""

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
    """One part's view of the run.

    Attributes:
        part: name of the part, and of its file in `out`.
        device: where it measures.
        quick: sizes that only show that the part works.
        out: folder of the figures.
        seconds: after so long a part starts nothing new.
        placements: folder of placements as `hf-distca plan` reads them; None for those that are
            made up.
        started: when the part began, by the monotonic clock.
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
        """What a model trains in there."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def size(self, *, quick: Sized, cpu: Sized, gpu: Sized) -> Sized:
        """The one of three sizes that this run has."""
        return quick if self.quick else gpu if self.device.type == "cuda" else cpu

    def put(self, **figures: Any) -> None:
        """Add figures to the file of the part, so that what is known outlives whatever comes."""
        self.figures.update(figures)
        text = json.dumps(
            {"part": self.part, "device": str(self.device), "quick": self.quick, **self.figures},
            indent=1,
        )
        temporary = self.out / f"{self.part}.json.part"
        temporary.write_text(text)
        temporary.rename(self.out / f"{self.part}.json")

    def left(self) -> float:
        """Seconds until the part is to start nothing new."""
        return self.started + self.seconds - time.monotonic()

    def time_for(self, what: str, *, gpu: float = 0.0, cpu: float = 0.0) -> bool:
        """Whether there is time for something that takes about so many seconds there, or little if
        sizes are quick; if not, its name is kept.
        """
        if self.size(quick=0.0, cpu=cpu, gpu=gpu) < self.left():
            return True
        self.put(left_out=[*self.figures.get("left_out", []), what])
        return False

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to a list among the figures."""
        self.put(**{name: [*self.figures.get(name, []), row]})


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_once(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of a call, back to back: between events on the GPU, else by the clock."""
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


def seconds_of(
    call: Callable[[], object], device: torch.device, *, repeats: int = 3, least: float = 5e-3
) -> float:
    """Median seconds of a call after two that are not counted; short ones are repeated for `least`
    seconds.
    """
    call()
    calls = max(1, min(50, int(least / max(seconds_once(call, device), 1e-7))))
    return statistics.median(seconds_once(call, device, calls) for _ in range(repeats))


def free(device: torch.device) -> None:
    """Give cached memory back, so that one measurement does not crowd the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
