"""What ranks measured of their plans, until all of it was announced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.agreement.announce import Figures, PlanKey
from hf_distca.agreement.figures import Estimate, History
from hf_distca.agreement.rates import Observation
from hf_distca.config import DistCAConfig
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.waves import Waves

__all__ = ["Measured", "Measurements", "by_micro_batch", "observed", "record"]


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
        exchange=_summed(_exchange(one.plan, cost, config) for one in measured),
        unmoved=_summed(one.estimate.given_back(seconds[:, at, 0]) for at, one in enumerate(measured)),
        unmoved_exchange=_summed(_exchange(Plan.local(one.plan.layout, one.plan.window), cost, config) for one in measured),
        overlapped=nano,
    )


def by_micro_batch(measured: Sequence[Measured], figures: IntArray) -> Iterator[tuple[list[Measured], IntArray]]:
    """The plans of one micro-batch and kind of layer together, in order of first use, with their figures."""
    groups: dict[tuple[int, PlanKey], list[int]] = {}
    for at, one in enumerate(measured):
        groups.setdefault((one.number, one.key._replace(nano=0)), []).append(at)
    for places in groups.values():
        yield [measured[at] for at in places], figures[:, places]


def _parts(plan: Plan, cost: CostModel) -> FloatArray:
    """(ranks, 3) seconds of tasks, bytes and flops, forward and backward, of every server."""
    each = replace(cost, window=plan.window).parts(plan.end - plan.start, plan.end)
    columns = (np.bincount(plan.server, weights=column, minlength=plan.layout.world_size) for column in each.T)
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _exchange(plan: Plan, cost: CostModel, config: DistCAConfig) -> FloatArray:
    """(ranks,) estimated seconds of exchanges."""
    if not plan.moved:
        return np.zeros(plan.layout.world_size)
    waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes)
    return PlanLoad(plan, cost, waves).exchange_seconds


def _summed(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.asarray(sum(arrays), dtype=np.float64)
