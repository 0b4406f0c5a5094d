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
from hf_distca.agreement.batch_plan import BatchPlan, Observation, observe_plans
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel, FloatArray, KernelCost
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["Correction", "Costs", "can_correct_rates"]

# Layers of one kind, by shape and type of device, have one cost model, whatever their windows are.
Kind = tuple[AttentionShape, str]

_WARM_UP_SAMPLES = 2  # micro-batches that make buffers and caches
_MIN_SAMPLES = 4  # micro-batches for a change
_MIN_CLEAR_SAMPLES = 2  # of those that take clearly longer for what was moved
_MAX_SAMPLES = 32
_SAMPLE_INTERVAL = 8  # of so many micro-batches one is learned from, after the first window
_TOLERANCE = 0.05  # error of the slowest rank's estimate that is worth a change, and of the estimate of exchanges beside it
_SPEED_TOLERANCE = 0.07  # the same of a rank's speed
_PULL = 0.01  # of each factor towards the common one, per measurement
_CLEAR_SLOWDOWN = 1.05  # times what moving nothing would take
_FACTOR_RANGE = 1e-3, 1e6
_FIRST_TRIAL, _LAST_TRIAL = 64, 4096  # micro-batches without a move until one is tried
_TRIAL_SHARE = 0.01  # of the time, for trials


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the seconds of a cost model."""

    task: float = 1.0
    byte: float = 1.0
    flop: float = 1.0
    exchange: float = 1.0

    def apply_to(self, cost: CostModel) -> CostModel:
        """Apply the factors to a cost model."""
        if self == Correction():
            return cost
        inside = cost.node_bytes_per_second
        return replace(
            cost,
            forward=self._correct_kernel(cost.forward),
            backward=self._correct_kernel(cost.backward),
            exchange_bytes_per_second=cost.exchange_bytes_per_second / self.exchange,
            exchange_seconds=cost.exchange_seconds * self.exchange,
            node_bytes_per_second=None if inside is None else inside / self.exchange,
            name=f"{cost.name}, fitted to what was measured",
        )

    @property
    def kernel_factors(self) -> FloatArray:
        """Factors of task, byte and flop."""
        return np.array([self.task, self.byte, self.flop])

    def _correct_kernel(self, cost: KernelCost) -> KernelCost:
        rates = {
            "bytes_per_second": cost.bytes_per_second / self.byte,
            "flops_per_second": cost.flops_per_second / self.flop,
        }
        return replace(cost, task_seconds=cost.task_seconds * self.task, **rates)


@dataclass(eq=False)
class _KindRates:
    """Measurements of one kind of layer."""

    correction: Correction = field(default_factory=Correction)
    offered_samples: int = 0
    sample_count: int = 0
    # Since the last change.
    new_samples: deque[Observation] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    slowdown: float | None = None  # what was lost by exchanges when they were given up
    idle_micro_batches: int = 0  # micro-batches since then in which nothing was moved
    trial_interval: int = _FIRST_TRIAL  # so many until a trial
    is_in_trial: bool = False  # plans leave exchanges uncorrected, to see how long they take now


class Costs(dict[Kind, CostModel]):
    """Cost models by kind of layer, without windows, with corrections by measurements.

    Attributes:
        measured: the ranks of the group, with measured speeds.
        dtypes: names of the current dtypes of q, k and v.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measured_ranks: Ranks = ALIKE
        self.dtypes: dict[Kind, str] = {}
        self._fitted: dict[Kind, _KindRates] = {}

    def get_cost(self, key: PlanKey) -> CostModel:
        """Return the current cost model for a plan, corrected by measurements."""
        kind = key.shape, key.device
        fitted = self._fitted.get(kind, _KindRates())
        correction = (
            replace(fitted.correction, exchange=1.0) if fitted.is_in_trial else fitted.correction
        )
        return replace(correction.apply_to(self[kind]), window=key.window)

    def make_ranks(self, count: int, per_node: int | None = None) -> Ranks:
        """Return the properties of the ranks of a group of
        `count`, as far as they were measured.
        """
        speeds = self.measured_ranks.speeds
        return Ranks(speeds if speeds is not None and len(speeds) == count else None, per_node)

    @property
    def learned_corrections(self) -> dict[str, object]:
        """Measured corrections: factors on seconds by kind of layer in words, and
        speeds of ranks; empty before there are any.
        """
        factors = {_describe_kind(kind): fitted.correction for kind, fitted in self._fitted.items()}
        known: dict[str, object] = {
            kind: asdict(factor) for kind, factor in factors.items() if factor != Correction()
        }
        return (
            known
            if self.measured_ranks.speeds is None
            else {**known, "speeds": list(self.measured_ranks.speeds)}
        )

    @property
    def exchange_slowdown(self) -> float | None:
        """Relative slowdown by exchanges, if exchanges were given up because of it; else None."""
        return max(
            (fitted.slowdown for fitted in self._fitted.values() if fitted.slowdown is not None),
            default=None,
        )

    def learn(self, plans: Sequence[BatchPlan], config: DistCAConfig) -> list[str]:
        """Correct rates by the measurements of each micro-batch and kind of layer.

        Return the changes, as sentences.
        """
        changes: list[str] = []
        if not can_correct_rates(config):
            return changes
        together: dict[tuple[int, PlanKey], list[BatchPlan]] = {}
        for plan in plans:
            together.setdefault((plan.number, plan.key._replace(nano=0)), []).append(plan)
        for (_, key), parts in together.items():
            kind = key.shape, key.device
            if (
                self.accept_sample(kind)
                and (observation := observe_plans(parts, self[kind], config)) is not None
            ):
                changes += self.learn_sample(kind, observation)
        return changes

    def accept_sample(self, kind: Kind) -> bool:
        """Return whether to learn from the next micro-batch: of many, a few
        are enough, and observing takes time.
        """
        fitted = self._fitted.setdefault(kind, _KindRates())
        fitted.offered_samples += 1
        return (
            fitted.offered_samples <= _MAX_SAMPLES
            or fitted.offered_samples % _SAMPLE_INTERVAL == 0
            or fitted.slowdown is not None
        )

    def learn_sample(self, kind: Kind, sample: Observation) -> list[str]:
        """Learn from a sample, the same on all ranks and in the same order.

        Return the changes, as sentences.
        """
        fitted, changes = self._fitted.setdefault(kind, _KindRates()), list[str]()
        fitted.sample_count += 1
        if fitted.sample_count <= _WARM_UP_SAMPLES:
            return changes
        if self.measured_ranks.speeds is not None and len(self.measured_ranks.speeds) != len(
            sample.kernel
        ):
            self.measured_ranks = ALIKE
        fitted.new_samples.append(sample)
        alike = [
            other for other in fitted.new_samples if len(other.kernel) == len(sample.kernel)
        ]  # of as many ranks
        if len(alike) >= _MIN_SAMPLES and self._is_far_off(fitted.correction, alike):
            changes += self._fit_rates(fitted, alike)
        return changes + self._learn_exchange(fitted, sample)

    def _is_far_off(self, correction: Correction, samples: Sequence[Observation]) -> bool:
        """Return whether estimates are so far from measurements that rates should change."""
        estimated = [
            self.measured_ranks.taken(sample.estimate_seconds(correction.kernel_factors))
            for sample in samples
        ]
        ratios = [
            seconds.max() / max(sample.kernel.max(), 1e-12)
            for seconds, sample in zip(estimated, samples, strict=True)
        ]
        if abs(math.log(max(float(np.median(ratios)), 1e-12))) > _TOLERANCE:
            return True
        return bool(np.abs(np.log(_compute_speeds(estimated, samples))).max() > _SPEED_TOLERANCE)

    def _fit_rates(self, fitted: _KindRates, samples: Sequence[Observation]) -> list[str]:
        before, ranks_before, changes = fitted.correction, self.measured_ranks, []
        count = len(samples[0].kernel)
        speeds = np.array(self.measured_ranks.each(count))
        factors = before.kernel_factors
        for _ in range(
            3
        ):  # what is a rank's and what is the kernel's tell each other apart in turns
            factors = _fit_factors(samples, speeds)
            speeds = _compute_speeds(
                [sample.estimate_seconds(factors) for sample in samples], samples
            )
        alike = bool(np.abs(np.log(speeds)).max() <= _SPEED_TOLERANCE)
        if alike:
            factors = _fit_factors(samples, np.ones(count))
        self.measured_ranks = ALIKE if alike else Ranks.of([_round_rate(speed) for speed in speeds])
        task, byte, flop = (
            _round_rate(float(np.clip(factor, *_FACTOR_RANGE))) for factor in factors
        )
        fitted.correction = replace(before, task=task, byte=byte, flop=flop)
        fitted.new_samples.clear()
        if fitted.correction != before:
            times = [
                sample.estimate_seconds(fitted.correction.kernel_factors).max()
                / sample.parts.sum(axis=1).max()
                for sample in samples
            ]
            changes.append(
                f"attention takes {np.median(times):.3g} times as long as the cost model says"
            )
        if self.measured_ranks != ranks_before:
            changes.append(_describe_ranks(self.measured_ranks))
        return changes

    @staticmethod
    def _learn_exchange(fitted: _KindRates, sample: Observation) -> list[str]:
        changes: list[str] = []
        if not sample.has_exchange:
            fitted.idle_micro_batches += fitted.slowdown is not None
            if fitted.idle_micro_batches >= fitted.trial_interval:
                fitted.is_in_trial, fitted.idle_micro_batches = True, 0
            return changes
        tried, fitted.is_in_trial = fitted.is_in_trial, False
        if (
            fitted.slowdown is not None and not tried
        ):  # planned in a trial before that told anything: the next one has to wait
            fitted.idle_micro_batches = max(
                fitted.idle_micro_batches - math.ceil(max(sample.slowdown, 0) / _TRIAL_SHARE),
                -_LAST_TRIAL,
            )
        moved = [other for other in fitted.new_samples if other.has_exchange] or [sample]
        factors = [
            factor for other in moved if (factor := other.compute_exchange_factor()) is not None
        ]
        clear = all(other.slowdown > _CLEAR_SLOWDOWN - 1 for other in moved)
        if not factors or len(moved) < (
            1 if tried else _MIN_CLEAR_SAMPLES if clear else _MIN_SAMPLES
        ):
            return changes
        factor = _round_rate(float(np.clip(np.median(factors), *_FACTOR_RANGE)))
        loss = float(np.median([other.slowdown for other in moved]))
        change = abs(factor - fitted.correction.exchange) * float(sample.estimated_exchange.max())
        if change > (_TOLERANCE if loss <= 0 else 0) * float(sample.kernel.max()):
            fitted.correction = replace(fitted.correction, exchange=factor)
            changes.append(f"exchanges take {factor:.3g} times as long as the cost model says")
            fitted.new_samples.clear()
        if loss <= 0:
            fitted.slowdown, fitted.trial_interval = None, _FIRST_TRIAL
        else:
            again = 2 * fitted.trial_interval if tried else fitted.trial_interval
            fitted.slowdown, fitted.trial_interval = (
                loss,
                min(max(again, math.ceil(loss / _TRIAL_SHARE)), _LAST_TRIAL),
            )
        return changes


