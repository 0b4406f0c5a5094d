"""Row placement under accelerate keeps the rows of each step and the row counts of ranks."""

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
    """Row indices in an order that depends on the epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(len(self)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def draw_work(rows: int, seed: int = 0) -> np.ndarray:
    """Draw the work of rows; few rows have most of the work."""
    return np.random.default_rng(seed).pareto(1.0, rows)


def make_batches(rows: int, places: StepPlaces, *, split: bool, drop: bool) -> BatchSampler:
    return BatchSampler(
        Shuffled(range(rows)), places.micro_batch_rows if split else places.rows_per_rank, drop
    )


def make_shards(sampler: Any, ranks: int, *, split: bool, even: bool) -> list[BatchSamplerShard]:
    return [BatchSamplerShard(sampler, ranks, rank, split, even) for rank in range(ranks)]


def read(shards: list[BatchSamplerShard], skip: int) -> list[list[list[int]]]:
    """Read the batches of each rank like a resumed Trainer."""
    # `list` would ask for a length, which accelerate lets fall below 0.
    return [[batch for batch in SkipBatchSampler(shard, skip)] for shard in shards]  # noqa: C416


def count_rows(read_: list[list[list[int]]], micro_batches: int) -> list[Counter[int]]:
    most = max(map(len, read_))
    steps = (slice(first, first + micro_batches) for first in range(0, most, micro_batches))
    return [
        Counter(row for rank in read_ for batch in rank[step] for row in batch) for step in steps
    ]


@given(st.integers(1, 90), PLACES, BOTH, BOTH, BOTH, st.integers(0, 4))
def test_placement_keeps_rows_of_steps_and_row_counts_of_ranks(
    rows: int, places: StepPlaces, split: bool, even: bool, drop: bool, skipped_steps: int
) -> None:
    assume(places.ranks > 1)  # accelerate cuts batches only for several processes
    given_ = make_batches(rows, places, split=split, drop=drop)
    placed = RowPlacement(
        make_batches(rows, places, split=split, drop=drop),
        draw_work(rows),
        places,
        even_batches=even,
    )
    shards = [
        make_shards(sampler, places.ranks, split=split, even=even) for sampler in (given_, placed)
    ]
    assert list(map(len, shards[0])) == list(map(len, shards[1]))
    before, after = (read(each, skipped_steps * places.micro_batches) for each in shards)
    assert [list(map(len, rank)) for rank in after] == [list(map(len, rank)) for rank in before]
    assert count_rows(after, places.micro_batches) == count_rows(before, places.micro_batches)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), BOTH)
def test_placement_on_one_rank_changes_no_batch(
    rows: int, size: int, micro_batches: int, drop: bool
) -> None:
    places = StepPlaces(1, 1, size, micro_batches)
    placed = RowPlacement(
        make_batches(rows, places, split=False, drop=drop), draw_work(rows), places
    )
    assert list(placed) == list(make_batches(rows, places, split=False, drop=drop))
    assert len(placed) == len(list(placed))


@given(PLACES, st.integers(1, 3), st.integers(0, 99))
def test_placement_never_increases_the_work_of_the_busiest_nodes(
    places: StepPlaces, micro_batches: int, seed: int
) -> None:
    work = np.rint(draw_work(places.micro_batch_rows * micro_batches, seed) * 1000).astype(np.int64)
    order = places.place(work)
    assert sorted(order) == list(range(len(work)))
    assert places.compute_busiest(work[order]).sum() <= places.compute_busiest(work).sum()


def test_placement_evens_the_work_of_nodes() -> None:
    """A step of four micro-batches is even within 1 %, a step of one within 10 %."""
    for micro_batches, bound in ((1, 1.1), (4, 1.01)):
        places = StepPlaces(8, 8, 1, micro_batches)
        work = np.rint(np.random.default_rng(0).exponential(1e6, 64 * micro_batches)).astype(
            np.int64
        )
        even = work.sum() / 8
        assert places.compute_busiest(work).sum() > 1.3 * even
        assert places.compute_busiest(work[places.place(work)]).sum() < bound * even


def test_heavy_rows_are_placed_in_the_same_micro_batch() -> None:
    """Two rows exceed the share of a node, so one micro-batch is slow instead of two."""
    places = StepPlaces(2, 2, 1, 2)
    work = np.array([100, 1, 1, 1, 100, 1, 1, 1])
    assert places.compute_busiest(work).tolist() == [101, 101]
    assert places.compute_busiest(work[places.place(work)]).tolist() == [101, 2]


def test_ranks_of_a_node_get_even_batches() -> None:
    """Each rank gets a heavy row and a light row."""
    work = np.array([9, 8, 9, 8, 2, 1, 2, 1])
    placed = work[StepPlaces(2, 2, 2).place(np.array([9, 8, 9, 8, 2, 1, 2, 1]))]
    assert placed.reshape(2, 2, 2).sum(axis=2).tolist() == [[10, 10], [10, 10]]


def test_placement_lets_accelerate_set_epochs_and_replace_samplers() -> None:
    places = StepPlaces(2, 1, 1, 2)
    placed = RowPlacement(make_batches(8, places, split=False, drop=False), draw_work(8), places)
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
def test_invalid_placements_are_refused(sampler: Any, work: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RowPlacement(sampler, work, StepPlaces(2, 1, 2))
    with pytest.raises(ConfigError, match="micro_batches=0 must be a whole number of at least 1"):
        StepPlaces(2, 1, 2, 0)
