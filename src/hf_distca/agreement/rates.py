"""`Costs`: the cost models that ranks plan with, and corrections of them by measurements.

Every rank learns from the same figures in the same order, so all ranks have the same corrections,
and exchange nothing for them. Results are rounded, so that different processors find the same
values. Figures are times, which differ from run to run: nothing is learned from them where torch is
set to deterministic algorithms.

- **Kernels.** A cost model adds up seconds for tasks, for bytes and for flops. Each of the three
  gets a factor, fitted to the kernel seconds of all ranks. Where measurements cannot tell the three
  apart, they are pulled towards one common factor.
- **Ranks.** A rank whose kernels keep taking longer or shorter than that has another speed.
- **Exchanges.** One factor makes estimates of exchanges as long as measured. It is taken from the
  rank that spends least on packing, waiting and unpacking relative to its exchange: other ranks
  also wait for slower ranks. Attention is then estimated to take as long as the rank whose kernels
  and exchanges take longest.
- **Trials.** Where exchanges take longer than they gain, plans move less, or nothing. As nothing
  could be learned about exchanges from then on, some micro-batches are planned without the exchange
  factor until one is measured. The more such trials cost, the rarer they are.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import MicroBatchPlan, Observation, observe_plans
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks

# Kind of layer: shape and type of device. Layers of one kind share a cost model, with any window.
Kind = tuple[AttentionShape, str]

# Samples, one a micro-batch: the first ones make buffers and caches and are left out.
_WARM_UP_SAMPLES = 2
_MAX_SAMPLES = 32  # the newest ones that are kept
_SAMPLE_INTERVAL = 8  # after as many, one of so many micro-batches is a sample
_MIN_SAMPLES = 4  # for a change
_MIN_CLEAR_SAMPLES = 2  # for a change, if attention was clearly slower than without exchanges
_CLEAR_SLOWDOWN = 0.05  # relative slowdown that is clear
# Relative errors that are worth a change: of the slowest rank's estimate, and of a rank's speed.
_TOLERANCE = 0.05
_SPEED_TOLERANCE = 0.07
_PULL = 0.01  # weight, per measurement, of the pull of each factor towards the common one
_FACTOR_RANGE = 1e-3, 1e6
# Micro-batches without an exchange before a trial: the fewest and the most.
_MIN_TRIAL_INTERVAL = 64
_MAX_TRIAL_INTERVAL = 4096
_TRIAL_SHARE = 0.01  # share of the time that trials may cost


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the seconds of a cost model.

    Attributes:
        task, byte, flop: factors on the parts of kernel seconds.
        exchange: factor on seconds of exchanges.
    """

    task: float = 1.0
    byte: float = 1.0
    flop: float = 1.0
    exchange: float = 1.0

    def apply_to(self, cost: CostModel) -> CostModel:
        """Apply the factors to a cost model."""
        if self == Correction():
            return cost
        node_rate = cost.node_bytes_per_second
        return replace(
            cost,
            forward=self._correct_kernel(cost.forward),
            backward=self._correct_kernel(cost.backward),
            exchange_bytes_per_second=cost.exchange_bytes_per_second / self.exchange,
            exchange_seconds=cost.exchange_seconds * self.exchange,
            node_bytes_per_second=None if node_rate is None else node_rate / self.exchange,
            name=f"{cost.name}, fitted to what was measured",
        )

    @property
    def kernel_factors(self) -> FloatArray:
        """Factors of task, byte and flop, (3,)."""
        return np.array([self.task, self.byte, self.flop])

    def _correct_kernel(self, cost: KernelCost) -> KernelCost:
        return replace(
            cost,
            task_seconds=cost.task_seconds * self.task,
            bytes_per_second=cost.bytes_per_second / self.byte,
            flops_per_second=cost.flops_per_second / self.flop,
        )


@dataclass(eq=False)
class _KindRates:
    """Correction and samples of one kind of layer.

    Attributes:
        correction: the current correction.
        offered_samples: number of micro-batches that could have been samples.
        sample_count: number of samples.
        new_samples: newest samples since the last change.
        slowdown: relative slowdown by exchanges that takes longer than moving nothing; None where
            exchanges gain.
        idle_micro_batches: micro-batches without exchange since then.
        trial_interval: number of those before a trial.
        is_in_trial: True if plans leave exchanges uncorrected, to measure one.
    """

    correction: Correction = field(default_factory=Correction)
    offered_samples: int = 0
    sample_count: int = 0
    new_samples: deque[Observation] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    slowdown: float | None = None
    idle_micro_batches: int = 0
    trial_interval: int = _MIN_TRIAL_INTERVAL
    is_in_trial: bool = False


