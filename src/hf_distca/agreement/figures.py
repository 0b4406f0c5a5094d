"""What planning promised and what ranks measured, per micro-batch, and the figures made of both.

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks): the ranks wait in every micro-batch, so
the slowest of each counts. Ranks announce their measured seconds with their next documents: a micro-batch is counted, all of it
at once, when its measurement is in. That is one micro-batch later, and on a GPU, where the host runs ahead of the kernels, two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field

import numpy as np

from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["Counted", "Estimate", "History", "Measurement", "Tally"]


@dataclass(frozen=True, eq=False)
class Estimate:
    """The attention seconds that a plan of a micro-batch is to take.

    Attributes:
        ranks: how many there are.
        home, server: (tasks,) of each CA-task.
        seconds: (tasks,) estimated, forward and backward, on a rank of speed 1.
        planning_ms: milliseconds of planning, exchange of the documents included, up to the plan.
        tokens: (largest, mean) of the ranks, whose queries are computed.
        plan: the plan, where it is known.
        speeds: what ranks are like.
        nano: as in `PlanKey`: plans of one have the same tokens.
    """

    ranks: int
    home: IntArray
    server: IntArray
    seconds: FloatArray
    planning_ms: float
    tokens: tuple[float, float] = (0.0, 0.0)
    plan: Plan | None = None
    speeds: Ranks = ALIKE
    nano: int = 0

    @classmethod
    def of(cls, plan: Plan, cost: CostModel, planning_ms: float, ranks: Ranks = ALIKE, nano: int = 0) -> Estimate:
        """The estimate of a plan's tasks."""
        seconds = cost.seconds(plan.end - plan.start, plan.end, plan.heads)
        tokens = plan.layout.query_tokens
        most_and_mean = float(tokens.max()), float(tokens.mean())
        return cls(plan.layout.world_size, plan.home, plan.server, seconds, planning_ms, most_and_mean, plan, ranks, nano)

    @property
    def moves(self) -> bool:
        """Whether a task has another server than its home."""
        return bool((self.home != self.server).any())

    @property
    def before(self) -> FloatArray:
        """(ranks,) seconds if every rank computed its own attention."""
        return self.speeds.taken(self._sum(self.home, self.seconds))

    @property
    def after(self) -> FloatArray:
        """(ranks,) seconds of every server."""
        return self.speeds.taken(self._sum(self.server, self.seconds))

    def given_back(self, measured: FloatArray) -> FloatArray:
        """Measured seconds of servers, given back to the home ranks of the tasks in proportion to their estimates."""
        served = self.after
        rate = np.divide(measured, served, out=np.zeros_like(served), where=served > 0)
        return self.speeds.taken(self._sum(self.home, self.seconds * rate[self.server]))

    def _sum(self, rank: IntArray, seconds: FloatArray) -> FloatArray:
        return np.bincount(rank, weights=seconds, minlength=self.ranks).astype(np.float64)


@dataclass(frozen=True)
class Tally:
    """Sums over micro-batches. Seconds are those of attention on one rank: the slowest, or the mean of all.

    The difference of two tallies of a session is the tally of what lies between them. `largest_tokens` and `mean_tokens` are
    of the ranks, for each plan, of which a micro-batch may have several. `moved` counts micro-batches in which work was
    moved, `planned_here` plans of shares of dealt batches that this process made since those of the loader were for other
    rates or settings. `promised` is what `measured_after` was estimated to be, `busiest_bytes` what the rank sent that sent
    most, `layers` layers of attention; `own_seconds` is this rank's time in attention kernels, `elapsed_seconds` the time
    from the beginning of each micro-batch to that of the next.
    """

    micro_batches: int = 0
    moved: int = 0
    largest_tokens: float = 0.0
    mean_tokens: float = 0.0
    planning_ms: float = 0.0
    estimated_before: float = 0.0
    estimated_after: float = 0.0
    estimated_mean: float = 0.0
    measured_before: float = 0.0
    measured_after: float = 0.0
    measured_mean: float = 0.0
    busiest_bytes: float = 0.0
    layers: int = 0
    own_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    promised: float = 0.0
    planned_here: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Tally) -> Tally:
        return Tally(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float]:
        """The figures to log; those without data are left out."""
        figures: dict[str, float] = {}
        if self.mean_tokens > 0:
            figures["distca/imbalance_tokens"] = self.largest_tokens / self.mean_tokens
        if self.estimated_mean > 0:
            figures["distca/imbalance_estimated_before"] = self.estimated_before / self.estimated_mean
            figures["distca/imbalance_estimated_after"] = self.estimated_after / self.estimated_mean
        if self.measured_mean > 0:
            figures["distca/imbalance_measured_before"] = self.measured_before / self.measured_mean
            figures["distca/imbalance_measured_after"] = self.measured_after / self.measured_mean
        if self.layers:
            figures["distca/exchanged_mb_per_layer"] = self.busiest_bytes / self.layers / 1e6
        if self.planned_here:
            figures["distca/planned_here"] = self.planned_here
        if self.micro_batches:
            figures["distca/planning_ms"] = self.planning_ms / self.micro_batches
            figures["distca/server_time_share"] = self.own_seconds / max(self.elapsed_seconds, 1e-9)
            figures["distca/micro_batches"] = self.micro_batches
        return figures


