"""`Costs`: the cost models that ranks plan with, and corrections of them by measurements.

Every rank learns from the same figures in the same order, so all of them have the same corrections:
nothing is exchanged for it. Figures are times, which differ from run to run. Where torch is told to
compute deterministically, nothing is learned from them. Sums run in a fixed order and results are
rounded, so that all processors find the same.

- **The kernel.** A cost model adds up seconds for tasks, for bytes and for flops. Each of the three
  gets a factor, fitted to the kernel seconds of all ranks, and drawn to one common factor where the
  figures do not tell them apart.
- **Ranks.** A rank whose kernels keep taking longer or shorter than that has another speed.
- **Exchanges.** Seconds of packing, waiting and unpacking are taken from the rank with the fewest
  in proportion to its exchange: others also wait for slower ranks. The factor makes the estimate as
  long. With it, attention takes as long as the rank whose kernels and exchanges take longest;
  measurements of other ranks say nothing about that, for they may wait elsewhere for that rank.
  Where exchanges take longer than they gain, plans by that estimate are coarser, or move nothing.
  Then nothing more could be learned about exchanges, so now and then micro-batches are planned
  without the factor until one is measured, more rarely the more such trials cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.planned import Observation, Planned, observed
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel, FloatArray, KernelCost
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks

__all__ = ["Correction", "Costs", "is_corrected"]

# Layers of one kind, by shape and type of device, have one cost model, whatever their windows are.
Kind = tuple[AttentionShape, str]

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
        """Apply the factors to a cost model."""
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
        """Factors of task, byte and flop."""
        return np.array([self.task, self.byte, self.flop])

    def _kernel(self, cost: KernelCost) -> KernelCost:
        rates = {"bytes_per_second": cost.bytes_per_second / self.byte, "flops_per_second": cost.flops_per_second / self.flop}
        return replace(cost, task_seconds=cost.task_seconds * self.task, **rates)


@dataclass(eq=False)
class _Fitted:
    """Measurements of one kind of layer."""

    correction: Correction = field(default_factory=Correction)
    offered: int = 0
    seen: int = 0
    # Since the last change.
    new: deque[Observation] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    slower: float | None = None  # what was lost by exchanges when they were given up
    still: int = 0  # micro-batches since then in which nothing was moved
    wait: int = _FIRST_TRIAL  # so many until a trial
    trying: bool = False  # plans leave exchanges uncorrected, to see how long they take now


class Costs(dict[Kind, CostModel]):
    """Cost models by kind of layer, without windows, with corrections by measurements.

    Attributes:
        measured: the ranks of the group, with measured speeds.
        dtypes: names of the current dtypes of q, k and v.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measured: Ranks = UNIFORM_RANKS
        self.dtypes: dict[Kind, str] = {}
        self._fitted: dict[Kind, _Fitted] = {}

    def of(self, key: PlanKey) -> CostModel:
        """Return the current cost model for a plan, corrected by measurements."""
        kind = key.shape, key.device
        fitted = self._fitted.get(kind, _Fitted())
        correction = replace(fitted.correction, exchange=1.0) if fitted.trying else fitted.correction
        return replace(correction.of(self[kind]), window=key.window)

    def ranks(self, count: int, per_node: int | None = None) -> Ranks:
        """Return the properties of the ranks of a group of
        `count`, as far as they were measured.
        """
        speeds = self.measured.speeds
        return Ranks(speeds if speeds is not None and len(speeds) == count else None, per_node)

    @property
    def learned(self) -> dict[str, object]:
        """Measured corrections: factors on seconds by kind of layer in words, and
        speeds of ranks; empty before there are any.
        """
        factors = {_said_of_kind(kind): fitted.correction for kind, fitted in self._fitted.items()}
        known: dict[str, object] = {kind: asdict(factor) for kind, factor in factors.items() if factor != Correction()}
        return known if self.measured.speeds is None else {**known, "speeds": list(self.measured.speeds)}

    @property
    def slower(self) -> float | None:
        """Relative slowdown by exchanges, if exchanges were given up because of it; else None."""
        return max((fitted.slower for fitted in self._fitted.values() if fitted.slower is not None), default=None)

    def learn(self, plans: Sequence[Planned], config: DistCAConfig) -> list[str]:
        """Correct rates by the measurements of each micro-batch and kind of layer.

        Return the changes, as sentences.
        """
        changes: list[str] = []
        if not is_corrected(config):
            return changes
        together: dict[tuple[int, PlanKey], list[Planned]] = {}
        for plan in plans:
            together.setdefault((plan.number, plan.key._replace(nano=0)), []).append(plan)
        for (_, key), parts in together.items():
            kind = key.shape, key.device
            if self.wants(kind) and (observation := observed(parts, self[kind], config)) is not None:
                changes += self.correct(kind, observation)
        return changes

    def wants(self, kind: Kind) -> bool:
        """Return whether to learn from the next micro-batch: of many, a few
        are enough, and observing takes time.
        """
        fitted = self._fitted.setdefault(kind, _Fitted())
        fitted.offered += 1
        return fitted.offered <= _WINDOW or fitted.offered % _SELDOM == 0 or fitted.slower is not None

    def correct(self, kind: Kind, sample: Observation) -> list[str]:
        """Learn from a sample, the same on all ranks and in the same order.

        Return the changes, as sentences.
        """
        fitted, changes = self._fitted.setdefault(kind, _Fitted()), list[str]()
        fitted.seen += 1
        if fitted.seen <= _WARM_UP:
            return changes
        if self.measured.speeds is not None and len(self.measured.speeds) != len(sample.kernel):
            self.measured = UNIFORM_RANKS
        fitted.new.append(sample)
        alike = [other for other in fitted.new if len(other.kernel) == len(sample.kernel)]  # of as many ranks
        if len(alike) >= _ENOUGH and self._off(fitted.correction, alike):
            changes += self._fit(fitted, alike)
        return changes + self._learn_exchange(fitted, sample)

    def _off(self, correction: Correction, samples: Sequence[Observation]) -> bool:
        """Return whether estimates are so far from measurements that rates should change."""
        estimated = [self.measured.scale_by_speed(sample.estimated(correction.kernel)) for sample in samples]
        ratios = [seconds.max() / max(sample.kernel.max(), 1e-12) for seconds, sample in zip(estimated, samples, strict=True)]
        if abs(math.log(max(float(np.median(ratios)), 1e-12))) > _OFF:
            return True
        return bool(np.abs(np.log(_speeds(estimated, samples))).max() > _SPEED_OFF)

    def _fit(self, fitted: _Fitted, samples: Sequence[Observation]) -> list[str]:
        before, ranks_before, changes = fitted.correction, self.measured, []
        count = len(samples[0].kernel)
        speeds = np.array(self.measured.list_speeds(count))
        factors = before.kernel
        for _ in range(3):  # what is a rank's and what is the kernel's tell each other apart in turns
            factors = _factors(samples, speeds)
            speeds = _speeds([sample.estimated(factors) for sample in samples], samples)
        alike = bool(np.abs(np.log(speeds)).max() <= _SPEED_OFF)
        if alike:
            factors = _factors(samples, np.ones(count))
        self.measured = UNIFORM_RANKS if alike else Ranks.of([_rounded(speed) for speed in speeds])
        task, byte, flop = (_rounded(float(np.clip(factor, *_FACTORS))) for factor in factors)
        fitted.correction = replace(before, task=task, byte=byte, flop=flop)
        fitted.new.clear()
        if fitted.correction != before:
            times = [sample.estimated(fitted.correction.kernel).max() / sample.parts.sum(axis=1).max() for sample in samples]
            changes.append(f"attention takes {np.median(times):.3g} times as long as the cost model says")
        if self.measured != ranks_before:
            changes.append(_said_of(self.measured))
        return changes

    @staticmethod
    def _learn_exchange(fitted: _Fitted, sample: Observation) -> list[str]:
        changes: list[str] = []
        if not sample.moved:
            fitted.still += fitted.slower is not None
            if fitted.still >= fitted.wait:
                fitted.trying, fitted.still = True, 0
            return changes
        tried, fitted.trying = fitted.trying, False
        if fitted.slower is not None and not tried:  # planned in a trial before that told anything: the next one has to wait
            fitted.still = max(fitted.still - math.ceil(max(sample.loss, 0) / _TRIAL_SHARE), -_LAST_TRIAL)
        moved = [other for other in fitted.new if other.moved] or [sample]
        factors = [factor for other in moved if (factor := other.exchange_factor()) is not None]
        clear = all(other.loss > _SLOWER - 1 for other in moved)
        if not factors or len(moved) < (1 if tried else _CLEAR if clear else _ENOUGH):
            return changes
        factor = _rounded(float(np.clip(np.median(factors), *_FACTORS)))
        loss = float(np.median([other.loss for other in moved]))
        change = abs(factor - fitted.correction.exchange) * float(sample.exchange.max())
        if change > (_OFF if loss <= 0 else 0) * float(sample.kernel.max()):
            fitted.correction = replace(fitted.correction, exchange=factor)
            changes.append(f"exchanges take {factor:.3g} times as long as the cost model says")
            fitted.new.clear()
        if loss <= 0:
            fitted.slower, fitted.wait = None, _FIRST_TRIAL
        else:
            again = 2 * fitted.wait if tried else fitted.wait
            fitted.slower, fitted.wait = loss, min(max(again, math.ceil(loss / _TRIAL_SHARE)), _LAST_TRIAL)
        return changes


