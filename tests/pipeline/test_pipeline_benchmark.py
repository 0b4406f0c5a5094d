"""What the benchmark of pipelines makes of what it measures: a step replayed from messages, 1F1B
and the ideal.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmark_modules import import_benchmark


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return import_benchmark("pipeline")


def test_a_step_is_replayed_from_message_to_message(benchmark: Any) -> None:
    event, replay = benchmark.Event, benchmark.replay
    there, back = ("dispatch", 0, 1), ("return", 1, 0)
    home = [event(2.0, sends=(there,)), event(3.0), event(1.0, waits=(back,))]
    server = [event(1.0), event(0.5, waits=(there,)), event(4.0, sends=(back,))]
    assert replay([home, server]) == 7.5  # 2 + 0.5 + 4 + 1: the home waits
    server[2] = event(1.0, sends=(back,))
    assert replay([home, server]) == 6.0  # and here it does not
    with pytest.raises(ValueError, match="nobody sent"):
        replay([home, []])


@pytest.mark.parametrize(
    ("attention", "linear", "seconds"),
    [
        ([4.0, 2.0], [1.0, 1.0], 4.0),  # both come at once
        ([4.0, 4.0], [0.0, 2.0], 5.0),  # one comes later: both end together
        # One without tokens has nothing to begin with before the other is there.
        ([4.0, 0.0], [3.0, 0.0], 5.0),
        # One begins with its own and then waits: the late one keeps half of its own.
        ([4.0, 1.0], [3.0, 0.0], 5.0),
        ([2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 2.0], 2.5),
    ],
)
def test_all_are_done_at_once_if_they_can_be(
    benchmark: Any, attention: list[float], linear: list[float], seconds: float
) -> None:
    assert benchmark.shared_seconds(attention, linear) == pytest.approx(seconds, abs=1e-6)


def test_the_ideal_shares_attention_and_nothing_else(benchmark: Any) -> None:
    """Two stages, two micro-batches: linear work and attention, forward and then backward."""
    classic, ideal = benchmark.classic, benchmark.ideal
    light, heavy, head = [1.0, 1.0, 0.0, 0.0], [1.0, 3.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]
    assert classic([[light, light], [light, light]]) == 6.0
    # Ticks: (0, -), (1, 0), (-, 1). In the first and in the last one an idle stage takes half.
    assert ideal([[light, light], [light, light]], 2) == 1.5 + 2 + 1.5
    assert ideal([[light, heavy], [light, heavy]], 2) == 1.5 + 3 + 2.5
    # The second stage comes a second later in the second tick, and gets a second less of 2.
    assert ideal([[light, light], [head, head]], 2) == pytest.approx(1.5 + 2.5 + 2.5)
    assert ideal([[light, light], [light, light]], 1) == 8.0  # stages share a core
