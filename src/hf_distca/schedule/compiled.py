"""`compiled`: loops of the scheduler as machine code.

Most of the scheduler is numpy. What is left are loops in which each step depends on the last one: a Python interpreter takes a
tenth of a second for the moves of 512 ranks, machine code a few milliseconds. numba compiles such functions when they are first
called, in seconds, and keeps what it made beside the source or in the user's cache. Without numba they run as they are written,
with the same plans.

"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

try:
    import numba
except ImportError:
    numba = None

__all__ = ["COMPILES", "column", "compiled", "entry", "interpreted"]

_FOLDER = Path(__file__).parent

F = TypeVar("F", bound=Callable[..., Any])

# Whether functions are compiled.
COMPILES = numba is not None


def compiled(function: F) -> F:
    """A function for other compiled ones, which reads and changes `column`s, numbers and named tuples of these.

    Its arithmetic is IEEE double arithmetic in the order that is written, so that every machine finds the same figures.
    """
    if numba is None:
        return function
    made: F = numba.njit(error_model="numpy", **({} if "passing" in function.__module__ else {"_nrt": False}))(function)
    return made


def entry(function: F) -> F:
    """A compiled function that Python calls; what is compiled for it, with all that it calls, is kept."""
    if numba is None:
        return function
    try:
        made: F = numba.njit(cache=True, error_model="numpy", **({} if "passing" in function.__module__ else {"_nrt": False}))(function)
    except RuntimeError:  # no folder to keep it in
        made = numba.njit(error_model="numpy", **({} if "passing" in function.__module__ else {"_nrt": False}))(function)
    return made


def interpreted(function: F) -> F:
    """A compiled function as it was written: for single calls, which take longer to hand over than to carry out."""
    plain: F = getattr(function, "py_func", function)
    return plain


def column(values: npt.NDArray[Any]) -> Any:
    """An array as compiled functions take it: as it is, or as a list, whose numbers Python reads faster, if nothing is compiled."""
    # One form of arrays, for which functions are compiled once.
    return np.ascontiguousarray(values) if COMPILES else values.tolist()


def _forget_old() -> None:
    """Remove what numba kept if a source is younger: it compares files one by one, but compiled functions hold those they call."""
    youngest = max(source.stat().st_mtime for source in _FOLDER.glob("*.py"))
    for kept in (_FOLDER / "__pycache__").glob("*.nbi"):
        if kept.stat().st_mtime < youngest:
            kept.unlink(missing_ok=True)


_forget_old()
