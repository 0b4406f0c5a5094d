"""Estimates and measurements since `configure`: figures for logs, the summary of a run, and
timelines for Perfetto.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.history import BalanceTotals
from hf_distca.integration.current_session import current_session
from hf_distca.integration.processes import print_lines
from hf_distca.integration.session import Session
from hf_distca.kernels.variants import late_compiles
from hf_distca.measure.timeline import Trace

__all__ = [
    "Metrics",
    "metrics",
    "nothing_moved_reason",
    "print_last_summary",
    "print_summary",
    "read_metrics",
    "summarize_balance",
    "trace",
]


@dataclass(frozen=True)
class Metrics:
    """Sums since `configure`.

    The difference of two readings covers the time between them,
    or the later one if settings changed.

    Attributes:
        balance: sums over the micro-batches that were planned with other ranks.
        attention_seconds: seconds that this rank spent in attention kernels, forward and backward,
            for itself and for others. On CUDA only finished kernels count: synchronise first for an
            exact figure. Work without other ranks is timed on CUDA from the first reading on.
        elapsed_seconds: seconds that have passed.
        since: their beginning, by `time.perf_counter`.
        state_bytes: bytes that this rank sent to others for recurrent layers, forward and backward.
        late_compiles: functions of kernels that this process compiled when a step needed them, not
            before the first one.
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
        """Return the figures that `DistCACallback` logs; those without data are left out."""
        figures = self.balance.compute_figures()
        if self.state_bytes and self.balance.micro_batches:
            figures["distca/states_mb"] = self.state_bytes / self.balance.micro_batches / 1e6
        if self.late_compiles and self.balance.micro_batches:
            figures["distca/late_compiles"] = self.late_compiles
        return figures


def metrics(*, gather: bool = False) -> Metrics:
    """Return sums of estimates and measurements since `configure`; reading does not reset them.

    For custom logs: ``before = metrics()``, and later ``(metrics(gather=True) -
    before).figures()``. All ranks see the same figures, except ``distca/planning_ms``,
    ``distca/server_time_share``, ``distca/states_mb`` and ``distca/late_compiles``, which are of
    this rank. With one rank or another attention implementation there are none.

    Args:
        gather: let ranks exchange their measurements first, so that all micro-batches up to here
            are in the sums. This takes one small collective, for which all ranks must call it at
            the same point, after a backward, and waits for the device, as reading the loss does.
            Without it nothing is exchanged and a rank may read alone: the sums then contain
            measurements announced with the documents of later micro-batches, so the last
            micro-batch is missing, and on CUDA the last two.

    Raises:
        DistCADesyncError: with `gather`, if not all ranks come.
    """
    session = current_session()
    session.times_local_work = True
    if gather:
        session.gather_measurements()
    return read_metrics(session)


def read_metrics(session: Session) -> Metrics:
    """Return the metrics for a log, which has no figures of a rank alone, without switching on
    their timing.
    """
    return Metrics(
        session.planner.history.total,
        session.meter.seconds,
        time.perf_counter() - session.start_time,
        session.start_time,
        session.meter.state_bytes,
        late_compiles(),
    )


def summarize_balance(
    totals: BalanceTotals, session: Session, replaced: float | None = None
) -> str | None:
    """Summarize micro-batches of a session in a few lines; None if there were none.

    Args:
        totals: their sums.
        session: the session.
        replaced: estimated imbalance of batches that dealt documents replaced, if known.
    """
    if not totals.micro_batches:
        return None
    figures = totals.compute_figures()
    tokens = figures.get("distca/imbalance_tokens", 1.0)
    in_order = figures.get("distca/imbalance_estimated_in_order")
    before, after = ("before", "after") if in_order is None else ("dealt", "moved")
    lines = [
        (
            f"distca: {totals.micro_batches} micro-batches on {session.rank_count} ranks, work"
            f" moved in {totals.moved}"
        ),
        f"  {'imbalance (slowest rank / mean)':<34}{before:>8}{after:>8}",
        f"    {'tokens':<32}{tokens:>8.3f}{tokens:>8.3f}",
    ]
    for kind in ("estimated", "measured"):
        if (home := figures.get(f"distca/imbalance_{kind}_before")) is not None:
            lines.append(
                f"    {kind:<32}{home:>8.3f}{figures[f'distca/imbalance_{kind}_after']:>8.3f}"
            )
    for name, value in (("batches replaced", replaced), ("documents in order", in_order)):
        if value is not None:
            lines.append(f"    {f'estimated, {name}':<32}{value:>8.3f}")
    parts = {
        "exchanged": (
            f"{figures.get('distca/exchanged_mb_per_layer', 0.0):.3f} MB per layer and micro-batch"
            " by the busiest rank, for moved work and for documents on several ranks"
        ),
    }
    if between := figures.get("distca/between_nodes_mb_per_layer"):
        parts["nodes"] = (
            f"{between:.3f} MB of that to other nodes, by the rank that sends most there"
        )
    parts |= {
        "planning": f"{figures['distca/planning_ms']:.1f} ms per micro-batch",
        "attention": (
            f"{figures['distca/server_time_share']:.0%} of this rank's time, in kernel"
            f" {', '.join(session.kernel_names)}"
        ),
    }
    if "distca/servers_share" in figures:
        parts["servers"] = (
            f"{figures['distca/servers_share']:.0%} of attention, idle"
            f" {figures['distca/servers_idle']:.0%} of the time"
        )
    return "\n".join([*lines, *(f"  {name:<12}{value}" for name, value in parts.items())])


