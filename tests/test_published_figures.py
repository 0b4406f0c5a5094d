"""Figures that others published, and what is predicted of them: profiles of GPUs, links, and ways
to share attention.
"""

from __future__ import annotations

import statistics
from types import ModuleType

import pytest

from benchmark_modules import import_benchmark


@pytest.fixture(scope="module")
def benchmarks() -> tuple[ModuleType, ModuleType]:
    return import_benchmark("published_timings"), import_benchmark("magi_setting")


def test_profiles_are_the_fit_to_published_timings(
    benchmarks: tuple[ModuleType, ModuleType],
) -> None:
    timings, _ = benchmarks
    cells = [*timings.chart_cells(), *timings.our_cells(), *timings.other_cells(None)]
    for name, rates in timings.fitted(cells).items():
        shipped = timings.Profile.load(name).kernels[0]
        for direction in ("forward", "backward"):
            fit, cost = getattr(rates, direction), getattr(shipped, direction)
            for part in (
                "bytes_per_second",
                "flops_per_second",
                "call_seconds",
                "least_seconds",
                "row_passes",
            ):
                assert getattr(cost, part) == pytest.approx(getattr(fit, part), rel=1e-3), (
                    name,
                    direction,
                    part,
                )
            assert rates.errors[f"fitted_{direction}_largest"] < 0.10, (name, direction)
            assert rates.errors[f"{direction}_largest"] < 0.15, (name, direction)


def test_gathers_inside_a_node_take_what_was_measured(
    benchmarks: tuple[ModuleType, ModuleType],
) -> None:
    timings, _ = benchmarks
    errors = [abs(cell["error"]) for cell in timings.link_cells()]
    assert max(errors) < 0.20
    assert statistics.median(errors) < 0.06


def test_others_share_attention_as_fast_as_was_measured(
    benchmarks: tuple[ModuleType, ModuleType],
) -> None:
    """Within 15 % in the median; no constant is adjusted to them."""
    _, magi = benchmarks
    errors = []
    for place, gpus in enumerate(magi.GPUS):
        rows = magi.packed_rows(gpus * magi.TOKENS, 10)
        for name in magi.JUDGED:
            speeds = magi.speed(name, gpus, rows)
            published = [magi.PUBLISHED[name][direction][place] for direction in (0, 1)]
            errors += (abs(speeds.tflops / published - 1)).tolist()
    assert statistics.median(errors) < 0.15
