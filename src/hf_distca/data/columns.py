"""Columns of rows: those that are read, and those that would
be lost although the model takes them.
"""

from __future__ import annotations

import inspect
import logging
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = [
    "ROW_COLUMNS",
    "TARGET_MASKS",
    "UNKNOWN_INPUTS",
    "ForwardInputs",
    "check_column",
    "check_columns",
    "convert_integers",
]

_log = logging.getLogger("hf_distca")

TARGET_MASKS = (
    "completion_mask",
    "assistant_masks",
)  # 1 for tokens that are targets, where a row has no labels
ROW_COLUMNS = frozenset(
    {"input_ids", "labels", "attention_mask", *TARGET_MASKS}
)  # what is read of a row
# Columns that say what documents and targets a row has, in a way that is not read here: without them it would be trained on as
# something else, whatever the model takes.
_DOCUMENT_COLUMNS = frozenset(
    {"shift_labels", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "distca_documents"}
)


@dataclass(frozen=True)
class ForwardInputs:
    """Arguments of a model's forward.

    Attributes:
        names: names of the arguments, in order; None if they are not known.
    """

    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: Any) -> ForwardInputs:
        """Read the arguments of a model, or of the model inside an adapter or a
        wrapper; they are unknown for a config or None.
        """
        if not isinstance(model, torch.nn.Module):
            return UNKNOWN_INPUTS
        if callable(unwrap := getattr(model, "get_base_model", None)):  # of adapters
            return cls.of(unwrap())
        if isinstance(inner := getattr(model, "module", None), torch.nn.Module):  # of engines
            return cls.of(inner)
        parameters = inspect.signature(model.forward).parameters.values()
        names = tuple(
            known.name
            for known in parameters
            if known.kind in (known.POSITIONAL_OR_KEYWORD, known.KEYWORD_ONLY)
        )
        return cls(names or None)


UNKNOWN_INPUTS = ForwardInputs()


def check_columns(
    row: Mapping[str, Any], tokens: int, read: Collection[str], inputs: ForwardInputs
) -> None:
    """Raise if a column is not read and may be an input of the model; warn
    about other columns with a number per token.

    Args:
        row, tokens: a row, and its number of tokens.
        read: the columns that the caller reads.
        inputs: inputs of the model that trains on it.

    Raises:
        LayoutError: names the column.
    """
    for name in row.keys() - set(read):
        value = row[name]
        if value is None:
            continue
        numbers = _has_numbers(value)
        check_column(name, read, inputs, numbers=numbers)
        if inputs.names is not None and numbers and len(value) == tokens > 1:
            _warn_of_unread_column(name, tuple(sorted(read)))


def check_column(name: str, read: Collection[str], inputs: ForwardInputs, *, numbers: bool) -> None:
    """Raise if a column that is not read is an input of the model or, for
    an unknown model, has lists of `numbers`.

    Raises:
        LayoutError: names it.
    """
    only = f"only {', '.join(sorted(read))} are read"
    if name in _DOCUMENT_COLUMNS:
        raise LayoutError(
            f"a row has a column {name!r}, which says what its documents or targets are, and would "
            f"be lost here: {only}. Give documents with labels of their own, and remove the "
            "column, or use another collator."
        )
    if inputs.names is None and numbers:
        raise LayoutError(
            f"a row has a column {name!r} of numbers, which may be an input of the model and would "
            f"be lost here: {only}. Remove the column; or say which model it is for, as in "
            "PackingCollator(model): what its forward does not take is left out."
        )
    if inputs.names is not None and name in inputs.names:
        raise LayoutError(
            f"a row has a column {name!r}, an input of the model that would be lost here: {only}. "
            "Remove the column, or use another collator."
        )


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a list, array or tensor of numbers, of any shape;
    single numbers, texts and the like are not.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return bool(value.ndim) and (isinstance(value, torch.Tensor) or value.dtype.kind in "iufcb")
    while isinstance(value, (list, tuple)) and len(value):
        value = value[0]
        if isinstance(value, (int, float, np.number, np.bool_, torch.Tensor)):
            return True
        if isinstance(value, np.ndarray):
            return value.dtype.kind in "iufcb"
    return False


@cache
def _warn_of_unread_column(name: str, read: tuple[str, ...]) -> None:
    _log.warning(
        "column %r has a number for each token, and is not read: only %s are. Remove it if it "
        "does not matter.",
        name,
        ", ".join(read),
    )


def convert_integers(values: Any, name: str, kinds: str = "iu") -> IntArray:
    """Convert integers of a document, a list, array or tensor, to int64;
    `kinds` are the accepted numpy kinds of dtype.

    Raises:
        LayoutError: if they are no flat row of integers; calls them `name`.
    """
    try:
        row = values.numpy(force=True) if isinstance(values, torch.Tensor) else values
        if not isinstance(row, np.ndarray):
            numbers = list(row)
            if numbers and isinstance(numbers[0], bool) and "b" not in kinds:
                raise TypeError("they are bool")
            # An `array` refuses what is no integer, and reads a list in a third of numpy's time.
            row = np.frombuffer(array("q", numbers), dtype=np.int64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers ({error})."
        ) from error
    if row.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # empty arrays and tensors have any dtype
    if (
        row.ndim != 1
        or row.dtype.kind not in kinds
        or (row.dtype == np.uint64 and row.max(initial=0) >= 2**63)
    ):
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; here they are {row.dtype} "
            f"of shape {row.shape}."
        )
    return row.astype(np.int64, copy=False)
