"""What planning promised and what ranks measured, per micro-batch, and the figures made of both.

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks): the ranks wait in every micro-batch, so
the slowest of each counts. Ranks announce their measured seconds with their next documents; the figures lag one micro-batch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import Plan

__all__ = ["History", "Micro", "Tally"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Micro:
    """One plan of a micro-batch.

    Attributes:
        work: (ranks, ranks) estimated attention seconds of home rank (row) computed by server (column).
        planning_ms: milliseconds from the documents to the route, exchange of layouts included.
    """

    work: FloatArray
    planning_ms: float

    @classmethod
    def of(cls, plan: Plan, cost: CostModel, planning_ms: float) -> Micro:
        """Add up the estimated seconds of a plan's tasks."""
        ranks = plan.layout.world_size
        seconds = cost.seconds(plan.end - plan.start, plan.end)
        work = np.bincount(plan.home * ranks + plan.server, weights=seconds, minlength=ranks * ranks).astype(np.float64)
        return cls(work.reshape(ranks, ranks), planning_ms)


@dataclass(frozen=True)
class Tally:
    """Sums over micro-batches; seconds of attention per rank unless said otherwise.

    The difference of two is what lies between them.
    """

    micro_batches: int = 0
    planning_ms: float = 0.0
    estimated_before: float = 0.0
    estimated_after: float = 0.0
    estimated_mean: float = 0.0
    measured_before: float = 0.0
    measured_after: float = 0.0
    measured_mean: float = 0.0
    busiest_bytes: float = 0.0
    layers: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Tally) -> Tally:
        return Tally(*(one - two for one, two in zip(astuple(self), astuple(earlier), strict=True)))

    def figures(self) -> dict[str, float]:
        """The figures to log; those without data are left out."""
        figures: dict[str, float] = {}
        if self.estimated_mean:
            figures["distca/imbalance_estimated_before"] = self.estimated_before / self.estimated_mean
            figures["distca/imbalance_estimated_after"] = self.estimated_after / self.estimated_mean
        if self.measured_mean:
            figures["distca/imbalance_measured_before"] = self.measured_before / self.measured_mean
            figures["distca/imbalance_measured_after"] = self.measured_after / self.measured_mean
        if self.layers:
            figures["distca/exchanged_mb_per_layer"] = self.busiest_bytes / self.layers / 1e6
        if self.micro_batches:
            figures["distca/planning_ms"] = self.planning_ms / self.micro_batches
        return figures


class History:
    """Collects micro-batches and measurements.

    Attributes:
        total: sums over all of them so far; never changed in place.
    """

    def __init__(self) -> None:
        self.total = Tally()
        self._number = 0

    def planned(self, micro: Micro, number: int) -> None:
        """A plan of micro-batch `number` was made: one of several, where kinds of layers or nano-batches have their own."""
        self.total += Tally(
            micro_batches=int(number != self._number),
            planning_ms=micro.planning_ms,
            estimated_before=float(micro.work.sum(axis=1).max()),
            estimated_after=float(micro.work.sum(axis=0).max()),
            estimated_mean=float(micro.work.sum() / len(micro.work)),
        )
        self._number = number

    def measured(self, micro: Micro, seconds: FloatArray, sent_bytes: IntArray, calls: int) -> None:
        """What all ranks did for a micro-batch.

        Args:
            micro: the micro-batch.
            seconds: attention kernel seconds of each rank.
            sent_bytes: bytes each rank sent.
            calls: attention layers that ran.
        """
        self.total += Tally(
            measured_before=float(_by_home(micro.work, seconds).max()),
            measured_after=float(seconds.max()),
            measured_mean=float(seconds.mean()),
            busiest_bytes=float(sent_bytes.max()),
            layers=calls,
        )


def _by_home(work: FloatArray, spent: FloatArray) -> FloatArray:
    """Measured seconds of servers, given back to the home ranks of the tasks in proportion to their estimates."""
    served = work.sum(axis=0)
    share = np.divide(work, served, out=np.zeros_like(work), where=served > 0)
    return np.asarray(share @ spent)
