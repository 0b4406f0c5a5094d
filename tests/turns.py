"""Parts of many cases that show the same: a run takes those that stand for their kind, and some of
the others.

Hashes of their names choose: two workers, two days and two machines run the same. With `-m "slow or
not slow"` all of them run.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import Any
from zlib import crc32

import pytest


def in_turn(cases: Iterable[Any], one_in: int, always: Container[Any] = ()) -> list[Any]:
    """The cases, of which one in so many runs, or at least one; of those in `always` and those
    marked already nothing changes.
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
    """The id, or what its values say of themselves: in every process the same."""
    name = case.id or "-".join(str(getattr(value, "__name__", value)) for value in case.values)
    assert " at 0x" not in name, (
        f"{name} has another name in every process: give pytest.param an id"
    )
    return str(name)
