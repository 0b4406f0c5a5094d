"""Lengths of the documents in packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hf_distca.data.reading import is_stored_dataset, read_document_lengths
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

# Columns that tell which documents a row has, as for `PackingCollator`; the first one decides.
_DOCUMENT_COLUMNS = ("documents", "seq_lengths", "position_ids")
_ROWS_PER_READ = 1024  # rows of a `datasets.Dataset` at once


def find_row_documents(
    rows: Any, end_of_document: int | None = None, *, quiet: bool = False
) -> tuple[IntArray, IntArray]:
    """Find the documents of all rows of a data set.

    Args:
        rows: a `datasets.Dataset`, or a sequence of mappings. A column ``documents``,
            ``seq_lengths`` or ``position_ids`` tells where documents begin, as for
            `PackingCollator`; without one, a row is one document. Of a `datasets.Dataset` only that
            column is read.
        end_of_document: token id with which documents end, to find them in ``input_ids`` instead.
        quiet: show no progress bar.

    Returns:
        The number of tokens of each document, and the number of its row: (documents,) int64 each.

    Raises:
        LayoutError: if rows have none of these columns.
    """
    column = _choose_column(rows, end_of_document)
    if column == "input_ids" and end_of_document is None:
        return read_document_lengths(rows, quiet=quiet), np.arange(len(rows))
    lengths = [np.zeros(0, dtype=np.int64)]
    counts = [np.zeros(0, dtype=np.int64)]
    for values, count in _read_blocks(rows, column, quiet=quiet):
        if column in ("input_ids", "position_ids"):
            starts = _find_starts(values, count, end_of_document)
            values = np.diff(starts, append=len(values))
            count = np.diff(np.searchsorted(starts, np.cumsum(count)), prepend=0)
        lengths.append(values.astype(np.int64))
        counts.append(count)
    documents = np.concatenate(counts)
    return np.concatenate(lengths), np.repeat(np.arange(len(documents)), documents)


def _choose_column(rows: Any, end_of_document: int | None) -> str:
    """Choose the column that tells which documents rows have."""
    if is_stored_dataset(rows):
        names: list[str] = list(rows.column_names)
    else:
        row = rows[0] if len(rows) else {"input_ids": []}
        if not hasattr(row, "keys"):
            raise LayoutError(
                f"rows are of {type(row).__name__}: they must be mappings, with input_ids."
            )
        names = list(row.keys())
    choices = ("input_ids",) if end_of_document is not None else (*_DOCUMENT_COLUMNS, "input_ids")
    column: str | None = next((name for name in choices if name in names), None)
    if column is None:
        raise LayoutError(
            f"rows have the columns {', '.join(names) or 'none'}: one of input_ids, "
            f"{', '.join(_DOCUMENT_COLUMNS)} tells how long their documents are."
        )
    return column


def _find_starts(values: IntArray, count: IntArray, end_of_document: int | None) -> IntArray:
    """Find the indices at which documents begin, (documents,) int64.

    Args:
        values: (tokens,) positions of rows, or their tokens if `end_of_document` is given.
        count: (rows,) number of tokens of each row.
        end_of_document: token id with which documents end.
    """
    is_start = np.zeros(len(values) + 1, dtype=np.bool_)
    is_start[np.cumsum(count) - count] = True
    if end_of_document is None:
        is_start[:-1] |= values == 0
    else:
        is_start[1:] |= values == end_of_document
    return np.flatnonzero(is_start[:-1])


def _read_blocks(rows: Any, column: str, *, quiet: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the numbers of a column for some rows at a time, and their count in each row.

    For the column of documents, numbers are the lengths of documents.
    """
    with tqdm(
        total=len(rows), desc=f"reading {column}", delay=1.0, disable=quiet, unit=" rows"
    ) as bar:
        if is_stored_dataset(rows):
            stored = rows.with_format("arrow", columns=[column])
            for first in range(0, len(rows), _ROWS_PER_READ):
                values = stored[first : first + _ROWS_PER_READ].column(column).combine_chunks()
                yield _read_stored_lists(values)
                bar.update(len(values))
            return
        for number in range(len(rows)):
            value = rows[number][column]
            value = [len(document) for document in value] if column == "documents" else value
            numbers = np.asarray(value if value is not None else [], dtype=np.int64).reshape(-1)
            yield numbers, np.array([len(numbers)])
            bar.update()


def _read_stored_lists(values: Any) -> tuple[IntArray, IntArray]:
    """Read the numbers in an Arrow array of lists, and their count in each list.

    For lists of lists, numbers are the lengths of the inner lists.
    """
    import pyarrow.compute as pc

    count = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    inner = pc.list_flatten(values)
    if hasattr(inner.type, "value_type"):
        inner = pc.fill_null(pc.list_value_length(inner), 0)
    return inner.to_numpy(zero_copy_only=False), count.astype(np.int64)
