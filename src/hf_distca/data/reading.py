"""Reads lengths and pieces of documents, and samples that ranks compare to find differences.

Only tokens that are needed are read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hf_distca.agreement.dealt_share import hash_numbers
from hf_distca.data.borrowed_readers import get_row_indices
from hf_distca.data.collator import make_labels
from hf_distca.data.columns import (
    ROW_COLUMNS,
    TARGET_MASKS,
    InputNames,
    check_column,
    check_columns,
    convert_integers,
)
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray, require_integers

_READ_COLUMNS = ROW_COLUMNS | {"position_ids"}
_OTHER_COLUMNS = _READ_COLUMNS - {"input_ids"}  # the column of tokens may have another name


class DocumentReader:
    """Reads only the chosen documents of a data set.

    Args:
        documents: a `datasets.Dataset`, or a sequence of rows or of tokens. Only the slices in use
            are copied from a `datasets.Dataset`.
        column: column of the tokens.
        inputs: input names of the model that trains on the documents.
    """

    def __init__(self, documents: Any, column: str, inputs: InputNames = None) -> None:
        self.column = column
        self._inputs = inputs
        self._is_stored = is_stored_dataset(documents)
        if self._is_stored:
            _check_stored_columns(documents, column, inputs)
            others = _OTHER_COLUMNS.intersection(documents.column_names) - {column}
            documents = documents.with_format("arrow", columns=[column, *sorted(others)])
        self._documents = documents

    def read_rows(self, numbers: IntArray) -> list[Mapping[str, Any]]:
        """Read the documents with these numbers, as rows for `DocumentPiece`.

        Raises:
            LayoutError: if a column that is not read may be an input of the model.
        """
        if not len(numbers):
            return []
        if not self._is_stored:
            return [
                convert_document(self._documents[number], self.column, number, self._inputs)
                for number in numbers.tolist()
            ]
        table = self._documents[numbers.tolist()]
        names = {name: "input_ids" if name == self.column else name for name in table.column_names}
        columns = [_view_lists(table.column(name), name) for name in names]
        return [dict(zip(names.values(), row, strict=True)) for row in zip(*columns, strict=True)]

    def compute_digest(self) -> int:
        """Compute a hash of a sample of tokens. All ranks take the same sample."""
        count = len(self._documents)
        sample = np.arange(count)
        if count > SAMPLE_COUNT:
            random = np.random.PCG64(count).random_raw(SAMPLE_COUNT)
            sample = (random % np.uint64(count)).astype(np.int64)
        numbers = np.unique(np.append(sample, [0, count - 1][:count]))
        rows = zip(numbers.tolist(), self.read_rows(numbers), strict=True)
        lengths = ((row, count_tokens(row["input_ids"], "input_ids", n)) for n, row in rows)
        return hash_pieces([DocumentPiece(row, 0, length) for row, length in lengths if length])


def convert_document(
    document: Any, column: str, number: int, inputs: InputNames = None
) -> Mapping[str, Any]:
    """Convert a document to a row for `DocumentPiece`.

    Args:
        document: tokens, or a row with a column of tokens.
        column: name of that column.
        number: number of the document, for errors.
        inputs: input names of the model that trains on the document.

    Raises:
        LayoutError: if the row was packed from several documents, or if it has a column that is not
            read and may be an input of the model.
    """
    if not hasattr(document, "keys"):
        return {"input_ids": document}
    tokens = count_tokens(document, column, number)
    others = {name: document[name] for name in document if name not in (column, "input_ids")}
    if others.get("seq_lengths") is not None:
        raise LayoutError(_PACKED_ROW_ERROR)
    check_columns(others, tokens, _READ_COLUMNS, inputs)
    read = {name: others[name] for name in others if name in _OTHER_COLUMNS}
    return {"input_ids": document[column], **read}


_PACKED_ROW_ERROR = (
    "a row has a column 'seq_lengths', so it was packed already, and would be dealt as one "
    "document. Give its documents one by one."
)


def _check_stored_columns(documents: Any, column: str, inputs: InputNames) -> None:
    """Check the columns of a `datasets.Dataset` by their types.

    This refuses the columns that `convert_document` refuses in a row. Later, only the columns in
    use are read, so all other columns must be checked here.
    """
    for name in sorted(set(documents.column_names) - {column, *_READ_COLUMNS}):
        stored = documents.data.column(name)
        if stored.null_count == len(stored):
            continue
        if name == "seq_lengths":
            raise LayoutError(_PACKED_ROW_ERROR)
        check_column(name, _READ_COLUMNS, inputs, has_numbers=_is_list_of_numbers(stored.type))
    if inputs is not None and len(documents):
        # Columns with one number for each token cause a warning. To find them, a row must be read,
        # because types do not tell how many numbers a list has.
        convert_document(documents.with_format(None)[0], column, 0, inputs)


def _is_list(arrow_type: Any) -> bool:
    """Return whether an Arrow type is a list type."""
    return hasattr(arrow_type, "value_field")


def _is_list_of_numbers(arrow_type: Any) -> bool:
    """Return whether an Arrow type is a list of numbers, or a nested list of numbers."""
    from pyarrow import types

    stored = getattr(arrow_type, "storage_type", arrow_type)  # the type inside an extension type
    value = stored
    while _is_list(value):
        value = value.value_type
    is_number = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
    return bool(is_number and _is_list(stored))


def _view_lists(column: Any, name: str) -> list[np.ndarray | None]:
    """Return each list of an Arrow column as an array, and each missing list as None.

    Lists without missing values are not copied.

    Raises:
        LayoutError: if the column does not hold lists. The error calls the column `name`.
    """
    if not _is_list(column.type) and column.null_count < len(column):
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; here they are "
            f"{column.type}."
        )
    lists = [getattr(row, "values", None) for row in column]
    return [None if row is None else row.to_numpy(zero_copy_only=False) for row in lists]


def is_stored_dataset(documents: Any) -> bool:
    """Return whether documents are a `datasets.Dataset` whose stored Arrow table can be read.

    The table cannot be read if the user has set a transform, because the transform makes the rows.
    """
    return is_datasets_class("Dataset", documents) and documents.format["type"] != "custom"


def is_datasets_class(name: str, documents: object) -> bool:
    """Return whether documents are an instance of a class of `datasets`, such as ``"Dataset"``."""
    datasets = sys.modules.get("datasets")  # None if nothing imported it
    return datasets is not None and isinstance(documents, getattr(datasets, name, ()))


def read_document_lengths(
    documents: Any, column: str = "input_ids", lengths: Any = None, *, quiet: bool = False
) -> IntArray:
    """Read the number of tokens of each document, (documents,) int64; 0 for missing documents.

    Args:
        documents: a `datasets.Dataset`, or a sequence. Each item of a sequence is tokens, or a row
            with the column. A sequence is read in full. From a `datasets.Dataset`, only the offsets
            of the column are read.
        column: column of the tokens.
        lengths: the lengths, the name of a column of lengths, or None if they are unknown.
        quiet: show no progress bar.

    Raises:
        LayoutError: if the column does not exist or is not a flat list of integers for each
            document, or if lengths are not one whole number for each document.
    """
    if isinstance(lengths, str):
        counts = _read_length_column(documents, lengths)
    elif lengths is not None:
        counts = require_integers(lengths, "lengths of documents")
    elif is_datasets_class("Dataset", documents):
        counts = _read_offsets(documents, column)
    else:
        bar = tqdm(
            documents, "reading lengths of documents", delay=1.0, disable=quiet, unit=" documents"
        )
        numbered = (count_tokens(document, column, number) for number, document in enumerate(bar))
        counts = np.fromiter(numbered, dtype=np.int64)
    if len(counts) != len(documents):
        raise LayoutError(
            f"{len(counts)} lengths for {len(documents)} documents: give one for each document."
        )
    return counts


def _read_length_column(documents: Any, name: str) -> IntArray:
    if not is_datasets_class("Dataset", documents):
        return require_integers([row[name] for row in documents], f"lengths in column {name!r}")
    import pyarrow as pa

    values = _select_rows(documents, _get_stored_column(documents, name))
    if not pa.types.is_integer(values.type) or values.null_count:
        raise LayoutError(
            f"column {name!r} of the documents holds {values.type} with {values.null_count} "
            "missing values: lengths must be whole numbers, one for each document."
        )
    return np.asarray(values.to_numpy()).astype(np.int64)


def _read_offsets(documents: Any, column: str) -> IntArray:
    """Read lengths from the offsets of lists in Arrow, without reading tokens."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = _get_stored_column(documents, column)
    arrow_type = values.type
    if pa.types.is_null(arrow_type):  # every document is missing
        return np.zeros(len(documents), dtype=np.int64)
    value_type = arrow_type.value_type if _is_list(arrow_type) else None
    if value_type is None or not (pa.types.is_integer(value_type) or pa.types.is_null(value_type)):
        raise LayoutError(
            f"column {column!r} of the documents holds {arrow_type}: it must be a flat list of "
            "integers for each document. Tokenize first, or name the column that holds the tokens."
        )
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    return np.asarray(_select_rows(documents, lengths).to_numpy()).astype(np.int64)


