"""What there is to say of a run: the balance in a few lines, why nothing was moved, and that exchanges were given up."""

from __future__ import annotations

from hf_distca.agreement.history import Tally
from hf_distca.integration.progress import say
from hf_distca.integration.session import Session

__all__ = ["sum_up", "summary", "why_nothing_moved"]


def summary(done: Tally, session: Session) -> str | None:
    """The balance of micro-batches in a few lines, None if there were none.

    Args:
        done: what they did.
        session: in which they ran.
    """
    if not done.micro_batches:
        return None
    tokens = done.largest_tokens / done.mean_tokens if done.mean_tokens else 1.0
    lines = [
        f"distca: {done.micro_batches} micro-batches on {session.ranks} ranks, work moved in {done.moved}",
        f"  {'imbalance (slowest rank / mean)':<34}{'before':>8}{'after':>8}",
        f"    {'tokens':<32}{tokens:>8.3f}{tokens:>8.3f}",
    ]
    for kind in ("estimated", "measured"):
        mean = getattr(done, f"{kind}_mean")
        if mean > 0:
            before, after = (getattr(done, f"{kind}_{at}") / mean for at in ("before", "after"))
            lines.append(f"    {kind:<32}{before:>8.3f}{after:>8.3f}")
    figures = done.figures()
    parts = {
        "exchanged": f"{figures.get('distca/exchanged_mb_per_layer', 0.0):.3f} MB per layer and micro-batch by the busiest rank",
        "planning": f"{figures['distca/planning_ms']:.1f} ms per micro-batch",
        "attention": f"{figures['distca/server_time_share']:.0%} of this rank's time, in kernel {', '.join(session.kernels)}",
    }
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
    cost = next(session.planner.costs.rates.cost(kind, given) for kind, given in session.planner.costs.items())
    return (
        f"{said}: {uneven}, and evening that out saves {milliseconds:.3g} ms a layer at most, of which the exchange would leave "
        f"less than min_gain={config.min_gain:g} (cost model {cost.name!r}: {cost.exchange_bytes_per_second / 1e9:g} GB/s and "
        f"{cost.exchange_seconds * 1e3:g} ms an exchange). Longer documents or a faster network gain more; if the figures do not "
        "fit your machine, give DistCAConfig(cost_model=...) your own."
    )


def why_given_up(session: Session) -> str | None:
    """That exchanges turned out to take longer than they gain, with the figures; None as long as they do not."""
    slower = session.planner.costs.rates.slower
    if slower is None:
        return None
    return (
        f"distca moves less, or nothing: with exchanges, attention took {slower:.0%} longer than it would have taken where it "
        "was. Plans go by what was measured, and exchanges are tried again now and then. A faster network or longer documents "
        "gain more; DistCAConfig(measured_rates=False) goes by the cost model alone."
    )
