"""Measured plans of micro-batches (`MicroBatchPlan`), and sums over micro-batches (`History`).

The imbalance of several micro-batches is sum(max over ranks) / sum(mean over ranks), because ranks
wait for the slowest rank in every micro-batch. A micro-batch is counted as a whole, once the
measurements of all ranks are known. Ranks gather their measurements for a log, or announce them
with the documents of a later micro-batch. A `RateSample` holds measured and estimated seconds per
layer of a micro-batch. The rates of cost models are learned from such samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

if TYPE_CHECKING:  # the report tool imports this file, but must not import torch
    from hf_distca.agreement.announce import PlanKey
    from hf_distca.runtime.meter import Meter

# Exchanges count as hidden if attention takes at most this fraction longer than the kernels of the
# slowest rank.
_HIDDEN_MARGIN = 0.05


class Measurement(NamedTuple):
    """One rank's measurement of a plan.

    `exchange_ns` and `calls` are -1 unless backward ran for every call, because rates are learned
    from forward and backward together.

    Attributes:
        kernel_ns: nanoseconds in kernels; -1 while kernels still run.
        sent_bytes: bytes sent to other ranks.
        exchange_ns: nanoseconds of packing, waiting and unpacking.
        calls: number of calls of core attention.
        between_bytes: bytes sent to other nodes.
    """

    kernel_ns: int
    sent_bytes: int
    exchange_ns: int
    calls: int
    between_bytes: int


_NO_FIGURES: IntArray = np.empty((0, len(Measurement._fields)), dtype=np.int64)


@dataclass(eq=False)
class MicroBatchPlan:
    """A plan that a micro-batch uses, with its estimates and measurements.

    Attributes:
        key: key of the plan in the micro-batch.
        plan: the plan; the same on all ranks.
        number: number of the micro-batch, from 1.
        task_seconds: (tasks,) estimated seconds, forward and backward, on a rank of speed 1.
        ranks: speeds and nodes of the ranks, as known when the plan was made.
        meter: meter of this rank's work for the plan.
        planning_ms: milliseconds of planning, including the exchange of documents.
        has_tokens: for each rank, whether it holds tokens; None if all ranks do.
        source: name of the global batch if it was dealt, else "".
        is_planned_again: True if this process made the plan of a share again, because the loader
            had made it for other settings or rates.
        in_order_imbalance: for a dealt batch, estimated imbalance if its documents filled one rank
            after another in their order; 0 for other batches.
        figures: (ranks, 5) int64, the final `Measurement` of each rank; empty until the
            measurements of all ranks are known.
    """

    key: PlanKey
    plan: Plan
    number: int
    task_seconds: FloatArray
    ranks: Ranks
    meter: Meter
    planning_ms: float = 0.0
    has_tokens: tuple[bool, ...] | None = None
    source: str = ""
    is_planned_again: bool = False
    in_order_imbalance: float = 0.0
    figures: IntArray = field(default_factory=lambda: _NO_FIGURES)

    @property
    def on_several_nodes(self) -> bool:
        """True if the ranks are known to be on several nodes."""
        per_node = self.ranks.per_node
        return per_node is not None and per_node < self.plan.layout.world_size

    @property
    def own_measurement(self) -> Measurement:
        """Measurement of this rank so far."""
        meter = self.meter
        kernels = int(meter.seconds * 1e9) if meter.is_finished else -1
        exchanges = calls = -1
        if meter.calls > 0 and meter.kernel_calls == 2 * meter.backward_calls:
            exchanges = int(meter.exchange_seconds * 1e9)
            calls = meter.calls
        return Measurement(kernels, meter.sent_bytes, exchanges, calls, meter.between_bytes)

    @property
    def estimated_before(self) -> FloatArray:
        """Estimated seconds if every rank computed its own attention, (ranks,)."""
        return self._sum_by_rank(self.plan.home, self.task_seconds)

    @property
    def estimated_after(self) -> FloatArray:
        """Estimated seconds of every rank with the plan, (ranks,)."""
        return self._sum_by_rank(self.plan.server, self.task_seconds)

    @property
    def is_measured(self) -> bool:
        """True once `figures` are known, from which the properties below are computed."""
        return len(self.figures) > 0

    @property
    def measured_before(self) -> FloatArray:
        """Measured seconds, (ranks,), with each task counted on its home rank, not on its server.

        The seconds of a server are divided among its tasks in proportion to their estimates.
        """
        estimated = self.estimated_after
        rate = np.zeros_like(estimated)
        np.divide(self.measured_after, estimated, out=rate, where=estimated > 0)
        return self._sum_by_rank(self.plan.home, self.task_seconds * rate[self.plan.server])

    @property
    def measured_after(self) -> FloatArray:
        """Measured seconds in attention kernels, (ranks,)."""
        return self.figures[:, 0] / 1e9

    @property
    def sent_bytes(self) -> IntArray:
        """Bytes sent by each rank, (ranks,)."""
        return self.figures[:, 1]

    @property
    def between_bytes(self) -> IntArray:
        """Bytes sent to other nodes by each rank, (ranks,); 0 unless several nodes are known."""
        return self.figures[:, 4] * self.on_several_nodes

    def _sum_by_rank(self, rank: IntArray, seconds: FloatArray) -> FloatArray:
        """Sum the seconds of each rank's tasks, and divide by the speed of the rank: (ranks,)."""
        size = self.plan.layout.world_size
        total = np.bincount(rank, weights=seconds, minlength=size)
        return self.ranks.scale_by_speed(total.astype(np.float64))


