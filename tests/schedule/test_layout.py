from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import layouts

from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import Layout, Segment, compute_lengths

LENGTHS = st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=5)


def test_lengths_become_documents_in_order() -> None:
    layout = Layout.from_lengths([[3, 2], [], [4]])
    assert layout.world_size == 3
    assert layout.list_segments(0) == [Segment(0, 0, 3), Segment(1, 0, 2)]
    assert layout.list_segments(1) == []
    assert layout.list_segments(2) == [Segment(2, 0, 4)]
    assert layout.query_tokens.tolist() == [5, 0, 4]
    assert layout.token.tolist() == [0, 3, 0]
    assert layout.rank.tolist() == [0, 0, 2]
    assert layout.longest == 4
    assert not layout.has_many_ranks.any()


def test_head_and_tail_of_a_document_may_lie_on_one_rank() -> None:
    layout = Layout.from_segments([[(5, 0, 2), (5, 6, 2)], [(5, 2, 4), (1, 0, 1)]])
    assert layout.documents[layout.has_many_ranks].tolist() == [5]
    assert layout.list_segments(0)[1].end == 8
    assert layout.token.tolist() == [0, 2, 0, 4]


def test_a_document_in_two_segments_of_one_rank_does_not_span() -> None:
    assert not Layout.from_segments([[(0, 0, 2), (1, 0, 1), (0, 2, 2)], []]).has_many_ranks.any()


@pytest.mark.parametrize("ranks", [[[]], [[], [], []]])
def test_layout_may_have_no_tokens(ranks: list[list[int]]) -> None:
    layout = Layout.from_lengths(ranks)
    assert layout.world_size == len(ranks)
    assert layout.longest == 0
    assert not layout.has_many_ranks.any()
    assert layout.query_tokens.tolist() == [0] * len(ranks)
    assert layout.token.tolist() == []


@given(st.lists(st.integers(0, 40), max_size=8))
def test_cu_seqlens_give_the_lengths_above_zero(lengths: list[int]) -> None:
    assert compute_lengths([0, *np.cumsum(lengths).tolist()]) == [n for n in lengths if n]


def test_run_that_starts_above_zero_continues_a_document() -> None:
    spanning = Layout.from_runs([[(0, 10), (0, 7)], [(7, 2), (0, 3)], [(9, 3)]])
    document = spanning.list_segments(0)[1].document
    assert spanning.documents[spanning.has_many_ranks].tolist() == [document]
    assert spanning.list_segments(1)[0] == Segment(document, 7, 2)
    assert spanning.list_segments(2) == [Segment(document, 9, 3)]


@given(layouts())
def test_tokens_of_a_rank_follow_the_order_of_its_segments(layout: Layout) -> None:
    for rank in range(layout.world_size):
        rows = np.flatnonzero(layout.rank == rank)
        lengths = layout.length[rows].tolist()
        assert layout.token[rows].tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
        context = int(layout.context[rank])
        assert layout.context_tokens[rank] == sum(lengths[:context])
        assert layout.query_tokens[rank] == sum(lengths[context:])
    ranks_of = {
        d: set(layout.rank[layout.document == d].tolist()) for d in layout.document.tolist()
    }
    assert set(layout.documents[layout.has_many_ranks].tolist()) == {
        d for d, ranks in ranks_of.items() if len(ranks) > 1
    }


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[(0, 0, 0)]], r"segment 0 is \(document 0, start 0, length 0\)"),
        ([[(0, 0, 2), (0, -1, 2)]], r"segment 1 is \(document 0, start -1, length 2\)"),
        ([[(7, 1, 2)]], r"document 7 has a segment that starts at 1, but position 0 is next"),
        ([[(0, 0, 2)], [(0, 3, 2)]], r"starts at 3, but position 2 is next"),
        ([[(0, 0, 4)], [(0, 3, 2)]], r"starts at 3, but position 4 is next"),
    ],
)
def test_segments_that_do_not_cover_documents_are_refused(
    ranks: list[list[tuple[int, int, int]]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_segments(ranks)


def test_columns_of_different_lengths_are_refused() -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(LayoutError, match="columns have 1, 1, 1 rows, but there are 2 segments"):
        Layout(one, one, one + 1, np.array([0, 2]))


@pytest.mark.parametrize("offsets", [[], [1, 2], [1, 1, 2], [-1, 2], [0, 2, 1, 2]])
def test_offsets_must_begin_with_zero_and_never_fall(offsets: list[int]) -> None:
    two = np.arange(2)
    with pytest.raises(
        LayoutError, match=re.escape(f"offsets {offsets} must begin with 0 and never fall")
    ):
        Layout(two, 0 * two, two + 1, np.array(offsets, dtype=np.int64))


def test_runs_that_do_not_match_at_a_position_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"1 run\(s\) start at position 4 .* and 2 end there"):
        Layout.from_runs([[(0, 4)], [(0, 4)], [(4, 2)]])


@pytest.mark.parametrize("bounds", [[], [1, 2], [0, 3, 2]])
def test_invalid_cu_seqlens_are_refused(bounds: list[int]) -> None:
    with pytest.raises(LayoutError, match="must start at 0 and never fall"):
        compute_lengths(bounds)
