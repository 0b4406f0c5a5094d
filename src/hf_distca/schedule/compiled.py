"""`compiled`: loops of the scheduler as machine code.

Most of the scheduler is numpy. What is compiled are loops in which each step depends on the last one, which take a Python
interpreter a tenth of a second for 512 ranks; and what every plan goes through, for among few ranks it is the number of calls to
numpy that takes the time. numba compiles these functions when they are first called, in 45 seconds for a plan and 9 for a route,
and keeps what it made beside the source or in the user's cache. Where numba cannot be imported, or is told to compile nothing,
they run as they are written and make the same plans.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "Flags",
    "Floats",
    "Ints",
    "array",
    "column",
    "compiled",
    "entry",
    "handed",
    "inlined",
    "interpreted",
    "room",
    "space",
    "table",
]

_log = logging.getLogger("hf_distca")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=tuple[Any, ...])
# What a `column` is to those who read it: an array of int64, float64 or bool, or a view of one. A slice of it is no copy.
Ints = list[int]
Floats = list[float]
Flags = list[bool]


def _numba() -> Any:
    try:
        module = import_module("numba")
    except ImportError:
        return None
    return None if module.config.DISABLE_JIT else module


numba = _numba()
# Divisions by zero are what numpy makes of them: without the check loops are a quarter faster. And columns are not counted as
# they are handed on, which takes four times as long as all else; functions that make no arrays of their own need no count.
_OPTIONS = {"error_model": "numpy", "_nrt": False, "nogil": True}


def compiled(function: F) -> F:
    """A function for other compiled ones. It reads and changes `column`s, numbers and named tuples of these, and makes no arrays.

    Its arithmetic is IEEE double arithmetic in the order that is written, so that every machine finds the same figures.
    """
    return function if numba is None else _made(function)


def inlined(function: F) -> F:
    """A compiled function that becomes part of those that call it, for one in a loop that reads little of much that it is handed.

    A named tuple of columns is handed over number by number, in which a call may take longer than what is called.
    """
    return function if numba is None else _made(function, forceinline=True)


def entry(function: F) -> F:
    """A compiled function that Python calls; what is compiled for it, with all that it calls, is kept."""
    if numba is None:
        return function
    # numba names what it keeps by this: what was compiled of other sources has another name.
    function.__qualname__ += f"-{_sources()}"
    try:
        return _made(function, cache=True)
    except RuntimeError:
        _say_that_nothing_is_kept()
        return _made(function)


def interpreted(function: F) -> F:
    """A compiled function as it was written: for single calls, which take longer to hand over than to carry out."""
    plain: F = getattr(function, "py_func", function)
    return plain


def column(values: Any) -> Any:
    """An array as compiled functions take it; a view, whose numbers Python reads faster, where nothing is compiled."""
    # One form of arrays, for which functions are compiled once.
    contiguous: Any = np.ascontiguousarray(values)
    return contiguous if numba is not None else memoryview(contiguous)


def handed(columns: T) -> T:
    """A named tuple of contiguous arrays as compiled functions take it."""
    return columns if numba is not None else type(columns)(*map(column, columns))


def room(rows: int, kind: Any = np.int64) -> Any:
    """A column of so many zeros.

    Handing columns over takes time: one that is sliced in a compiled function is better than ten.
    """
    return column(np.zeros(rows, dtype=kind))


def space(rows: int | tuple[int, int], kind: Any = np.int64) -> Any:
    """A column or table of so many numbers, whatever they are."""
    return column(np.empty(rows, dtype=kind))


def table(rows: int, columns: int) -> Any:
    """So many rows of zeros, which compiled functions read as ``table[row][column]``."""
    return np.zeros((rows, columns), dtype=np.int64) if numba is not None else [[0] * columns for _ in range(rows)]


def array(values: Any, kind: Any = np.int64) -> npt.NDArray[Any]:
    """A column as an array again."""
    return np.asarray(values, dtype=kind)


def _made(function: F, **options: Any) -> F:
    try:
        made: F = numba.njit(**_OPTIONS, **options)(function)
    except KeyError:  # a version without one of the options
        made = numba.njit(**options)(function)
    return made


@cache
def _sources() -> str:
    """What the sources say, in a few letters: a function is compiled with all that it calls, and numba looks at one file only."""
    text = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        text.update(source.read_bytes())
    return text.hexdigest()[:16]


@cache
def _say_that_nothing_is_kept() -> None:
    _log.warning(
        "numba finds no folder that it can write to, so every process compiles the loops of the scheduler again, in about a "
        "minute: set NUMBA_CACHE_DIR to a folder that can be written."
    )
