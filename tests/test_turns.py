from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import turns

# Of a file that pytest would collect: the names of what runs by default.
CHOOSE = """
import turns
cases = [("a", size) for size in range(40)]
print([case.values for case in turns.in_turn(cases, 4) if not case.marks])
"""


def run_by_default(cases: list[Any]) -> list[Any]:
    return [case.values[0] for case in cases if not case.marks]


def test_cases_in_every_process_are_the_same() -> None:
    chosen = set()
    for seed in ("0", "1"):
        paths = {"PYTHONPATH": str(Path(turns.__file__).parent), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", CHOOSE],
            env=os.environ | paths,
            capture_output=True,
            text=True,
            check=True,
        )
        chosen.add(done.stdout)
    assert len(chosen) == 1


def test_cases_in_two_orders_are_the_same() -> None:
    cases = [("a", size) for size in range(40)]
    forwards, backwards = turns.in_turn(cases, 4), turns.in_turn(reversed(cases), 4)
    assert {case.values for case in forwards if not case.marks} == {
        case.values for case in backwards if not case.marks
    }


def test_a_new_case_takes_the_place_of_one_at_most() -> None:
    names = [f"case {number}" for number in range(200)]
    before, after = (
        run_by_default(turns.in_turn(names, 5)),
        run_by_default(turns.in_turn(["new", *names], 5)),
    )
    assert len(before) == len(after) == 40
    assert len({*before} - {*after}) <= 1


def test_marked_and_named_cases_stay_as_they_are() -> None:
    cases = [
        ("a", 1),
        pytest.param("b", 2, id="second"),
        pytest.param("c", 3, marks=pytest.mark.slow),
        ("d", 4),
    ]
    marked = turns.in_turn(cases, 10**9, [("a", 1)])
    assert run_by_default(marked) == ["a"]
    assert [case.id for case in marked] == [None, "second", None, None]


def test_one_case_runs_where_no_other_does() -> None:
    assert len(run_by_default(turns.in_turn(["a", "b", "c"], 10**9))) == 1
    assert turns.in_turn([], 3) == []


def test_a_case_without_a_lasting_name_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"give pytest\.param an id"):
        turns.in_turn([object()], 2)
