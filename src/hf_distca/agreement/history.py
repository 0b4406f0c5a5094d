"""What planning promised and what ranks measured, per micro-batch, and the figures made of both.

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks): the ranks wait in every micro-batch, so
the slowest of each counts. Ranks announce their measured seconds with their next documents: a micro-batch is counted, all of it
at once, when its measurement is in. That is one micro-batch later, and on a GPU, where the host runs ahead of the kernels, two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reports of runs read tallies without torch
    from hf_distca.agreement.planned import Planned

__all__ = ["History", "Tally"]


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
        for kind, mean in (("estimated", self.estimated_mean), ("measured", self.measured_mean)):
            for side in ("before", "after") if mean > 0 else ():
                figures[f"distca/imbalance_{kind}_{side}"] = getattr(self, f"{kind}_{side}") / mean
        if self.layers:
            figures["distca/exchanged_mb_per_layer"] = self.busiest_bytes / self.layers / 1e6
        if self.planned_here:
            figures["distca/planned_here"] = self.planned_here
        if self.micro_batches:
            figures["distca/planning_ms"] = self.planning_ms / self.micro_batches
            figures["distca/server_time_share"] = self.own_seconds / max(self.elapsed_seconds, 1e-9)
            figures["distca/micro_batches"] = self.micro_batches
        return figures


@dataclass(eq=False)
class _MicroBatch:
    """A micro-batch that is not counted yet."""

    began: float
    ended: float | None = None
    plans: list[Planned] = field(default_factory=list)


def _tally_of(plan: Planned) -> Tally:
    """What one of the plans of a micro-batch adds to its tally."""
    tokens, before, after = plan.plan.layout.query_tokens, plan.estimated_before, plan.estimated_after
    measured, calls = plan.measured_after, plan.meter.calls
    return Tally(
        largest_tokens=float(tokens.max()),
        mean_tokens=float(tokens.mean()),
        planning_ms=plan.planning_ms,
        estimated_before=float(before.max()),
        estimated_after=float(after.max()),
        estimated_mean=float(before.mean()),
        measured_before=float(plan.measured_before.max()),
        measured_after=float(measured.max()),
        measured_mean=float(measured.mean()),
        busiest_bytes=float(plan.sent_bytes.max()),
        layers=0 if plan.key.nano == 2 else calls,  # both nano-batches go through each layer: one of them counts it
        own_seconds=plan.meter.seconds,
        promised=float(after.max()) * calls,
        planned_here=plan.planned_here,
    )


# Gets the number of a micro-batch, what it added to the total, and its plans.
Observer = Callable[[int, Tally, Sequence["Planned"]], None]


@dataclass(eq=False)
class History:
    """Adds up micro-batches. One counts when it is over and all its plans are measured, so that a sum is about whole ones.

    Attributes:
        total: since the start. It only grows; whoever reports keeps the one it reported last and takes the difference.
        observer: is told of each micro-batch when it is counted.
    """

    total: Tally = field(default_factory=Tally)
    observer: Observer | None = None
    _number: int = 0  # of the micro-batch at hand
    _running: dict[int, _MicroBatch] = field(default_factory=dict)

    def planned(self, plan: Planned) -> None:
        """A plan of a micro-batch is used: one of several, where kinds of layers or nano-batches have their own."""
        if plan.number != self._number:
            self.end()
            self._number = plan.number
            self._running[plan.number] = _MicroBatch(time.perf_counter())
        if plan.number in self._running:
            self._running[plan.number].plans.append(plan)

    def drop(self, number: int) -> None:
        """Count nothing of a micro-batch: what some rank did for it will not be known."""
        self._running.pop(number, None)

    def begin_anew(self) -> None:
        """Count nothing of micro-batches that were not counted yet, and begin with their numbers anew."""
        self._running.clear()
        self._number = 0

    def end(self) -> None:
        """The micro-batch at hand is over."""
        micro_batch = self._running.get(self._number)
        if micro_batch is not None:
            micro_batch.ended = micro_batch.ended or time.perf_counter()
            self.count(self._number)

    def count(self, number: int) -> None:
        """Add a micro-batch to the total if it is over and all its plans are measured."""
        micro_batch = self._running.get(number)
        if micro_batch is None or micro_batch.ended is None or not all(plan.is_measured for plan in micro_batch.plans):
            return
        moves, elapsed = any(plan.moves for plan in micro_batch.plans), micro_batch.ended - micro_batch.began
        tally = sum(map(_tally_of, micro_batch.plans), Tally(micro_batches=1, moved=int(moves), elapsed_seconds=elapsed))
        self.total += tally
        del self._running[number]
        if self.observer is not None:
            self.observer(number, tally, micro_batch.plans)