def print_summary(totals: BalanceTotals, session: Session, replaced: float | None = None) -> None:
    """Print the summary on the first rank, if there is one."""
    text = summarize_balance(totals, session, replaced)
    if text is not None and session.is_first_rank:
        print_lines(text)
        session.has_summary = True


def print_last_summary() -> None:
    """Print the balance of the session in use on the first rank, unless that was done before."""
    session = current_session()
    if not session.has_summary:
        print_summary(session.planner.history.total, session)


def nothing_moved_reason(totals: BalanceTotals, session: Session) -> str | None:
    """Return why no work was moved in some micro-batches, with the figures; None if some was, or if
    there were none.
    """
    if totals.moved or totals.busiest_bytes or not totals.estimated_mean:
        return None
    config, ratio = session.config, totals.estimated_before / totals.estimated_mean
    finding = f"distca moved nothing in {totals.micro_batches} micro-batches"
    uneven = f"the slowest rank has {ratio:.3f} times the mean attention seconds, by estimate"
    if not config.balance:
        return f"{finding}: balancing is off (balance=False). Without it, {uneven}."
    if ratio <= 1 + config.tolerance:
        return (
            f"{finding}: the documents are even ({uneven}; tolerance={config.tolerance:g}). There"
            " is nothing to win."
        )
    saved = 1 - 1 / ratio
    if saved < config.min_gain:
        return (
            f"{finding}: {uneven}, and evening that out saves {saved:.1%} at most, less than"
            f" min_gain={config.min_gain:g}."
        )
    seconds = (totals.estimated_before - totals.estimated_mean) / totals.micro_batches
    costs = session.planner.resume_progress().costs
    cost = costs.get_cost(PlanKey(*next(iter(costs))))
    return (
        f"{finding}: {uneven}, and evening that out saves {seconds * 1e3:.3g} ms a layer at most,"
        f" of which the exchange would leave less than min_gain={config.min_gain:g} (cost model"
        f" {cost.name!r}: {cost.exchange_bytes_per_second / 1e9:g} GB/s and"
        f" {cost.exchange_seconds * 1e3:g} ms an exchange). Longer documents or a faster network"
        " gain more; if the figures do not fit your machine, give DistCAConfig(cost_model=...)"
        " your own."
    )


def fewer_moves_reason(session: Session) -> str | None:
    """Return a message that exchanges were given up because they cost more than they saved, with
    the figures; else None.
    """
    slower = session.planner.resume_progress().costs.exchange_slowdown
    if slower is None:
        return None
    return (
        f"distca moves less, or nothing: with exchanges, attention took {slower:.0%} longer than it"
        " would have taken where it was. Plans go by what was measured, and exchanges are tried"
        " again now and then. A faster network or longer documents gain more;"
        " DistCAConfig(measured_rates=False) goes by the cost model alone."
    )


@contextmanager
def trace(folder: str | Path | None = None) -> Iterator[Trace]:
    """Record a timeline of core attention: linear, dispatch, server and return spans of both
    nano-batches and directions.

    Open the files at ui.perfetto.dev or chrome://tracing. On CUDA, recording puts events on the
    stream without waiting; writing waits for the device. With a Trainer, put ``trainer.train()``
    inside, for a few steps: every step is recorded, the first ones as well.

    Args:
        folder: folder in which each rank writes ``rank_<number>.json`` at the end; None to write
            nothing. The page of ``hf-distca report`` shows those in the run's ``output_dir``.

    Yields:
        The trace; ``spans`` and ``hidden`` (the part of the messages' time hidden by computation)
        can be read at any time.
    """
    session, recorded = current_session(), Trace()
    before, session.trace = session.trace, recorded
    try:
        yield recorded
    finally:
        session.trace = before
    if folder is not None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        recorded.write(Path(folder) / f"rank_{rank}.json", rank)
