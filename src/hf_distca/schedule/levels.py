"""The seconds of attention that ranks are brought to."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["INNER_BAND", "Levels"]

# Levels are set inside the tolerated band, because slices end on tiles and seldom move exactly what was wanted.
INNER_BAND = 0.7


class Levels(NamedTuple):
    """Seconds of a rank: the edges of the tolerated band, and where ranks outside it should end."""

    floor: float
    low: float
    mean: float
    high: float
    cap: float

    @classmethod
    def of(cls, seconds: list[float], speeds: list[float], mean: float, tolerance: float) -> Levels:
        """What one side sheds the other takes: the side with more to do stops inside its edge, the other goes further.

        Args:
            seconds: what each rank takes for its work.
            speeds: of each rank; what it sheds is work of so many seconds times its speed.
            mean: what each would take if work were spread by speed.
            tolerance: half the width of the band, as a part of the mean.
        """
        low, high = mean * (1 - tolerance * INNER_BAND), mean * (1 + tolerance * INNER_BAND)
        surplus = math.fsum((work - high) * speed for work, speed in zip(seconds, speeds, strict=True) if work > high)
        deficit = math.fsum((low - work) * speed for work, speed in zip(seconds, speeds, strict=True) if work < low)
        if surplus >= deficit:
            low = min(_fill(seconds, speeds, surplus), mean)
        else:
            high = max(-_fill([-work for work in seconds], speeds, deficit), mean)
        return cls(mean * (1 - tolerance), low, mean, high, mean * (1 + tolerance))

    @classmethod
    def below(cls, cap: float) -> Levels:
        """For few large slices: ranks above `cap` come down to it, and servers fill up to it, the others stay as they are."""
        return cls(0.9 * cap, 0.95 * cap, cap, 0.97 * cap, cap)

    @classmethod
    def still(cls) -> Levels:
        """Nothing moves."""
        return cls(-math.inf, -math.inf, -math.inf, math.inf, math.inf)


def _fill(seconds: list[float], speeds: list[float], amount: float) -> float:
    """The level that `amount` poured over the lowest ranks reaches."""
    total = width = 0.0
    ordered = sorted(zip(seconds, speeds, strict=True))
    for count, (work, speed) in enumerate(ordered, 1):
        total += work * speed
        width += speed
        level = (amount + total) / width
        if count == len(ordered) or level <= ordered[count][0]:
            return level
    return 0.0
