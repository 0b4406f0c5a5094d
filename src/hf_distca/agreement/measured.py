"""What ranks measured of their plans, until all of it was announced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.agreement.announce import Figures, PlanKey
from hf_distca.agreement.figures import Estimate, History
from hf_distca.agreement.rates import Observation, Rates
from hf_distca.config import DistCAConfig
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape, CostModel, FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.waves import Waves

__all__ = ["Lessons", "Measured", "Measurements", "observed", "record"]


class Measured(NamedTuple):
    """A plan that is used: which, in which micro-batch, what it is to take, and the meter of what it takes."""

    key: PlanKey
    number: int
    estimate: Estimate
    meter: Meter
    plan: Plan

    @property
    def figures(self) -> Figures:
        """Kernel nanoseconds, -1 while kernels still run; sent bytes; nanoseconds of exchanging; calls.

        The last two are -1 where backward did not run for every call: rates are those of whole layers.
        """
        meter = self.meter
        whole = meter.calls > 0 and meter.kernel_calls == 2 * meter.backward_calls
        rest = (int(meter.exchange_seconds * 1e9), meter.calls) if whole else (-1, -1)
        return int(meter.seconds * 1e9) if meter.finished else -1, meter.sent_bytes, *rest


class Measurements:
    """Those of plans that were used, in the order of use; the same plans on all ranks.

    They are announced with the next plan of the same key: until then all of it was launched.
    """

    def __init__(self) -> None:
        self._waiting: dict[PlanKey, list[Measured]] = {}

    def add(self, measured: Measured) -> None:
        """Measure a plan that is used from now on."""
        self._waiting.setdefault(measured.key, []).append(measured)

    def take(self, keys: Iterable[PlanKey]) -> list[Measured]:
        """What is announced with plans of these keys. On a GPU the newest of a key waits: its kernels may still have to run."""
        return [one for key in dict.fromkeys(keys) for one in self._finished(key)]

    def take_all(self) -> list[Measured]:
        """What was not announced, the newest included."""
        return [one for key in list(self._waiting) for one in self._waiting.pop(key)]

    def put_back(self, measured: Sequence[Measured]) -> None:
        """What was taken and not announced is the first to be taken next time."""
        for one in reversed(measured):
            self._waiting.setdefault(one.key, []).insert(0, one)

    def _finished(self, key: PlanKey) -> list[Measured]:
        measured = self._waiting.pop(key, [])
        if key.device != "cpu" and measured:
            self._waiting[key] = [measured.pop()]
        return measured


def record(measured: Sequence[Measured], figures: IntArray, history: History, rank: int) -> list[Measured]:
    """Add what all ranks measured to the history.

    Args:
        measured: the plans.
        figures: (ranks, plans, 4) as in `Measured.figures`.
        history: what they are added to.
        rank: this one.

    Returns:
        Those with a kernel that still runs on some rank, with which there is nothing to compare yet.
    """
    unfinished = []
    for one, (nanoseconds, sent_bytes, *_) in zip(measured, figures.transpose(1, 2, 0), strict=True):
        if nanoseconds.min() < 0:
            unfinished.append(one)
            continue
        # Both nano-batches go through each layer: one of them counts it.
        history.measured(one.estimate, one.number, nanoseconds / 1e9, sent_bytes, one.meter.calls, rank, again=one.key.nano == 2)
    return unfinished


def observed(measured: Sequence[Measured], figures: IntArray, cost: CostModel, config: DistCAConfig) -> Observation | None:
    """What all ranks measured of the plans of one micro-batch, whole or in two nano-batches, for one kind of layer.

    Args:
        measured: the plans.
        figures: (ranks, plans, 4) as in `Measured.figures`.
        cost: the uncorrected cost model of the layer.
        config: settings under which plans were made.

    Returns:
        None if some rank did not run whole layers, has kernels that still run, or one of two nano-batches is missing.
    """
    nano = measured[0].key.nano > 0
    calls = figures[:, :, 3]
    if figures.min() < 0 or (calls != calls[0, 0]).any() or len(measured) != 1 + nano:
        return None
    seconds = figures / (1e9 * calls[0, 0])
    return Observation(
        parts=_summed(_parts(one.plan, cost) for one in measured),
        kernel=seconds[:, :, 0].sum(axis=1),
        exchanging=seconds[:, :, 2].sum(axis=1),
        exchange=_summed(_exchange(one.plan, cost, config, one.estimate.speeds) for one in measured),
        unmoved=_summed(one.estimate.given_back(seconds[:, at, 0]) for at, one in enumerate(measured)),
        unmoved_exchange=_summed(_unmoved_exchange(one.plan, cost, config, one.estimate.speeds) for one in measured),
        overlapped=nano,
    )


class Lessons:
    """Measurements that all ranks know of, until rates are corrected by them: at one micro-batch on all ranks.

    Args:
        rates: what is corrected.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._waiting: deque[tuple[int, Sequence[Measured], IntArray]] = deque()

    def add(self, number: int, measured: Sequence[Measured], figures: IntArray) -> None:
        """Take in what the meeting of this number told: plans, and (ranks, plans, 4) figures."""
        self._waiting.append((number, measured, figures))

    def learn(self, before: int, costs: Mapping[tuple[AttentionShape, str], CostModel], config: DistCAConfig) -> None:
        """Correct rates by what meetings before this one told.

        Args:
            before: number of a meeting; a rank may know of later ones that others do not know of yet.
            costs: cost models by shape and device type, uncorrected.
            config: settings.
        """
        while self._waiting and self._waiting[0][0] < before:
            _, measured, figures = self._waiting.popleft()
            # What a user's own model says is meant as it is.
            if not config.measured_rates or isinstance(config.cost_model, CostModel):
                continue
            for together, theirs in _by_micro_batch(measured, figures):
                kind = together[0].key.shape, together[0].key.device
                if self._rates.wants(kind):
                    one = observed(together, theirs, costs[kind], config)
                    if one is not None:
                        self._rates.learn(kind, one)


