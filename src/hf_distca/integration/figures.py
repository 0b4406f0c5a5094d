"""`balance_figures`: what to log of the balance, for training loops of your own and for the callback."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

from hf_distca.agreement.figures import Tally
from hf_distca.integration.session import Session, current_session

__all__ = ["balance_figures"]


@dataclass(frozen=True)
class _Reading:
    """When the figures were taken last, and the attention seconds of the session at that time."""

    session: weakref.ref[Session]
    clock: float
    seconds: float
    total: Tally


_last: _Reading | None = None


def balance_figures() -> dict[str, float]:
    """The figures of the balance since the last call, under the names that `DistCACallback` logs; it says what they mean.

    Call it before the first step, to start counting, and then whenever you log. Nothing is exchanged: a rank may call it alone.
    All ranks see the same figures, but for ``distca/planning_ms`` and ``distca/server_time_share``, which are of this rank.
    What a micro-batch measured comes in with the documents of the next one, and is in the figures after that.

    Figures without data are left out: all of them where nothing was planned, as with one rank or another attention
    implementation, and the share of time in the first call after `configure`. Each micro-batch is in the figures of one call
    only, so under the Trainer leave the calling to `DistCACallback`.
    """
    global _last
    session, last = current_session(), _last
    now, seconds = time.perf_counter(), session.meter.seconds
    total = session.planner.history.total
    _last = _Reading(weakref.ref(session), now, seconds, total)
    same = last is not None and last.session() is session
    figures = (total - last.total if last is not None and same else total).figures()
    if figures and last is not None and same:
        figures["distca/server_time_share"] = (seconds - last.seconds) / max(now - last.clock, 1e-9)
    return figures
