"""Subsets of many similar cases: a test run takes representative cases and some of the others.

Hashes of their names choose, so two workers, two days and two machines run the same cases. With `-m
"slow or not slow"`, all of them run.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import Any
from zlib import crc32

import pytest


def in_turn(cases: Iterable[Any], one_in: int, always: Container[Any] = ()) -> list[Any]:
    """Mark cases as slow, except one in `one_in`, but at least one. Cases in `always` and cases
    with marks stay unchanged.
    """
    module = sys._getframe(1).f_globals["__name__"]
    given = [
        case
        if hasattr(case, "marks")
        else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    named = [(case.values if len(case.values) > 1 else case.values[0]) in always for case in given]
    others = [
        case for case, is_named in zip(given, named, strict=True) if not case.marks and not is_named
    ]
    others.sort(key=lambda case: crc32(f"{module} {_name_of(case)}".encode()))
    slow = others[max(round(len(others) / one_in), 0 if any(named) else 1) :]
    return [
        pytest.param(*case.values, marks=pytest.mark.slow, id=case.id)
        if any(case is one for one in slow)
        else case
        for case in given
    ]


def _name_of(case: Any) -> str:
    """Return the id, or a name made from the values, which must be equal in every process."""
    name = case.id or "-".join(str(getattr(value, "__name__", value)) for value in case.values)
    assert " at 0x" not in name, (
        f"{name} has another name in every process: give pytest.param an id"
    )
    return str(name)
