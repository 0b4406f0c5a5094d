"""The seconds of attention that ranks are brought to."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Levels"]

# Levels are set inside the tolerated band, because slices end on tiles and seldom move exactly what was wanted.
_INNER_BAND = 0.7


class Levels(NamedTuple):
    """Seconds of a rank: the edges of the tolerated band, and where ranks outside it should end."""

    floor: float
    low: float
    mean: float
    high: float
    cap: float

    @classmethod
    def of(cls, seconds: list[float], mean: float, tolerance: float) -> Levels:
        """What one side sheds the other takes: the side with more to do stops inside its edge, the other goes further."""
        low, high = mean * (1 - tolerance * _INNER_BAND), mean * (1 + tolerance * _INNER_BAND)
        surplus = math.fsum(work - high for work in seconds if work > high)
        deficit = math.fsum(low - work for work in seconds if work < low)
        if surplus >= deficit:
            low = min(_fill(seconds, surplus), mean)
        else:
            high = max(-_fill([-work for work in seconds], deficit), mean)
        return cls(mean * (1 - tolerance), low, mean, high, mean * (1 + tolerance))

    @classmethod
    def below(cls, cap: float) -> Levels:
        """For few large slices: ranks above `cap` come down to it, and servers fill up to it, the others stay as they are."""
        return cls(0.9 * cap, 0.95 * cap, cap, 0.97 * cap, cap)


def _fill(seconds: list[float], amount: float) -> float:
    """The level that `amount` poured over the lowest ranks reaches."""
    total = 0.0
    ordered = sorted(seconds)
    for count, work in enumerate(ordered, 1):
        total += work
        level = (amount + total) / count
        if count == len(ordered) or level <= ordered[count]:
            return level
    return 0.0