def can_correct_rates(config: DistCAConfig) -> bool:
    """Return whether cost models are corrected: not a user's own model, and not in
    deterministic mode, because times do not repeat.
    """
    given = isinstance(config.cost_model, CostModel)
    return config.measured_rates and not given and not torch.are_deterministic_algorithms_enabled()


def _compute_speeds(estimated: Sequence[FloatArray], samples: Sequence[Observation]) -> FloatArray:
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


def _fit_factors(samples: Sequence[Observation], speeds: FloatArray) -> FloatArray:
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
    products = [
        [_sum_in_order(scaled[:, i] * scaled[:, j]) + _PULL * rows * (i == j) for j in range(3)]
        for i in range(3)
    ]
    wanted = [_sum_in_order(scaled[:, i]) + _PULL * rows for i in range(3)]
    factors = [1.0, 1.0, 1.0]
    for _ in range(100):
        for i in range(3):
            rest = math.fsum(products[i][j] * factors[j] for j in range(3) if j != i)
            factors[i] = max(0.0, (wanted[i] - rest) / products[i][i])
    return np.array(factors) * common


def _sum_in_order(values: FloatArray) -> float:
    """Sum values in a fixed order."""
    return float(np.bincount(np.zeros(len(values), dtype=np.int64), weights=values)[0])


def _round_rate(value: float) -> float:
    """Round to three digits: the last bits differ between processors,
    and ranks must have the same value.
    """
    return float(f"{value:.3g}")


def _describe_kind(kind: Kind) -> str:
    shape, device = kind
    width = (
        shape.head_dim
        if shape.head_dim == shape.value_head_dim
        else f"{shape.head_dim} and {shape.value_head_dim}"
    )
    return f"{shape.query_heads}:{shape.key_value_heads} heads of {width}, {shape.element_bytes} bytes, {device}"


def _describe_ranks(ranks: Ranks) -> str:
    if ranks.speeds is None:
        return "all ranks are equally fast"
    others = [
        (rank, speed)
        for rank, speed in enumerate(ranks.speeds)
        if abs(math.log(speed)) > _SPEED_TOLERANCE
    ]
    listed = ", ".join(
        f"rank {rank} takes {1 / speed:.2f} times as long as others" for rank, speed in others[:8]
    )
    return listed + (f", and {len(others) - 8} more differ" if len(others) > 8 else "")
