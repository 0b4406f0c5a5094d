"""What stages do beside attention counts in how the attention of a tick is shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_distca.pipeline.pace import Before, Pace, Stopwatch, learns, ranks_at, row, turnout
from hf_distca.runtime import meter
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.ranks import ALIKE

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("own", "before", "given", "seconds"),
    [
        ([4.0, 2.0], [1.0, 1.0], [3.0, 3.0], 4.0),  # all come at once
        ([4.0, 4.0], [0.0, 2.0], [5.0, 3.0], 5.0),  # one comes later: all end together
        ([4.0, 0.0], [3.0, 0.0], [2.0, 2.0], 5.0),  # one without tokens has nothing to begin with before the other is there
        ([4.0, 1.0], [3.0, 0.0], [2.0, 3.0], 5.0),  # one begins with its own and then waits: the late one keeps half of its own
        ([2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 2.0], [2.5, 2.5, 2.5, 0.5], 2.5),
    ],
)
def test_all_are_done_at_once_if_they_can_be(own: list[float], before: list[float], given: list[float], seconds: float) -> None:
    found = turnout(own, before)
    assert found.given == pytest.approx(given, abs=1e-6)
    assert found.seconds == pytest.approx(seconds, abs=1e-6)
    assert sum(found.given) == pytest.approx(sum(own))


def test_the_scheduler_sees_speeds_in_the_ratio_of_what_ranks_are_to_get() -> None:
    assert ranks_at([4.0, 4.0], [0.0, 2.0]).speeds == (1.2, 0.75)  # 5 to 3, to two digits
    assert ranks_at([4.0, 4.0], [1.0, 1.1]) is ALIKE  # nothing that is worth another plan
    assert ranks_at([0.0, 0.0], [1.0, 0.0]) is ALIKE
    assert ranks_at([1.0, 0.0], [0.0, 9.0]).speeds == (2.0, 0.02)  # a speed of 0 is none


class _Clock:
    """Goes on by hand."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


def test_what_lies_between_calls_is_timed_without_attention_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = type("Clock", (_Clock,), {})
    monkeypatch.setattr(meter, "time", clock)
    whole = Meter()
    watch = Stopwatch(CPU, whole)
    watch.step()
    for number in range(3):
        for backward in (False, True):
            watch.tick(busy=True)
            with watch.mail():
                clock.now += 7  # for other stages
            clock.now += 1 + number
            with watch.call(Before(backward, 0)).kernel(CPU):
                clock.now += 100
    # Of the first call nobody knows what was before it. Before forward: 2, 3; before backward: 1, 2, 3.
    assert watch.found(1).tolist() == [2.5, 2.0]
    assert whole.seconds == 600
    assert whole.exchange_seconds == 0  # waiting for stages is none of attention's
    watch.step()
    assert watch.found(1).tolist() == [-1, -1]


def test_ticks_without_a_micro_batch_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = type("Clock", (_Clock,), {})
    monkeypatch.setattr(meter, "time", clock)
    watch = Stopwatch(CPU, Meter())
    for busy in (True, False, True):
        watch.tick(busy)
        watch.call(Before(False, 0))
        clock.now += 1
    assert watch.found(1).tolist() == [-1, -1]
    watch.tick(busy=True)
    watch.call(Before(False, 0))
    assert watch.found(1).tolist() == [1, -1]


def test_all_ranks_know_the_same_in_seconds_of_the_cost_model() -> None:
    """Stages of two copies; attention takes half as long as the cost model says in forward, and backward as long."""
    stages = (0, 1, 0, 1)
    before = [[1.0, -1.0, 2.0, 2.0], [1.0, 2.0, 6.0, 2.0], [3.0, -1.0, 2.0, 2.0], [1.0, 4.0, 6.0, 2.0]]
    rows = [row({False: 5.0, True: 10.0}, np.array(one)) for one in before]
    pace = Pace()
    assert pace.before(Before(False, 0), [True, True], stages) is None
    pace.learn(rows, stages, 2, {False: 40.0, True: 40.0})
    assert pace.before(Before(False, 0), [True, True], stages) == [4.0, 2.0, 4.0, 2.0]
    # Of the first stage nothing is known: it is like others.
    assert pace.before(Before(False, 1), [True, True], stages) == [6.0, 6.0, 6.0, 6.0]
    assert pace.before(Before(True, 1), [True, True], stages) == [2.0, 2.0, 2.0, 2.0]
    assert pace.before(Before(True, 0), [False, True], stages) == [0.0, 6.0, 0.0, 6.0]  # it has no micro-batch
    unknown = [row({False: 5.0, True: 10.0}, np.full(4, -1.0))] * 4
    pace.learn(unknown, stages, 2, {False: 40.0, True: 40.0})
    assert pace.before(Before(True, 0), [True, True], stages) == [2.0, 6.0, 2.0, 6.0]  # as before


def test_they_compare_the_more_seldom_the_longer_they_train() -> None:
    assert [steps for steps in range(20) if learns(steps)] == [2, 4, 8, 16]


def test_attention_of_nobody_is_no_reason_to_divide_by_nothing() -> None:
    pace = Pace()
    pace.learn([row({False: 0.0, True: 0.0}, np.ones(2))], (0,), 1, {False: 1.0, True: 1.0})
    assert pace.before(Before(False, 0), [True], (0,)) is None
    pace.learn([row({False: 1.0, True: 1.0}, np.ones(2))], (0,), 1, {})  # of a step that failed
    assert pace.before(Before(False, 0), [True], (0,)) is None