@dataclass(frozen=True, eq=False)
class RateSample:
    """Estimates and measurements of all ranks for a micro-batch, in seconds per layer.

    Attributes:
        estimated: (ranks,) seconds in kernels according to the uncorrected cost model.
        kernel: (ranks,) measured seconds in kernels.
        measured_exchange: (ranks,) measured seconds of packing, waiting and unpacking.
        estimated_exchange: (ranks,) seconds of exchanges according to the uncorrected cost model; 0
            on ranks that send and receive nothing.
        unmoved: (ranks,) seconds that kernels would have taken if no work had been moved.
        unmoved_exchange: (ranks,) `estimated_exchange` of a plan that moves no work.
        is_overlapped: True if layers ran as two nano-batches, of which one can compute while the
            other exchanges.
    """

    estimated: FloatArray
    kernel: FloatArray
    measured_exchange: FloatArray
    estimated_exchange: FloatArray
    unmoved: FloatArray
    unmoved_exchange: FloatArray
    is_overlapped: bool = False

    @property
    def has_exchange(self) -> bool:
        """True if anything was exchanged."""
        return bool(self.estimated_exchange.any())

    @property
    def slowdown(self) -> float:
        """Relative slowdown compared with a plan that moves no work; negative for a speed-up."""
        moved = self._compute_slowest(self.kernel, self.estimated_exchange)
        unmoved = self._compute_slowest(self.unmoved, self.unmoved_exchange)
        return moved / max(unmoved, 1e-12) - 1

    def compute_exchange_factor(self) -> float | None:
        """Compute the factor by which exchanges take longer than estimated.

        No rank finishes its exchange before the data has arrived, and most ranks also wait for
        slower ranks. So the rank with the shortest measured time, relative to its estimate, shows
        how long exchanges take.

        Return None if exchanges were hidden behind other work, or if nothing was exchanged.
        """
        if not self.has_exchange:
            return None
        exchanges = self.estimated_exchange > 0
        estimated = self.estimated_exchange[exchanges]
        measured = self.measured_exchange + self.kernel * self.is_overlapped
        factor = float((measured[exchanges] / estimated).min())
        slowest = float(self.kernel.max()) * (1 + _HIDDEN_MARGIN)
        is_hidden = self.is_overlapped and factor * float(estimated.max()) <= slowest
        return None if is_hidden else factor

    def _compute_slowest(self, kernel: FloatArray, exchange: FloatArray) -> float:
        """Compute the seconds of the slowest rank, from its kernels and its estimated exchange."""
        exchange = exchange * (self.compute_exchange_factor() or 0.0)
        seconds = np.maximum(kernel, exchange) if self.is_overlapped else kernel + exchange
        return float(seconds.max())


