"""`Planned`: a plan of a micro-batch, from its making to the measurements of all ranks.

An `Observation` combines the plans of a micro-batch, per layer, as a sample from which rates are
learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_distca.agreement.announce import FIGURES, Figures, PlanKey
from hf_distca.config import DistCAConfig
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.layout import BoolArray, IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.waves import Waves

__all__ = ["Observation", "Planned", "observed"]

_HIDDEN = 0.05  # exchanges are hidden where attention takes at most this much longer than the kernels of the slowest rank


@dataclass(eq=False)
class Planned:
    """A plan of a micro-batch, from its making to the measurements of all ranks.

    Attributes:
        key: key of the plan in the micro-batch.
        plan: the plan; the same on all ranks.
        config: the settings that it was made under.
        rows: the documents that this rank announced for it, see `Documents.rows`.
        planning_ms: milliseconds of planning, exchange of documents included.
        source: name of the global batch, for a share.
        per_node: ranks of a node that the plan assumes; None if nodes were not told apart.
        holds: for each rank, whether it holds tokens, if a pool of servers takes part; else None.
        planned_here: plans of its share that this process made since the last one, instead of the
            loader.
        serial: number by which servers of a pool identify it.
        number: number of the micro-batch that uses it; 0 before its use.
        seconds: (tasks,) estimated seconds, forward and backward, on a rank of speed 1; empty
            before its use.
        ranks: estimated properties of the ranks at its use.
        meter: counts the work of this rank for it.
        figures: (ranks, 5) int64, `own_figures` as announced by each rank; -1 until they are known.
    """

    key: PlanKey
    plan: Plan
    config: DistCAConfig
    rows: IntArray
    planning_ms: float
    source: str = ""
    per_node: int | None = None
    holds: tuple[bool, ...] | None = None
    planned_here: int = 0
    serial: int = 0
    number: int = 0
    seconds: FloatArray = field(default_factory=lambda: np.zeros(0))
    ranks: Ranks = UNIFORM_RANKS
    meter: Meter = field(default_factory=Meter)
    figures: IntArray = field(default_factory=lambda: np.full((1, FIGURES), -1))

    def begin(self, number: int, cost: CostModel, ranks: Ranks, meter: Meter) -> None:
        """Begin the use of the plan by a micro-batch; the cost model now estimates its tasks."""
        self.number, self.ranks, self.meter = number, ranks, meter
        self.seconds = cost.estimate_seconds(self.plan.end - self.plan.start, self.plan.end, self.plan.heads)

    @property
    def own_figures(self) -> Figures:
        """Kernel nanoseconds, -1 while kernels still run; sent bytes; nanoseconds
        of exchanging; number of calls; bytes sent to other nodes.

        Exchanging and calls are -1 where backward did not run for every call: rates are those of whole layers.
        """
        meter = self.meter
        whole = meter.calls > 0 and meter.kernel_calls == 2 * meter.backward_calls
        rest = (int(meter.exchange_seconds * 1e9), meter.calls) if whole else (-1, -1)
        kernels = int(meter.seconds * 1e9) if meter.is_finished else -1
        return kernels, meter.sent_bytes, *rest, meter.between_bytes

    @property
    def is_measured(self) -> bool:
        """True if all ranks announced their measurements, after the last kernel."""
        return bool(self.figures[:, 0].min() >= 0)

    @property
    def estimated_before(self) -> FloatArray:
        """Estimated seconds if every rank computed its own attention, (ranks,)."""
        return self._by_rank(self.plan.home, self.seconds)

    @property
    def estimated_after(self) -> FloatArray:
        """Estimated seconds of every server, (ranks,)."""
        return self._by_rank(self.plan.server, self.seconds)

    @property
    def measured_before(self) -> FloatArray:
        """Measured seconds of servers, attributed to the home ranks of the tasks
        in proportion to their estimates, (ranks,).
        """
        measured, served = self.measured_after, self.estimated_after
        rate = np.divide(measured, served, out=np.zeros_like(served), where=served > 0)
        return self._by_rank(self.plan.home, self.seconds * rate[self.plan.server])

    @property
    def measured_after(self) -> FloatArray:
        """Measured seconds in attention kernels, (ranks,)."""
        return self.figures[:, 0] / 1e9

    @property
    def servers(self) -> BoolArray:
        """True for each rank that is a server of a pool, (ranks,)."""
        return ~np.array(self.holds or [True] * len(self.figures))

    @property
    def sent_bytes(self) -> IntArray:
        """Bytes sent by each rank, (ranks,)."""
        return self.figures[:, 1]

    @property
    def between_bytes(self) -> IntArray:
        """Bytes sent to other nodes by each rank, (ranks,); all, if nodes are not told apart."""
        return self.figures[:, 4]

    @property
    def on_several_nodes(self) -> bool:
        """True if nodes are told apart, and there are several."""
        return self.per_node is not None and self.per_node < self.plan.layout.world_size

    def _by_rank(self, rank: IntArray, seconds: FloatArray) -> FloatArray:
        """Sum seconds of tasks by their ranks, at the speeds of the ranks: (ranks,)."""
        return self.ranks.scale_by_speed(
            np.bincount(rank, weights=seconds, minlength=self.plan.layout.world_size).astype(np.float64)
        )


@dataclass(frozen=True, eq=False)
class Observation:
    """Estimates and measurements of all ranks for a micro-batch, in seconds of one layer.

    Attributes:
        parts: (ranks, 3) seconds of tasks, bytes and flops by the uncorrected cost model.
        kernel, exchanging: (ranks,) measured seconds in kernels; and in packing, waiting and
            unpacking.
        exchange: (ranks,) seconds of exchanges, estimated by the uncorrected cost model; 0 on ranks
            that send and receive nothing.
        unmoved, unmoved_exchange: (ranks,) seconds that kernels would have taken, and `exchange`,
            with nothing moved.
        overlapped: whether exchanges are hidden behind the other nano-batch.
    """

    parts: FloatArray
    kernel: FloatArray
    exchanging: FloatArray
    exchange: FloatArray
    unmoved: FloatArray
    unmoved_exchange: FloatArray
    overlapped: bool = False

    @property
    def moved(self) -> bool:
        """True if anything was exchanged."""
        return bool(self.exchange.any())

    @property
    def loss(self) -> float:
        """Relative slowdown against moving nothing; negative for a speed-up."""
        return self._slowest(self.kernel, self.exchange) / max(self._slowest(self.unmoved, self.unmoved_exchange), 1e-12) - 1

    def estimated(self, factors: FloatArray) -> FloatArray:
        """Estimate seconds by the cost model with these factors, (ranks,).

        Processors round `parts @ factors` differently.
        """
        tasks, moved_bytes, flops = self.parts.T
        return np.asarray(tasks * factors[0] + moved_bytes * factors[1] + flops * factors[2])

    def exchange_factor(self) -> float | None:
        """Return the factor by which measured exchanges are longer than
        estimated; None if they hid behind other work.

        No rank finishes its exchange before the data has arrived, and most ranks also wait for
        slower ranks, in the exchange or later. So the rank that waits least, relative to its
        exchange, shows how long exchanges take.
        """
        if not self.moved:
            return None
        exchanges = self.exchange > 0
        kernel, estimated = self.kernel[exchanges], self.exchange[exchanges]
        taken = self.exchanging[exchanges] + (kernel if self.overlapped else 0)
        factor = float((taken / estimated).min())
        hidden = self.overlapped and factor * float(estimated.max()) <= float(self.kernel.max()) * (1 + _HIDDEN)
        return None if hidden else factor

    def _slowest(self, kernel: FloatArray, exchange: FloatArray) -> float:
        """Return the seconds of the slowest rank, given measured
        kernel and estimated exchange seconds.
        """
        taken = exchange * (self.exchange_factor() or 0.0)
        return float((np.maximum(kernel, taken) if self.overlapped else kernel + taken).max())


def observed(plans: Sequence[Planned], cost: CostModel, config: DistCAConfig) -> Observation | None:
    """Combine the measurements of the plans of one micro-batch, whole or in
    two nano-batches, for one kind of layer.

    Returns None if some rank did not run whole layers or has running kernels, or if one of two
    nano-batches is missing. `cost` is the uncorrected cost model of the layer.
    """
    nano = plans[0].key.nano > 0
    figures = np.stack([plan.figures for plan in plans])
    calls = figures[:, :, 3]
    if len(plans) != 1 + nano or figures.min() < 0 or (calls != calls[0, 0]).any():
        return None
    layers, unmoved = calls[0, 0], [Plan.local(plan.plan.layout, plan.plan.window) for plan in plans]
    return Observation(
        parts=_summed(_parts(plan.plan, cost) for plan in plans),
        kernel=figures[:, :, 0].sum(axis=0) / (1e9 * layers),
        exchanging=figures[:, :, 2].sum(axis=0) / (1e9 * layers),
        exchange=_summed(_exchange(plan.plan, cost, config, plan.ranks) for plan in plans),
        unmoved=_summed(plan.measured_before / layers for plan in plans),
        unmoved_exchange=_summed(_exchange(local, cost, config, plan.ranks) for plan, local in zip(plans, unmoved, strict=True)),
        overlapped=nano,
    )


def _parts(plan: Plan, cost: CostModel) -> FloatArray:
    """Sum the seconds of tasks, bytes and flops, forward and
    backward, of every server: (ranks, 3).
    """
    parts = replace(cost, window=plan.window).estimate_parts(plan.end - plan.start, plan.end, plan.heads).sum(axis=0)
    columns = (np.bincount(plan.server, weights=column, minlength=plan.layout.world_size) for column in parts.T)
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _exchange(plan: Plan, cost: CostModel, config: DistCAConfig, ranks: Ranks) -> FloatArray:
    """Estimate the seconds of exchanges, (ranks,); 0 on ranks that send and
    receive nothing, which wait for nobody.
    """
    if not plan.moved:
        return np.zeros(plan.layout.world_size)
    waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
    load = PlanLoad(plan, cost, waves, ranks=ranks)
    return np.where(load.wire_seconds.any(axis=0), load.exchange_seconds, 0.0)


def _summed(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.asarray(sum(arrays), dtype=np.float64)
