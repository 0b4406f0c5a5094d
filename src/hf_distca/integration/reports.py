"""Figures for logs and the summary of a run, from estimates and measurements since `configure`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import BalanceTotals
from hf_distca.integration.processes import print_lines
from hf_distca.integration.session import Session
from hf_distca.kernels.check import count_late_compiles


@dataclass(frozen=True)
class Metrics:
    """Sums of estimates and measurements since `configure`.

    The difference of two readings covers the time between them. If settings changed between them,
    it covers the time since the change.

    Attributes:
        balance: sums over the micro-batches that this rank planned together with other ranks.
        attention_seconds: seconds that this rank spent in attention kernels, forward and backward,
            for itself and for other ranks. On CUDA only finished kernels count, so synchronise
            first for an exact figure. On CUDA, work in which no other rank takes part is timed only
            after the first reading.
        elapsed_seconds: seconds since `since`.
        since: time at which the sums began, from `time.perf_counter`.
        state_bytes: bytes that this rank sent to others for recurrent layers, forward and backward.
        late_compiles: number of kernel functions that this process compiled during training,
            instead of before the first step.
    """

    balance: BalanceTotals = field(default_factory=BalanceTotals)
    attention_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    since: float = 0.0
    state_bytes: int = 0
    late_compiles: int = 0

    def __sub__(self, earlier: Metrics) -> Metrics:
        if earlier.since != self.since:
            return self
        return Metrics(
            self.balance - earlier.balance,
            self.attention_seconds - earlier.attention_seconds,
            self.elapsed_seconds - earlier.elapsed_seconds,
            self.since,
            self.state_bytes - earlier.state_bytes,
            self.late_compiles - earlier.late_compiles,
        )

    def figures(self) -> dict[str, float]:
        """Return the figures that `DistCACallback` logs. Figures without data are left out."""
        count = self.balance.micro_batches
        changes = {
            "distca/states_mb": self.state_bytes / max(count, 1) / 1e6,
            "distca/late_compiles": self.late_compiles,
        }
        known = {name: figure for name, figure in changes.items() if count and figure}
        return {**self.balance.compute_figures(), **known}


def read_metrics(session: Session) -> Metrics:
    """Return the metrics for a log. Unlike `metrics`, do not set `times_local_work`, because logs
    do not show work in which no other rank takes part.
    """
    return Metrics(
        session.planner.history.total,
        session.meter.seconds,
        time.perf_counter() - session.start_time,
        session.start_time,
        session.meter.state_bytes,
        count_late_compiles(),
    )


def summarize_balance(
    totals: BalanceTotals, session: Session, replaced: float | None = None
) -> str | None:
    """Summarize micro-batches of a session in a few lines; None if there were no micro-batches.

    Args:
        totals: sums over the micro-batches.
        session: the session.
        replaced: estimated imbalance of the batches that `deal` replaced, if it is known.
    """
    if not totals.micro_batches:
        return None
    figures = totals.compute_figures()
    in_order = figures.get("distca/imbalance_estimated_in_order")
    ratios: dict[str, list[float | None]] = {
        "tokens": [figures.get("distca/imbalance_tokens", 1.0)] * 2,
        **{
            kind: [figures.get(f"distca/imbalance_{kind}_{side}") for side in ("before", "after")]
            for kind in ("estimated", "measured")
        },
        "estimated, batches replaced": [replaced],
        "estimated, documents in order": [in_order],
    }
    before, after = ("before", "after") if in_order is None else ("dealt", "moved")
    lines = [
        f"distca: {totals.micro_batches} micro-batches on {session.rank_count} ranks, work moved in"
        f" {totals.moved}",
        f"  {'imbalance (slowest rank / mean)':<34}{before:>8}{after:>8}",
    ]
    lines += [
        f"    {name:<32}" + "".join(f"{ratio:>8.3f}" for ratio in some)
        for name, some in ratios.items()
        if some[0] is not None
    ]
    between = figures.get("distca/between_nodes_mb_per_layer")
    servers = figures.get("distca/servers_share")
    parts = {
        "exchanged": f"{figures.get('distca/exchanged_mb_per_layer', 0.0):.3f} MB per layer and"
        " micro-batch by the busiest rank, for moved work and for documents on several ranks",
        "nodes": f"{between:.3f} MB of that to other nodes, by the rank that sends most there"
        if between
        else "",
        "planning": f"{figures['distca/planning_ms']:.1f} ms per micro-batch",
        "attention": f"{figures['distca/server_time_share']:.0%} of this rank's time, in kernel"
        f" {', '.join(session.kernel_names)}",
        "servers": f"{servers:.0%} of attention, idle {figures['distca/servers_idle']:.0%} of the"
        " time"
        if servers is not None
        else "",
    }
    return "\n".join([*lines, *(f"  {name:<12}{text}" for name, text in parts.items() if text)])


def print_summary(totals: BalanceTotals, session: Session, replaced: float | None = None) -> None:
    """Print the summary, if there is one, on the first rank."""
    text = summarize_balance(totals, session, replaced)
    if text is not None and session.is_first_rank:
        print_lines(text)
        session.has_summary = True


def nothing_moved_reason(totals: BalanceTotals, session: Session) -> str | None:
    """Explain, with figures, why no work was moved in these micro-batches. Return None if work was
    moved, or if there were no micro-batches.
    """
    if totals.moved or totals.busiest_bytes or not totals.estimated_mean:
        return None
    config = session.config
    ratio = totals.estimated_before / totals.estimated_mean
    finding = f"distca moved nothing in {totals.micro_batches} micro-batches"
    uneven = f"the slowest rank has {ratio:.3f} times the mean attention seconds, by estimate"
    if not config.balance:
        return f"{finding}: balancing is off (balance=False), and {uneven}."
    if ratio <= 1 + config.tolerance:
        return (
            f"{finding}: the documents are even ({uneven}; tolerance={config.tolerance:g}). There"
            " is nothing to gain."
        )
    saved = 1 - 1 / ratio
    if saved < config.min_gain:
        return (
            f"{finding}: {uneven}, and evening that out saves {saved:.1%} at most, less than"
            f" min_gain={config.min_gain:g}."
        )
    seconds = (totals.estimated_before - totals.estimated_mean) / totals.micro_batches
    costs = session.planner.costs
    cost = costs.get_cost(PlanKey(*next(iter(costs))))
    return (
        f"{finding}: {uneven}, and evening that out saves {seconds * 1e3:.3g} ms a layer at most,"
        f" of which the exchange would leave less than min_gain={config.min_gain:g} (cost model"
        f" {cost.name!r}: {cost.exchange_bytes_per_second / 1e9:g} GB/s and"
        f" {cost.exchange_seconds * 1e3:g} ms an exchange). Longer documents or a faster network"
        " gain more. If the cost model does not fit your machine, give your own:"
        " DistCAConfig(cost_model=...)."
    )


def fewer_moves_reason(session: Session) -> str | None:
    """Explain, with figures, that plans avoid exchanges because exchanges cost more than they
    saved. Return None if plans do not avoid them.
    """
    slower = session.planner.costs.exchange_slowdown
    if slower is None:
        return None
    return (
        f"distca moves less, or nothing: attention took {slower:.0%} longer with exchanges than"
        " without. Plans follow this measurement, and exchanges are tried again from time to time."
        " A faster network or longer documents gain more."
        " DistCAConfig(measured_rates=False) uses the cost model alone."
    )