def observe_plans(plans: Sequence[MicroBatchPlan], cost: CostModel) -> RateSample | None:
    """Combine one micro-batch's measurements of one kind of layer into a sample.

    Args:
        plans: the plan of the whole batch, or the plans of both nano-batches.
        cost: uncorrected cost model of the layer.

    Returns:
        The sample; None if ranks ran different numbers of layers, if some rank ran no backward
            for a layer, or if one of two nano-batches is missing.
    """
    is_nano = plans[0].key.nano > 0
    figures = np.stack([plan.figures for plan in plans])
    calls = figures[:, :, 3]
    layers = calls[0, 0]
    if len(plans) != 1 + is_nano or figures.min() < 0 or (calls != layers).any():
        return None
    seconds = figures.sum(axis=0) / (1e9 * layers)
    pairs = [(plan.plan, plan.ranks) for plan in plans]
    local = [(Plan.make_local(plan.layout, plan.window), ranks) for plan, ranks in pairs]
    return RateSample(
        estimated=np.sum([PlanLoad(plan, cost).compute_seconds for plan, _ in pairs], axis=0),
        kernel=seconds[:, 0],
        measured_exchange=seconds[:, 2],
        estimated_exchange=np.sum([_estimate_exchange(*pair, cost) for pair in pairs], axis=0),
        unmoved=np.sum([plan.measured_before / layers for plan in plans], axis=0),
        unmoved_exchange=np.sum([_estimate_exchange(*pair, cost) for pair in local], axis=0),
        is_overlapped=is_nano,
    )


def _estimate_exchange(plan: Plan, ranks: Ranks, cost: CostModel) -> FloatArray:
    """Estimate each rank's seconds of exchanges, (ranks,); 0 for ranks that exchange nothing."""
    if not plan.moved:
        return np.zeros(plan.layout.world_size)
    load = PlanLoad(plan, cost, ranks=ranks)
    return np.where(load.wire_seconds.any(axis=0), load.exchange_seconds, 0.0)


