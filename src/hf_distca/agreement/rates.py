"""`LearnedCosts`: the cost models that ranks plan with, corrected by measurements.

Every rank learns from the same measurements in the same order, so all ranks have the same
corrections without an exchange. Results are rounded, so that different processors find the same
values. Measured times differ from run to run, so nothing is learned if torch is set to
deterministic algorithms.

- **Kernels.** One factor scales the estimated seconds of kernels to the measured seconds.
- **Ranks.** If the kernels of a rank take more or less time than these estimates in many samples,
  the speed of the rank is corrected.
- **Exchanges.** One factor scales the estimated seconds of exchanges to the measured seconds of
  packing, waiting and unpacking. The rank with the smallest factor counts, because other ranks also
  wait for slower ranks. Attention is estimated to take as long as the kernels and exchanges of the
  slowest rank.
- **Trials.** If exchanges cost more time than they save, plans move less work, or no work at all.
  Then nothing can be learned about exchanges. So a few micro-batches are trials, which are planned
  without the exchange factor. The more time a trial costs, the rarer trials are.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import MicroBatchPlan, RateSample, observe_plans
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks

# A kind of layer is a shape and a type of device. Its layers share a cost model, whatever their
# windows are.
Kind = tuple[AttentionShape, str]

# A micro-batch gives one sample. The first samples are ignored, because caches are still empty.
_WARM_UP_SAMPLES = 2
# The newest _MAX_SAMPLES samples are kept. After _MAX_SAMPLES micro-batches, only one in
# _SAMPLE_INTERVAL micro-batches gives a sample, unless exchanges slow attention down.
_MAX_SAMPLES = 32
_SAMPLE_INTERVAL = 8
# A correction needs _MIN_SAMPLES samples. If exchanges slowed attention down by more than the
# fraction _CLEAR_SLOWDOWN, _MIN_CLEAR_SAMPLES samples are enough.
_MIN_SAMPLES = 4
_MIN_CLEAR_SAMPLES = 2
_CLEAR_SLOWDOWN = 0.05
# Corrections change if the relative error of the slowest rank's estimate exceeds _TOLERANCE, or if
# the relative error of a rank's speed exceeds _SPEED_TOLERANCE.
_TOLERANCE = 0.05
_SPEED_TOLERANCE = 0.07
_FACTOR_RANGE = 1e-3, 1e6
# At least _MIN_TRIAL_INTERVAL samples without an exchange come before each trial. The more time a
# trial costs, the more samples come before the next trial, so that trials cost at most the fraction
# _TRIAL_SHARE of the time.
_MIN_TRIAL_INTERVAL = 64
_TRIAL_SHARE = 0.01


class Correction(NamedTuple):
    """Factors that correct a cost model: one for seconds of kernels, one for exchanges."""

    kernel: float = 1.0
    exchange: float = 1.0


@dataclass(eq=False)
class _KindRates:
    """Correction and samples of one kind of layer.

    Attributes:
        correction: the current correction.
        offered_samples: number of micro-batches so far, with and without a sample.
        sample_count: number of samples so far.
        new_samples: newest samples since the last change of the correction.
        slowdown: relative slowdown that exchanges cause, compared with moving no work; None if
            exchanges save time.
        idle_samples: number of samples since the last sample with an exchange. It is counted only
            while `slowdown` is not None.
        is_trial: True while plans ignore the exchange factor, so that an exchange can be measured.
    """

    correction: Correction = field(default_factory=Correction)
    offered_samples: int = 0
    sample_count: int = 0
    new_samples: deque[RateSample] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    slowdown: float | None = None
    idle_samples: int = 0
    is_trial: bool = False

    @property
    def trial_interval(self) -> int:
        """A trial follows this many consecutive samples without an exchange."""
        return max(_MIN_TRIAL_INTERVAL, math.ceil((self.slowdown or 0) / _TRIAL_SHARE))


@lru_cache
def _correct_cost(cost: CostModel, kernel: float, exchange: float, window: int | None) -> CostModel:
    """Multiply the seconds of a cost model by factors, and set its window.

    The result is cached, because each micro-batch needs it several times.
    """
    return replace(cost.scale(kernel, exchange), window=window)


class LearnedCosts(dict[Kind, CostModel]):
    """Cost models without windows, by kind of layer, and their corrections from measurements.

    Attributes:
        measured_ranks: measured speeds of the ranks of the group.
        dtypes: names of the current dtypes of q, k and v.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measured_ranks: Ranks = UNIFORM_RANKS
        self.dtypes: dict[Kind, str] = {}
        self._rates: defaultdict[Kind, _KindRates] = defaultdict(_KindRates)

    def get_cost(self, key: PlanKey) -> CostModel:
        """Return the current cost model for a plan, corrected by measurements."""
        kind = key.shape, key.device
        rates = self._rates[kind]
        kernel, exchange = rates.correction
        return _correct_cost(self[kind], kernel, 1.0 if rates.is_trial else exchange, key.window)

    def make_ranks(self, count: int, per_node: int | None = None) -> Ranks:
        """Make the `Ranks` of a group, with measured speeds if there are any.

        Args:
            count: number of ranks.
            per_node: number of ranks per node; None to treat all ranks alike.
        """
        speeds = self.measured_ranks.speeds
        return Ranks(speeds if speeds is not None and len(speeds) == count else None, per_node)

    @property
    def learned_corrections(self) -> dict[str, object]:
        """Learned factors for each kind of layer, and the speeds of ranks under the key "speeds".

        The other keys describe the kinds. Kinds and speeds without a correction are left out.
        """
        corrections: dict[str, object] = {
            _describe_kind(kind): rates.correction._asdict()
            for kind, rates in self._rates.items()
            if rates.correction != Correction()
        }
        if self.measured_ranks.speeds is not None:
            corrections["speeds"] = list(self.measured_ranks.speeds)
        return corrections

    @property
    def exchange_slowdown(self) -> float | None:
        """Largest relative slowdown by exchanges in any kind of layer; None if there is none."""
        slowdowns = (rates.slowdown for rates in self._rates.values())
        return max((slowdown for slowdown in slowdowns if slowdown is not None), default=None)

    def learn_from_plans(self, plans: Sequence[MicroBatchPlan], config: DistCAConfig) -> list[str]:
        """Correct rates with the measurements of each micro-batch and kind of layer.

        Return sentences that describe the changes.
        """
        changes: list[str] = []
        # A user's own cost model is not corrected. With deterministic algorithms, no cost model is
        # corrected, because measured times would make runs differ.
        is_own = isinstance(config.cost_model, CostModel)
        if is_own or not config.measured_rates or torch.are_deterministic_algorithms_enabled():
            return changes
        plans_of = defaultdict(list)  # by micro-batch and key of the whole batch
        for plan in plans:
            plans_of[plan.number, plan.key._replace(nano=0)].append(plan)
        for _, key in plans_of:  # a trial ends when its kind of layer is measured
            self._rates[key.shape, key.device].is_trial = False
        for (_, key), nano_plans in plans_of.items():
            kind = key.shape, key.device
            if self.accept_sample(kind):
                observation = observe_plans(nano_plans, self[kind])
                if observation is not None:
                    changes += self.learn_from_sample(kind, observation)
        return changes

    def accept_sample(self, kind: Kind) -> bool:
        """Count a micro-batch, and return whether to learn from it.

        Making a sample takes time, and samples of a few micro-batches are enough.
        """
        rates = self._rates[kind]
        rates.offered_samples += 1
        return (
            rates.offered_samples <= _MAX_SAMPLES
            or rates.offered_samples % _SAMPLE_INTERVAL == 0
            or rates.slowdown is not None
        )

    def learn_from_sample(self, kind: Kind, sample: RateSample) -> list[str]:
        """Learn from a sample, and return sentences that describe the changes.

        All ranks must learn from the same samples in the same order.
        """
        rates = self._rates[kind]
        rates.sample_count += 1
        is_empty = not (sample.kernel.any() and sample.estimated.any())
        if is_empty or rates.sample_count <= _WARM_UP_SAMPLES:
            return []
        count = len(sample.kernel)
        self.measured_ranks = self.make_ranks(count)
        rates.new_samples.append(sample)
        samples = [other for other in rates.new_samples if len(other.kernel) == count]
        changes = self._learn_kernel(rates, samples) if len(samples) >= _MIN_SAMPLES else []
        return changes + self._learn_exchange(rates, sample)

    def _learn_kernel(self, rates: _KindRates, samples: Sequence[RateSample]) -> list[str]:
        """Fit the factor of kernels and the speeds of ranks. Return sentences that describe the
        changes.

        Nothing is changed if estimates are close to measurements.
        """
        before, ranks_before = rates.correction, self.measured_ranks
        speeds = _compute_speeds(samples)
        speeds_before = ranks_before.list_speeds(len(speeds))
        error = _compute_factor(samples, ranks_before) / before.kernel
        if abs(math.log(error)) <= _TOLERANCE and not _differ(speeds / speeds_before):
            return []
        self.measured_ranks = UNIFORM_RANKS
        if _differ(speeds):
            self.measured_ranks = Ranks.from_speeds([_round_rate(speed) for speed in speeds])
        factor = _round_factor(_compute_factor(samples, self.measured_ranks))
        rates.correction = before._replace(kernel=factor)
        rates.new_samples.clear()
        changes = []
        if rates.correction != before:
            changes.append(f"attention takes {factor:.3g} times as long as the cost model says")
        if self.measured_ranks != ranks_before:
            changes.append(_describe_ranks(self.measured_ranks))
        return changes

    @staticmethod
    def _learn_exchange(rates: _KindRates, sample: RateSample) -> list[str]:
        """Fit the factor of exchanges. Return sentences that describe the changes."""
        changes: list[str] = []
        if not sample.has_exchange:
            rates.idle_samples += rates.slowdown is not None
            if rates.idle_samples and rates.idle_samples % rates.trial_interval == 0:
                rates.is_trial = True
            return changes
        was_trial = rates.idle_samples >= rates.trial_interval
        rates.idle_samples = 0
        samples = [other for other in rates.new_samples if other.has_exchange] or [sample]
        all_factors = (other.compute_exchange_factor() for other in samples)
        factors = [factor for factor in all_factors if factor is not None]
        required = _MIN_SAMPLES
        if was_trial:
            required = 1
        elif all(other.slowdown > _CLEAR_SLOWDOWN for other in samples):
            required = _MIN_CLEAR_SAMPLES
        if not factors or len(samples) < required:
            return changes
        factor = _round_factor(np.median(factors))
        slowdown = _round_rate(np.median([other.slowdown for other in samples]))
        change = abs(factor - rates.correction.exchange) * float(sample.estimated_exchange.max())
        if change > (_TOLERANCE if slowdown <= 0 else 0) * float(sample.kernel.max()):
            rates.correction = rates.correction._replace(exchange=factor)
            changes.append(f"exchanges take {factor:.3g} times as long as the cost model says")
            rates.new_samples.clear()
        rates.slowdown = slowdown if slowdown > 0 else None
        return changes


