"""Shares of a stream of documents: each rank gets its own shares, and each token once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from some_documents import ROWS, check_shares, draw_lengths, expect, make_dealing, make_rows
from torch.utils.data import DataLoader, get_worker_info

from hf_distca import ConfigError, PackingCollator
from hf_distca.data import shares as streaming
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.shares import StreamedShares
from hf_distca.errors import LayoutError

RANKS, TOKENS = 3, 100
LENGTHS = [0, *draw_lengths(30, longest=500)]


class Stream:
    """A stream of documents without a length, in reverse order in later epochs."""

    def __init__(self, labels: bool = False) -> None:
        self.rows = make_rows(LENGTHS, labels=labels)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows[::-1] if self.epoch else self.rows)


def check_epoch(
    of_ranks: list[list[Any]], rows: list[dict[str, list[int]]], epoch: int = 0, first: int = 0
) -> None:
    """Compare the shares of each rank with global batches of documents in order."""
    batches = GlobalBatches(
        [len(row["input_ids"]) for row in rows], RANKS * TOKENS, None, quiet=True
    )
    assert [len(shares) for shares in of_ranks] == [len(batches) - first] * RANKS
    for number, shares in enumerate(zip(*of_ranks, strict=True), first):
        check_shares(list(shares), expect(batches.get_pieces(0, number), rows), TOKENS)
        assert [share["distca_documents"].dealt_share.batch_id for share in shares] == [
            (epoch, number)
        ] * RANKS
        assert [share["distca_documents"].dealt_share.rank for share in shares] == list(
            range(RANKS)
        )


def shard(stream: StreamedShares, rank: int) -> IterableDatasetShard:
    """Wrap a stream for one process like accelerate."""
    return IterableDatasetShard(stream, 1, False, RANKS, rank)


def unbatch(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: row[0] if name in ROWS else row for name, row in batch.items()}


@pytest.mark.parametrize("labels", [False, True])
def test_accelerate_gives_each_process_its_own_shares(labels: bool) -> None:
    stream = StreamedShares(Stream(labels), make_dealing(RANKS, TOKENS))
    check_epoch([list(shard(stream, rank)) for rank in range(RANKS)], Stream(labels).rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_keep_the_order_of_batches(workers: int) -> None:
    found: dict[int, list[list[Any]]] = {0: [], 1: []}
    for rank in range(RANKS):
        mine = shard(StreamedShares(Stream(), make_dealing(RANKS, TOKENS)), rank)
        how = {"num_workers": workers, "persistent_workers": workers > 0}
        if workers:
            how["multiprocessing_context"] = "fork"
        loader = DataLoader(mine, collate_fn=PackingCollator(), **how)
        found[0].append([unbatch(batch) for batch in loader])
        mine.set_epoch(1)
        found[1].append([unbatch(batch) for batch in loader])
    check_epoch(found[0], Stream().rows)
    check_epoch(found[1], Stream().rows[::-1], epoch=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_streams_are_divided_among_workers(workers: int) -> None:
    rows = make_rows(LENGTHS)
    documents = (
        datasets.Dataset.from_list(rows)
        .to_iterable_dataset(num_shards=4)
        .shuffle(seed=0, buffer_size=3)
    )
    stream = shard(StreamedShares(documents, make_dealing(RANKS, TOKENS)), 1)
    how = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    loader = DataLoader(stream, collate_fn=PackingCollator(), num_workers=workers, **how)
    first = list(loader)
    assert len(first) >= sum(LENGTHS) // (RANKS * TOKENS) - max(workers, 1)
    seen = torch.cat([batch["input_ids"][0] for batch in first]).tolist()
    assert len(set(seen)) == len(seen)
    numbers = [batch["distca_documents"].dealt_share.batch_id for batch in first]
    assert len(set(numbers)) == len(numbers)
    assert {epoch for epoch, _ in numbers} == {0}
    stream.set_epoch(1)
    second = list(loader)
    assert {batch["distca_documents"].dealt_share.batch_id[0] for batch in second} == {1}
    assert torch.cat([batch["input_ids"][0] for batch in second]).tolist() != seen


class Tokenizing(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """A data set that tokenizes the rows of a `datasets` stream."""

    def __init__(self, texts: datasets.IterableDataset) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for row in self.texts:
            yield {"input_ids": [int(word) for word in row["text"].split()]}


class Dividing(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """A data set that divides its documents among workers, like an example of torch."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        info = get_worker_info()
        return iter(self.rows if info is None else self.rows[info.id :: info.num_workers])


class Around:
    """An iterable around documents that is no data set of torch."""

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        yield from self.documents


def wrap(kind: str) -> Any:
    rows = make_rows(LENGTHS)
    texts = [{"text": " ".join(map(str, row["input_ids"]))} for row in rows]
    stream = datasets.Dataset.from_list(texts).to_iterable_dataset(num_shards=4)
    made = {
        "torch data set": Tokenizing(stream),
        "by worker": Dividing(rows),
        "other": Around(Tokenizing(stream)),
    }
    return made[kind]


@pytest.mark.parametrize("kind", ["torch data set", "by worker", "other"])
def test_wrapped_stream_is_read_completely_by_all_workers(kind: str) -> None:
    for workers in (2, 0):
        mine = shard(StreamedShares(wrap(kind), make_dealing(RANKS, TOKENS)), 1)
        how = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(mine, collate_fn=PackingCollator(), num_workers=workers, **how)
        found = [unbatch(batch) for batch in loader]
        expected = [
            shard(StreamedShares(Stream(), make_dealing(RANKS, TOKENS)), rank)
            for rank in range(RANKS)
        ]
        check_epoch([list(expected[0]), found, list(expected[2])], Stream().rows)


def test_loader_worker_that_cannot_be_hidden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses no worker process, because torch waits 5 s for a worker that raised."""
    stream = StreamedShares(wrap("by worker"), make_dealing(1, TOKENS))
    assert len(list(stream)) > 0
    monkeypatch.setattr(streaming, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    with pytest.raises(
        ConfigError, match=r"torch's worker info could not be hidden .* num_workers=0"
    ):
        list(stream)


def test_loader_makes_only_the_shares_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    how, made = make_dealing(RANKS, TOKENS), []
    share = how.make_share
    monkeypatch.setattr(
        how,
        "make_share",
        lambda lengths, batch, rank, names: made.append(rank) or share(lengths, batch, rank, names),
    )
    loader = DataLoader(shard(StreamedShares(Stream(), how), 2), collate_fn=PackingCollator())
    assert len(list(loader)) == len(made) == sum(LENGTHS) // (RANKS * TOKENS)
    assert set(made) == {2}


def test_documents_may_be_arrays_of_tokens() -> None:
    rows = make_rows(LENGTHS)
    arrays = Around([np.array(row["input_ids"], dtype=np.int32) for row in rows])
    stream = StreamedShares(arrays, make_dealing(RANKS, TOKENS))
    check_epoch([list(shard(stream, rank)) for rank in range(RANKS)], rows)


def test_iterators_and_missing_columns_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="documents are a list_iterator, which can be read only once"
    ):
        StreamedShares(iter([[1, 2]]), make_dealing(RANKS, TOKENS))
    with pytest.raises(LayoutError, match="document 1 has no column 'input_ids'"):
        list(StreamedShares([[1], {"text": "x"}], make_dealing(RANKS, TOKENS)))
