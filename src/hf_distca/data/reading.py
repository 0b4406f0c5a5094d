"""Readers of documents, which read only slices of them, and their lengths."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hf_distca.data.borrowed_readers import kept_rows
from hf_distca.data.columns import COLUMNS, NO_INPUTS, ForwardInputs, check_column, check_columns
from hf_distca.data.pieces import SAMPLED, Piece, digest_of
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray, require_integers

__all__ = ["Reader", "as_row", "document_lengths", "is_of", "is_stored", "length_of"]

_READ = COLUMNS | {"position_ids"}


class Reader:
    """Reads some of many documents.

    Args:
        documents: a `datasets.Dataset`, of which nothing is copied before it is sliced, or a
            sequence of rows or of tokens.
        column: column of the tokens.
        inputs: inputs of the model that trains on them.
    """

    def __init__(self, documents: Any, column: str, inputs: ForwardInputs = NO_INPUTS) -> None:
        self.column, self._inputs = column, inputs
        self._arrow = is_stored(documents)
        if self._arrow:
            _check_stored_columns(documents, column, inputs)
            documents = documents.with_format("arrow", columns=[column, *_others(documents.column_names, column)])
        self._documents = documents

    def rows(self, numbers: IntArray) -> list[Mapping[str, Any]]:
        """Return the documents of these numbers, as rows for `Piece`."""
        if not len(numbers):
            return []
        if not self._arrow:
            return [as_row(self._documents[number], self.column, number, self._inputs) for number in numbers.tolist()]
        table = self._documents[numbers.tolist()]
        names = {name: "input_ids" if name == self.column else name for name in table.column_names}
        columns = [_row_views(table.column(name)) for name in names]
        return [dict(zip(names.values(), row, strict=True)) for row in zip(*columns, strict=True)]

    def digest(self) -> int:
        """Return a hash of some tokens of some documents, the same ones on all ranks."""
        count = len(self._documents)
        chosen = np.random.PCG64(count).random_raw(SAMPLED) % np.uint64(count) if count > SAMPLED else np.arange(count)
        numbers = np.unique(np.append(chosen.astype(np.int64), [0, count - 1][:count]))
        read = zip(numbers.tolist(), self.rows(numbers), strict=True)
        lengths = [(row, length_of(row["input_ids"], "input_ids", number)) for number, row in read]
        return digest_of([Piece(row, 0, length) for row, length in lengths if length])


def as_row(document: Any, column: str, number: int, inputs: ForwardInputs = NO_INPUTS) -> Mapping[str, Any]:
    """Convert a document, which is its tokens or a row with them in a column, to
    a row for `Piece`; `number` is for errors.
    """
    if not hasattr(document, "keys"):
        return {"input_ids": document}
    tokens = length_of(document, column, number)
    row = {"input_ids": document[column], **{name: document[name] for name in document if name != column}}
    if row.get("seq_lengths") is not None:
        raise LayoutError(_PACKED_ROW)
    check_columns(row, tokens, _READ, inputs)
    return {"input_ids": row["input_ids"], **{name: row[name] for name in _others(row, column)}}


_PACKED_ROW = (
    "a row has a column 'seq_lengths': it was packed already, and would be dealt as one document. Give its documents one by one."
)


def _check_stored_columns(documents: Any, column: str, inputs: ForwardInputs) -> None:
    """Check the columns of a `datasets.Dataset` as `as_row` checks a row, by their
    stored types: rows are read in slices later.
    """
    names = [name for name in documents.column_names if name != column and name not in _READ]
    for name in names:
        stored = documents.data.column(name)
        if stored.null_count == len(stored):
            continue
        if name == "seq_lengths":
            raise LayoutError(_PACKED_ROW)
        check_column(name, _READ, inputs, numbers=_stores_numbers(stored.type))
    if inputs.names is not None and len(documents):
        as_row(documents.with_format(None)[0], column, 0, inputs)  # warns of numbers for each token


def _stores_numbers(kind: Any) -> bool:
    """Return whether an Arrow type is one of lists of numbers."""
    import pyarrow as pa

    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth > 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _others(names: Collection[str], column: str) -> list[str]:
    """List the columns of a row that are read beside that of its tokens."""
    return [name for name in (*sorted(COLUMNS - {"input_ids"}), "position_ids") if name in names and name != column]


def _row_views(column: Any) -> list[np.ndarray | None]:
    """Return each list of an Arrow column as an array: a view where no value is missing.

    None for a missing list.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    views: list[np.ndarray | None] = []
    for chunk in column.chunks:
        if pa.types.is_null(chunk.type):
            views += [None] * len(chunk)
            continue
        array = chunk.flatten().to_numpy(zero_copy_only=False)
        if len(chunk) == 1:  # as nearly always: rows from here and there are chunks of their own
            views.append(None if chunk.null_count else array)
            continue
        missing = chunk.is_null().to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False))
        views += [None if gone else array[a:b] for gone, a, b in zip(missing, [0, *ends[:-1]], ends, strict=True)]
    return views


