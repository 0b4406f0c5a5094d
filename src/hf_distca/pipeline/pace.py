"""What stages do beside attention, what attention takes, and what each computes of the attention of a tick for it.

Between two calls of attention a stage runs its layers. One with more to do in between, such as the output layer, comes later to
the next call, and all others would wait for it. So each rank times what it does before its calls, ranks tell each other now and
then, and a rank that comes late to a call gets less of its attention: all are done with it at once.

They also tell what kernels took in each call. A tick is forward or backward, and what tasks, bytes and flops take beside each
other is not the same in both. So each direction has a correction of the cost model, in which exchanges have the weight beside
kernels that they have in that direction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.rates import Correction, kernel_factors
from hf_distca.pipeline.ticks import Tick
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["Before", "CallId", "Estimate", "Pace", "Stopwatch", "Turnout", "learns", "ranks_at", "row", "turnout"]

_CLEAR = 0.01  # of an even share: what a rank must get more or less for it to be told from the others
# Of each factor towards the common one, per measurement. Bytes are a fiftieth of what the cost model says a batch takes; on a CPU
# core they take 10 times that, and a correction that does not tell them apart leaves estimates 12 % off, not 1.5 %.
_PULL = 1e-5
# Of the bytes of a call, which cost models add up: k and v go forward; backward they go again, and their gradients come back.
_PART_OF_BYTES = {False: 1 / 3, True: 2 / 3}
_LEAST = 0.02  # of an even share, which a rank gets however late it comes


class Before(NamedTuple):
    """What a stage does in a tick before a call of attention, since the one before it or since the tick began.

    With as many turns as there are calls, what it does after the last one, until the tick ends.
    """

    backward: bool
    turn: int


class CallId(NamedTuple):
    """A call of attention of a step: the number of its tick, and which of the calls of the tick it is."""

    tick: int
    number: int


class Estimate(NamedTuple):
    """What a cost model that was not corrected says of a call of attention.

    Attributes:
        call: which one.
        backward: the direction of its tick.
        key: of its plan.
        parts: (ranks, 3) seconds of tasks, bytes and flops that each rank computes, forward and backward together.
    """

    call: CallId
    backward: bool
    key: PlanKey
    parts: FloatArray


class _Sample(NamedTuple):
    """From the begin of a tick or a call of attention to the next call or the end: all of it, and what is not the stage's own."""

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
        self._calls: dict[CallId, Meter] = {}
        self._busy = False

    @contextmanager
    def tick(self, end: Before, busy: bool) -> Iterator[None]:
        """What is inside is a tick.

        Args:
            end: the place after its last call.
            busy: whether the stage has a micro-batch in it. Others tell nothing.
        """
        self._busy = busy
        self._start(Meter())
        try:
            yield
        finally:
            self._stop(end)

    def call(self, call: CallId, before: Before) -> Meter:
        """A call of attention begins. Returns what is to count its seconds."""
        self._stop(before)
        self._calls[call] = found = Meter(self._meter)
        self._start(found)
        return found

    def _start(self, call: Meter) -> None:
        self._all, self._call, self._mail = Meter(), call, Meter()
        self._running = self._all.kernel(self._device)
        self._running.__enter__()

    def _stop(self, place: Before) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)
            if self._busy:
                self._samples.append(_Sample(place, self._all, self._call, self._mail))

    @contextmanager
    def mail(self) -> Iterator[None]:
        """What is inside waits for other stages."""
        with self._mail.exchanging(self._device):
            yield

    def step(self) -> None:
        """A step begins: forget the one before."""
        self._samples, self._calls = [], {}

    def kernels(self, calls: Sequence[CallId]) -> FloatArray:
        """Seconds of attention kernels in calls of the step, -1 where they are not known: shape (calls,)."""
        meters = (self._calls.get(call) for call in calls)
        return np.array([-1.0 if meter is None or not meter.finished else meter.seconds for meter in meters], dtype=np.float64)

    def found(self, turns: int) -> FloatArray:
        """Seconds of all places, -1 where nothing is known: shape (2 * turns + 2,).

        Before each call of a forward and after the last one, and then of a backward.
        """
        seconds: dict[Before, list[float]] = {}
        for sample in self._samples:
            if (taken := sample.seconds) is not None:
                seconds.setdefault(sample.before, []).append(taken)
        return np.array([statistics.median(seconds.get(at, [-1.0])) for at in _places(turns)], dtype=np.float64)