def _get_stored_column(documents: Any, name: str) -> Any:
    """Return a column with all stored rows. The data set may have only some of these rows."""
    if name not in documents.column_names:
        raise LayoutError(
            f"the documents have no column {name!r}. Their columns: "
            f"{', '.join(map(repr, documents.column_names)) or 'none'}."
        )
    return documents.data.column(name)


def _select_rows(documents: Any, values: Any) -> Any:
    """Select the values of the data set's rows from the values of all stored rows.

    After `filter`, `shuffle` or `select`, a data set still stores all rows, and records which rows
    it has.
    """
    indices = get_row_indices(documents)
    return values if indices is None else values.take(indices.column(0))


def count_tokens(document: Any, column: str, number: int) -> int:
    """Count the tokens of a document; 0 if it is missing.

    Args:
        document: tokens, or a row with a column of tokens.
        column: name of that column.
        number: number of the document, for errors.

    Raises:
        LayoutError: if the column does not exist or is not a flat list.
    """
    if hasattr(document, "keys"):
        if column not in document:
            raise LayoutError(
                f"document {number} has no column {column!r}. Its columns: "
                f"{', '.join(map(repr, document)) or 'none'}."
            )
        document = document[column]
    if document is None:
        return 0
    shape = getattr(document, "shape", None)
    if shape is not None:
        is_flat = len(shape) == 1
    else:
        is_list = hasattr(document, "__len__") and not isinstance(document, str)
        is_flat = is_list and not (len(document) and hasattr(document[0], "__len__"))
    if not is_flat:
        shaped = "" if shape is None else f" and shape {tuple(shape)}"
        raise LayoutError(
            f"document {number} has type {type(document).__name__}{shaped}: it must be a flat list "
            f"of integers, or a row with such a list in {column!r}."
        )
    return len(document)