def is_stored(documents: Any) -> bool:
    """True for a `datasets.Dataset` whose columns can be read as Arrow stores them: no transform of the user's makes its rows."""
    return is_of("Dataset", documents) and documents.format["type"] != "custom"


def is_of(name: str, documents: object) -> bool:
    """Return whether documents are of a class of `datasets`, such as ``"Dataset"``."""
    datasets = sys.modules.get("datasets")  # nothing is of a package that was never imported
    return datasets is not None and isinstance(documents, getattr(datasets, name, ()))


def document_lengths(documents: Any, column: str = "input_ids", lengths: Any = None, *, quiet: bool = False) -> IntArray:
    """Return the number of tokens of each document: int64, as many as there are documents.

    A missing (null) document has 0.

    Args:
        documents: a `datasets.Dataset`, of which only the offsets of the column are read; or a
            sequence of documents, each of which is read: a row with the column, or the tokens
            themselves.
        column: column of the tokens.
        lengths: the numbers, or the name of the column that holds them, if they are known.
        quiet: show no progress bar.

    Raises:
        LayoutError: if there is no such column, it does not hold a flat list of integers a row, or
            lengths are not one whole number of at least 0 a document.
    """
    if isinstance(lengths, str):
        counts = _column_of_counts(documents, lengths)
    elif lengths is not None:
        counts = require_integers(lengths, "lengths of documents")
    elif is_of("Dataset", documents):
        counts = _from_offsets(documents, column)
    else:
        bar = tqdm(documents, "reading lengths of documents", delay=1.0, disable=quiet, unit=" documents")
        numbered = (length_of(document, column, number) for number, document in enumerate(bar))
        counts = np.fromiter(numbered, dtype=np.int64)
    if len(counts) != len(documents):
        raise LayoutError(f"{len(counts)} lengths for {len(documents)} documents: give one for each.")
    if len(counts) and counts.min() < 0:
        raise LayoutError(f"document {counts.argmin()} has length {counts.min()}: lengths are at least 0.")
    return counts


def _column_of_counts(documents: Any, name: str) -> IntArray:
    if not is_of("Dataset", documents):
        return require_integers([row[name] for row in documents], f"lengths in column {name!r}")
    import pyarrow as pa

    values = _in_order(documents, _arrow_column(documents, name))
    if not pa.types.is_integer(values.type) or values.null_count:
        raise LayoutError(
            f"column {name!r} of the documents holds {values.type} with {values.null_count} missing values: lengths are whole "
            "numbers, one for each document."
        )
    return np.asarray(values.to_numpy()).astype(np.int64)


def _from_offsets(documents: Any, column: str) -> IntArray:
    """Read lengths from the offsets that Arrow keeps for each list beside the tokens."""
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
    """Return the stored column; the data set has some of its rows, see `_in_order`."""
    if name not in documents.column_names:
        raise LayoutError(
            f"the documents have no column {name!r}, only {', '.join(map(repr, documents.column_names)) or 'none'}."
        )
    return documents.data.column(name)


def _in_order(documents: Any, values: Any) -> Any:
    """Pick the values of the data set's rows from those of stored rows: `filter`,
    `shuffle` and `select` only note which they keep.
    """
    indices = kept_rows(documents)
    return values if indices is None else values.take(indices.column(0))


def length_of(document: Any, column: str, number: int) -> int:
    """Return the number of tokens of a document, a row with the column or
    the tokens themselves; 0 if it is missing.
    """
    if hasattr(document, "keys"):
        if column not in document:
            raise LayoutError(f"document {number} has no {column!r}, only {', '.join(map(repr, document))}.")
        document = document[column]
    if document is None:
        return 0
    if (shape := getattr(document, "shape", None)) is not None:
        is_flat = len(shape) == 1
    else:
        is_list = hasattr(document, "__len__") and not isinstance(document, str)
        is_flat = is_list and not (len(document) and hasattr(document[0], "__len__"))
    if not is_flat:
        shaped = "" if shape is None else f" of shape {tuple(shape)}"
        raise LayoutError(
            f"document {number} is of {type(document).__name__}{shaped}: it must be a flat list of integers, or a row with one "
            f"in {column!r}."
        )
    return len(document)
