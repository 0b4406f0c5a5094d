"""Global batches: exact in tokens, each token at most once, equal on any number of ranks."""

from __future__ import annotations

import itertools
import logging
import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca import ConfigError
from hf_distca.data.global_batches import BatchPieces, FillRule, GlobalBatches
from hf_distca.errors import LayoutError

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=40).filter(any)


def list_pieces(pieces: BatchPieces) -> list[tuple[int, int, int]]:
    return list(
        zip(pieces.documents.tolist(), pieces.starts.tolist(), pieces.ends.tolist(), strict=True)
    )


def list_epoch(batches: GlobalBatches, epoch: int) -> list[list[tuple[int, int, int]]]:
    return [list_pieces(batches.get_pieces(epoch, number)) for number in range(len(batches))]


def check_epoch(
    lengths: list[int], tokens: int, made: list[list[tuple[int, int, int]]]
) -> np.ndarray:
    """Check the batches of an epoch, and count how often each token was served."""
    offsets = np.cumsum([0, *lengths])
    served = np.zeros(offsets[-1], dtype=int)
    for batch in made:
        assert sum(end - start for _, start, end in batch) == tokens
        for document, start, end in batch:
            assert start < end
            if document >= 0:
                assert end <= lengths[document]
                served[offsets[document] + start : offsets[document] + end] += 1
    return served


@given(LENGTHS, st.integers(1, 200), st.integers(0, 3), st.sampled_from([None, 0, 7]))
def test_cut_batches_are_exact_and_keep_documents_in_order(
    lengths: list[int], tokens: int, epoch: int, seed: int | None
) -> None:
    if sum(lengths) < tokens:
        with pytest.raises(
            LayoutError, match=f"{sum(lengths)} tokens together, but a global batch has {tokens}"
        ):
            GlobalBatches(lengths, tokens, seed, quiet=True)
        return
    batches = GlobalBatches(lengths, tokens, seed, quiet=True)
    made = list_epoch(batches, epoch)
    served = check_epoch(lengths, tokens, made)
    assert served.max() == 1
    assert len(made) == sum(lengths) // tokens  # a rest of less than a batch is dropped
    flat = [piece for batch in made for piece in batch]
    for (document, _, end), (following, start, _) in itertools.pairwise(flat):
        assert (following, start) == (document, end) or (end == lengths[document] and start == 0)
    for batch in made:  # cut only where a batch begins or ends
        assert all(start == 0 for _, start, _ in batch[1:])
        assert all(end == lengths[document] for document, _, end in batch[:-1])


@given(LENGTHS, st.integers(1, 200), st.integers(0, 3), st.sampled_from([None, 0, 7]))
def test_fill_whole_keeps_documents_whole_and_leaves_none_out(
    lengths: list[int], tokens: int, epoch: int, seed: int | None
) -> None:
    batches = GlobalBatches(lengths, tokens, seed, fill="whole", quiet=True)
    made = list_epoch(batches, epoch)
    assert check_epoch(lengths, tokens, made).tolist() == [1] * sum(lengths)
    for document, start, end in (piece for batch in made for piece in batch):
        if document < 0:
            assert start == 0
            assert end <= 128
        else:
            assert start % tokens == 0  # longer documents are cut into pieces of a batch
            assert end == min(start + tokens, lengths[document])
    assert sorted(map(sorted, made)) == sorted(map(sorted, list_epoch(batches, epoch + 1)))


