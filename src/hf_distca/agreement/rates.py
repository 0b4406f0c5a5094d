"""`Rates`: what ranks measured, made into corrections of the cost models that they plan with.

Every rank learns from the same figures in the same order, so all of them have the same corrections: nothing is exchanged for it.
Sums run in a fixed order and results are rounded, so that no processor finds others than the next.

- **The kernel.** A cost model adds up seconds for tasks, for bytes and for flops. Each of the three gets a factor, fitted to the
  kernel seconds of all ranks, and drawn to one common factor where the figures do not tell them apart.
- **Ranks.** A rank whose kernels keep taking longer or shorter than that has another speed.
- **Exchanges.** Seconds of packing, waiting and unpacking, on the rank that has the least of them for what it exchanges: others
  also wait for slower ranks. The factor is what makes the estimate as long. With it, attention takes as long as the rank whose
  kernels and exchanges take longest; what others measured says nothing of that, for they may wait elsewhere for that rank. Where
  exchanges take longer than they gain, plans by that estimate are coarser, or move nothing. Then nothing more would be learned of
  exchanges, so one micro-batch is planned without the factor now and then, the more rarely the more it costs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_distca.schedule.cost import CostModel, FloatArray, KernelCost
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["Correction", "Observation", "Rates", "kernel_factors"]

_WARM_UP = 2  # micro-batches that make buffers and caches
_ENOUGH = 4  # micro-batches for a change
_CLEAR = 2  # of those that take clearly longer for what was moved
_WINDOW = 32
_SELDOM = 8  # of so many micro-batches one is learned from, after the first window
_OFF = 0.05  # error of the slowest rank's estimate that is worth a change, and of the estimate of exchanges beside it
_SPEED_OFF = 0.07  # the same of a rank's speed
_PULL = 0.01  # of each factor towards the common one, per measurement
_SLOWER = 1.05  # times what moving nothing would take
_FACTORS = 1e-3, 1e6
_FIRST_TRIAL, _LAST_TRIAL = 64, 4096  # micro-batches without a move until one is tried
_TRIAL_SHARE = 0.01  # of the time, for trials


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the seconds of a cost model."""

    task: float = 1.0
    byte: float = 1.0
    flop: float = 1.0
    exchange: float = 1.0

    def of(self, cost: CostModel) -> CostModel:
        """The cost model with these factors."""
        if self == Correction():
            return cost
        inside = cost.node_bytes_per_second
        return replace(
            cost,
            forward=self._kernel(cost.forward),
            backward=self._kernel(cost.backward),
            exchange_bytes_per_second=cost.exchange_bytes_per_second / self.exchange,
            exchange_seconds=cost.exchange_seconds * self.exchange,
            node_bytes_per_second=None if inside is None else inside / self.exchange,
            name=f"{cost.name}, fitted to what was measured",
        )

    @property
    def kernel(self) -> FloatArray:
        """The factors of task, byte and flop."""
        return np.array([self.task, self.byte, self.flop])

    def _kernel(self, cost: KernelCost) -> KernelCost:
        return KernelCost(cost.task_seconds * self.task, cost.bytes_per_second / self.byte, cost.flops_per_second / self.flop)


@dataclass(frozen=True, eq=False)
class Observation:
    """What all ranks estimated and measured of a micro-batch, in seconds of one layer.

    Attributes:
        parts: (ranks, 3) seconds of tasks, bytes and flops by the uncorrected cost model.
        kernel: (ranks,) measured in kernels.
        exchanging: (ranks,) measured in packing, waiting and unpacking.
        exchange: (ranks,) estimated of exchanges by the uncorrected cost model; 0 on ranks that send and receive nothing.
        unmoved: (ranks,) what kernels would have taken with nothing moved.
        unmoved_exchange: (ranks,) as `exchange`, with nothing moved: of documents that span ranks.
        overlapped: whether exchanges are hidden behind the other nano-batch.
    """

    parts: FloatArray
    kernel: FloatArray
    exchanging: FloatArray
    exchange: FloatArray
    unmoved: FloatArray
    unmoved_exchange: FloatArray
    overlapped: bool = False

    @property
    def moved(self) -> bool:
        """Whether anything was exchanged."""
        return bool(self.exchange.any())

    @property
    def attention(self) -> float:
        """Seconds that attention took the slowest rank: its kernels and its own exchanges, without waiting for others."""
        return self._slowest(self.kernel, self.exchange)

    @property
    def loss(self) -> float:
        """What moving cost more than it gained, as a part of what moving nothing would take; negative if it gained."""
        return self.attention / max(self._slowest(self.unmoved, self.unmoved_exchange), 1e-12) - 1

    def exchange_factor(self) -> float | None:
        """The factor that makes the estimated exchanges as long as measured; None if they hid behind other work.

        No rank is done with its exchange before it has arrived, and most ranks wait for others besides: in the exchange, or
        elsewhere, after they were done. The rank that waits least, for what it exchanges, tells how long exchanges take.
        """
        if not self.moved:
            return None
        exchanges = self.exchange > 0
        kernel, estimated = self.kernel[exchanges], self.exchange[exchanges]
        taken = self.exchanging[exchanges] + (kernel if self.overlapped else 0)
        factor = float((taken / estimated).min())
        hidden = self.overlapped and factor * float(estimated.max()) <= float(self.kernel.max()) * (1 + _OFF)
        return None if hidden else factor

    def _slowest(self, kernel: FloatArray, exchange: FloatArray) -> float:
        """Seconds of the slowest rank for kernels and exchanges of so many estimated seconds."""
        taken = exchange * (self.exchange_factor() or 0.0)
        return float((np.maximum(kernel, taken) if self.overlapped else kernel + taken).max())


