"""Documents of packed rows are found in every form that packers write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.data.row_placement import find_row_documents
from hf_distca.errors import LayoutError

END = 2
ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6)


def make_rows(lengths: list[list[int]], form: str) -> list[dict[str, Any]]:
    """Make rows of documents; each document ends with `END`, unless the row cuts it."""
    if form == "documents":
        return [{"documents": [[5] * length for length in row]} for row in lengths]
    tokens = [{"input_ids": [5] * sum(row)} for row in lengths]
    if form == "seq_lengths":
        return [
            row | {"seq_lengths": row_lengths}
            for row, row_lengths in zip(tokens, lengths, strict=True)
        ]
    if form == "position_ids":
        positions = [[place for length in row for place in range(length)] for row in lengths]
        return [
            row | {"position_ids": places} for row, places in zip(tokens, positions, strict=True)
        ]
    ended = [[token for length in row for token in [5] * (length - 1) + [END]] for row in lengths]
    return [{"input_ids": [*row[:-1], 5]} for row in ended]


@pytest.mark.parametrize("form", ["documents", "seq_lengths", "position_ids", "end of document"])
@settings(max_examples=15)
@given(lengths=ROWS, seed=st.integers(0, 9))
def test_all_forms_give_the_same_documents(form: str, lengths: list[list[int]], seed: int) -> None:
    end = END if form == "end of document" else None
    rows = make_rows(lengths, form)
    stored = Dataset.from_list([rows[0], *rows]).select(range(1, len(rows) + 1))
    for given_ in (
        rows,
        stored,
        stored.with_format("torch"),
        stored.with_transform(lambda batch: batch),
    ):
        found, row = find_row_documents(given_, end, quiet=True)
        assert found.dtype == row.dtype == np.int64
        assert [found[row == number].tolist() for number in range(len(rows))] == lengths


def test_rows_without_document_columns_are_one_document() -> None:
    found, row = find_row_documents([{"input_ids": [1, 2, 3]}, {"input_ids": []}], quiet=True)
    assert (found.tolist(), row.tolist()) == ([3, 0], [0, 1])
    found, row = find_row_documents(
        Dataset.from_dict({"seq_lengths": [[4, 1], None, []]}), quiet=True
    )
    assert (found.tolist(), row.tolist()) == ([4, 1], [0, 0])


def test_invalid_rows_are_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"columns text\..* is read from documents or seq_lengths"
    ):
        find_row_documents([{"text": "a"}])
    with pytest.raises(LayoutError, match=r"columns documents\..* is read from input_ids: add"):
        find_row_documents([{"documents": [3]}], end_of_document=0)
    with pytest.raises(LayoutError, match="rows have type list: they must be mappings"):
        find_row_documents([[1, 2]])
