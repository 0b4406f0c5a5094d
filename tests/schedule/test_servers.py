"""Plans with ranks without tokens, which are the servers of a pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import PAIRS, make_load

from hf_distca import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout

LENGTHS = st.lists(st.integers(1, 4000), min_size=1, max_size=6)
RANKS = st.lists(st.one_of(LENGTHS, st.just([])), min_size=2, max_size=8).filter(
    lambda ranks: any(ranks)
)
IN_POOL = DistCAConfig(serve_in_place=False)


def test_servers_take_the_work_above_the_mean() -> None:
    seconds = make_load(Layout.from_lengths([[16384]] * 3 + [[]]), PAIRS, IN_POOL).compute_seconds
    assert seconds.max() <= 1.03 * seconds.mean()


def test_nothing_moves_without_servers_if_serve_in_place_is_off() -> None:
    assert not balance(Layout.from_lengths([[16384], [64] * 8]), PAIRS, IN_POOL).moved


@given(RANKS, st.data())
def test_layout_placed_on_holders_keeps_its_segments(
    ranks: list[list[int]], data: st.DataObject
) -> None:
    holds = data.draw(st.permutations([True] * len(ranks) + [False] * 3))
    layout, among = Layout.from_lengths(ranks), Layout.from_lengths(ranks).place_on_holders(holds)
    holders = np.flatnonzero(holds)
    assert among.world_size == len(holds)
    for rank, holder in enumerate(holders.tolist()):
        assert among.list_segments(holder) == layout.list_segments(rank)
    assert among.query_tokens[~np.array(holds)].sum() == 0


@pytest.mark.parametrize("place", [0, 3])
def test_layout_placed_on_holders_keeps_context_on_its_ranks(place: int) -> None:
    layout = Layout.from_segments([[(0, 0, 100), (0, 100, 50)], [(1, 0, 10)]], context=[0, 0])
    two = Layout(layout.document, layout.start, layout.length, layout.offsets, np.array([0, 1]))
    holds = [True] * 4
    holds[place] = holds[1] = False
    assert two.place_on_holders(holds).context[holds].tolist() == [0, 1]
