"""Timelines on the clock of a device; what they show of real ranks is in integration/test_trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from device_events import Device
from hf_distca.measure.timeline import Trace
from hf_distca.runtime.meter import Mark, Meter, mark_now

CUDA = torch.device("cuda")


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    with made.installed():
        yield made


def recorded(device: Device) -> Trace:
    """A layer of two halves: server of A, 1 s of its linear layers and 2 s of the next layer's;
    messages of B behind both.
    """
    trace = Trace()
    first, second = (trace.make_call_meter(Meter(), half, half) for half in (1, 2))

    def launched(meter: Meter, name: str, seconds: float) -> Mark:
        begin = mark_now(CUDA)
        device.launch(seconds)
        end = mark_now(CUDA)
        meter.span(name, begin, end)
        return end

    left = launched(first, "pack", 0.5)
    launched(first, "server", 4.0)
    launched(first, "unpack", 0.25)
    device.launch(1.0)
    trace.mark_border(CUDA)
    device.launch(2.0)
    second.span("dispatch", left, launched(second, "wait", 0.75))
    return trace


def test_spans_are_on_the_clock_of_the_device(device: Device) -> None:
    trace = recorded(device)
    assert device.waits == [], "recording stops nothing"
    found = {(span.name, span.nano): (span.start, span.end) for span in trace.spans}
    assert device.done == device.launched, "reading waits for the device"
    assert found == {
        ("pack", 1): (0.0, 0.5),
        ("server", 1): (0.5, 4.5),
        ("unpack", 1): (4.5, 4.75),
        ("linear", 1): (4.75, 5.75),  # up to the border of the layers
        ("linear", 2): (5.75, 7.75),
        ("wait", 2): (7.75, 8.5),
        ("dispatch", 2): (0.5, 8.5),
    }
    assert trace.hidden == 1 - 0.75 / 8


def test_files_have_the_times_of_the_device(device: Device, tmp_path: Path) -> None:
    recorded(device).write(tmp_path / "folder" / "rank_3.json", 3)
    events = json.loads((tmp_path / "folder" / "rank_3.json").read_text())["traceEvents"]
    server = next(event for event in events if event["name"] == "server")
    assert (server["ts"], server["dur"], server["pid"]) == (0.5e6, 4e6, 3)


def test_marks_of_two_kinds_of_device_are_refused(device: Device) -> None:
    trace = recorded(device)
    trace.mark_border(torch.device("cpu"))
    with pytest.raises(TypeError, match="one kind of device"):
        _ = trace.spans
