"""The Python calls that one more layer adds to a step of one rank, beside a bare attention function, are bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, float]]:
    """The counter of `benchmarks/host_time.py`, by number of documents."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import host_time

    hf_distca.configure()
    counter: Callable[[int], dict[str, float]] = host_time.calls
    return counter


def test_python_calls_of_a_layer_are_bounded(calls: Callable[[int], dict[str, float]]) -> None:
    found = calls(2)
    assert found["bare: a layer"] > 100, "a layer was counted"
    assert found["beyond bare: a layer"] <= 220
    assert found["beyond bare: a step besides"] <= 1100