@dataclass(frozen=True, eq=False)
class Measurement:
    """What all ranks did by one plan.

    Attributes:
        estimate: what the plan was to take.
        seconds: (ranks,) in attention kernels.
        sent_bytes: (ranks,) sent.
    """

    estimate: Estimate
    seconds: FloatArray
    sent_bytes: IntArray


@dataclass(frozen=True, eq=False)
class Counted:
    """A micro-batch that was counted, rank by rank.

    Attributes:
        number: of the micro-batch.
        tally: what it added to the total.
        measurements: one for each of its plans.
    """

    number: int
    tally: Tally
    measurements: tuple[Measurement, ...]


@dataclass(eq=False)
class _MicroBatch:
    """A micro-batch that is not counted yet: how many of its plans are not measured, and since when it runs."""

    tally: Tally
    began: float
    unmeasured: int = 0
    moved: bool = False
    ended: float | None = None
    measurements: list[Measurement] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """Adds up micro-batches. One counts when it is over and all its plans are measured, so that a sum is about whole ones.

    Attributes:
        total: since the start. It only grows; whoever reports keeps the one it reported last and takes the difference.
        observer: gets each micro-batch when it is counted.
    """

    total: Tally = field(default_factory=Tally)
    observer: Callable[[Counted], None] | None = None
    _number: int = 0  # of the micro-batch at hand
    _running: dict[int, _MicroBatch] = field(default_factory=dict)

    def planned(self, estimate: Estimate, number: int, planned_here: int = 0) -> None:
        """A plan of micro-batch `number` is used: one of several, where kinds of layers or nano-batches have their own.

        Args:
            estimate: what it is to take.
            number: of the micro-batch.
            planned_here: as in `Tally`.
        """
        new = number != self._number
        if new:
            self.end()
            self._number = number
        one = self._running.setdefault(number, _MicroBatch(Tally(micro_batches=int(new)), time.perf_counter()))
        before = estimate.before
        one.tally += Tally(
            moved=int(estimate.moves and not one.moved),
            largest_tokens=estimate.tokens[0],
            mean_tokens=estimate.tokens[1],
            planning_ms=estimate.planning_ms,
            estimated_before=float(before.max()),
            estimated_after=float(estimate.after.max()),
            estimated_mean=float(before.mean()),
            planned_here=planned_here,
        )
        one.moved |= estimate.moves
        one.unmeasured += 1

    def measured(
        self,
        estimate: Estimate,
        number: int,
        seconds: FloatArray,
        sent_bytes: IntArray,
        calls: int,
        rank: int,
        *,
        again: bool = False,
    ) -> None:
        """What all ranks did by a plan of a micro-batch.

        Args:
            estimate: what the plan was to take.
            number: of the micro-batch.
            seconds: attention kernel seconds of each rank.
            sent_bytes: bytes each rank sent.
            calls: attention layers that ran.
            rank: this one.
            again: whether another plan of the micro-batch counts these layers.
        """
        one = self._running.get(number)
        if one is None:  # dropped
            return
        one.tally += Tally(
            measured_before=float(estimate.given_back(seconds).max()),
            measured_after=float(seconds.max()),
            measured_mean=float(seconds.mean()),
            promised=float(estimate.after.max()) * calls,
            busiest_bytes=float(sent_bytes.max()),
            layers=0 if again else calls,
            own_seconds=float(seconds[rank]),
        )
        if self.observer is not None:
            one.measurements.append(Measurement(estimate, seconds, sent_bytes))
        one.unmeasured -= 1
        self._count(number)

    def drop(self, number: int) -> None:
        """Count nothing of a micro-batch: what some rank did for it will not be known."""
        self._running.pop(number, None)

    def drop_all(self) -> None:
        """Count nothing of micro-batches that were not counted yet, and begin with their numbers anew."""
        self._running.clear()
        self._number = 0

    def end(self) -> None:
        """The micro-batch at hand is over."""
        one = self._running.get(self._number)
        if one is not None:
            one.ended = one.ended or time.perf_counter()
            self._count(self._number)

    def _count(self, number: int) -> None:
        one = self._running[number]
        if one.ended is not None and not one.unmeasured:
            tally = one.tally + Tally(elapsed_seconds=one.ended - one.began)
            self.total += tally
            del self._running[number]
            if self.observer is not None:
                self.observer(Counted(number, tally, tuple(one.measurements)))
