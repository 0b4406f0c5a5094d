"""What was planned and measured since `configure`, and what to log of it."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

from hf_distca.agreement.history import Tally
from hf_distca.integration.session import Session, current_session

__all__ = ["Metrics", "Reading", "balance_figures", "metrics"]


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
        return self.balance.figures()


def metrics() -> Metrics:
    """What was planned and measured since `configure`: a read that changes nothing, and that each rank may do alone.

    For loggers of your own: ``before = metrics()``, and later ``(metrics() - before).figures()``.
    """
    session = current_session()
    return Metrics(session.planner.history.total, session.meter.seconds, time.perf_counter() - session.started)


class Reading:
    """Figures since its own last reading: of several loggers, each has one."""

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None
        self._last = Tally()

    @classmethod
    def from_now(cls) -> Reading:
        """One that leaves out what came before."""
        reading = cls()
        reading.figures()
        return reading

    def figures(self) -> dict[str, float]:
        """The figures since the last call; since `configure` in the first one after it."""
        done, session = self.so_far(), current_session()
        self._session, self._last = weakref.ref(session), session.planner.history.total
        return done.figures()

    def so_far(self) -> Tally:
        """What was done since the last call of `figures`."""
        session = current_session()
        known = self._session is not None and self._session() is session
        return session.planner.history.total - self._last if known else session.planner.history.total

    def rounded(self) -> dict[str, float]:
        """The figures since the last call, for a log."""
        return {name: round(value, 4) for name, value in self.figures().items()}


_reading = Reading()


def balance_figures() -> dict[str, float]:
    """The figures of the balance since the last call, under the names that `DistCACallback` logs; it says what they mean.

    Call it before the first step, to start counting, and then whenever you log. Nothing is exchanged: a rank may call it alone.
    All ranks see the same figures, but for ``distca/planning_ms`` and ``distca/server_time_share``, which are of this rank.
    What a micro-batch measured comes in with the documents of the next one, and only then is it in the figures, with all that
    was planned and done for it: ``distca/micro_batches`` says how many they are about.

    Without such micro-batches there are no figures, as with one rank or another attention implementation. Other readers, such as
    `metrics` and `DistCACallback`, take nothing away from it.
    """
    return _reading.figures()