def _by_micro_batch(measured: Sequence[Measured], figures: IntArray) -> Iterator[tuple[list[Measured], IntArray]]:
    """The plans of one micro-batch and kind of layer together, in order of first use, with their figures."""
    groups: dict[tuple[int, PlanKey], list[int]] = {}
    for at, one in enumerate(measured):
        groups.setdefault((one.number, one.key._replace(nano=0)), []).append(at)
    for places in groups.values():
        yield [measured[at] for at in places], figures[:, places]


def _parts(plan: Plan, cost: CostModel) -> FloatArray:
    """(ranks, 3) seconds of tasks, bytes and flops, forward and backward, of every server."""
    each = replace(cost, window=plan.window).parts(plan.end - plan.start, plan.end, plan.heads)
    columns = (np.bincount(plan.server, weights=column, minlength=plan.layout.world_size) for column in each.T)
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _exchange(plan: Plan, cost: CostModel, config: DistCAConfig, ranks: Ranks) -> FloatArray:
    """(ranks,) estimated seconds of exchanges; 0 on ranks that send and receive nothing, which wait for nobody."""
    if not plan.moved:
        return np.zeros(plan.layout.world_size)
    waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
    load = PlanLoad(plan, cost, waves, ranks=ranks)
    return np.where(load.wire_seconds.any(axis=0), load.exchange_seconds, 0.0)


def _unmoved_exchange(plan: Plan, cost: CostModel, config: DistCAConfig, ranks: Ranks) -> FloatArray:
    """(ranks,) the same if nothing were moved: of documents that span ranks."""
    if not plan.layout.scattered:
        return np.zeros(plan.layout.world_size)
    return _exchange(Plan.local(plan.layout, plan.window), cost, config, ranks)


def _summed(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.asarray(sum(arrays), dtype=np.float64)