# Ranks compare at most this many documents.
SAMPLE_COUNT = 64
# Ranks compare this many tokens at the beginning, in the middle and at the end of each document.
_SAMPLE_TOKENS = 64
_PADDING_REMEDY = "documents to deal must have no padding. Tokenize with padding=False."
_PACKED_MASK_REMEDY = (
    "the row was packed already, and would be dealt as one document. Give its documents one by "
    "one, or train with PackingCollator, which accepts packed rows."
)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPiece:
    """Tokens [start, end) of a document. They are trained on as a separate document.

    Attributes:
        row: the document as columns that can be sliced: ``input_ids``, and possibly ``labels``,
            ``attention_mask``, ``position_ids`` and masks of targets. It is empty for padding.
        start, end: bounds of the piece, in tokens of the document.
    """

    row: Mapping[str, Any]
    start: int
    end: int

    def read_tokens(self, begin: int, end: int) -> IntArray:
        """Read the tokens [begin, end) of the piece, (tokens,) int64.

        Raises:
            LayoutError: if a token is padding, if positions are not consecutive, or if the document
                has fewer tokens than expected from its length.
        """
        positions = np.arange(self.start + begin, self.start + end)
        for name, expected in (
            ("attention_mask", np.ones_like(positions)),
            ("position_ids", positions),
        ):
            values = self._read_slice(name, begin, end) if self._has_column(name) else expected
            wrong = np.flatnonzero(values != expected)
            if len(wrong):
                value = values[wrong[0]]
                place = f"at token {positions[wrong[0]]}"
                if name == "position_ids":
                    raise LayoutError(
                        f"position_ids of a document is {int(value)} {place}, but positions must "
                        "count from 0 without gaps. If the row was packed already, it would be "
                        "dealt as one document. If the document has gaps, dealing would lose them. "
                        "Give documents one by one, without position_ids."
                    )
                remedy = _PACKED_MASK_REMEDY if value else _PADDING_REMEDY
                raise LayoutError(f"{name} of a document is {int(value)} {place}: {remedy}")
        return self._read_slice("input_ids", begin, end)

    def read_sample(self) -> IntArray:
        """Read tokens at the beginning, middle and end of the piece, without checks."""
        count = self.end - self.start
        last = max(0, count - _SAMPLE_TOKENS)
        return np.concatenate(
            [
                self._read_slice("input_ids", begin, min(begin + _SAMPLE_TOKENS, count))
                for begin in (0, last // 2, last)
            ]
        )

    def read_labels(self, begin: int, end: int) -> IntArray:
        """Read the labels of the tokens [begin, end) of the piece, (tokens,) int64.

        For a document without labels, see `make_labels`.
        """
        if self._has_column("labels"):
            return self._read_slice("labels", begin, end)
        masks = [
            self._read_slice(name, begin, end) for name in TARGET_MASKS if self._has_column(name)
        ]
        return make_labels(self._read_slice("input_ids", begin, end), masks)

    def _has_column(self, name: str) -> bool:
        return self.row.get(name) is not None

    def _read_slice(self, name: str, begin: int, end: int) -> IntArray:
        column = self.row[name]
        if hasattr(column, "__len__") and getattr(column, "shape", None) != ():
            column = column[self.start + begin : self.start + end]
        values = convert_integers(column, name)  # raises if the column is one number
        if len(values) != end - begin:
            raise LayoutError(
                f"the {name} of a document end before token {self.start + end}, but its length or "
                "other columns say that it has more tokens. Give one value for each token."
            )
        return values


def hash_pieces(pieces: Sequence[DocumentPiece]) -> int:
    """Hash a sample of the tokens of pieces to a number below 2**56. Tokens may be any integers."""
    indices = np.unique(np.linspace(0, max(len(pieces) - 1, 0), SAMPLE_COUNT).astype(np.int64))
    samples = [pieces[index].read_sample() for index in indices if index < len(pieces)]
    return hash_numbers(part for sample in samples for part in ([len(sample)], sample))