@pytest.mark.parametrize("fill", ["cut", "whole"])
def test_global_batches_do_not_depend_on_the_number_of_ranks(fill: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 500)
    made = [GlobalBatches(lengths, ranks * (1200 // ranks), 5, fill) for ranks in (1, 2, 3, 4)]
    for batches in made[1:]:
        assert list_epoch(batches, 2) == list_epoch(made[0], 2)


@pytest.mark.parametrize("fill", ["cut", "whole"])
def test_epochs_and_seeds_change_the_order_of_documents(fill: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 500)
    batches = GlobalBatches(lengths, 1000, 0, fill)
    first = list_epoch(batches, 0)
    assert list_epoch(batches, 1) != first
    assert list_epoch(batches, 0) == first  # also after another epoch
    assert list_epoch(GlobalBatches(lengths, 1000, 1, fill), 0) != first
    assert list_epoch(pickle.loads(pickle.dumps(batches)), 0) == first
    as_given = GlobalBatches(lengths, 1000, None, fill)
    assert list_epoch(as_given, 0) == list_epoch(as_given, 3)


def test_epochs_drop_different_documents() -> None:
    lengths, dropped = [10] * 19, []
    batches = GlobalBatches(lengths, 100, 0)
    for epoch in range(5):
        dropped.append(
            tuple(np.flatnonzero(check_epoch(lengths, 100, list_epoch(batches, epoch)) == 0))
        )
    assert len(set(dropped)) > 1


def test_order_of_a_seed_is_the_same_with_every_numpy() -> None:
    """A run that resumes with another numpy must read the same order."""
    batches = GlobalBatches([5, 6, 7, 8, 9], 12, 3)
    assert list_pieces(batches.get_pieces(1, 0)) == [(0, 0, 5), (2, 0, 7)]
    assert list_pieces(batches.get_pieces(1, 1)) == [(1, 0, 6), (3, 0, 6)]


def test_documents_longer_than_a_batch_are_reported_once_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = [10, 250, 30, 120, 90]
    for fill in ("cut", "whole"):
        with caplog.at_level(logging.WARNING, "hf_distca"):
            batches = GlobalBatches(lengths, 100, 0, fill)
            list_epoch(batches, 0)
        assert [record.getMessage() for record in caplog.records][:1] == [
            "2 of 5 documents are longer than a global batch of 100 tokens (ranks x"
            " tokens_per_rank); document 1 has 250. They are cut: each piece is a separate"
            " document. With tokens_per_rank 2.5 times as large, a global batch would have room"
            " for the longest document."
        ]
        assert len(caplog.records) == 1 + (fill == "whole"), "whole documents are padded"
        caplog.clear()
        with pytest.raises(LayoutError, match=r"2 of 5 documents are longer .* document 1 has 250"):
            GlobalBatches(lengths, 100, 0, fill, longer="refuse")
        GlobalBatches(lengths, 100, 0, fill, quiet=True)
        assert not caplog.records


def test_whole_documents_are_packed_tightly() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.3, 20_000).astype(int) + 1, 32768)
    batches = GlobalBatches(lengths, 32768, 0, "whole", quiet=True)
    assert len(batches) - 1 <= lengths.sum() / 32768 / 0.999
    padding = batches.count_padding_tokens()
    assert padding == len(batches) * 32768 - lengths.sum() < 0.01 * lengths.sum()


def test_much_padding_of_whole_documents_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Padding in the last batch of an epoch causes no warning."""
    with caplog.at_level(logging.WARNING, "hf_distca"):
        GlobalBatches([50] * 21, 100, 0, "whole")
        GlobalBatches([60] * 20, 100, 0, "cut")
        assert not caplog.records
        GlobalBatches([60] * 20, 100, 0, "whole")
    assert "40.0 % of the tokens of 20 global batches are padding" in caplog.text
    assert 'fill="cut", which needs no padding' in caplog.text


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=20),
    tokens=st.integers(1, 40),
    fill=st.sampled_from(["cut", "whole"]),
)
def test_tokens_of_pieces_that_begin_inside_documents_are_counted(
    lengths: list[int], tokens: int, fill: FillRule
) -> None:
    if sum(lengths) < max(tokens, 1):
        return
    batches = GlobalBatches(lengths, tokens, fill=fill, quiet=True)
    pieces = [batches.get_pieces(0, number) for number in range(len(batches))]
    expected = sum(int(one.lengths[one.starts > 0].sum()) for one in pieces)
    assert batches.count_cut_tokens() == expected


def test_empty_documents_are_left_out() -> None:
    batches = GlobalBatches([0, 3, 0, 1, 0], 2, None)
    assert list_epoch(batches, 0) == [[(1, 0, 2)], [(1, 2, 3), (3, 0, 1)]]


def test_bad_arguments_are_refused() -> None:
    for wrong in (
        {"tokens": 0},
        {"tokens": 2.0},
        {"tokens": True},
        {"seed": -1},
        {"seed": "0"},
        {"fill": "x"},
        {"longer": "x"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            GlobalBatches(**{"lengths": [5, 5], "tokens": 4, **wrong})
    with pytest.raises(LayoutError, match="document 2 has length -3"):
        GlobalBatches([1, 2, -3, 0, 0], 4)
    for lengths in ([], [0, 0], [-1, 3], [1.5], [[1]]):
        with pytest.raises(LayoutError):
            GlobalBatches(lengths, 4, fill="whole")
    with pytest.raises(IndexError, match="no global batch 2: an epoch has 2, numbered from 0"):
        GlobalBatches([5, 5], 4).get_pieces(0, 2)


@pytest.mark.parametrize(("fill", "seconds"), [("cut", 3.0), ("whole", 20.0)])
def test_a_million_documents_are_batched_in_seconds(fill: str, seconds: float) -> None:
    lengths = np.minimum(
        np.random.default_rng(0).lognormal(6, 1.3, 1_000_000).astype(int) + 1, 2**17
    )
    began = time.process_time()
    batches = GlobalBatches(lengths, 2**19, 0, fill, quiet=True)
    batches.get_pieces(0, 0)
    assert time.process_time() - began < seconds
    began = time.process_time()
    for number in range(1000):
        batches.get_pieces(0, number)
    assert time.process_time() - began < 2.0
