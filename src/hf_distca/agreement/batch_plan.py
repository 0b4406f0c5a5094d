"""`BatchPlan`: a plan of a micro-batch; `PlanUse`: its use; `PlanMeasurement`: the measurements.

Each is made once, when all of it is known. An `Observation` combines the measurements of a
micro-batch, per layer, as a sample from which rates are learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.agreement.announce import Figures, PlanKey
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

# Exchanges count as hidden if attention takes at most this much longer than the slowest kernels.
_HIDDEN_MARGIN = 0.05


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """A plan of a micro-batch, as the planner makes it.

    Attributes:
        key: key of the plan in the micro-batch.
        plan: the plan; the same on all ranks.
        planning_ms: milliseconds of planning, with the exchange of documents.
        per_node: ranks of a node that the plan assumes; None if nodes were not told apart.
        holds: for each rank whether it holds tokens; None if all do.
        source: name of the global batch, for a share; else "".
        local_plan_count: number of plans of its share that this process made instead of the loader
            since the previous plan.
        in_order: estimated imbalance if the documents of a share lay on ranks in their order; 0 for
            others.
    """

    key: PlanKey
    plan: Plan
    planning_ms: float
    per_node: int | None = None
    holds: tuple[bool, ...] | None = None
    source: str = ""
    local_plan_count: int = 0
    in_order: float = 0.0

    @property
    def on_several_nodes(self) -> bool:
        """True if nodes are told apart, and there are several."""
        return self.per_node is not None and self.per_node < self.plan.layout.world_size


@dataclass(frozen=True, eq=False)
class PlanUse:
    """Use of a plan by a micro-batch.

    Attributes:
        batch_plan: the plan.
        number: number of the micro-batch, from 1.
        task_seconds: (tasks,) estimated seconds, forward and backward, on a rank of speed 1.
        ranks: properties of the ranks, as estimated when the use began.
        meter: meter of this rank's work for it.
    """

    batch_plan: BatchPlan
    number: int
    task_seconds: FloatArray
    ranks: Ranks
    meter: Meter

    @classmethod
    def start(
        cls, batch_plan: BatchPlan, number: int, cost: CostModel, ranks: Ranks, meter: Meter
    ) -> PlanUse:
        """Begin the use of a plan, and estimate its tasks by a cost model."""
        plan = batch_plan.plan
        seconds = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
        return cls(batch_plan, number, seconds, ranks, meter)

    @property
    def own_figures(self) -> Figures:
        """Measurements of this rank.

        Kernel nanoseconds, sent bytes, nanoseconds of exchanges, number of calls, and bytes sent to
        other nodes. Kernel nanoseconds are -1 while kernels still run. Exchanges and calls are -1
        unless backward ran for every call, because rates are learned from whole layers.
        """
        meter = self.meter
        kernels = int(meter.seconds * 1e9) if meter.is_finished else -1
        exchanges = calls = -1
        if meter.calls > 0 and meter.kernel_calls == 2 * meter.backward_calls:
            exchanges = int(meter.exchange_seconds * 1e9)
            calls = meter.calls
        return kernels, meter.sent_bytes, exchanges, calls, meter.between_bytes

    @property
    def estimated_before(self) -> FloatArray:
        """Estimated seconds if every rank computed its own attention, (ranks,)."""
        return self.sum_by_rank(self.batch_plan.plan.home, self.task_seconds)

    @property
    def estimated_after(self) -> FloatArray:
        """Estimated seconds of every rank by the plan, (ranks,)."""
        return self.sum_by_rank(self.batch_plan.plan.server, self.task_seconds)

    def sum_by_rank(self, rank: IntArray, seconds: FloatArray) -> FloatArray:
        """Sum seconds of tasks by their ranks, at the speeds of the ranks: (ranks,)."""
        size = self.batch_plan.plan.layout.world_size
        total = np.bincount(rank, weights=seconds, minlength=size)
        return self.ranks.scale_by_speed(total.astype(np.float64))


@dataclass(frozen=True, eq=False)
class PlanMeasurement:
    """Measurements of all ranks for the use of a plan, after their last kernels.

    Attributes:
        use: the use.
        figures: (ranks, 5) int64, `PlanUse.own_figures` as announced by each rank.
    """

    use: PlanUse
    figures: IntArray

    @property
    def measured_before(self) -> FloatArray:
        """Measured seconds, attributed to the home ranks of tasks by their estimates, (ranks,)."""
        use = self.use
        plan = use.batch_plan.plan
        estimated = use.estimated_after
        rate = np.zeros_like(estimated)
        np.divide(self.measured_after, estimated, out=rate, where=estimated > 0)
        return use.sum_by_rank(plan.home, use.task_seconds * rate[plan.server])

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
        """Bytes sent to other nodes by each rank, (ranks,); 0 if nodes are not told apart."""
        return self.figures[:, 4] * self.use.batch_plan.on_several_nodes


@dataclass(frozen=True, eq=False)
class Observation:
    """Estimates and measurements of all ranks for a micro-batch, in seconds of one layer.

    Attributes:
        estimated: (ranks,) seconds in kernels by the uncorrected cost model.
        kernel: (ranks,) measured seconds in kernels.
        measured_exchange: (ranks,) measured seconds of packing, waiting and unpacking.
        estimated_exchange: (ranks,) seconds of exchanges by the uncorrected cost model; 0 on ranks
            that send and receive nothing.
        unmoved: (ranks,) seconds that kernels would have taken if nothing had been moved.
        unmoved_exchange: (ranks,) `estimated_exchange` if nothing had been moved.
        is_overlapped: True if exchanges are hidden behind the other nano-batch.
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
        """Relative slowdown against moving nothing; negative for a speed-up."""
        moved = self._compute_slowest(self.kernel, self.estimated_exchange)
        unmoved = self._compute_slowest(self.unmoved, self.unmoved_exchange)
        return moved / max(unmoved, 1e-12) - 1

    def compute_exchange_factor(self) -> float | None:
        """Compute the factor by which exchanges take longer than estimated.

        None if they were hidden behind other work, or if nothing was exchanged. No rank finishes
        its exchange before the data has arrived, and most ranks also wait for slower ranks. So the
        rank that waits least, relative to its exchange, shows how long exchanges take.
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


def observe_plans(plans: Sequence[PlanMeasurement], cost: CostModel) -> Observation | None:
    """Combine the measurements of one micro-batch for one kind of layer.

    Args:
        plans: the plan of the whole batch, or those of both nano-batches.
        cost: uncorrected cost model of the layer.

    Returns:
        None if some rank did not run whole layers, or if one of two nano-batches is missing.
    """
    is_nano = plans[0].use.batch_plan.key.nano > 0
    figures = np.stack([plan.figures for plan in plans])
    calls = figures[:, :, 3]
    layers = calls[0, 0]
    if len(plans) != 1 + is_nano or figures.min() < 0 or (calls != layers).any():
        return None
    seconds = figures.sum(axis=0) / (1e9 * layers)
    pairs = [(plan.use.batch_plan.plan, plan.use.ranks) for plan in plans]
    local = [(Plan.make_local(plan.layout, plan.window), ranks) for plan, ranks in pairs]
    return Observation(
        estimated=np.sum([_sum_seconds(plan, cost) for plan, _ in pairs], axis=0),
        kernel=seconds[:, 0],
        measured_exchange=seconds[:, 2],
        estimated_exchange=np.sum([_estimate_exchange(*pair, cost) for pair in pairs], axis=0),
        unmoved=np.sum([plan.measured_before / layers for plan in plans], axis=0),
        unmoved_exchange=np.sum([_estimate_exchange(*pair, cost) for pair in local], axis=0),
        is_overlapped=is_nano,
    )


def _sum_seconds(plan: Plan, cost: CostModel) -> FloatArray:
    """Sum the seconds of the tasks of each server, forward and backward: (ranks,)."""
    cost = replace(cost, window=plan.window)
    seconds = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
    size = plan.layout.world_size
    return np.bincount(plan.server, weights=seconds, minlength=size).astype(np.float64)


def _estimate_exchange(plan: Plan, ranks: Ranks, cost: CostModel) -> FloatArray:
    """Estimate the seconds of exchanges, (ranks,); 0 on ranks that send and receive nothing."""
    if not plan.moved:
        return np.zeros(plan.layout.world_size)
    load = PlanLoad(plan, cost, ranks=ranks)
    return np.where(load.wire_seconds.any(axis=0), load.exchange_seconds, 0.0)
