"""What was planned and measured since `configure`: figures for logs, the summary of a run, and timelines for Perfetto."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.history import Tally
from hf_distca.integration.processes import say
from hf_distca.integration.session import Session, current_session
from hf_distca.kernels.variants import late_compiles
from hf_distca.measure.timeline import Trace

__all__ = ["Metrics", "metrics", "metrics_of", "sum_up", "summary", "trace", "why_nothing_moved"]


@dataclass(frozen=True)
class Metrics:
    """Sums since `configure`. The difference of two readings is what lies between them, or the later where settings are new.

    Attributes:
        balance: sums over the micro-batches that were planned with other ranks.
        attention_seconds: that this rank spent in attention kernels, forward and backward, for itself and for others. On CUDA
            those of finished kernels: synchronise first for an exact figure. Of what it computes without other ranks, CUDA tells
            seconds from the first reading on.
        elapsed_seconds: that have passed.
        since: when they began, by `time.perf_counter`.
        state_bytes: that this rank sent to others for recurrent layers, forward and backward.
        late_compiles: functions of kernels that this process compiled when a step needed them, not before the first one.
    """

    balance: Tally = field(default_factory=Tally)
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
        """The figures that `DistCACallback` logs; those without data are left out."""
        figures = self.balance.figures()
        if self.state_bytes and self.balance.micro_batches:
            figures["distca/states_mb"] = self.state_bytes / self.balance.micro_batches / 1e6
        if self.late_compiles and self.balance.micro_batches:
            figures["distca/late_compiles"] = self.late_compiles
        return figures


def metrics(*, gather: bool = False) -> Metrics:
    """What was planned and measured since `configure`, as sums that reading does not change.

    For logs of your own: ``before = metrics()``, and later ``(metrics(gather=True) - before).figures()``. All ranks see the same
    figures, but for ``distca/planning_ms``, ``distca/server_time_share``, ``distca/states_mb`` and ``distca/late_compiles``,
    which are of this rank. With one rank or another attention implementation there are none.

    Args:
        gather: let ranks tell each other first what they measured, so that all micro-batches up to here are in the sums. This
            takes one small collective, for which all ranks must call it at the same point, after a backward, and waits for the
            device, as reading the loss does. Without it nothing is exchanged and a rank may read alone: the sums then have what
            came in with the documents of later micro-batches, which leaves out the last one, and on CUDA the last two.

    Raises:
        DistCADesyncError: with `gather`, if not all ranks come.
    """
    session = current_session()
    session.times_alone = True
    if gather:
        session.gather()
    return metrics_of(session)


def metrics_of(session: Session) -> Metrics:
    """The same for a log, which has no figures of a rank alone: asking does not make a session time what it does alone."""
    since, meter = session.started, session.meter
    elapsed = time.perf_counter() - since
    return Metrics(session.planner.history.total, meter.seconds, elapsed, since, meter.state_bytes, late_compiles())


def summary(done: Tally, session: Session) -> str | None:
    """What micro-batches of a session did, in a few lines; None if there were none."""
    if not done.micro_batches:
        return None
    figures = done.figures()
    tokens = figures.get("distca/imbalance_tokens", 1.0)
    lines = [
        f"distca: {done.micro_batches} micro-batches on {session.ranks} ranks, work moved in {done.moved}",
        f"  {'imbalance (slowest rank / mean)':<34}{'before':>8}{'after':>8}",
        f"    {'tokens':<32}{tokens:>8.3f}{tokens:>8.3f}",
    ]
    for kind in ("estimated", "measured"):
        if (before := figures.get(f"distca/imbalance_{kind}_before")) is not None:
            lines.append(f"    {kind:<32}{before:>8.3f}{figures[f'distca/imbalance_{kind}_after']:>8.3f}")
    parts = {
        "exchanged": f"{figures.get('distca/exchanged_mb_per_layer', 0.0):.3f} MB per layer and micro-batch by the busiest rank, "
        "for moved work and for documents on several ranks",
    }
    if between := figures.get("distca/between_nodes_mb_per_layer"):
        parts["nodes"] = f"{between:.3f} MB of that to other nodes, by the rank that sends most there"
    parts |= {
        "planning": f"{figures['distca/planning_ms']:.1f} ms per micro-batch",
        "attention": f"{figures['distca/server_time_share']:.0%} of this rank's time, in kernel {', '.join(session.kernels)}",
    }
    if "distca/servers_share" in figures:
        parts["servers"] = (
            f"{figures['distca/servers_share']:.0%} of attention, idle {figures['distca/servers_idle']:.0%} of the time"
        )
    return "\n".join([*lines, *(f"  {name:<12}{value}" for name, value in parts.items())])


def sum_up(done: Tally, session: Session) -> None:
    """Print the summary on the first rank, if there is anything to say."""
    text = summary(done, session)
    if text is not None and session.is_first:
        say(text)
        session.summarized = True


def why_nothing_moved(done: Tally, session: Session) -> str | None:
    """Why no work was moved in some micro-batches, with the figures; None if some was, or if there were none."""
    if done.moved or done.busiest_bytes or not done.estimated_mean:
        return None
    config, ratio = session.config, done.estimated_before / done.estimated_mean
    said = f"distca moved nothing in {done.micro_batches} micro-batches"
    uneven = f"the slowest rank has {ratio:.3f} times the mean attention seconds, by estimate"
    if not config.balance:
        return f"{said}: balancing is off (balance=False). Without it, {uneven}."
    if ratio <= 1 + config.tolerance:
        return f"{said}: the documents are even ({uneven}; tolerance={config.tolerance:g}). There is nothing to win."
    saved, milliseconds = 1 - 1 / ratio, (done.estimated_before - done.estimated_mean) / done.micro_batches * 1e3
    if saved < config.min_gain:
        return f"{said}: {uneven}, and evening that out saves {saved:.1%} at most, less than min_gain={config.min_gain:g}."
    costs = session.planner.progress.costs
    cost = costs.of(PlanKey(*next(iter(costs))))
    return (
        f"{said}: {uneven}, and evening that out saves {milliseconds:.3g} ms a layer at most, of which the exchange would leave "
        f"less than min_gain={config.min_gain:g} (cost model {cost.name!r}: {cost.exchange_bytes_per_second / 1e9:g} GB/s and "
        f"{cost.exchange_seconds * 1e3:g} ms an exchange). Longer documents or a faster network gain more; if the figures do not "
        "fit your machine, give DistCAConfig(cost_model=...) your own."
    )


def why_given_up(session: Session) -> str | None:
    """That exchanges turned out to take longer than they gain, with the figures; None as long as they do not."""
    slower = session.planner.progress.costs.slower
    if slower is None:
        return None
    return (
        f"distca moves less, or nothing: with exchanges, attention took {slower:.0%} longer than it would have taken where it "
        "was. Plans go by what was measured, and exchanges are tried again now and then. A faster network or longer documents "
        "gain more; DistCAConfig(measured_rates=False) goes by the cost model alone."
    )


@contextmanager
def trace(folder: str | Path | None = None) -> Iterator[Trace]:
    """Record what core attention does inside: linear, dispatch, server and return spans of both nano-batches and directions.

    Open the files at ui.perfetto.dev or chrome://tracing. On CUDA, recording puts events on the stream and stops nothing; writing
    waits for the device.

    Args:
        folder: where each rank writes ``rank_<number>.json`` at the end; None to write nothing.

    Yields:
        The trace; ``spans`` and ``hidden`` (the part of the messages' time that was computed in) can be read at any time.
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
