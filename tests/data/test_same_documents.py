"""Ranks tell whether they read the same documents, by what those are and not by their lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from some_documents import dealing, some_lengths

from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import ConfigError

RANKS, TOKENS = 2, 120


def rows(
    lengths: list[int], differing: Callable[[int], slice] = lambda length: slice(None)
) -> list[dict[str, list[int]]]:
    """Documents that differ in some tokens only: those of a template are the same in all."""
    made = []
    for number, length in enumerate(lengths):
        tokens = np.full(length, 7)
        tokens[differing(length)] = 100 + number
        made.append({"input_ids": tokens.tolist()})
    return made


def digests(documents: Any, count: int = 3, **how: Any) -> list[int]:
    """What ranks compare of the first global batches."""
    if hasattr(documents, "__len__"):
        batches = GlobalBatches(read_document_lengths(documents), RANKS * TOKENS, quiet=True, **how)
        shares = Shares(documents, batches, dealing(RANKS, TOKENS))
        return [
            shares[number * RANKS]["distca_documents"].dealt_share.digest
            for number in range(min(count, len(batches)))
        ]
    first = islice(StreamedShares(documents, dealing(RANKS, TOKENS)), 0, count * RANKS, RANKS)
    return [share["distca_documents"].dealt_share.digest for share in first]


class Stream:
    """Documents without a length."""

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        return iter(self.documents)


TEMPLATES: dict[str, Callable[[int], slice]] = {
    "all tokens": lambda length: slice(None),
    "first tokens": lambda length: slice(0, 4),
    "last tokens": lambda length: slice(length - 4, None),
    "middle": lambda length: slice(length // 2 - 10, length // 2 + 10),
}
DIVIDED: dict[str, Callable[[datasets.Dataset, int], Any]] = {
    "by node": lambda data, rank: split_dataset_by_node(data, rank, RANKS),
    "shard": lambda data, rank: data.shard(RANKS, rank, contiguous=False),
    "halves": lambda data, rank: list(data)[rank * 50 : rank * 50 + 50],
    "another order": lambda data, rank: data.shuffle(seed=rank),
    "stream": lambda data, rank: Stream(list(data.shard(RANKS, rank))),
    "stream around a divided one": lambda data, rank: Stream(
        split_dataset_by_node(data.to_iterable_dataset(2), rank, RANKS)
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("way", DIVIDED)
def test_divided_rows_of_one_length_differ(way: str, template: str) -> None:
    data = datasets.Dataset.from_list(rows([48] * 100, TEMPLATES[template]))
    hows: list[dict[str, Any]] = (
        [{}] if "stream" in way else [{}, {"fill": "whole"}, {"seed": None}]
    )
    for how in hows:
        one, other = (digests(DIVIDED[way](data, rank), **how) for rank in range(RANKS))
        assert len(one) == len(other)
        assert all(a != b for a, b in zip(one, other, strict=True)), (how, one, other)


def test_a_few_rows_among_many_are_found() -> None:
    """Of 10,000 rows, 500 are others: ranks look at the same 64, whatever the order of the
    epoch.
    """
    lengths = [20] * 10_000
    same, other = rows(lengths), rows(lengths)
    for row in other[::20]:
        row["input_ids"] = [5] * 20
    assert digests(same, 1) != digests(other, 1)


SMALL = datasets.List(datasets.Value("int16"))
FORMS: dict[str, Callable[[list[dict[str, list[int]]]], Any]] = {
    "lists": lambda made: made,
    "tokens alone": lambda made: [row["input_ids"] for row in made],
    "numpy, small": lambda made: [np.array(row["input_ids"], dtype=np.uint16) for row in made],
    "numpy, other bytes": lambda made: [np.array(row["input_ids"], dtype=">i8") for row in made],
    "tensors": lambda made: [
        {"input_ids": torch.tensor(row["input_ids"], dtype=torch.int32)} for row in made
    ],
    "arrow": datasets.Dataset.from_list,
    "arrow, small": lambda made: datasets.Dataset.from_list(
        made, datasets.Features(input_ids=SMALL)
    ),
    "arrow, as tensors": lambda made: datasets.Dataset.from_list(made).with_format("torch"),
    "arrow, with a transform": lambda made: datasets.Dataset.from_list(made).with_transform(
        lambda batch: batch
    ),
    "arrow, selected": lambda made: datasets.Dataset.from_list(made[::-1]).select(
        range(len(made) - 1, -1, -1)
    ),
}


def test_the_same_documents_of_any_form_are_the_same() -> None:
    lengths = [0, *some_lengths(90, longest=200), 1]
    for how in ({}, {"fill": "whole"}):
        assert len({tuple(digests(form(rows(lengths)), **how)) for form in FORMS.values()}) == 1
    streams = {tuple(digests(Stream(form(rows(lengths))))) for form in FORMS.values()}
    assert len(streams) == 1


@pytest.mark.parametrize(
    "then", [lambda data: data, lambda data: data.map(lambda row: row).shuffle(seed=0)]
)
def test_a_stream_that_is_divided_by_rank_is_refused(then: Callable[[Any], Any]) -> None:
    data = datasets.Dataset.from_list(rows([48] * 20)).to_iterable_dataset(4)
    with pytest.raises(
        ConfigError,
        match=r"one of 2 parts of a stream .*split_dataset_by_node.* Give the undivided stream",
    ):
        StreamedShares(then(split_dataset_by_node(data, 1, 2)), dealing(RANKS, TOKENS))
    StreamedShares(then(split_dataset_by_node(data, 0, 1)), dealing(RANKS, TOKENS))
