"""Ranks detect that they read different documents, even if all lengths are equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from some_documents import draw_lengths, make_dealing
from test_shares import FORMS
from test_streaming import Around

from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import ConfigError

RANKS, TOKENS = 2, 120


def make_rows(
    lengths: list[int], differing: Callable[[int], slice] = lambda length: slice(None)
) -> list[dict[str, list[int]]]:
    """Make documents that differ only in some tokens, like documents of a template."""
    made = []
    for number, length in enumerate(lengths):
        tokens = np.full(length, 7)
        tokens[differing(length)] = 100 + number
        made.append({"input_ids": tokens.tolist()})
    return made


def digest(documents: Any, count: int = 3, **how: Any) -> list[int]:
    """Read the digests of the first global batches."""
    if hasattr(documents, "__len__"):
        batches = GlobalBatches(read_document_lengths(documents), RANKS * TOKENS, quiet=True, **how)
        shares = Shares(documents, batches, make_dealing(RANKS, TOKENS))
        return [
            shares[number * RANKS]["distca_documents"].dealt_share.digest
            for number in range(min(count, len(batches)))
        ]
    first = islice(StreamedShares(documents, make_dealing(RANKS, TOKENS)), 0, count * RANKS, RANKS)
    return [share["distca_documents"].dealt_share.digest for share in first]


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
    "stream": lambda data, rank: Around(list(data.shard(RANKS, rank))),
    "stream around a divided one": lambda data, rank: Around(
        split_dataset_by_node(data.to_iterable_dataset(2), rank, RANKS)
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("way", DIVIDED)
def test_digests_of_divided_rows_of_equal_length_differ(way: str, template: str) -> None:
    data = datasets.Dataset.from_list(make_rows([48] * 100, TEMPLATES[template]))
    hows: list[dict[str, Any]] = (
        [{}] if "stream" in way else [{}, {"fill": "whole"}, {"seed": None}]
    )
    for how in hows:
        one, other = (digest(DIVIDED[way](data, rank), **how) for rank in range(RANKS))
        assert len(one) == len(other)
        assert all(a != b for a, b in zip(one, other, strict=True)), (how, one, other)


def test_digests_differ_if_one_row_in_twenty_differs() -> None:
    """Digests cover the same 64 rows on all ranks, whatever the order of the epoch."""
    lengths = [20] * 10_000
    same, other = make_rows(lengths), make_rows(lengths)
    for row in other[::20]:
        row["input_ids"] = [5] * 20
    assert digest(same, 1) != digest(other, 1)


SMALL = datasets.List(datasets.Value("int16"))
ALL_FORMS: dict[str, Callable[[list[dict[str, list[int]]]], Any]] = {
    **FORMS,
    "tokens alone": lambda made: [row["input_ids"] for row in made],
    "numpy, small": lambda made: [np.array(row["input_ids"], dtype=np.uint16) for row in made],
    "numpy, other bytes": lambda made: [np.array(row["input_ids"], dtype=">i8") for row in made],
    "tensors, small": lambda made: [
        {"input_ids": torch.tensor(row["input_ids"], dtype=torch.int32)} for row in made
    ],
    "arrow, small": lambda made: datasets.Dataset.from_list(
        made, datasets.Features(input_ids=SMALL)
    ),
}


def test_digests_do_not_depend_on_the_form_of_documents() -> None:
    lengths = [0, *draw_lengths(90, longest=200), 1]
    for how in ({}, {"fill": "whole"}):
        digests = {tuple(digest(form(make_rows(lengths)), **how)) for form in ALL_FORMS.values()}
        assert len(digests) == 1
    streams = {tuple(digest(Around(form(make_rows(lengths))))) for form in ALL_FORMS.values()}
    assert len(streams) == 1


@pytest.mark.parametrize(
    "then", [lambda data: data, lambda data: data.map(lambda row: row).shuffle(seed=0)]
)
def test_stream_that_is_divided_by_rank_is_refused(then: Callable[[Any], Any]) -> None:
    data = datasets.Dataset.from_list(make_rows([48] * 20)).to_iterable_dataset(4)
    with pytest.raises(
        ConfigError,
        match=r"one of 2 parts of a stream .*split_dataset_by_node.* Give the undivided stream",
    ):
        StreamedShares(then(split_dataset_by_node(data, 1, 2)), make_dealing(RANKS, TOKENS))
    StreamedShares(then(split_dataset_by_node(data, 0, 1)), make_dealing(RANKS, TOKENS))
