"""Estimates of plans and measurements of ranks, summed over micro-batches, and figures of both.

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks): ranks wait in
every micro-batch, so the slowest of each counts. A micro-batch is counted as a whole, once the
measurements of all ranks are known: ranks gather them for a log, or announce them with the
documents of a later micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # reports of runs read totals without torch
    from hf_distca.agreement.batch_plan import PlanMeasurement, PlanUse


@dataclass(frozen=True)
class BalanceTotals:
    """Sums over micro-batches, in which a micro-batch may have several plans.

    The difference of two totals is the total of the micro-batches between them.

    Attributes:
        micro_batches: number of micro-batches.
        moved: number of micro-batches in which work was moved.
        largest_tokens, mean_tokens: tokens of the rank with most of them, and of the mean rank.
        planning_ms: milliseconds of planning.
        estimated_before, estimated_after: estimated attention seconds of the slowest rank, if
            nothing is moved and by the plan.
        estimated_mean: estimated attention seconds of the mean rank.
        measured_before, measured_after, measured_mean: the same, measured; before the move,
            measured seconds are attributed to home ranks.
        busiest_bytes: bytes sent by the rank that sent most.
        layers: number of layers of attention.
        own_seconds: seconds of this rank in attention kernels.
        elapsed_seconds: seconds from the beginning of each micro-batch to that of the next.
        planned_here: number of plans of dealt shares that this process made again, because the
            loader's were for other rates or settings.
        served_seconds, server_seconds: measured seconds of all ranks without tokens together, and
            of their mean.
        all_seconds: measured seconds of all ranks together.
        between_bytes: bytes sent to other nodes by the rank that sent most there.
        node_layers: number of layers of ranks on several nodes.
        estimated_in_order, dealt_mean: of dealt documents, estimated seconds of the slowest rank if
            they lay on ranks in their order, and of the mean rank.
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
    planned_here: int = 0
    served_seconds: float = 0.0
    server_seconds: float = 0.0
    all_seconds: float = 0.0
    between_bytes: float = 0.0
    node_layers: int = 0
    estimated_in_order: float = 0.0
    dealt_mean: float = 0.0

    def __add__(self, other: BalanceTotals) -> BalanceTotals:
        return BalanceTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: BalanceTotals) -> BalanceTotals:
        return BalanceTotals(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def compute_figures(self) -> dict[str, float]:
        """Compute the figures to log; those without data are left out."""
        elapsed = max(self.elapsed_seconds, 1e-9)
        ratios = {
            "imbalance_tokens": (self.largest_tokens, self.mean_tokens),
            "imbalance_estimated_in_order": (self.estimated_in_order, self.dealt_mean),
            "imbalance_estimated_before": (self.estimated_before, self.estimated_mean),
            "imbalance_estimated_after": (self.estimated_after, self.estimated_mean),
            "imbalance_measured_before": (self.measured_before, self.measured_mean),
            "imbalance_measured_after": (self.measured_after, self.measured_mean),
            "exchanged_mb_per_layer": (self.busiest_bytes / 1e6, self.layers),
            "between_nodes_mb_per_layer": (self.between_bytes / 1e6, self.node_layers),
            "planning_ms": (self.planning_ms, self.micro_batches),
            "server_time_share": (self.own_seconds, elapsed * bool(self.micro_batches)),
            "servers_share": (self.served_seconds, self.all_seconds * bool(self.served_seconds)),
        }
        figures = {f"distca/{name}": part / of for name, (part, of) in ratios.items() if of > 0}
        counts = {"planned_here": self.planned_here, "micro_batches": self.micro_batches}
        figures |= {f"distca/{name}": count for name, count in counts.items() if count}
        if self.served_seconds:
            figures["distca/servers_idle"] = 1 - self.server_seconds / elapsed
        return figures


@dataclass(eq=False)
class PlannedMicroBatch:
    """A micro-batch until it is counted.

    Attributes:
        number: number of the micro-batch, from 1.
        step: optimizer step that it belongs to.
        start_time, end_time: seconds of `time.perf_counter`; None while it runs.
        uses: uses of plans by it.
        plans: those of them that all ranks have measured.
    """

    number: int
    step: int
    start_time: float
    end_time: float | None = None
    uses: list[PlanUse] = field(default_factory=list)
    measurements: list[PlanMeasurement] = field(default_factory=list)


def _compute_totals(plan: PlanMeasurement) -> BalanceTotals:
    """Compute the contribution of one plan to the totals of its micro-batch."""
    use = plan.use
    batch_plan = use.batch_plan
    tokens = batch_plan.plan.layout.query_tokens
    before = use.estimated_before
    measured = plan.measured_after
    tokenless = ~np.array(batch_plan.holds or [True] * len(measured))
    served = float(measured[tokenless].sum())
    # Both nano-batches go through each layer: the first one counts it.
    layers = 0 if batch_plan.key.nano == 2 else use.meter.calls
    return BalanceTotals(
        largest_tokens=float(tokens.max()),
        mean_tokens=float(tokens[~tokenless].mean()),
        planning_ms=batch_plan.planning_ms,
        estimated_before=float(before.max()),
        estimated_after=float(use.estimated_after.max()),
        estimated_mean=float(before.mean()),
        measured_before=float(plan.measured_before.max()),
        measured_after=float(measured.max()),
        measured_mean=float(measured.mean()),
        busiest_bytes=float(plan.sent_bytes.max()),
        layers=layers,
        own_seconds=use.meter.seconds,
        planned_here=batch_plan.local_plan_count,
        served_seconds=served,
        server_seconds=served / max(int(tokenless.sum()), 1),
        all_seconds=float(measured.sum()),
        between_bytes=float(plan.between_bytes.max()),
        node_layers=layers * batch_plan.on_several_nodes,
        estimated_in_order=batch_plan.in_order * float(before.mean()),
        dealt_mean=float(before.mean()) * (batch_plan.in_order > 0),
    )


# Micro-batches that wait for measurements of all ranks; older ones are never counted.
_MAX_RUNNING = 1024


@dataclass(eq=False)
class History:
    """Sums of micro-batches.

    Each is counted when it is over and all its plans are measured, so that sums cover whole ones.

    Attributes:
        total: sum since the start. It only grows: a report subtracts the total that it reported
            last.
        observer: called with each micro-batch when it is counted, and with its totals.
        step: optimizer step of micro-batches from now on.
    """

    total: BalanceTotals = field(default_factory=BalanceTotals)
    observer: Callable[[PlannedMicroBatch, BalanceTotals], None] | None = None
    step: int = 0
    _running: dict[int, PlannedMicroBatch] = field(default_factory=dict)

    def record_use(self, use: PlanUse) -> None:
        """Record the use of a plan by a micro-batch.

        A micro-batch uses several if kinds of layers or nano-batches have plans of their own.
        """
        number = use.number
        if number not in self._running:
            self.end_micro_batch()
            self._running[number] = PlannedMicroBatch(number, self.step, time.perf_counter())
            if len(self._running) > _MAX_RUNNING:
                del self._running[next(iter(self._running))]
        self._running[number].uses.append(use)

    def record_measurement(self, measurement: PlanMeasurement) -> None:
        """Record what all ranks measured of a plan. A micro-batch with all of them is counted."""
        micro_batch = self._running.get(measurement.use.number)
        if micro_batch is not None:
            micro_batch.measurements.append(measurement)
            self._count_if_measured(micro_batch)

    @property
    def unmeasured_uses(self) -> list[PlanUse]:
        """Uses without measurements of all ranks, in their order."""
        return [
            use
            for micro_batch in self._running.values()
            for use in micro_batch.uses
            if all(plan.use is not use for plan in micro_batch.measurements)
        ]

    def reset(self) -> None:
        """Drop micro-batches that are not counted yet, as numbers start again."""
        self._running.clear()

    def end_micro_batch(self) -> None:
        """End the current micro-batch."""
        micro_batch = next(reversed(self._running.values()), None)
        if micro_batch is not None:
            micro_batch.end_time = micro_batch.end_time or time.perf_counter()
            self._count_if_measured(micro_batch)

    def _count_if_measured(self, micro_batch: PlannedMicroBatch) -> None:
        """Add a micro-batch to the total if it is over and all its plans are measured."""
        plans = micro_batch.measurements
        if micro_batch.end_time is None or len(plans) < len(micro_batch.uses):
            return
        plans_made = [plan.use.batch_plan.plan for plan in plans]
        moved = any((plan.home != plan.server).any() for plan in plans_made)
        totals = BalanceTotals(
            micro_batches=1,
            moved=int(moved),
            elapsed_seconds=micro_batch.end_time - micro_batch.start_time,
        )
        totals = sum(map(_compute_totals, plans), totals)
        self.total += totals
        del self._running[micro_batch.number]
        if self.observer is not None:
            self.observer(micro_batch, totals)
