"""What stages do beside attention, and what each computes of the attention of a tick for it.

Between two calls of attention a stage runs its layers. One with more to do in between, such as the output layer, comes later to
the next call, and all others would wait for it. So each rank times what it does before its calls, ranks tell each other now and
then, and a rank that comes late to a call gets less of its attention: all are done with it at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["Before", "Pace", "Stopwatch", "Turnout", "learns", "ranks_at", "row", "turnout"]

_CLEAR = 0.05  # of an even share: what a rank must get more or less for it to be told from the others
_LEAST = 0.02  # of an even share, which a rank gets however late it comes


class Before(NamedTuple):
    """A place in the tick of a stage: before a call of attention, in its forward or backward."""

    backward: bool
    turn: int


class _Sample(NamedTuple):
    """From the begin of a call of attention to the begin of the next one: all of it, and what of it is not the stage's own."""

    before: Before
    all: Meter
    call: Meter
    mail: Meter

    @property
    def seconds(self) -> float | None:
        """What the stage did beside attention; None if that is not known yet."""
        if not (self.all.finished and self.call.finished and self.mail.finished):
            return None
        return max(self.all.seconds - self.call.seconds - self.call.exchange_seconds - self.mail.exchange_seconds, 0.0)


class Stopwatch:
    """Times what a rank does before its calls of attention.

    Args:
        device: of the rank.
        meter: counts all calls.
    """

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._samples: list[_Sample] = []
        self._all, self._call, self._mail = Meter(), Meter(), Meter()
        self._running: AbstractContextManager[None] | None = None
        self._busy = self._steady = False

    def tick(self, busy: bool) -> None:
        """A tick begins, in which the stage has a micro-batch or none.

        Only ticks after others with a micro-batch tell: what is before a call may have begun in the tick before.
        """
        self._steady, self._busy = busy and self._busy, busy

    def call(self, before: Before) -> Meter:
        """A call of attention begins. Returns what is to count its seconds."""
        if self._running is not None:
            self._stop()
            if self._steady:
                self._samples.append(_Sample(before, self._all, self._call, self._mail))
        self._all, self._call, self._mail = Meter(), Meter(self._meter), Meter()
        self._running = self._all.kernel(self._device)
        self._running.__enter__()
        return self._call

    @contextmanager
    def mail(self) -> Iterator[None]:
        """What is inside waits for other stages."""
        with self._mail.exchanging(self._device):
            yield

    def step(self) -> None:
        """A step begins: forget the one before."""
        self._stop()
        self._samples, self._busy, self._steady = [], False, False

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)

    def found(self, turns: int) -> FloatArray:
        """Seconds before each call of a forward and then of a backward, -1 where nothing is known: shape (2 * turns,)."""
        seconds: dict[Before, list[float]] = {}
        for sample in self._samples:
            if (taken := sample.seconds) is not None:
                seconds.setdefault(sample.before, []).append(taken)
        return np.array([statistics.median(seconds.get(at, [-1.0])) for at in _places(turns)], dtype=np.float64)


class Pace:
    """What all ranks know of what stages do beside attention, in seconds of the cost model.

    Attributes:
        seconds: of each stage, before calls of attention.
    """

    def __init__(self) -> None:
        self.seconds: list[dict[Before, float]] = []

    def learn(self, rows: Sequence[IntArray], stages: Sequence[int], turns: int, estimated: Mapping[bool, float]) -> None:
        """Take in what all ranks have measured of a step.

        Args:
            rows: of each rank, what `row` made.
            stages: of each rank.
            turns: calls of attention in a tick.
            estimated: seconds of all attention of the step by the cost model, forward and backward ticks; empty if it failed.
        """
        found = [row.view(np.float64).tolist() for row in rows]
        attention = {way: math.fsum(row[way] for row in found) for way in (False, True)}
        factor = {way: estimated.get(way, 0.0) / seconds if seconds else 0.0 for way, seconds in attention.items()}
        self.seconds = self.seconds or [{} for _ in range(1 + max(stages))]
        for number, at in enumerate(_places(turns), start=2):
            for stage, known in enumerate(self.seconds):
                taken = [row[number] for row, its in zip(found, stages, strict=True) if its == stage and row[number] >= 0]
                if taken and factor[at.backward]:
                    known[at] = statistics.median(taken) * factor[at.backward]

    def before(self, at: Before, busy: Sequence[bool], stages: Sequence[int]) -> list[float] | None:
        """Seconds until each rank comes to a call; None if nobody knows.

        Args:
            at: the call.
            busy: whether each stage has a micro-batch.
            stages: of each rank.
        """
        found = [known[at] for known in self.seconds if at in known]
        if not found:
            return None
        usual = statistics.median(found)  # for a stage of which nothing is known
        return [self.seconds[stage].get(at, usual) if busy[stage] else 0.0 for stage in stages]


def row(attention: Mapping[bool, float], before: FloatArray) -> IntArray:
    """What a rank tells others: seconds in attention, forward and backward, and before calls (see `Stopwatch.found`)."""
    return np.concatenate([[attention[False], attention[True]], before]).view(np.int64)


def learns(steps: int) -> bool:
    """Whether ranks tell each other what they measured, after so many steps: the second, fourth, eighth, and so on."""
    return steps > 1 and steps & (steps - 1) == 0


class Turnout(NamedTuple):
    """A call of attention to which ranks come at different times.

    Attributes:
        begin: when each rank can begin with all that it gets, in seconds.
        given: seconds of attention for each, with which they end together, or as nearly so as can be.
    """

    begin: list[float]
    given: list[float]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(begin + given for begin, given in zip(*self, strict=True))


def turnout(own: Sequence[float], before: Sequence[float]) -> Turnout:
    """How a call of attention is best shared.

    Args:
        own: seconds of attention of each rank's own tokens.
        before: seconds until each comes to the call.
    """
    count, total = len(own), math.fsum(own)
    arrive = []
    for rank, (mine, late) in enumerate(zip(own, before, strict=True)):
        others = [when for other, when in enumerate(before) if other != rank and own[other]]
        # It begins with what is its own. What it does for others cannot begin before one of them is there.
        arrive.append(max(late, min(others, default=0.0) - mine))
    # Nobody can take all from one that comes late, for it comes late itself: an even part of it stays.
    least = [mine / count for mine in own]
    low, high = min(arrive), max(arrive) + total
    for _ in range(60):
        level = (low + high) / 2
        given = [max(level - late, part) for late, part in zip(arrive, least, strict=True)]
        low, high = (low, level) if math.fsum(given) > total else (level, high)
    return Turnout(arrive, given)


def ranks_at(own: Sequence[float], before: Sequence[float]) -> Ranks:
    """What ranks are like for the scheduler in a call of attention to which they come at different times.

    It evens out seconds over speed. With speeds in the ratio of what ranks are to get, they end together. Arguments as for
    `turnout`.
    """
    even = math.fsum(own) / len(own)
    if not even:
        return ALIKE
    given = turnout(own, before).given
    shares = [max(each / even, _LEAST) for each in given]
    if max(abs(share - 1) for share in shares) < _CLEAR:
        return ALIKE
    return Ranks.of([float(f"{share:.2g}") for share in shares])


def _places(turns: int) -> list[Before]:
    return [Before(backward, turn) for backward in (False, True) for turn in range(turns)]
