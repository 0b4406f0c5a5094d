"""What ranks measured of their plans, until all of it was announced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.figures import Estimate, History
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.layout import IntArray

__all__ = ["Measured", "Measurements", "record"]


class Measured(NamedTuple):
    """A plan that is used: which, in which micro-batch, what it is to take, and the meter of what it takes."""

    key: PlanKey
    number: int
    estimate: Estimate
    meter: Meter

    @property
    def figures(self) -> tuple[int, int]:
        """Kernel nanoseconds, -1 while kernels still run, and sent bytes."""
        return int(self.meter.seconds * 1e9) if self.meter.finished else -1, self.meter.sent_bytes


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
        figures: (ranks, plans, 2) as in `Measured.figures`.
        history: what they are added to.
        rank: this one.

    Returns:
        Those with a kernel that still runs on some rank, with which there is nothing to compare yet.
    """
    unfinished = []
    for one, (nanoseconds, sent_bytes) in zip(measured, figures.transpose(1, 2, 0), strict=True):
        if nanoseconds.min() < 0:
            unfinished.append(one)
            continue
        # Both nano-batches go through each layer: one of them counts it.
        calls = 0 if one.key.nano == 2 else one.meter.calls
        history.measured(one.estimate, one.number, nanoseconds / 1e9, sent_bytes, calls, rank)
    return unfinished
