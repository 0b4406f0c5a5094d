"""Loaders give each rank its own shares in every epoch and after a resume."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, skip_first_batches
from some_documents import ROWS, draw_lengths, make_dealing, make_rows
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_distca import PackingCollator
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.shares import Shares
from hf_distca.integration.training.document_shares import make_lazy_dataset

RANKS, TOKENS = 3, 100


def make_shares() -> Shares:
    lengths = draw_lengths(30, longest=500)
    return Shares(
        make_rows(lengths),
        GlobalBatches(lengths, RANKS * TOKENS, quiet=True),
        make_dealing(RANKS, TOKENS),
    )


def load_rank(rank: int, dataset: Any, **more: Any) -> DataLoaderShard:
    """Make the loader that accelerate gives a rank for a sequential loader of one item a batch."""
    sampler = BatchSamplerShard(BatchSampler(SequentialSampler(dataset), 1, False), RANKS, rank)
    return DataLoaderShard(dataset, batch_sampler=sampler, collate_fn=PackingCollator(), **more)


def check(batches: list[dict[str, Any]], rank: int, epoch: int, first: int = 0) -> None:
    expected = make_shares()
    expected.set_epoch(epoch)
    assert len(batches) == len(expected.batches) - first
    for number, batch in enumerate(batches, first):
        share = expected[number * RANKS + rank]
        assert all(torch.equal(batch[name][0], share[name]) for name in ROWS)
        packed = batch["distca_documents"]
        assert packed == share["distca_documents"]
        assert (packed.dealt_share.batch_id, packed.dealt_share.rank) == ((epoch, number), rank)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_gets_its_own_shares_in_every_epoch(rank: int, workers: int) -> None:
    how = {"num_workers": workers, "persistent_workers": workers > 0}
    if workers:
        how["multiprocessing_context"] = "fork"
    loader = load_rank(rank, make_lazy_dataset(make_shares()), **how)
    for epoch in range(3):  # the loader of accelerate sets the epoch
        check(list(loader), rank, epoch)
    loader.set_epoch(7)
    check(list(loader), rank, 7)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_with_a_pickled_data_set_get_the_epoch(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no start method {method}")
    loader = load_rank(
        1,
        make_lazy_dataset(make_shares()),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    for epoch in range(2):
        check(list(loader), 1, epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_epoch_continues_after_the_skipped_batches(workers: int) -> None:
    loader = load_rank(2, make_lazy_dataset(make_shares()), num_workers=workers)
    resumed = skip_first_batches(loader, 4)
    resumed.set_epoch(1)
    check(list(resumed), 2, 1, first=4)


def test_plain_loader_with_a_sampler_reads_the_shares_of_one_rank() -> None:
    dataset = make_lazy_dataset(make_shares())
    own = DataLoader(dataset, sampler=range(1, len(dataset), RANKS), collate_fn=PackingCollator())
    check(list(own), 1, 0)


def test_lazy_data_set_supports_the_calls_of_trainers() -> None:
    dataset = make_lazy_dataset(make_shares())
    kept = dataset.remove_columns([])
    kept.set_epoch(5)
    check([PackingCollator()([kept[number * RANKS]]) for number in range(len(kept) // RANKS)], 0, 5)
    assert len(dataset[:2]["input_ids"]) == 2
    assert next(iter(dataset)).keys() == {*ROWS, "distca_documents"}
