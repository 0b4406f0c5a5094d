"""Estimates of plans and measurements of ranks, per micro-batch, and figures made of both.

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks): the ranks wait
in every micro-batch, so the slowest of each counts. A micro-batch is counted, all of it at once,
when the measurements of all ranks are known: when they gather them, as for a log, or else when they
announce them with documents of a later micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reports of runs read tallies without torch
    from hf_distca.agreement.batch_plan import BatchPlan

__all__ = ["History", "PlannedMicroBatch", "BalanceTotals"]


@dataclass(frozen=True)
class BalanceTotals:
    """Sums over micro-batches.

    Seconds are attention seconds of one rank: the slowest, or the mean of all.

    The difference of two tallies of a session is the tally of the micro-batches between them.
    `largest_tokens` and `mean_tokens` are of the ranks, for each plan, of which a micro-batch may
    have several. `moved` counts micro-batches in which work was moved, `planned_here` plans of
    shares of dealt batches that this process made since those of the loader were for other rates or
    settings. `busiest_bytes` are bytes sent by the rank that sent most, `layers` counts layers of
    attention; `between_bytes` are bytes sent to other nodes by the rank that sent most there, in
    `node_layers` layers, those of ranks on several nodes; `own_seconds` is this rank's time in
    attention kernels, `elapsed_seconds` the time from the beginning of each micro-batch to that of
    the next. `served_seconds` are measured
    seconds of all servers of a pool together, `server_seconds` those of their mean, and
    `all_seconds` those of all ranks together.
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

    def __add__(self, other: BalanceTotals) -> BalanceTotals:
        return BalanceTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: BalanceTotals) -> BalanceTotals:
        return BalanceTotals(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def compute_figures(self) -> dict[str, float]:
        """Return the figures to log; those without data are left out."""
        figures: dict[str, float] = {}
        if self.mean_tokens > 0:
            figures["distca/imbalance_tokens"] = self.largest_tokens / self.mean_tokens
        for kind, mean in (("estimated", self.estimated_mean), ("measured", self.measured_mean)):
            for side in ("before", "after") if mean > 0 else ():
                figures[f"distca/imbalance_{kind}_{side}"] = getattr(self, f"{kind}_{side}") / mean
        if self.layers:
            figures["distca/exchanged_mb_per_layer"] = self.busiest_bytes / self.layers / 1e6
        if self.node_layers:
            figures["distca/between_nodes_mb_per_layer"] = (
                self.between_bytes / self.node_layers / 1e6
            )
        if self.planned_here:
            figures["distca/planned_here"] = self.planned_here
        if self.micro_batches:
            figures["distca/planning_ms"] = self.planning_ms / self.micro_batches
            figures["distca/server_time_share"] = self.own_seconds / max(self.elapsed_seconds, 1e-9)
            figures["distca/micro_batches"] = self.micro_batches
        if self.served_seconds:
            figures["distca/servers_share"] = self.served_seconds / self.all_seconds
            figures["distca/servers_idle"] = 1 - self.server_seconds / max(
                self.elapsed_seconds, 1e-9
            )
        return figures


@dataclass(eq=False)
class PlannedMicroBatch:
    """A micro-batch until it is counted: its number, the optimizer
    step, its begin and end, and its plans.
    """

    number: int
    step: int
    start_time: float
    end_time: float | None = None
    plans: list[BatchPlan] = field(default_factory=list)


def _compute_totals(plan: BatchPlan) -> BalanceTotals:
    """Compute the contribution of one plan of a micro-batch to its tally."""
    tokens, before, after = (
        plan.plan.layout.query_tokens,
        plan.estimated_before,
        plan.estimated_after,
    )
    measured, servers, several = plan.measured_after, plan.servers, plan.on_several_nodes
    layers = (
        0 if plan.key.nano == 2 else plan.meter.calls
    )  # both nano-batches go through each layer: one of them counts it
    return BalanceTotals(
        largest_tokens=float(tokens.max()),
        mean_tokens=float(tokens[~servers].mean()),
        planning_ms=plan.planning_ms,
        estimated_before=float(before.max()),
        estimated_after=float(after.max()),
        estimated_mean=float(before.mean()),
        measured_before=float(plan.measured_before.max()),
        measured_after=float(measured.max()),
        measured_mean=float(measured.mean()),
        busiest_bytes=float(plan.sent_bytes.max()),
        layers=layers,
        own_seconds=plan.meter.seconds,
        planned_here=plan.local_plan_count,
        served_seconds=float(measured[servers].sum()),
        server_seconds=float(measured[servers].sum() / max(servers.sum(), 1)),
        all_seconds=float(measured.sum()),
        between_bytes=float(plan.between_bytes.max()) * several,
        node_layers=layers * several,
    )


_MAX_RUNNING = 1024  # micro-batches that are not measured everywhere, where nobody gathers; of older ones nothing is counted


@dataclass(eq=False)
class History:
    """Sums up micro-batches.

    Each is counted when it is over and all its plans are measured, so that sums cover whole ones.

    Attributes:
        total: sum since the start. It only grows; a report keeps the total that it reported last
            and takes the difference.
        observer: called with each micro-batch when it is counted, and its tally.
        step: optimizer step of micro-batches from now on.
    """

    total: BalanceTotals = field(default_factory=BalanceTotals)
    observer: Callable[[PlannedMicroBatch, BalanceTotals], None] | None = None
    step: int = 0
    _running: dict[int, PlannedMicroBatch] = field(default_factory=dict)

    def record_plan(self, plan: BatchPlan) -> None:
        """Record the use of a plan by a micro-batch.

        Several are used if kinds of layers or nano-batches have their own.
        """
        if plan.number not in self._running:
            self.end_micro_batch()
            self._running[plan.number] = PlannedMicroBatch(
                plan.number, self.step, time.perf_counter()
            )
            if len(self._running) > _MAX_RUNNING:
                del self._running[next(iter(self._running))]
        self._running[plan.number].plans.append(plan)

    @property
    def unmeasured_plans(self) -> list[BatchPlan]:
        """Plans without measurements of all ranks, in the order of their use."""
        return [
            plan
            for micro_batch in self._running.values()
            for plan in micro_batch.plans
            if not plan.is_measured
        ]

    def reset(self) -> None:
        """Drop micro-batches that were not counted yet: numbering restarts."""
        self._running.clear()

    def end_micro_batch(self) -> None:
        """End the current micro-batch."""
        if (micro_batch := next(reversed(self._running.values()), None)) is not None:
            micro_batch.end_time = micro_batch.end_time or time.perf_counter()
            self.count_if_measured(micro_batch.number)

    def count_if_measured(self, number: int) -> None:
        """Add a micro-batch to the total if it is over and all its plans are measured."""
        micro_batch = self._running.get(number)
        if (
            micro_batch is None
            or micro_batch.end_time is None
            or not all(plan.is_measured for plan in micro_batch.plans)
        ):
            return
        moves = any((plan.plan.home != plan.plan.server).any() for plan in micro_batch.plans)
        elapsed = micro_batch.end_time - micro_batch.start_time
        tally = sum(
            map(_compute_totals, micro_batch.plans),
            BalanceTotals(micro_batches=1, moved=int(moves), elapsed_seconds=elapsed),
        )
        self.total += tally
        del self._running[number]
        if self.observer is not None:
            self.observer(micro_batch, tally)
