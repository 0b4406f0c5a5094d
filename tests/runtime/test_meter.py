from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from device_events import Device
from hf_distca.kernels import ScoreOptions, TaskBatch
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.runtime import meter as meters
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.meter import Meter, get_clock

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    with made.installed():
        yield made


def run(meter: Meter, device: Device, *seconds: float) -> None:
    """Run kernel calls of these lengths, each after one second of other work."""
    for one in seconds:
        device.launch(1.0)
        record_span(meter, device, "server", one)


def record_span(meter: Meter, device: Device, name: str, seconds: float) -> None:
    begin = get_clock(CUDA)()
    device.launch(seconds)
    meter.span(name, begin, get_clock(CUDA)())


def test_seconds_on_the_cpu_are_known_at_once() -> None:
    whole = Meter()
    part = Meter(whole)
    begin = get_clock(CPU)()
    part.span("server", begin, get_clock(CPU)())
    assert part.is_finished
    assert part.seconds == whole.seconds > 0


def test_seconds_count_finished_calls_without_waiting_for_others(device: Device) -> None:
    meter = Meter()
    run(meter, device, 2.0, 3.0, 4.0)
    assert (meter.seconds, meter.is_finished) == (0.0, False)
    device.finish(until=1 + 2 + 1 + 3 + 1)
    assert (meter.seconds, meter.is_finished) == (5.0, False)
    device.finish()
    assert (meter.is_finished, meter.seconds) == (True, 9.0)
    assert device.waits == []


def test_a_part_counts_its_own_calls_and_the_whole_counts_all(device: Device) -> None:
    """This holds for any order of reads, and for parts that no longer exist."""
    whole = Meter()
    first, second = Meter(whole), Meter(whole)
    run(first, device, 2.0)
    run(second, device, 4.0, 8.0)
    run(Meter(whole), device, 16.0)
    device.finish(until=3.0)
    assert (first.seconds, first.is_finished) == (2.0, True)
    assert (second.seconds, second.is_finished, whole.is_finished) == (0.0, False, False)
    device.finish()
    assert (second.seconds, whole.seconds, first.seconds) == (12.0, 30.0, 2.0)
    assert second.is_finished
    assert whole.is_finished
    assert device.events == 0


def test_events_do_not_pile_up_if_seconds_are_never_read(device: Device) -> None:
    whole = Meter()
    for _ in range(200):
        run(Meter(whole), device, *[0.5] * 8)
        device.finish()
    assert device.events <= 2 * 8
    assert device.waits == []
    assert whole.seconds == 200 * 8 * 0.5


def test_events_are_bounded_if_the_device_does_not_keep_up(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits only for the oldest call while the device runs the others."""
    monkeypatch.setattr(meters, "_MOST_RUNNING", 10)
    whole = Meter()
    run(Meter(whole), device, *[0.5] * 100)
    assert device.events == 2 * 10
    assert device.waits == [1.5 * (n + 1) for n in range(90)]
    assert whole.seconds == 90 * 0.5
    device.finish()
    assert whole.seconds == 100 * 0.5


def test_exchange_seconds_are_separate_from_kernel_seconds(device: Device) -> None:
    whole = Meter()
    part = Meter(whole)
    for name in ("pack", "wait", "unpack"):
        record_span(part, device, name, 1.0)
    run(part, device, 2.0)
    assert (part.exchange_seconds, part.is_finished) == (0.0, False)
    device.finish()
    assert (part.exchange_seconds, part.seconds, whole.exchange_seconds, whole.seconds) == (
        3.0,
        2.0,
        3.0,
        2.0,
    )
    assert part.is_finished
    assert device.waits == []


class Kernel:
    """Compute nothing; raise without tasks."""

    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        if not len(tasks):
            raise ZeroDivisionError
        return Outputs(pools.q_THD, pools.q_THD)

    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        return Grads(*pools.operands)


def test_kernel_calls_that_raise_are_counted_but_not_timed() -> None:
    meter, x = Meter(), torch.empty(1, 1, 1)
    server = AttentionServer(Kernel(), ScoreOptions(1.0), meter)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        server.run(Operands(x, x, x), TaskBatch((), (), (), ()))
    assert (meter.kernel_calls, meter.backward_calls, meter.seconds) == (1, 0, 0.0)
    server.run(Operands(x, x, x), TaskBatch((0,), (1,), (0,), (1,)))
    server.run(BackwardInputs(*[x] * 6), TaskBatch((0,), (1,), (0,), (1,)))
    assert (meter.kernel_calls, meter.backward_calls) == (3, 1)
    assert meter.seconds > 0
