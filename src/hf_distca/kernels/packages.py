"""Packages with kernels, which are looked at when they are needed: importing one loads CUDA libraries, or a compiler."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["imported"]


@cache
def imported(name: str) -> Any:
    """The module of this name, or the exception that importing it raised."""
    try:
        return import_module(name)
    except Exception as error:
        return error