def is_corrected(config: DistCAConfig) -> bool:
    """Return whether cost models are corrected: not a user's own model, and not in
    deterministic mode, because times do not repeat.
    """
    given = isinstance(config.cost_model, CostModel)
    return config.measured_rates and not given and not torch.are_deterministic_algorithms_enabled()


def _speeds(estimated: Sequence[FloatArray], samples: Sequence[Observation]) -> FloatArray:
    """Compute the relative speed of each rank, (ranks,): estimated
    seconds divided by measured ones.

    Ranks with next to nothing to do are left out.
    """
    ratios = np.full((len(samples), len(samples[0].kernel)), np.nan)
    for ratio, seconds, sample in zip(ratios, estimated, samples, strict=True):
        tells = (seconds > 0.2 * seconds.mean()) & (sample.kernel > 0)
        ratio[tells] = seconds[tells] / sample.kernel[tells]
    known = ~np.isnan(ratios).all(axis=0)
    speeds = np.ones(ratios.shape[1])
    if known.any():
        speeds[known] = np.nanmedian(ratios[:, known], axis=0)
        speeds[known] /= np.median(speeds[known])
    return speeds


def _factors(samples: Sequence[Observation], speeds: FloatArray) -> FloatArray:
    """Fit factors >= 0 on the seconds of tasks, bytes and flops, on ranks of these speeds: (3,).

    This is least squares on relative errors, with a pull of each factor towards the common one. A
    part whose share of all seconds is below the square root of the pull hardly gets a factor of its
    own.
    """
    parts = np.concatenate([sample.parts / speeds[:, None] for sample in samples])
    taken = np.concatenate([sample.kernel for sample in samples])
    use = (taken > 0) & (parts.sum(axis=1) > 0)
    if not use.any():
        return np.ones(3)
    scaled = parts[use] / taken[use][:, None]
    common = float(np.median(1 / scaled.sum(axis=1)))
    scaled = scaled * common  # factors are about 1 from here on
    rows = len(scaled)
    products = [[_sum(scaled[:, i] * scaled[:, j]) + _PULL * rows * (i == j) for j in range(3)] for i in range(3)]
    wanted = [_sum(scaled[:, i]) + _PULL * rows for i in range(3)]
    factors = [1.0, 1.0, 1.0]
    for _ in range(100):
        for i in range(3):
            rest = math.fsum(products[i][j] * factors[j] for j in range(3) if j != i)
            factors[i] = max(0.0, (wanted[i] - rest) / products[i][i])
    return np.array(factors) * common


def _sum(values: FloatArray) -> float:
    """Sum values in a fixed order."""
    return float(np.bincount(np.zeros(len(values), dtype=np.int64), weights=values)[0])


def _rounded(value: float) -> float:
    """Round to three digits: the last bits differ between processors,
    and ranks must have the same value.
    """
    return float(f"{value:.3g}")


def _said_of_kind(kind: Kind) -> str:
    shape, device = kind
    width = shape.head_dim if shape.head_dim == shape.value_head_dim else f"{shape.head_dim} and {shape.value_head_dim}"
    return f"{shape.query_heads}:{shape.key_value_heads} heads of {width}, {shape.element_bytes} bytes, {device}"


def _said_of(ranks: Ranks) -> str:
    if ranks.speeds is None:
        return "all ranks are equally fast"
    others = [(rank, speed) for rank, speed in enumerate(ranks.speeds) if abs(math.log(speed)) > _SPEED_OFF]
    listed = ", ".join(f"rank {rank} takes {1 / speed:.2f} times as long as others" for rank, speed in others[:8])
    return listed + (f", and {len(others) - 8} more differ" if len(others) > 8 else "")
