"""Flat rows of integers, read from whatever documents come as."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["flat"]

_LARGEST = np.iinfo(np.int64).max


def flat(values: Any, name: str, kinds: str = "iu") -> IntArray:
    """Integers of a document, a list, array or tensor, as an int64 array; `kinds` are the numpy kinds of dtype that are taken.

    Raises:
        LayoutError: if they are no flat row of integers; `name` says of what.
    """
    try:
        row = values.numpy(force=True) if isinstance(values, torch.Tensor) else values
        if not isinstance(row, np.ndarray):
            row = _from_list(list(row), kinds)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"the {name} of a document must be a flat list of integers ({error}).") from error
    if row.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # empty arrays and tensors have any dtype
    if row.ndim != 1 or row.dtype.kind not in kinds or (row.dtype == np.uint64 and row.size and row.max() > _LARGEST):
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; here they are {row.dtype} of shape {row.shape}."
        )
    return row.astype(np.int64, copy=False)


def _from_list(values: list[Any], kinds: str) -> IntArray:
    """The same numbers; an `array` refuses what is no integer, and reads a list in a third of numpy's time."""
    if values and isinstance(values[0], bool) and "b" not in kinds:
        raise TypeError("they are bool")
    return np.frombuffer(array("q", values), dtype=np.int64)
