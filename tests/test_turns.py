from __future__ import annotations

from datetime import date, timedelta
from unittest.mock import patch

import pytest

import turns


def run_on(day: date) -> list[object]:
    cases = [("a", 1), pytest.param("b", 2, id="second"), pytest.param("c", 3, marks=pytest.mark.slow), ("d", 4), ("e", 5)]
    with patch.object(turns, "date") as today:
        today.today.return_value = day
        marked = turns.in_turn(cases, 3, [("a", 1)])
    assert len(marked) == len(cases)
    return [case.values[0] for case in marked if not case.marks]


def test_each_case_has_its_turn() -> None:
    days = [run_on(date(2026, 1, 1) + timedelta(days=number)) for number in range(3)]
    assert all(day[0] == "a" for day in days)
    assert sorted(str(case) for day in days for case in day[1:]) == ["b", "d", "e"]
