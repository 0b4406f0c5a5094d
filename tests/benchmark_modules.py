"""Modules in the folders of benchmarks/, whose scripts import each other by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from pages import ROOT


def prepend_benchmarks(patch: pytest.MonkeyPatch) -> None:
    """Prepend the folders of benchmarks/ to the import path, as their scripts see it."""
    for folder in (ROOT / "benchmarks").glob("*/"):
        patch.syspath_prepend(folder)


def import_benchmark(name: str) -> Any:
    """Import a module from a folder of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        prepend_benchmarks(patch)
        return import_module(name)
