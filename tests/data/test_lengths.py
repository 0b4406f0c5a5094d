"""Document lengths from Arrow offsets, a column or documents, in the order of the rows."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from hf_distca.data.reading import read_document_lengths
from hf_distca.errors import LayoutError

ROWS = [[5, 6, 7], [], [8], [9, 4, 4, 4], [1, 2]]
LENGTHS = [3, 0, 1, 4, 2]


def make_data(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": ROWS, **columns})


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())]
)
def test_lengths_of_arrow_columns_are_read_without_rows(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked = pa.chunked_array([pa.array(ROWS[:2], kind), pa.array(ROWS[2:], kind)])
    documents = datasets.Dataset(pa.table({"input_ids": chunked}))
    monkeypatch.setattr(datasets.Dataset, "_getitem", None)  # no row is read
    assert read_document_lengths(documents).tolist() == LENGTHS


def test_lengths_follow_the_order_of_selected_or_shuffled_rows() -> None:
    documents = make_data()
    for changed in (
        documents.select([4, 0, 3]),
        documents.select(range(1, 4)),
        documents.shuffle(seed=3),
        documents.filter(lambda row: len(row["input_ids"]) != 1),
        documents.shuffle(seed=1).filter(lambda row: len(row["input_ids"]) > 1).select([2, 0]),
        datasets.concatenate_datasets([documents.select([3, 1]), documents]),
        documents.with_format("torch"),
        documents.select([]),
    ):
        assert read_document_lengths(changed).tolist() == [
            len(row) for row in changed.with_format(None)["input_ids"]
        ]


def test_lengths_of_fixed_size_lists_and_missing_rows_are_read() -> None:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 4)
    assert read_document_lengths(datasets.Dataset(pa.table({"input_ids": fixed}))).tolist() == [
        4,
        4,
        4,
    ]
    assert read_document_lengths(
        datasets.Dataset.from_dict({"input_ids": [[1], None, [2, 3]]})
    ).tolist() == [1, 0, 2]


def test_lengths_may_be_given_as_a_column_or_an_array() -> None:
    documents = make_data(n=LENGTHS)
    assert read_document_lengths(documents.select([3, 2]), lengths="n").tolist() == [4, 1]
    assert read_document_lengths(documents, "text", lengths=np.array(LENGTHS)).tolist() == LENGTHS
    assert read_document_lengths([{"n": 4}, {"n": 2}], lengths="n").tolist() == [4, 2]


@pytest.mark.parametrize(
    "made",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda row: {"tokens": row},
        lambda row: {"tokens": np.array(row)},
    ],
)
def test_lengths_of_any_sequence_of_documents_are_read(made: Any) -> None:
    assert read_document_lengths([made(row) for row in ROWS], "tokens").tolist() == LENGTHS


def test_lengths_ignore_the_transform_of_a_data_set() -> None:
    assert read_document_lengths(make_data().with_transform(lambda rows: rows)).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        (make_data(), {"column": "ids"}, "no column 'ids'. Their columns: 'input_ids'"),
        (
            datasets.Dataset.from_dict({"input_ids": [[[1, 2]], [[3]]]}),
            {},
            r"holds list<.*list<.*flat list of integers",
        ),
        (datasets.Dataset.from_dict({"input_ids": ["a b", "c"]}), {}, "holds string"),
        (datasets.Dataset.from_dict({"input_ids": [[0.5]]}), {}, "holds list<.*double"),
        (make_data(n=["a"] * 5), {"lengths": "n"}, "holds string"),
        (make_data(n=[1, None, 1, 1, 1]), {"lengths": "n"}, "1 missing values"),
        (make_data(), {"lengths": [1, 2]}, "2 lengths for 5 documents"),
        ([[1], [[2, 3]]], {}, "document 1 has type list"),
        ([[1], "a b"], {}, "document 1 has type str"),
        ([[1], 7], {}, "document 1 has type int"),
        ([np.ones((2, 2), int)], {}, r"document 0 has type ndarray and shape \(2, 2\)"),
        ([{"ids": [1]}], {}, "document 0 has no column 'input_ids'. Its columns: 'ids'"),
    ],
)
def test_invalid_documents_and_lengths_are_refused(
    documents: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        read_document_lengths(documents, **arguments)
