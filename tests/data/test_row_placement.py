"""Rows placed: each step keeps its rows and each rank their number, whatever accelerate makes of
the batches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from hf_distca import ConfigError
from hf_distca.data.row_placement import RowPlacement, StepPlaces

PLACES = st.builds(
    StepPlaces, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)
)
BOTH = st.booleans()


class Shuffled(SequentialSampler):
    """Row numbers in an order of the seed and the epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(len(self)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def some_work(rows: int, seed: int = 0) -> np.ndarray:
    """Few rows have most of it."""
    return np.random.default_rng(seed).pareto(1.0, rows)


def batches(rows: int, places: StepPlaces, *, split: bool, drop: bool) -> BatchSampler:
    return BatchSampler(
        Shuffled(range(rows)), places.micro_batch_rows if split else places.rows_per_rank, drop
    )


def shards_of(sampler: Any, ranks: int, *, split: bool, even: bool) -> list[BatchSamplerShard]:
    return [BatchSamplerShard(sampler, ranks, rank, split, even) for rank in range(ranks)]


def read(shards: list[BatchSamplerShard], skip: int) -> list[list[list[int]]]:
    """The batches of each rank, as a resumed Trainer reads them."""
    # No `list`: it asks for a length, which accelerate lets fall below 0.
    return [[batch for batch in SkipBatchSampler(shard, skip)] for shard in shards]  # noqa: C416


def rows_of_steps(read_: list[list[list[int]]], micro_batches: int) -> list[Counter[int]]:
    most = max(map(len, read_))
    steps = (slice(first, first + micro_batches) for first in range(0, most, micro_batches))
    return [
        Counter(row for rank in read_ for batch in rank[step] for row in batch) for step in steps
    ]


@given(st.integers(1, 90), PLACES, BOTH, BOTH, BOTH, st.integers(0, 4))
def test_steps_keep_their_rows_and_ranks_the_number_of_theirs(
    rows: int, places: StepPlaces, split: bool, even: bool, drop: bool, skipped_steps: int
) -> None:
    assume(places.ranks > 1)  # accelerate cuts batches only for several processes
    given_ = batches(rows, places, split=split, drop=drop)
    placed = RowPlacement(
        batches(rows, places, split=split, drop=drop), some_work(rows), places, even_batches=even
    )
    shards = [
        shards_of(sampler, places.ranks, split=split, even=even) for sampler in (given_, placed)
    ]
    assert list(map(len, shards[0])) == list(map(len, shards[1]))
    before, after = (read(each, skipped_steps * places.micro_batches) for each in shards)
    assert [list(map(len, rank)) for rank in after] == [list(map(len, rank)) for rank in before]
    assert rows_of_steps(after, places.micro_batches) == rows_of_steps(before, places.micro_batches)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), BOTH)
def test_a_rank_alone_keeps_its_last_batch(
    rows: int, size: int, micro_batches: int, drop: bool
) -> None:
    places = StepPlaces(1, 1, size, micro_batches)
    placed = RowPlacement(batches(rows, places, split=False, drop=drop), some_work(rows), places)
    assert list(placed) == list(batches(rows, places, split=False, drop=drop))
    assert len(placed) == len(list(placed))


@given(PLACES, st.integers(1, 3), st.integers(0, 99))
def test_nodes_never_wait_longer_than_before(
    places: StepPlaces, micro_batches: int, seed: int
) -> None:
    work = np.rint(some_work(places.micro_batch_rows * micro_batches, seed) * 1000).astype(np.int64)
    order = places.place(work)
    assert sorted(order) == list(range(len(work)))
    assert places.compute_busiest(work[order]).sum() <= places.compute_busiest(work).sum()


def test_nodes_become_even() -> None:
    """64 ranks in nodes of 8: a step of four micro-batches within a percent, of one within a
    tenth.
    """
    for micro_batches, bound in ((1, 1.1), (4, 1.01)):
        places = StepPlaces(8, 8, 1, micro_batches)
        work = np.rint(np.random.default_rng(0).exponential(1e6, 64 * micro_batches)).astype(
            np.int64
        )
        even = work.sum() / 8
        assert places.compute_busiest(work).sum() > 1.3 * even
        assert places.compute_busiest(work[places.place(work)]).sum() < bound * even


def test_nodes_that_cannot_be_even_wait_for_each_other() -> None:
    """Two rows of more than a node's part: one micro-batch is slow instead of two."""
    places = StepPlaces(2, 2, 1, 2)
    work = np.array([100, 1, 1, 1, 100, 1, 1, 1])
    assert places.compute_busiest(work).tolist() == [101, 101]
    assert places.compute_busiest(work[places.place(work)]).tolist() == [101, 2]


def test_ranks_of_a_node_get_even_batches() -> None:
    """Two rows each: a heavy one and a light one."""
    work = np.array([9, 8, 9, 8, 2, 1, 2, 1])
    placed = work[StepPlaces(2, 2, 2).place(np.array([9, 8, 9, 8, 2, 1, 2, 1]))]
    assert placed.reshape(2, 2, 2).sum(axis=2).tolist() == [[10, 10], [10, 10]]


def test_samplers_are_told_of_epochs_and_replaced() -> None:
    """Both as `DataLoaderShard` does it."""
    places = StepPlaces(2, 1, 1, 2)
    placed = RowPlacement(batches(8, places, split=False, drop=False), some_work(8), places)
    first = list(placed)
    assert not hasattr(placed, "set_epoch")
    placed.sampler.set_epoch(1)
    second = list(placed)
    assert first != second
    placed.sampler = Shuffled(range(8))
    assert list(placed) == first


@pytest.mark.parametrize(
    ("sampler", "work", "said"),
    [
        (
            [[0, 1]],
            [1, 1],
            r"batches of None rows .* micro-batches of 4 rows \(2 ranks with 2 rows each\)",
        ),
        (
            BatchSampler(range(8), 3, False),
            [1] * 8,
            "batches of 3 rows do not make micro-batches of 4",
        ),
        (
            BatchSampler(range(8), 2, False),
            [[1]],
            r"work of shape \(1, 1\) must be one finite number",
        ),
        (BatchSampler(range(8), 2, False), [-1.0], "work of shape"),
    ],
)
def test_what_cannot_be_placed_is_refused(sampler: Any, work: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RowPlacement(sampler, work, StepPlaces(2, 1, 2))
    with pytest.raises(ConfigError, match="micro_batches=0 must be a whole number of at least 1"):
        StepPlaces(2, 1, 2, 0)
