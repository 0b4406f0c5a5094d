"""Names of the columns that are read from rows, and checks of all other columns."""

from __future__ import annotations

import inspect
import logging
import re
from array import array
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.documents import DOCUMENT_KEYS
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import IntArray

_log = logging.getLogger("hf_distca")

# Masks that are 1 for targets. They are read if a row has no labels.
TARGET_MASKS = ("completion_mask", "assistant_masks")
# The columns of a row that are read.
ROW_COLUMNS = frozenset({"input_ids", "labels", "attention_mask", *TARGET_MASKS})
# Unread columns that determine the documents and targets of a row. If they were ignored, a model
# would train on wrong documents or targets.
_REFUSED_COLUMNS = frozenset({"shift_labels", "seq_idx", "cu_seq_lens_k", *DOCUMENT_KEYS})
# Columns of files or objects, each with the model input that the collators of TRL and LLaMA-Factory
# make from it.
_MEDIA_INPUTS = {
    "images": "pixel_values",
    "videos": "pixel_values_videos",
    "audios": "input_features",
}


# Names of the arguments of a model's forward, or None if they are unknown.
InputNames = tuple[str, ...] | None


def read_input_names(model: Any) -> InputNames:
    """Read the argument names of a model's forward, after removing adapters and wrappers.

    Return None for objects that are not models, such as a config.

    Raises:
        UnsupportedError: see `check_head`.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    unwrap = getattr(model, "get_base_model", None)  # a method of peft's models
    if callable(unwrap):
        return read_input_names(unwrap())
    inner = getattr(model, "module", None)  # the model inside a wrapper or engine
    if isinstance(inner, torch.nn.Module):
        return read_input_names(inner)
    check_head(model)
    names = tuple(
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
    return names or None


# Matches the class names of transformers models that do not learn to predict next tokens.
_OTHER_HEADS = re.compile(
    r"For(\w*(Classification|Regression|Prediction)|QuestionAnswering|MultipleChoice|MaskedLM)"
)


def check_head(model: object) -> None:
    """Raise if a model does not learn to predict next tokens, because dealt and packed batches have
    no other labels.

    Raises:
        UnsupportedError: if the model learns labels of rows or of tokens, like a classifier.
    """
    model_class: Any = type(model)  # `Any` avoids a false error from mypy
    name = find_other_head(model_class)
    if name is not None:
        raise UnsupportedError(
            f"{name} learns labels of rows or of tokens, but dealt and packed documents have the "
            "labels of next tokens, so the model would train on the wrong labels. Give it padded "
            "batches, made by DataCollatorWithPadding or "
            'DataCollatorForTokenClassification: attn_implementation="distca" balances these too.'
        )


@cache
def find_other_head(model_class: Any) -> str | None:
    """Search the names of a class and its bases for one that matches `_OTHER_HEADS`.

    Return None if no name matches.
    """
    names = (kind.__name__ for kind in model_class.__mro__)
    return next(filter(_OTHER_HEADS.search, names), None)


def check_columns(
    row: Mapping[str, Any], tokens: int, read_columns: Collection[str], inputs: InputNames
) -> None:
    """Raise if an unread column of a row may be an input of the model, or may become one.

    Warn about other unread columns that have a number for each token.

    Args:
        row: the row.
        tokens: number of tokens of the row.
        read_columns: the columns that the caller reads.
        inputs: input names of the model that trains on the row.

    Raises:
        LayoutError: names the column.
    """
    for name in row.keys() - set(read_columns):
        value = row[name]
        has_numbers = _has_numbers(value)
        if value is not None:
            check_column(name, read_columns, inputs, has_numbers=has_numbers)
        if inputs is not None and has_numbers and len(value) == tokens > 1:
            _warn_of_unread_column(name, tuple(sorted(read_columns)))


def check_column(
    name: str, read_columns: Collection[str], inputs: InputNames, *, has_numbers: bool
) -> None:
    """Raise if this unread column may be an input of the model, or may become one.

    Args:
        name: name of the column.
        read_columns: the columns that the caller reads.
        inputs: input names of the model. If they are None, any column of numbers may be an input.
        has_numbers: True if the column has lists of numbers.

    Raises:
        LayoutError: names the column.
    """
    checks = (
        (
            name in _REFUSED_COLUMNS,
            ", which tells what the documents or targets are",
            "Give documents with their labels, and remove the column, or use another collator.",
        ),
        (
            name in _MEDIA_INPUTS and (inputs is None or _MEDIA_INPUTS[name] in inputs),
            ", from which another collator would make an input of the model",
            "Remove the column if the model trains on text alone, or use another collator.",
        ),
        (
            inputs is None and has_numbers,
            " of numbers, which may be an input of the model",
            "Remove the column, or pass the model, as in PackingCollator(model): columns that "
            "the model's forward does not take are left out.",
        ),
        (
            name in (inputs or ()),
            ", an input of the model",
            "Remove the column, or use another collator.",
        ),
    )
    for is_wrong, description, remedy in checks:
        if is_wrong:
            raise LayoutError(
                f"a row has a column {name!r}{description}. Only "
                f"{', '.join(sorted(read_columns))} are read here, so this column would be lost. "
                f"{remedy}"
            )


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a list, array or tensor of numbers, not a single number."""
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
def _warn_of_unread_column(name: str, read_columns: tuple[str, ...]) -> None:
    _log.warning(
        "column %r has a number for each token, and is not read: only %s are. Remove it if it "
        "does not matter.",
        name,
        ", ".join(read_columns),
    )


def convert_integers(values: Any, name: str) -> IntArray:
    """Convert a flat list, array or tensor of integers to a one-dimensional int64 array.

    Args:
        values: the integers.
        name: name of their column. Columns of masks may be bool.

    Raises:
        LayoutError: if the values are not a flat row of integers.
    """
    kinds = "iub" if "mask" in name else "iu"
    try:
        row = values.numpy(force=True) if isinstance(values, torch.Tensor) else values
        if not isinstance(row, np.ndarray):
            numbers = list(row)
            if numbers and isinstance(numbers[0], bool) and "b" not in kinds:
                raise TypeError("they are bool")
            # `array` accepts only integers, and reads a list in a third of numpy's time.
            row = np.frombuffer(array("q", numbers), dtype=np.int64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers ({error})."
        ) from error
    if row.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # an empty array may have any dtype
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
