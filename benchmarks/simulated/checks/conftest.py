"""Checks of the simulator: pytest -n 0 benchmarks/simulated/checks, in minutes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.extend(map(str, Path(__file__).parents[2].glob("*/")))
sys.path.append(str(Path(__file__).parents[3] / "tests"))

from simulator.hardware import find_hardware
from simulator.model_shape import find_model
from simulator.setting import Setting


@pytest.fixture
def setting() -> Setting:
    """Eight devices of a node with 16K tokens each."""
    return Setting(find_model("llama-3-8b"), find_hardware("h100"), 8, 16384)
