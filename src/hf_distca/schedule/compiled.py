"""Compilation of functions by numba for the loops of `schedule`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numba

_log = logging.getLogger("hf_distca")

F = TypeVar("F", bound=Callable[..., Any])


def compile_function(function: F, *, keep: Sequence[str] = (), inside: bool = False) -> F:
    """Compile a function. It may call only compiled functions.

    Divisions by zero behave as in numpy.

    Args:
        function: compiled when it is first called.
        keep: source files of the function and of the functions that it calls. If any are given,
            the machine code is cached for other processes.
        inside: whether only compiled functions call it. If so, no entry from Python is compiled.
            Compiling it would take as long as compiling the function.
    """
    if keep:
        # numba names its cache files by `__qualname__`, so a hash of the sources is added to this
        # name. numba itself only compares the times of source files, which may be the same for
        # different sources.
        sources = b"".join(Path(source).read_bytes() for source in keep)
        function.__qualname__ += f"-{hashlib.sha256(sources).hexdigest()[:16]}"
    # Without the GIL, plans can be made while training runs. The arrays outlive the call, so numba
    # need not count references to them.
    options: dict[str, Any] = {
        "error_model": "numpy",
        "nogil": True,
        "_nrt": False,
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": inside,
    }
    try:
        machine_code: F = numba.njit(cache=bool(keep), **options)(function)
    except RuntimeError:
        _log.warning(
            "numba finds no writable folder for its cache, so every process compiles the scheduler"
            " again, which takes a few seconds. Set NUMBA_CACHE_DIR to a writable folder."
        )
        return compile_function(function)
    return machine_code


def compile_inner(function: F) -> F:
    """Compile a function that only compiled functions may call."""
    return compile_function(function, inside=True)
