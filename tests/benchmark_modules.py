"""Modules of benchmarks/, where scripts import each other by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from pages import ROOT


def import_benchmark(name: str) -> Any:
    """Import a module of benchmarks/, with the path that its scripts have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return import_module(name)