@dataclass(frozen=True)
class BalanceTotals:
    """Sums over micro-batches, each of which may have several plans.

    The difference of two totals is the total of the micro-batches between them.

    Attributes:
        micro_batches: number of micro-batches.
        moved: number of micro-batches in which work was moved.
        largest_tokens, mean_tokens: tokens of the rank with the most tokens, and mean over the
            ranks that hold tokens.
        planning_ms: milliseconds of planning.
        estimated_before: estimated attention seconds of the slowest rank, if every rank computed
            its own attention.
        estimated_after: estimated attention seconds of the slowest rank, with the plans.
        estimated_mean: mean of the estimated attention seconds of the ranks.
        measured_before, measured_after, measured_mean: the same three figures from measurements.
            For `measured_before` see `MicroBatchPlan`.
        busiest_bytes: bytes sent by the rank that sent the most.
        layers: number of layers of attention.
        own_seconds: seconds of this rank in attention kernels.
        elapsed_seconds: seconds from the beginning of each micro-batch until the next one begins or
            measurements are gathered.
        planned_here: number of plans for which `MicroBatchPlan.is_planned_again` is true.
        served_seconds, server_seconds: sum and mean of the measured seconds of the ranks without
            tokens.
        all_seconds: measured seconds of all ranks together.
        between_bytes: most bytes that any rank sent to other nodes.
        node_layers: number of layers if ranks are on several nodes, else 0.
        estimated_in_order: for dealt batches, estimated seconds of the slowest rank if documents
            filled one rank after another in their order.
        dealt_mean: for dealt batches, mean of the estimated seconds of the ranks.
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
        return BalanceTotals(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: BalanceTotals) -> BalanceTotals:
        return BalanceTotals(*map(sub, astuple(self), astuple(other)))

    def compute_figures(self) -> dict[str, float]:
        """Compute the figures to log. Figures without data are left out."""
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
class RunningMicroBatch:
    """A micro-batch that has not been counted yet.

    Attributes:
        number: number of the micro-batch, from 1.
        step: optimizer step of the micro-batch.
        start_time, end_time: values of `time.perf_counter`; `end_time` is None until the
            micro-batch ends.
        plans: plans of the micro-batch, one for each kind of layer and nano-batch.
    """

    number: int
    step: int
    start_time: float
    end_time: float | None = None
    plans: list[MicroBatchPlan] = field(default_factory=list)

    def compute_totals(self) -> BalanceTotals:
        """Compute the totals of the micro-batch, once it is over and all its plans are measured."""
        totals = BalanceTotals(
            micro_batches=1,
            moved=int(any((plan.plan.home != plan.plan.server).any() for plan in self.plans)),
            elapsed_seconds=(self.end_time or self.start_time) - self.start_time,
        )
        return sum(map(_compute_totals, self.plans), totals)


def _compute_totals(plan: MicroBatchPlan) -> BalanceTotals:
    """Compute the contribution of one plan to the totals of its micro-batch."""
    tokens = plan.plan.layout.query_tokens
    before = plan.estimated_before
    measured = plan.measured_after
    tokenless = ~np.array(plan.has_tokens or [True] * len(measured))
    served = float(measured[tokenless].sum())
    # Both nano-batches run each layer, so count the layers of the first one only.
    layers = 0 if plan.key.nano == 2 else plan.meter.calls
    return BalanceTotals(
        largest_tokens=float(tokens.max()),
        mean_tokens=float(tokens[~tokenless].mean()),
        planning_ms=plan.planning_ms,
        estimated_before=float(before.max()),
        estimated_after=float(plan.estimated_after.max()),
        estimated_mean=float(before.mean()),
        measured_before=float(plan.measured_before.max()),
        measured_after=float(measured.max()),
        measured_mean=float(measured.mean()),
        busiest_bytes=float(plan.sent_bytes.max()),
        layers=layers,
        own_seconds=plan.meter.seconds,
        planned_here=int(plan.is_planned_again),
        served_seconds=served,
        server_seconds=served / max(int(tokenless.sum()), 1),
        all_seconds=float(measured.sum()),
        between_bytes=float(plan.between_bytes.max()),
        node_layers=layers * plan.on_several_nodes,
        estimated_in_order=plan.in_order_imbalance * float(before.mean()),
        dealt_mean=float(before.mean()) * (plan.in_order_imbalance > 0),
    )


# At most this many micro-batches wait for the measurements of all ranks. Older micro-batches are
# dropped, and never counted.
_MAX_RUNNING = 1024


@dataclass(eq=False)
class History:
    """Sums over the micro-batches of a run.

    A micro-batch is counted when it is over and all its plans are measured, so sums cover only
    whole micro-batches.

    Attributes:
        total: sum since the start. It only grows, so a report subtracts the total at the previous
            report.
        observer: function that is called with each counted micro-batch and its totals.
        step: optimizer step of the micro-batches that begin from now on.
    """

    total: BalanceTotals = field(default_factory=BalanceTotals)
    observer: Callable[[RunningMicroBatch, BalanceTotals], None] | None = None
    step: int = 0
    _running: dict[int, RunningMicroBatch] = field(default_factory=dict)

    def record_plan(self, plan: MicroBatchPlan) -> None:
        """Record a plan that a micro-batch begins to use."""
        if plan.number not in self._running:
            self.end_micro_batch()
            started = RunningMicroBatch(plan.number, self.step, time.perf_counter())
            self._running[plan.number] = started
            if len(self._running) > _MAX_RUNNING:
                del self._running[next(iter(self._running))]
        self._running[plan.number].plans.append(plan)

    def record_figures(self, plan: MicroBatchPlan, figures: IntArray) -> None:
        """Record the measurements of a plan, and count its micro-batch if it is complete.

        Args:
            plan: the plan.
            figures: (ranks, 5) int64, the `Measurement` of each rank.
        """
        plan.figures = figures
        self._count_if_measured(plan.number)

    @property
    def unmeasured_plans(self) -> list[MicroBatchPlan]:
        """Plans without the measurements of all ranks, oldest first."""
        batches = self._running.values()
        return [plan for batch in batches for plan in batch.plans if not plan.is_measured]

    def reset(self) -> None:
        """Drop micro-batches that are not counted yet, so that new ones can be numbered from 1."""
        self._running.clear()

    def end_micro_batch(self) -> None:
        """End the current micro-batch."""
        number = next(reversed(self._running), 0)
        if number:
            ended = self._running[number]
            ended.end_time = ended.end_time or time.perf_counter()
            self._count_if_measured(number)

    def _count_if_measured(self, number: int) -> None:
        """Add a micro-batch to the total if it has ended and all its plans are measured."""
        batch = self._running.get(number)
        if batch is None or batch.end_time is None or not all(p.is_measured for p in batch.plans):
            return
        totals = batch.compute_totals()
        self.total += totals
        del self._running[number]
        if self.observer is not None:
            self.observer(batch, totals)
