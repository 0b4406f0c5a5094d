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
    today, taken, others = date.today().toordinal(), list[Any](), 0
    for case in cases:
        marked = getattr(case, "marks", ())
        if case in always or marked:
            taken.append(case)
            continue
        values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
        taken.append(
            pytest.param(*values, marks=[pytest.mark.slow] * ((today + others) % days != 0), id=getattr(case, "id", None))
        )
        others += 1
    return taken
