"""How many tokens documents have, without reading the tokens where that can be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hf_distca.borrowed import kept_rows
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray, as_integers

__all__ = ["document_lengths", "is_arrow", "length_of", "splits_itself"]


def is_arrow(documents: object) -> bool:
    """Whether documents are a `datasets.Dataset`."""
    return _is_of("Dataset", documents)


def splits_itself(documents: object) -> bool:
    """Whether documents are a `datasets.IterableDataset`, of which each worker of a loader reads other files."""
    return _is_of("IterableDataset", documents)


def _is_of(name: str, documents: object) -> bool:
    datasets = sys.modules.get("datasets")  # nothing is of a package that was never imported
    return datasets is not None and isinstance(documents, getattr(datasets, name, ()))


def document_lengths(documents: Any, column: str = "input_ids", lengths: Any = None, *, quiet: bool = False) -> IntArray:
    """Tokens of each document: int64, as many as there are documents. A missing (null) document has 0.

    Args:
        documents: a `datasets.Dataset`, of which only the offsets of the column are read; or a sequence of documents, each
            of which is read: a row with the column, or the tokens themselves.
        column: where the tokens are.
        lengths: the numbers, or the name of the column that holds them, if they are known.
        quiet: show no progress bar.

    Raises:
        LayoutError: if there is no such column, it does not hold a flat list of integers a row, or lengths are not one whole
            number of at least 0 a document.
    """
    if isinstance(lengths, str):
        counts = _column_of_counts(documents, lengths)
    elif lengths is not None:
        counts = as_integers(lengths, "lengths of documents")
    elif is_arrow(documents):
        counts = _from_offsets(documents, column)
    else:
        counts = _one_by_one(documents, column, quiet)
    if len(counts) != len(documents):
        raise LayoutError(f"{len(counts)} lengths for {len(documents)} documents: give one for each.")
    if len(counts) and counts.min() < 0:
        at = int(counts.argmin())
        raise LayoutError(f"document {at} has length {counts[at]}: lengths are at least 0.")
    return counts


def _column_of_counts(documents: Any, name: str) -> IntArray:
    if not is_arrow(documents):
        return as_integers([row[name] for row in documents], f"lengths in column {name!r}")
    import pyarrow as pa

    values = _in_order(documents, _arrow_column(documents, name))
    if not pa.types.is_integer(values.type) or values.null_count:
        raise LayoutError(
            f"column {name!r} of the documents holds {values.type} with {values.null_count} missing values: lengths are whole "
            "numbers, one for each document."
        )
    return np.asarray(values.to_numpy()).astype(np.int64)


def _from_offsets(documents: Any, column: str) -> IntArray:
    """Arrow keeps where each list begins and ends beside the tokens."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = _arrow_column(documents, column)
    kind = values.type
    if pa.types.is_null(kind):  # nothing but missing documents
        return np.zeros(len(documents), dtype=np.int64)
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise LayoutError(
            f"column {column!r} of the documents holds {kind}: it must be a flat list of integers for each document. Tokenize "
            "first, or name the column that holds the tokens."
        )
    return np.asarray(_in_order(documents, pc.fill_null(pc.list_value_length(values), 0)).to_numpy()).astype(np.int64)


def _arrow_column(documents: Any, name: str) -> Any:
    """The stored column; rows of the data set are some of its rows, see `_in_order`."""
    if name not in documents.column_names:
        raise LayoutError(
            f"the documents have no column {name!r}, only {', '.join(map(repr, documents.column_names)) or 'none'}."
        )
    return documents.data.column(name)


def _in_order(documents: Any, values: Any) -> Any:
    """Values of stored rows as values of the data set's rows: `filter`, `shuffle` and `select` only note which rows they keep."""
    indices = kept_rows(documents)
    return values if indices is None else values.take(indices.column(0))


def _one_by_one(documents: Sequence[Any], column: str, quiet: bool) -> IntArray:
    bar = tqdm(documents, "reading lengths of documents", delay=1.0, disable=quiet, unit=" documents")
    counts = np.zeros(len(documents), dtype=np.int64)
    for at, document in enumerate(bar):
        counts[at] = length_of(document, column, at)
    return counts


def length_of(document: Any, column: str, at: int) -> int:
    """Tokens of document number `at`, a row with the column or the tokens themselves; 0 of a missing one.

    Raises:
        LayoutError: if it is no such document.
    """
    if hasattr(document, "keys"):
        if column not in document:
            raise LayoutError(f"document {at} has no {column!r}, only {', '.join(map(repr, document))}.")
        document = document[column]
    if document is None:
        return 0
    shape = getattr(document, "shape", None)
    nested = len(shape) != 1 if shape is not None else not hasattr(document, "__len__") or isinstance(document, str)
    if not nested and shape is None and len(document):
        nested = hasattr(document[0], "__len__")
    if nested:
        raise LayoutError(
            f"document {at} is of {type(document).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}: it must be a "
            f"flat list of integers, or a row with one in {column!r}."
        )
    return len(document)
