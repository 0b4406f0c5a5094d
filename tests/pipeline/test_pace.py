"""What stages do beside attention counts in how the attention of a tick is shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.pipeline.pace import Before, CallId, Estimate, Pace, Stopwatch, learns, ranks_at, row, turnout
from hf_distca.pipeline.ticks import Tick
from hf_distca.runtime import meter
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape, FloatArray
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
    assert ranks_at([4.0, 4.0], [0.0, 2.0]).speeds == (1.25, 0.75)  # 5 to 3
    assert ranks_at([4.0, 4.0], [1.0, 1.3]).speeds == (1.04, 0.96)
    assert ranks_at([4.0, 4.0], [1.0, 1.05]) is ALIKE  # nothing that is worth another plan
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
            with watch.tick(Before(backward, 1), busy=True):
                with watch.mail():
                    clock.now += 7  # for other stages
                clock.now += 1 + number
                with watch.call(CallId(2 * number + backward, 0), Before(backward, 0)).kernel(CPU):
                    clock.now += 100 + number
                clock.now += 20 + 10 * backward
                with watch.mail():
                    clock.now += 5
            clock.now += 1000  # between ticks
    assert watch.found(1).tolist() == [2.0, 20.0, 2.0, 30.0]
    assert whole.seconds == 606
    assert watch.kernels([CallId(0, 0), CallId(5, 0), CallId(5, 1)]).tolist() == [100, 102, -1]
    assert whole.exchange_seconds == 0  # waiting for stages is none of attention's
    watch.step()
    assert watch.found(1).tolist() == [-1] * 4
    assert watch.kernels([CallId(0, 0)]).tolist() == [-1]


def test_ticks_without_a_micro_batch_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = type("Clock", (_Clock,), {})
    monkeypatch.setattr(meter, "time", clock)
    watch = Stopwatch(CPU, Meter())
    for busy, found in ((False, -1.0), (True, 1.0)):
        with watch.tick(Before(False, 1), busy):
            clock.now += 1
            watch.call(CallId(0, 0), Before(False, 0))
            clock.now += 1
        assert watch.found(1).tolist() == [found, found, -1, -1]


KEY = PlanKey(AttentionShape(2, 1, 8, 8, 4), "cpu", None)
HALVES = np.array([[2.0, 4.0, 14.0], [2.0, 4.0, 14.0]])  # of two ranks: 20 seconds each


def _estimates(*parts: FloatArray) -> list[Estimate]:
    """Of calls of forward, and then of as many calls of backward that are estimated alike."""
    return [Estimate(CallId(at, 0), at >= len(parts), KEY, one) for at, one in enumerate((*parts, *parts))]


def test_all_ranks_know_the_same_in_seconds_of_the_cost_model() -> None:
    """Stages of two copies; attention takes half as long as the cost model says in forward, and backward as long."""
    stages = (0, 1, 0, 1)
    before = [
        [1.0, -1.0, 5.0, 2.0, 2.0, -1.0],
        [1.0, 2.0, 5.0, 6.0, 2.0, -1.0],
        [3.0, -1.0, 5.0, 2.0, 2.0, -1.0],
        [1.0, 4.0, 5.0, 6.0, 2.0, -1.0],
    ]
    rows = [row(np.array([10.0, 20.0]), np.array(one)) for one in before]
    pace, estimates = Pace(), _estimates(np.concatenate([HALVES, HALVES]))
    assert pace.before(Before(False, 0), [True, True], stages) is None
    pace.learn(rows, stages, 2, estimates)
    assert pace.before(Before(False, 0), [True, True], stages) == [4.0, 2.0, 4.0, 2.0]
    # Of the first stage nothing is known: it is like others.
    assert pace.before(Before(False, 1), [True, True], stages) == [6.0, 6.0, 6.0, 6.0]
    assert pace.before(Before(True, 1), [True, True], stages) == [2.0, 2.0, 2.0, 2.0]
    assert pace.before(Before(True, 0), [False, True], stages) == [0.0, 6.0, 0.0, 6.0]  # it has no micro-batch
    unknown = [row(np.array([10.0, 20.0]), np.full(6, -1.0))] * 4
    pace.learn(unknown, stages, 2, estimates)
    assert pace.before(Before(True, 0), [True, True], stages) == [2.0, 6.0, 2.0, 6.0]  # as before


def test_what_a_stage_has_left_of_the_tick_before_counts_for_the_first_call() -> None:
    """Two stages with a call each. Before a call both take 1 second; after it 2 and 3 in forward, 4 and 5 in backward."""
    pace, stages = Pace(), (0, 1)
    places = [[1.0, 2.0, 1.0, 4.0], [1.0, 3.0, 1.0, 5.0]]
    pace.learn([row(np.array([20.0, 20.0]), np.array(one)) for one in places], stages, 1, _estimates(HALVES))
    first, second, back, third, last = Tick(0, False, (0, None)), *(Tick(1, way, (1, 0)) for way in (False, True, False, True))

    def arrival(tick: Tick, earlier: Tick | None) -> list[float] | None:
        return pace.arrival(tick, 0, earlier, 1, stages)

    assert arrival(second, None) == [1, 1]  # of a later call of the tick
    assert arrival(first, None) == [1, 0]
    assert arrival(back, second) == [3, 4]
    assert arrival(third, back) == [5, 6]
    assert arrival(third, Tick(2, True, (None, 0))) == [1, 6]  # the first stage only served
    assert arrival(second, first) == [3, 3]  # the second stage waits for what the first one makes
    assert arrival(last, Tick(3, True, (None, 0))) == [6, 6]
    assert arrival(Tick(9, True, (7, None)), Tick(8, False, (None, 7))) == [1, 3]
    assert Pace().arrival(second, 0, first, 1, stages) is None


def test_what_is_left_of_a_forward_is_counted_in_seconds_of_the_backward_that_follows() -> None:
    """Attention takes half as long in forward as the cost model says, and a quarter longer in backward."""
    pace, stages = Pace(), (0, 1)
    places = [[1.0, 2.0, 1.0, 4.0], [1.0, 3.0, 1.0, 5.0]]  # seconds, as in the test before
    pace.learn([row(np.array([10.0, 25.0]), np.array(one)) for one in places], stages, 1, _estimates(HALVES))
    forward, back, again = Tick(1, False, (1, 0)), Tick(2, True, (0, 1)), Tick(3, False, (2, 1))
    assert pace.arrival(back, 0, forward, 1, stages) == pytest.approx([0.8 * 3, 0.8 * 4])
    assert pace.arrival(again, 0, back, 1, stages) == pytest.approx([2 * 5, 2 * 6])


@pytest.mark.parametrize("corrects", [True, False])
def test_each_direction_has_rates_of_its_own(corrects: bool) -> None:
    """Bytes take ten times as long as the cost model says in forward, and flops twice as long in backward."""
    parts = [np.array([[0.1, 0.2, 9.0], [0.1, 0.4, 2.0]]), np.array([[0.2, 0.3, 1.0], [0.1, 0.1, 5.0]])]
    took = [one @ factors for factors in ([1.0, 10.0, 1.0], [1.0, 1.0, 2.0]) for one in parts]
    pace = Pace(corrects=corrects)
    pace.learn([row(np.array([one[rank] for one in took]), np.ones(4)) for rank in (0, 1)], (0, 1), 1, _estimates(*parts))
    if not corrects:
        assert not pace.corrections
        return
    forward, backward = (pace.corrections[way, KEY] for way in (False, True))
    assert forward.byte / forward.flop == pytest.approx(10, rel=0.05)
    assert backward.flop / backward.byte == pytest.approx(2, rel=0.05)
    # All attention of a direction takes as long together as it did. A third of the bytes travels forward, two thirds backward;
    # beside kernels they weigh as much as they do by the clock.
    for way, one, part in ((0, forward, 1 / 3), (2, backward, 2 / 3)):
        estimated, measured = sum(each.sum() for each in parts), sum(each.sum() for each in took[way : way + 2])
        assert sum((each @ one.kernel).sum() for each in parts) == pytest.approx(estimated, rel=0.02)
        assert one.exchange == pytest.approx(part * estimated / measured, rel=0.01)


def test_what_some_ranks_do_not_know_is_learned_by_none() -> None:
    """A step failed on one of them; or a rank has kernels that still run."""
    pace, estimates = Pace(), _estimates(HALVES)
    failed = [row(np.array([10.0, 20.0]), np.ones(4)), row(np.array([]), np.ones(4))]
    pace.learn(failed, (0, 1), 1, estimates)
    assert not pace.corrections
    assert pace.before(Before(False, 0), [True, True], (0, 1)) is None
    running = [row(np.array([10.0, 20.0]), np.ones(4)), row(np.array([-1.0, 20.0]), np.ones(4))]
    pace.learn(running, (0, 1), 1, estimates)
    assert pace.before(Before(False, 0), [True, True], (0, 1)) == [2.0, 2.0]  # of the calls that are known


def test_they_compare_the_more_seldom_the_longer_they_train() -> None:
    assert [steps for steps in range(20) if learns(steps)] == [2, 4, 8, 16]


def test_attention_of_nobody_is_no_reason_to_divide_by_nothing() -> None:
    pace = Pace()
    nobody, nothing = np.zeros((1, 3)), [row(np.zeros(2), np.ones(4))]
    pace.learn(nothing, (0,), 1, _estimates(nobody))
    assert pace.before(Before(False, 0), [True], (0,)) is None
    pace.learn([row(np.array([]), np.ones(4))], (0,), 1, [])  # of a step that failed
    assert pace.before(Before(False, 0), [True], (0,)) is None
