"""Costs of kernels that are fitted to timings, with what calls take besides their tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from hf_distca.schedule.cost import KernelCost
from hf_distca.schedule.layout import FloatArray


@dataclass(frozen=True, slots=True)
class FittedCost(KernelCost):
    """A kernel's cost with that of its calls, which is about the same on all ranks, so that plans
    leave it out.

    Attributes:
        call_seconds: what a call takes besides its tasks.
        least_seconds: what no call takes less than, however little it computes: its launch.
    """

    call_seconds: float = 0.0
    least_seconds: float = 0.0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read the coefficients by name, None for an infinite rate."""
        return cls(**{name: math.inf if value is None else value for name, value in data.items()})


def add_call_overhead(
    cost: KernelCost, seconds: npt.ArrayLike, calls: npt.ArrayLike = 1
) -> FloatArray:
    """Return the seconds of so many calls whose tasks take `seconds` together; without tasks there
    is no call.
    """
    tasks = np.asarray(seconds, dtype=np.float64)
    if not isinstance(cost, FittedCost):
        return tasks
    whole = np.maximum(
        tasks + cost.call_seconds * np.asarray(calls), cost.least_seconds * np.asarray(calls)
    )
    return np.where(tasks > 0, whole, 0.0)


def fit_kernel(counts: FloatArray, seconds: FloatArray) -> KernelCost:
    """Fit a kernel's coefficients to measured seconds.

    Args:
        counts: (measurements, 3) columns tasks, bytes, flops.
        seconds: (measurements,) measured seconds.
    """
    task, byte, flop = fit_coefficients(counts, seconds).tolist()
    return KernelCost(task, 1 / byte if byte else math.inf, 1 / flop if flop else math.inf)


def fit_coefficients(counts: FloatArray, seconds: FloatArray) -> FloatArray:
    """Fit coefficients >= 0 by least squares on relative errors.

    Args:
        counts: (measurements, coefficients), a column for what each is multiplied with.
        seconds: (measurements,) measured seconds, above 0.

    Returns:
        The coefficients, in the order of columns.
    """
    scaled = counts / seconds[:, None]
    # tasks, bytes and flops are of unlike sizes, and nnls has one tolerance for all.
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0] = 1
    return np.asarray(nnls(scaled / sizes, np.ones(len(scaled)))[0] / sizes)