class Costs(dict[Kind, CostModel]):
    """Cost models by kind of layer, without windows, with corrections by measurements.

    Attributes:
        measured_ranks: the ranks of the group, with measured speeds.
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
        correction = rates.correction
        if rates.is_in_trial:
            correction = replace(correction, exchange=1.0)
        return replace(correction.apply_to(self[kind]), window=key.window)

    def make_ranks(self, count: int, per_node: int | None = None) -> Ranks:
        """Make the properties of a group's ranks, as far as they were measured.

        Args:
            count: number of ranks.
            per_node: number of ranks of a node; None if nodes are not told apart.
        """
        speeds = self.measured_ranks.speeds
        return Ranks(speeds if speeds is not None and len(speeds) == count else None, per_node)

    @property
    def learned_corrections(self) -> dict[str, object]:
        """Measured corrections: factors by kind of layer in words, and "speeds" of ranks.

        Empty before there are any.
        """
        corrections: dict[str, object] = {
            _describe_kind(kind): asdict(rates.correction)
            for kind, rates in self._rates.items()
            if rates.correction != Correction()
        }
        if self.measured_ranks.speeds is not None:
            corrections["speeds"] = list(self.measured_ranks.speeds)
        return corrections

    @property
    def exchange_slowdown(self) -> float | None:
        """Relative slowdown by exchanges, if some kind of layer loses by them; else None."""
        slowdowns = (rates.slowdown for rates in self._rates.values())
        return max((slowdown for slowdown in slowdowns if slowdown is not None), default=None)

    def learn_from_plans(self, plans: Sequence[MicroBatchPlan], config: DistCAConfig) -> list[str]:
        """Correct rates by the measurements of each micro-batch and kind of layer.

        Return the changes, as sentences.
        """
        changes: list[str] = []
        # A user's own model is not corrected, nor is any where times would make runs differ.
        is_own = isinstance(config.cost_model, CostModel)
        if is_own or not config.measured_rates or torch.are_deterministic_algorithms_enabled():
            return changes
        plans_of = defaultdict(list)  # by micro-batch and whole batch
        for plan in plans:
            plans_of[plan.number, plan.key._replace(nano=0)].append(plan)
        for (_, key), nano_plans in plans_of.items():
            kind = key.shape, key.device
            if self.accept_sample(kind):
                observation = observe_plans(nano_plans, self[kind])
                if observation is not None:
                    changes += self.learn_from_sample(kind, observation)
        return changes

    def accept_sample(self, kind: Kind) -> bool:
        """Count a micro-batch, and return whether to learn from it.

        Of many micro-batches a few are enough, and making a sample takes time.
        """
        rates = self._rates[kind]
        rates.offered_samples += 1
        return (
            rates.offered_samples <= _MAX_SAMPLES
            or rates.offered_samples % _SAMPLE_INTERVAL == 0
            or rates.slowdown is not None
        )

    def learn_from_sample(self, kind: Kind, sample: Observation) -> list[str]:
        """Learn from a sample. All ranks must call it with the same samples in the same order.

        Return the changes, as sentences.
        """
        rates = self._rates[kind]
        changes: list[str] = []
        rates.sample_count += 1
        if rates.sample_count <= _WARM_UP_SAMPLES:
            return changes
        count = len(sample.kernel)
        self.measured_ranks = self.make_ranks(count)
        rates.new_samples.append(sample)
        samples = [other for other in rates.new_samples if len(other.kernel) == count]
        if len(samples) >= _MIN_SAMPLES and self._is_far_off(rates.correction, samples):
            changes += self._fit_rates(rates, samples)
        return changes + self._learn_exchange(rates, sample)

    def _is_far_off(self, correction: Correction, samples: Sequence[Observation]) -> bool:
        """Return whether estimates are so far from measurements that rates should change."""
        factors = correction.kernel_factors
        estimated = [
            self.measured_ranks.scale_by_speed(sample.estimate_seconds(factors))
            for sample in samples
        ]
        ratios = [
            seconds.max() / max(sample.kernel.max(), 1e-12)
            for seconds, sample in zip(estimated, samples, strict=True)
        ]
        if abs(math.log(max(float(np.median(ratios)), 1e-12))) > _TOLERANCE:
            return True
        return bool(np.abs(np.log(_compute_speeds(estimated, samples))).max() > _SPEED_TOLERANCE)

    def _fit_rates(self, rates: _KindRates, samples: Sequence[Observation]) -> list[str]:
        """Fit factors of kernels and speeds of ranks, and return the changes as sentences."""
        correction_before = rates.correction
        ranks_before = self.measured_ranks
        changes = []
        count = len(samples[0].kernel)
        speeds = np.array(ranks_before.list_speeds(count))
        for _ in range(3):  # in turns, as each of the two needs the other
            factors = _fit_factors(samples, speeds)
            speeds = _compute_speeds(
                [sample.estimate_seconds(factors) for sample in samples], samples
            )
        if np.abs(np.log(speeds)).max() <= _SPEED_TOLERANCE:
            factors = _fit_factors(samples, np.ones(count))
            self.measured_ranks = UNIFORM_RANKS
        else:
            self.measured_ranks = Ranks.from_speeds([_round_rate(speed) for speed in speeds])
        task, byte, flop = map(_round_rate, np.clip(factors, *_FACTOR_RANGE))
        rates.correction = replace(correction_before, task=task, byte=byte, flop=flop)
        rates.new_samples.clear()
        if rates.correction != correction_before:
            factors = rates.correction.kernel_factors
            times = np.median(
                [
                    sample.estimate_seconds(factors).max() / sample.parts.sum(axis=1).max()
                    for sample in samples
                ]
            )
            changes.append(f"attention takes {times:.3g} times as long as the cost model says")
        if self.measured_ranks != ranks_before:
            changes.append(_describe_ranks(self.measured_ranks))
        return changes

    @staticmethod
    def _learn_exchange(rates: _KindRates, sample: Observation) -> list[str]:
        """Fit the factor of exchanges, schedule trials, and return the changes as sentences."""
        changes: list[str] = []
        if not sample.has_exchange:
            rates.idle_micro_batches += rates.slowdown is not None
            if rates.idle_micro_batches >= rates.trial_interval:
                rates.is_in_trial = True
                rates.idle_micro_batches = 0
            return changes
        was_in_trial = rates.is_in_trial
        rates.is_in_trial = False
        if rates.slowdown is not None and not was_in_trial:
            # Another micro-batch of an earlier trial. Its cost puts off the next trial.
            cost = math.ceil(max(sample.slowdown, 0) / _TRIAL_SHARE)
            rates.idle_micro_batches = max(rates.idle_micro_batches - cost, -_MAX_TRIAL_INTERVAL)
        samples = [other for other in rates.new_samples if other.has_exchange] or [sample]
        all_factors = (other.compute_exchange_factor() for other in samples)
        factors = [factor for factor in all_factors if factor is not None]
        required = _MIN_SAMPLES
        if was_in_trial:
            required = 1
        elif all(other.slowdown > _CLEAR_SLOWDOWN for other in samples):
            required = _MIN_CLEAR_SAMPLES
        if not factors or len(samples) < required:
            return changes
        factor = _round_rate(np.clip(np.median(factors), *_FACTOR_RANGE))
        slowdown = float(np.median([other.slowdown for other in samples]))
        change = abs(factor - rates.correction.exchange) * float(sample.estimated_exchange.max())
        if change > (_TOLERANCE if slowdown <= 0 else 0) * float(sample.kernel.max()):
            rates.correction = replace(rates.correction, exchange=factor)
            changes.append(f"exchanges take {factor:.3g} times as long as the cost model says")
            rates.new_samples.clear()
        rates.slowdown = slowdown if slowdown > 0 else None
        interval = max(
            rates.trial_interval * (1 + was_in_trial), math.ceil(slowdown / _TRIAL_SHARE)
        )
        rates.trial_interval = (
            min(interval, _MAX_TRIAL_INTERVAL) if slowdown > 0 else _MIN_TRIAL_INTERVAL
        )
        return changes


def _compute_speeds(estimated: Sequence[FloatArray], samples: Sequence[Observation]) -> FloatArray:
    """Compute the relative speed of each rank, (ranks,): estimated by measured seconds.

    Samples in which a rank has next to nothing to do are left out.
    """
    work = np.array(estimated)
    kernel = np.array([sample.kernel for sample in samples])
    is_idle = (work <= 0.2 * work.mean(axis=1, keepdims=True)) | (kernel <= 0)
    ratios = np.ma.array(work / np.maximum(kernel, 1e-12), mask=is_idle)
    speeds = np.ma.median(ratios, axis=0)  # type: ignore[no-untyped-call]
    speeds /= np.ma.median(speeds)  # type: ignore[no-untyped-call]
    return np.asarray(speeds.filled(1.0))


def _fit_factors(samples: Sequence[Observation], speeds: FloatArray) -> FloatArray:
    """Fit factors >= 0 on the seconds of tasks, bytes and flops, on ranks of these speeds: (3,).

    This is least squares on relative errors, with a pull of each factor towards the common one. A
    part whose share of all seconds is below the square root of the pull hardly gets a factor of its
    own.

    Args:
        samples: samples of the same number of ranks.
        speeds: (ranks,) relative speeds.
    """
    from scipy.optimize import nnls  # scipy takes long to import, and no plan needs it

    parts = np.concatenate([sample.parts / speeds[:, None] for sample in samples])
    measured = np.concatenate([sample.kernel for sample in samples])
    is_usable = (measured > 0) & (parts.sum(axis=1) > 0)
    if not is_usable.any():
        return np.ones(3)
    scaled = parts[is_usable] / measured[is_usable][:, None]
    common = float(np.median(1 / scaled.sum(axis=1)))
    pull = math.sqrt(_PULL * len(scaled)) * np.eye(3)
    targets = np.append(np.ones(len(scaled)), pull.diagonal())
    # Factors are about 1 here.
    return np.asarray(nnls(np.concatenate([scaled * common, pull]), targets)[0] * common)


def _round_rate(value: float | np.float64) -> float:
    """Round to three digits, because last bits differ between processors."""
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