def _compute_factor(samples: Sequence[RateSample], ranks: Ranks) -> float:
    """Compute the factor by which the kernels of the slowest rank take longer than estimated."""
    return float(
        np.median(
            [
                sample.kernel.max() / ranks.scale_by_speed(sample.estimated).max()
                for sample in samples
            ]
        )
    )


def _compute_speeds(samples: Sequence[RateSample]) -> FloatArray:
    """Compute the relative speed of each rank, (ranks,): estimated divided by measured seconds.

    A rank's speed is not computed from samples in which the rank has almost no work.
    """
    work = np.array([sample.estimated for sample in samples])
    kernel = np.array([sample.kernel for sample in samples])
    is_idle = (work <= 0.2 * work.mean(axis=1, keepdims=True)) | (kernel <= 0)
    ratios = np.ma.array(work / np.maximum(kernel, 1e-12), mask=is_idle)
    speeds = np.ma.median(ratios, axis=0)  # type: ignore[no-untyped-call]
    speeds /= np.ma.median(speeds)  # type: ignore[no-untyped-call]
    return np.asarray(speeds.filled(1.0))


def _differ(speeds: FloatArray) -> bool:
    return bool(np.abs(np.log(speeds)).max() > _SPEED_TOLERANCE)


def _round_factor(value: float | np.float64) -> float:
    return _round_rate(min(max(value, _FACTOR_RANGE[0]), _FACTOR_RANGE[1]))


def _round_rate(value: float | np.float64) -> float:
    """Round to three digits, because processors differ in the last bits."""
    return float(f"{value:.3g}")


def _describe_kind(kind: Kind) -> str:
    shape, device = kind
    widths = dict.fromkeys((str(shape.head_dim), str(shape.value_head_dim)))
    heads = f"{shape.query_heads}:{shape.key_value_heads} heads of {' and '.join(widths)}"
    return f"{heads}, {shape.element_bytes} bytes, {device}"


def _describe_ranks(ranks: Ranks) -> str:
    if ranks.speeds is None:
        return "all ranks are equally fast"
    different = [
        f"rank {rank} takes {1 / speed:.2f} times as long as others"
        for rank, speed in enumerate(ranks.speeds)
        if abs(math.log(speed)) > _SPEED_TOLERANCE
    ]
    if len(different) > 8:
        different[8:] = [f"and {len(different) - 8} more differ"]
    return ", ".join(different)
