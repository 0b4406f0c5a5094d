"""A timeline of core attention: what each nano-batch computes, and how long its messages travel and are waited for.

Spans of a rank, forward and backward:

- ``dispatch`` and ``return``: an exchange, from its launch until its rows are there;
- ``wait``: the part of it in which nothing else was computed;
- ``pack``: rows gathered and launched; ``unpack``: those that returned put in their places;
- ``server``: tasks that run, the rank's own and those that arrived;
- ``linear``: what lies between, which is everything else in the layers. It is counted to the nano-batch whose attention ended
  before it, or else to the one whose attention begins after it. At the border of two layers that were cut, it is split.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Mark", "Span", "Trace", "Tracer"]

Mark = float | torch.cuda.Event
_PARTS = ("whole layers", "nano-batch 1", "nano-batch 2")
_EXCHANGES = ("dispatch", "return")


class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds since the trace began.

    `nano` is 0 for whole layers, 1 and 2 for nano-batches; `call` numbers the calls of core attention.
    """

    name: str
    start: float
    end: float
    nano: int
    call: int
    backward: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class _Open:
    """A span whose times may still be events of a CUDA stream."""

    name: str
    start: Mark
    end: Mark
    nano: int
    call: int
    backward: bool


class Trace:
    """Collects the spans of one rank. Times are of the host on the CPU, of the current stream on CUDA."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._borders: list[Mark] = []
        self._origin: Mark | None = None

    def border(self, device: torch.device) -> None:
        """One layer ends and the next one begins, forward or backward."""
        self._borders.append(self.mark(device))

    def mark(self, device: torch.device) -> Mark:
        """This moment, on the clock of the device."""
        mark = _now(device)
        if self._origin is None:
            self._origin = mark
        return mark

    def add(self, name: str, start: Mark, end: Mark, *, nano: int, call: int, backward: bool) -> None:
        """Record a span between two marks."""
        self._open.append(_Open(name, start, end, nano, call, backward))

    @property
    def spans(self) -> list[Span]:
        """All spans in order of their start, ``linear`` ones among them. On CUDA this waits for the device."""
        spans = [
            Span(opened.name, self._seconds(opened.start), self._seconds(opened.end), opened.nano, opened.call, opened.backward)
            for opened in self._open
        ]
        borders = [self._seconds(mark) for mark in self._borders]
        return sorted([*spans, *_linear(spans, borders)], key=lambda span: (span.start, -span.end))

    @property
    def hidden(self) -> float | None:
        """The part of the time in which messages travelled that was computed in; None if there were no messages."""
        spans = self.spans
        travelled = sum(span.seconds for span in spans if span.name in _EXCHANGES)
        waited = sum(span.seconds for span in spans if span.name == "wait")
        return 1 - waited / travelled if travelled else None

    def write(self, path: str | Path, rank: int) -> None:
        """Write the trace as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        lanes = {(nano, exchange): 2 * nano + exchange for nano in range(len(_PARTS)) for exchange in (0, 1)}
        spans = self.spans
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
        for (nano, exchange), lane in lanes.items():
            if any(span.nano == nano for span in spans):
                name = _PARTS[nano] + (", messages" if exchange else "")
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
        for span in spans:
            lane = lanes[span.nano, int(span.name in _EXCHANGES)]
            times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
            args = {"call": span.call, "direction": "backward" if span.backward else "forward"}
            events.append({"ph": "X", "name": span.name, "pid": rank, "tid": lane, **times, "args": args})
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _seconds(self, mark: Mark) -> float:
        origin = self._origin
        if isinstance(mark, torch.cuda.Event) and isinstance(origin, torch.cuda.Event):
            mark.synchronize()
            return float(origin.elapsed_time(mark)) / 1e3
        if isinstance(mark, torch.cuda.Event) or not isinstance(origin, float):
            raise TypeError("a trace holds the marks of one kind of device")
        return mark - origin


class Tracer:
    """Records the spans of one call of core attention, or nothing without a trace."""

    def __init__(self, trace: Trace | None = None, nano: int = 0, call: int = 0, device: torch.device | None = None) -> None:
        self.trace, self.nano, self.call, self.device = trace, nano, call, device or torch.device("cpu")
        self.backward = False

    def now(self) -> Mark | None:
        """This moment, None if nothing is traced."""
        return None if self.trace is None else self.trace.mark(self.device)

    def since(self, start: Mark | None, name: str) -> None:
        """Record what began at `start` and ends now."""
        if self.trace is not None and start is not None:
            end = self.trace.mark(self.device)
            self.trace.add(name, start, end, nano=self.nano, call=self.call, backward=self.backward)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what happens inside."""
        start = self.now()
        yield
        self.since(start, name)


def _now(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _linear(spans: Sequence[Span], borders: Sequence[float]) -> list[Span]:
    """The gaps between the spans in which a rank worked on attention or waited for it."""
    busy = sorted((span for span in spans if span.name not in _EXCHANGES), key=lambda span: span.start)
    linear = []
    for before, after in itertools.pairwise(busy):
        if after.start <= before.end or after.backward != before.backward:
            continue
        owner = before if before.name == "unpack" else after
        border = next((border for border in borders if before.end < border < after.start), None)
        if border is None:
            linear.append(owner._replace(name="linear", start=before.end, end=after.start))
        else:
            linear.append(before._replace(name="linear", start=before.end, end=border))
            linear.append(after._replace(name="linear", start=border, end=after.start))
    return linear
