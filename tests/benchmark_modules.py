"""Modules in the folders of benchmarks/, where scripts import each other by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from pages import ROOT


def prepend_benchmarks(patch: pytest.MonkeyPatch) -> None:
    """Have the path that scripts of benchmarks/ have."""
    for folder in (ROOT / "benchmarks").glob("*/"):
        patch.syspath_prepend(folder)


def import_benchmark(name: str) -> Any:
    """Import a module of a folder of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        prepend_benchmarks(patch)
        return import_module(name)
