"""A timeline of core attention: computation of each nano-batch, and travel and waiting times of its
messages.

Spans of a rank, forward and backward:

- ``dispatch`` and ``return``: an exchange, from its launch until its rows have arrived;
- ``wait``: the part of it in which nothing else was computed;
- ``pack``: rows gathered and launched; ``unpack``: those that returned put in their places;
- ``server``: tasks that run, the rank's own and those that arrived;
- ``linear``: the time between these, which is everything else in the layers. It is counted to the
  nano-batch whose attention ended before it, or else to the one whose attention begins after it. At
  the border of two layers that were cut, it is split.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_distca.runtime.meter import Mark, Meter, mark_now

_PARTS = ("whole layers", "nano-batch 1", "nano-batch 2")
_EXCHANGES = ("dispatch", "return")


class Span(NamedTuple):
    """An activity from `start` to `end`, in seconds since the trace began.

    `nano` is 0 for whole layers, 1 and 2 for nano-batches; `call` numbers the calls of core
    attention.
    """

    name: str
    start: float
    end: float
    nano: int
    call: int
    backward: bool

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class Trace:
    """Collects the spans of one rank. Times are of the host on the CPU, of the current stream on
    CUDA.
    """

    def __init__(self) -> None:
        # With times to come: they may still be events of a CUDA stream.
        self._recorded: list[tuple[Mark, Mark, Span]] = []
        self._borders: list[Mark] = []
        self._origin: Mark | None = None

    def mark_border(self, device: torch.device) -> None:
        """Mark the place where one layer ends and the next one begins, forward or backward."""
        self._borders.append(mark_now(device))
        self._begin(self._borders[-1])

    def make_call_meter(self, whole: Meter, nano: int, call: int) -> Meter:
        """Make a meter for one call of core attention, whose spans are recorded; for `nano` and
        `call` see `Span`.
        """
        return _CallMeter(whole, self, nano, call)

    def record(self, begin: Mark, end: Mark, span: Span) -> None:
        """Record a span; its times are read later."""
        self._recorded.append((begin, end, span))
        self._begin(begin)

    def _begin(self, mark: Mark) -> None:
        self._origin = mark if self._origin is None else self._origin

    @property
    def spans(self) -> list[Span]:
        """All spans in order of their start, ``linear`` ones among them. On CUDA this waits for the
        device.
        """
        spans = [
            span._replace(start=self._read_mark(begin), end=self._read_mark(end))
            for begin, end, span in self._recorded
        ]
        borders = [self._read_mark(mark) for mark in self._borders]
        return sorted(
            [*spans, *_find_linear_spans(spans, borders)], key=lambda span: (span.start, -span.end)
        )

    @property
    def hidden(self) -> float | None:
        """Part of the travel time of messages during which this rank computed; None if there were
        no messages.
        """
        spans = self.spans
        travelled = sum(span.seconds for span in spans if span.name in _EXCHANGES)
        waited = sum(span.seconds for span in spans if span.name == "wait")
        return 1 - waited / travelled if travelled else None

    def write(self, path: str | Path, rank: int) -> None:
        """Write the trace as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        spans = self.spans
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        ]
        # Two lanes of each nano-batch: what it computes, and its messages.
        events += [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": 2 * nano + lane,
                "args": {"name": _PARTS[nano] + suffix},
            }
            for nano in sorted({span.nano for span in spans})
            for lane, suffix in enumerate(("", ", messages"))
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": 2 * span.nano + int(span.name in _EXCHANGES),
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": {
                    "call": span.call,
                    "direction": "backward" if span.backward else "forward",
                },
            }
            for span in spans
        ]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _read_mark(self, mark: Mark) -> float:
        origin = self._origin
        if isinstance(mark, float) and isinstance(origin, float):
            return mark - origin
        if isinstance(mark, float) or origin is None or isinstance(origin, float):
            raise TypeError("a trace holds the marks of one kind of device")
        mark.synchronize()
        return float(origin.elapsed_time(mark)) / 1e3


class _CallMeter(Meter):
    """A meter of one call of core attention, whose spans a trace records, too."""

    def __init__(self, whole: Meter, trace: Trace, nano: int, call: int) -> None:
        super().__init__(whole)
        self._trace, self._nano, self._call = trace, nano, call

    def span(self, name: str, begin: Mark, end: Mark, *, backward: bool = False) -> None:
        """See `Meter.span`."""
        super().span(name, begin, end, backward=backward)
        self._trace.record(begin, end, Span(name, 0.0, 0.0, self._nano, self._call, backward))


def _find_linear_spans(spans: Sequence[Span], borders: Sequence[float]) -> list[Span]:
    """Find the gaps between spans in which a rank worked on attention or waited for it."""
    busy = sorted(
        (span for span in spans if span.name not in _EXCHANGES), key=lambda span: span.start
    )
    linear: list[Span] = []
    for before, after in itertools.pairwise(busy):
        if after.start <= before.end or after.backward != before.backward:
            continue
        owner = before if before.name == "unpack" else after
        border = next((border for border in borders if before.end < border < after.start), None)
        parts = (
            [(owner, before.end, after.start)]
            if border is None
            else [(before, before.end, border), (after, border, after.start)]
        )
        linear += [of._replace(name="linear", start=start, end=end) for of, start, end in parts]
    return linear
