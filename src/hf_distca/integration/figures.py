"""What was planned and measured since `configure`, and what to log of it."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

from hf_distca.agreement.figures import Tally
from hf_distca.integration.session import Session, current_session

__all__ = ["Metrics", "Reading", "balance_figures", "metrics"]

_SHARE = "distca/server_time_share"


@dataclass(frozen=True)
class Metrics:
    """Sums since `configure`. The difference of two readings is what lies between them.

    Attributes:
        balance: sums over the micro-batches that were planned with other ranks.
        attention_seconds: that this rank spent in attention kernels, for itself and for others.
        elapsed_seconds: that have passed.
    """

    balance: Tally
    attention_seconds: float
    elapsed_seconds: float

    def __sub__(self, earlier: Metrics) -> Metrics:
        return Metrics(
            self.balance - earlier.balance,
            self.attention_seconds - earlier.attention_seconds,
            self.elapsed_seconds - earlier.elapsed_seconds,
        )

    def figures(self) -> dict[str, float]:
        """The figures that `DistCACallback` logs and explains; those without data are left out."""
        figures = self.balance.figures()
        if figures:
            figures[_SHARE] = self.attention_seconds / max(self.elapsed_seconds, 1e-9)
        return figures


def metrics() -> Metrics:
    """What was planned and measured since `configure`: a read that changes nothing, and that each rank may do alone.

    For loggers of your own: ``before = metrics()``, and later ``(metrics() - before).figures()``.
    """
    return _read(current_session())


def _read(session: Session) -> Metrics:
    return Metrics(session.planner.history.total, session.meter.seconds, time.perf_counter() - session.started)


class Reading:
    """Figures since its own last reading: of several loggers, each has one."""

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None
        self._last: Metrics | None = None

    def figures(self) -> dict[str, float]:
        """The figures since the last call; since `configure` in the first one after it, without the share of time."""
        session = current_session()
        now, last = _read(session), self._last
        known = last is not None and self._session is not None and self._session() is session
        self._session, self._last = weakref.ref(session), now
        if known and last is not None:
            return (now - last).figures()
        return {name: value for name, value in now.figures().items() if name != _SHARE}

    def rounded(self) -> dict[str, float]:
        """The figures since the last call, for a log."""
        return {name: round(value, 4) for name, value in self.figures().items()}


_reading = Reading()


def balance_figures() -> dict[str, float]:
    """The figures of the balance since the last call, under the names that `DistCACallback` logs; it says what they mean.

    Call it before the first step, to start counting, and then whenever you log. Nothing is exchanged: a rank may call it alone.
    All ranks see the same figures, but for ``distca/planning_ms`` and ``distca/server_time_share``, which are of this rank.
    What a micro-batch measured comes in with the documents of the next one, and is in the figures after that.

    Figures without data are left out: all of them where nothing was planned, as with one rank or another attention
    implementation, and the share of time in the first call after `configure`. Other readers, such as `metrics` and
    `DistCACallback`, take nothing away from it.
    """
    return _reading.figures()