@dataclass(eq=False)
class _Fitted:
    """What is known of one attention shape."""

    correction: Correction = field(default_factory=Correction)
    offered: int = 0
    seen: int = 0
    # Since the last change.
    new: deque[Observation] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    slower: float | None = None  # what was lost by exchanges when they were given up
    still: int = 0  # micro-batches since then in which nothing was moved
    wait: int = _FIRST_TRIAL  # so many until a trial
    due: bool = False  # a trial
    tried: bool = False  # and not seen yet


class Rates:
    """Corrections by attention shape, and what the ranks are like.

    Attributes:
        ranks: their speeds.
        changes: what changed, as sentences for a log, until they are taken.
    """

    def __init__(self) -> None:
        self.ranks: Ranks = ALIKE
        self.changes: list[str] = []
        self._fitted: dict[object, _Fitted] = {}

    @property
    def slower(self) -> float | None:
        """How much longer attention took with exchanges than without, as a fraction, if they were given up for it."""
        return max((one.slower for one in self._fitted.values() if one.slower is not None), default=None)

    def cost(self, shape: object, cost: CostModel, *, trial: bool = False) -> CostModel:
        """The corrected cost model.

        Args:
            shape: whatever tells the attention of one kind from others.
            cost: as it was given.
            trial: leave exchanges uncorrected, to see how long they take now.
        """
        fitted = self._fitted.get(shape)
        if fitted is None:
            return cost
        return (replace(fitted.correction, exchange=1.0) if trial else fitted.correction).of(cost)

    def begin_trial(self, shape: object) -> bool:
        """Whether the next micro-batch is a trial of exchanges. Says so once."""
        fitted = self._fitted.get(shape)
        if fitted is None or not fitted.due:
            return False
        fitted.due, fitted.tried = False, True
        return True

    def wants(self, shape: object) -> bool:
        """Whether the next micro-batch is to be learned from: of many, a few are enough, and observing takes time."""
        fitted = self._fitted.setdefault(shape, _Fitted())
        fitted.offered += 1
        return fitted.offered <= _WINDOW or fitted.offered % _SELDOM == 0 or fitted.slower is not None

    def learn(self, shape: object, one: Observation) -> None:
        """Take in what was measured; all ranks the same, in the same order."""
        fitted = self._fitted.setdefault(shape, _Fitted())
        fitted.seen += 1
        if fitted.seen <= _WARM_UP:
            return
        if self.ranks.speeds is not None and len(self.ranks.speeds) != len(one.kernel):
            self.ranks = ALIKE
        fitted.new.append(one)
        alike = [other for other in fitted.new if len(other.kernel) == len(one.kernel)]  # of as many ranks
        if len(alike) >= _ENOUGH and self._off(fitted.correction, alike):
            self._fit(fitted, alike)
        self._learn_exchange(fitted, one)

    def take_changes(self) -> list[str]:
        """What changed since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def _off(self, correction: Correction, observations: Sequence[Observation]) -> bool:
        """Whether estimates are so far from what was measured that rates are worth a change."""
        estimated = [self.ranks.taken(_seconds(one.parts, correction.kernel)) for one in observations]
        ratios = [float(mine.max() / max(one.kernel.max(), 1e-12)) for mine, one in zip(estimated, observations, strict=True)]
        if abs(math.log(max(float(np.median(ratios)), 1e-12))) > _OFF:
            return True
        speeds = _speeds(estimated, observations)
        return bool(np.abs(np.log(speeds)).max() > _SPEED_OFF)

    def _fit(self, fitted: _Fitted, observations: Sequence[Observation]) -> None:
        before, ranks_before = fitted.correction, self.ranks
        count = len(observations[0].kernel)
        speeds = np.array(self.ranks.each(count))
        factors = before.kernel
        for _ in range(3):  # what is a rank's and what is the kernel's tell each other apart in turns
            factors = _factors(observations, speeds)
            speeds = _speeds([_seconds(one.parts, factors) for one in observations], observations)
        alike = bool(np.abs(np.log(speeds)).max() <= _SPEED_OFF)
        if alike:
            factors = _factors(observations, np.ones(count))
        self.ranks = ALIKE if alike else Ranks.of([_rounded(speed) for speed in speeds])
        task, byte, flop = (_rounded(float(np.clip(factor, *_FACTORS))) for factor in factors)
        fitted.correction = replace(before, task=task, byte=byte, flop=flop)
        fitted.new.clear()
        if fitted.correction != before:
            mine = [_seconds(one.parts, fitted.correction.kernel).max() / one.parts.sum(axis=1).max() for one in observations]
            self.changes.append(f"attention takes {np.median(mine):.3g} times as long as the cost model says")
        if self.ranks != ranks_before:
            self.changes.append(_said_of(self.ranks))

    def _learn_exchange(self, fitted: _Fitted, one: Observation) -> None:
        if not one.moved:
            fitted.still += fitted.slower is not None
            if fitted.still >= fitted.wait:
                fitted.due, fitted.still = True, 0
            return
        tried, fitted.tried = fitted.tried, False
        moved = [other for other in fitted.new if other.moved] or [one]
        found = [factor for other in moved if (factor := other.exchange_factor()) is not None]
        clear = all(other.loss > _SLOWER - 1 for other in moved)
        if not found or len(moved) < (1 if tried else _CLEAR if clear else _ENOUGH):
            return
        factor = _rounded(float(np.clip(np.median(found), *_FACTORS)))
        loss = float(np.median([other.loss for other in moved]))
        change = abs(factor - fitted.correction.exchange) * float(one.exchange.max())
        if change > (_OFF if loss <= 0 else 0) * float(one.kernel.max()):
            fitted.correction = replace(fitted.correction, exchange=factor)
            self.changes.append(f"exchanges take {factor:.3g} times as long as the cost model says")
            fitted.new.clear()
        if loss <= 0:
            fitted.slower, fitted.wait = None, _FIRST_TRIAL
            return
        fitted.slower = loss
        again = 2 * fitted.wait if tried else fitted.wait
        fitted.wait = min(max(again, math.ceil(loss / _TRIAL_SHARE)), _LAST_TRIAL)


def _seconds(parts: FloatArray, factors: FloatArray) -> FloatArray:
    """(ranks,) seconds of (ranks, 3) parts. Not `parts @ factors`, which processors round differently."""
    tasks, moved, flops = parts.T
    return np.asarray(tasks * factors[0] + moved * factors[1] + flops * factors[2])


def _speeds(estimated: Sequence[FloatArray], observations: Sequence[Observation]) -> FloatArray:
    """(ranks,) how fast each rank is against the others: what it was estimated to take / what it took.

    A rank with next to nothing to do says nothing of its speed.
    """
    found = []
    for mine, one in zip(estimated, observations, strict=True):
        tells = (mine > 0.2 * mine.mean()) & (one.kernel > 0)
        found.append(np.where(tells, mine / np.where(tells, one.kernel, 1.0), np.nan))
    stacked = np.stack(found)
    known = ~np.isnan(stacked).all(axis=0)
    speeds = np.ones(stacked.shape[1])
    if known.any():
        speeds[known] = np.nanmedian(stacked[:, known], axis=0)
        speeds[known] /= np.median(speeds[known])
    return speeds


def _factors(observations: Sequence[Observation], speeds: FloatArray) -> FloatArray:
    parts = np.concatenate([one.parts / speeds[:, None] for one in observations])
    return kernel_factors(parts, np.concatenate([one.kernel for one in observations]))


def kernel_factors(parts: FloatArray, taken: FloatArray, pull: float = _PULL) -> FloatArray:
    """(3,) factors >= 0 on the parts: least squares on relative errors, with a pull of each towards the common factor.

    Args:
        parts: (measurements, 3) seconds of tasks, bytes and flops by a cost model.
        taken: (measurements,) seconds measured; those of 0 or less are left out.
        pull: per measurement. A part that is less than the root of it beside all is not told apart from the others.
    """
    use = (taken > 0) & (parts.sum(axis=1) > 0)
    if not use.any():
        return np.ones(3)
    scaled = parts[use] / taken[use][:, None]
    common = float(np.median(1 / scaled.sum(axis=1)))
    scaled = scaled * common  # factors are about 1 from here on
    rows = len(scaled)
    products = [[_sum(scaled[:, i] * scaled[:, j]) + pull * rows * (i == j) for j in range(3)] for i in range(3)]
    wanted = [_sum(scaled[:, i]) + pull * rows for i in range(3)]
    factors = [1.0, 1.0, 1.0]
    for _ in range(100):
        for i in range(3):
            rest = math.fsum(products[i][j] * factors[j] for j in range(3) if j != i)
            factors[i] = max(0.0, (wanted[i] - rest) / products[i][i])
    return np.array(factors) * common


def _sum(values: FloatArray) -> float:
    """A sum in one order."""
    return float(np.bincount(np.zeros(len(values), dtype=np.int64), weights=values)[0])


def _rounded(value: float) -> float:
    """To three digits: the last bits differ between processors, and ranks must have the same."""
    return float(f"{value:.3g}")


def _said_of(ranks: Ranks) -> str:
    if ranks.speeds is None:
        return "all ranks are equally fast"
    others = [(rank, speed) for rank, speed in enumerate(ranks.speeds) if abs(math.log(speed)) > _SPEED_OFF]
    listed = ", ".join(f"rank {rank} takes {1 / speed:.2f} times as long as others" for rank, speed in others[:8])
    return listed + (f", and {len(others) - 8} more differ" if len(others) > 8 else "")