class Pace:
    """What all ranks know of what stages do beside attention, in seconds of the cost model, and of that.

    Args:
        corrects: whether the cost model is corrected.

    Attributes:
        seconds: of each stage, before calls of attention.
        corrections: of the cost model, forward and backward, by kind of plan.
    """

    def __init__(self, *, corrects: bool = True) -> None:
        self.seconds: list[dict[Before, float]] = []
        self.corrections: dict[tuple[bool, PlanKey], Correction] = {}
        self._corrects = corrects
        self._factors: dict[bool, float] = {}  # how many seconds of the cost model one second is, forward and backward

    def learn(self, rows: Sequence[IntArray], stages: Sequence[int], turns: int, estimates: Sequence[Estimate]) -> None:
        """Take in what all ranks have measured of a step.

        Args:
            rows: of each rank, what `row` made.
            stages: of each rank.
            turns: calls of attention in a tick.
            estimates: of the calls of the step; none if it failed.
        """
        if any(len(row) != len(estimates) + 2 * turns + 2 for row in rows):
            return  # a step that failed on some ranks
        found = np.stack([row.view(np.float64) for row in rows])
        kernels, before = found[:, : len(estimates)], found[:, len(estimates) :]
        factor = {way: self._learn_rates(kernels, estimates, way) for way in (False, True)}
        self._factors |= {way: one for way, one in factor.items() if one}
        self.seconds = self.seconds or [{} for _ in range(1 + max(stages))]
        for at, column in zip(_places(turns), before.T.tolist(), strict=True):
            for stage, known in enumerate(self.seconds):
                taken = [one for one, its in zip(column, stages, strict=True) if its == stage and one >= 0]
                if taken and factor[at.backward]:
                    known[at] = statistics.median(taken) * factor[at.backward]

    def _learn_rates(self, kernels: FloatArray, estimates: Sequence[Estimate], backward: bool) -> float:
        """Learn what attention takes in one direction. Returns how many seconds of the cost model one second is, 0 if unknown."""
        mine = [at for at, one in enumerate(estimates) if one.backward is backward]
        measured = [(kernels[:, at], estimates[at].parts, estimates[at].key) for at in mine]
        taken = math.fsum(float(one) for kernel, _, _ in measured for one in kernel if one > 0)
        said = math.fsum(float(one) for kernel, parts, _ in measured for one in parts.sum(axis=1)[kernel > 0])
        if not taken or not said:
            return 0.0
        factor = said / taken
        for key in dict.fromkeys(key for _, _, key in measured) if self._corrects else ():
            these = [(kernel, parts) for kernel, parts, its in measured if its == key]
            kernel, parts = (np.concatenate(each) for each in zip(*these, strict=True))
            task, byte, flop = (_rounded(one * factor) for one in kernel_factors(parts, kernel, _PULL))
            exchange = _rounded(factor * _PART_OF_BYTES[backward])
            self.corrections[backward, key] = Correction(task, byte, flop, exchange)
        return factor

    def before(self, at: Before, busy: Sequence[bool], stages: Sequence[int]) -> list[float] | None:
        """Seconds of the cost model, in the direction of a place, that each rank takes for what it does there; None if unknown.

        Args:
            at: the place.
            busy: whether each stage has a micro-batch.
            stages: of each rank.
        """
        found = [known[at] for known in self.seconds if at in known]
        if not found:
            return None
        usual = statistics.median(found)  # for a stage of which nothing is known
        return [self.seconds[stage].get(at, usual) if busy[stage] else 0.0 for stage in stages]

    def arrival(self, tick: Tick, turn: int, earlier: Tick | None, turns: int, stages: Sequence[int]) -> list[float] | None:
        """Seconds of the cost model, in its direction, after the last call until each rank comes to a call; None if unknown.

        Args:
            tick: of the call.
            turn: which call of a forward it is.
            earlier: the tick before, if it is the first call of its tick: some stages have something left to do there.
            turns: how many calls there are in a tick.
            stages: of each rank.
        """
        own = self.before(Before(tick.backward, turn), tick.busy, stages)
        if own is None or earlier is None:
            return own
        left = self.before(Before(earlier.backward, turns), earlier.busy, stages)
        if left is None:
            return own
        # A cost model has one number of seconds for a task, forward and backward: a second of the clock is not the same in both.
        factor = self._factors[tick.backward] / self._factors[earlier.backward]
        if earlier.backward == tick.backward:
            # A stage begins with what its neighbour made in the tick before.
            until = dict(zip(stages, left, strict=True))
            source = 1 if tick.backward else -1
            left = [
                max(seconds, until.get(stage + source, 0.0)) if tick.busy[stage] else seconds
                for stage, seconds in zip(stages, left, strict=True)
            ]
        return [one + factor * other for one, other in zip(own, left, strict=True)]


def row(kernels: FloatArray, before: FloatArray) -> IntArray:
    """What a rank tells others: seconds in kernels of all calls, and before calls (see `Stopwatch`)."""
    return np.concatenate([kernels, before]).view(np.int64)


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
    shares = [max(each / even, _LEAST) for each in turnout(own, before).given]
    if max(abs(share - 1) for share in shares) < _CLEAR:
        return ALIKE
    return Ranks.of([round(share, 2) for share in shares])


def _places(turns: int) -> list[Before]:
    return [Before(backward, turn) for backward in (False, True) for turn in range(turns + 1)]


def _rounded(factor: float) -> float:
    """To three digits, and not 0, by which rates are divided."""
    return max(float(f"{factor:.3g}"), 1e-3)
