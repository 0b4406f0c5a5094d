"""Cases that take turns: a run takes those that stand for their kind, and a part of the others, another one each day.

With `-m "slow or not slow"` all of them run.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import date
from typing import Any

import pytest


def in_turn(cases: Iterable[Any], days: int, always: Container[Any] = ()) -> list[Any]:
    """The cases, of which one in so many runs today; of those in `always`, and of those marked already, nothing changes."""
    turn, taken = date.today().toordinal(), list[Any]()
    for case in cases:
        given = case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        value = given.values if len(given.values) > 1 else given.values[0]
        if not given.marks and value not in always:
            given = given if turn % days == 0 else pytest.param(*given.values, marks=pytest.mark.slow, id=given.id)
            turn += 1
        taken.append(given)
    return taken
