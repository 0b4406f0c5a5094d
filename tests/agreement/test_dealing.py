"""Shares of a global batch: every rank finds the same layout and plans by itself."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.agreement import dealt_share as dealt_module
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing, PlanJob
from hf_distca.agreement.documents import TokenBatch
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.ranks import Ranks

SHAPE = AttentionShape(4, 2, 16, 16, 2)
KEY = PlanKey(SHAPE, "cpu")
COST = CostModel.make_of_pairs(SHAPE)


def dealing(ranks: int, tokens: int, placement: str = "dealt", **settings: object) -> Dealing:
    config = DistCAConfig(**{"tile": 4, "min_gain": 0.0, **settings})
    return Dealing(ranks, tokens, {KEY: COST}, config, placement=placement)


def in_a_worker() -> Any:
    """Make shares as a worker of a loader does."""
    return patch.object(dealt_module, "get_worker_info", return_value="a worker")


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(st.integers(1, 5), LENGTHS, st.booleans(), st.sampled_from(["dealt", "in order"]))
def test_shares_of_all_ranks_are_the_layout(
    ranks: int, lengths: list[int], ping_pong: bool, placement: str
) -> None:
    lengths.append((-sum(lengths)) % ranks + ranks)
    tokens, more = divmod(sum(lengths), ranks)
    assert not more
    made = dealing(ranks, tokens, placement, ping_pong=ping_pong)
    shares = [
        pickle.loads(pickle.dumps(made)).make_share(np.array(lengths), (3, 7), rank)
        for rank in range(ranks)
    ]
    rows = [list(zip(one.documents, one.starts, one.lengths, strict=True)) for one in shares]
    layout = Layout.from_segments(rows)
    assert layout.query_tokens.tolist() == [tokens] * ranks
    for rank, one in enumerate(shares):
        assert str(one.dealt_share) == "global batch 7 of epoch 3"
        assert (one.dealt_share.rank, one.dealt_share.ranks, one.dealt_share.longest_document) == (
            rank,
            ranks,
            max(lengths),
        )
        assert [one.dealt_share.whole_layout.list_segments(r) for r in range(ranks)] == [
            layout.list_segments(r) for r in range(ranks)
        ]
        first = one.dealt_share.first_nano_tokens
        assert first is None or (ping_pong and 0 < first < tokens)
        if first is not None:  # no document is in both nano-batches
            parts = TokenBatch(1, tokens, packed=one).read_documents().split_at(first)
            assert not set(parts[0].runs[:, 0]) & set(parts[1].runs[:, 0])
            assert [int(part.runs[:, 2].sum()) for part in parts] == [first, tokens - first]


def test_plans_travel_and_are_made_again_under_other_settings() -> None:
    with in_a_worker():
        share = pickle.loads(pickle.dumps(dealing(2, 32).make_share(np.array([40, 24]), (0, 0), 1)))
    config = DistCAConfig(tile=4, min_gain=0.0)
    with patch.object(dealt_module, "balance", wraps=dealt_module.balance) as made:
        plan = share.dealt_share.plan(PlanJob(KEY, COST, config))
        assert not made.called
        assert share.dealt_share.plan(PlanJob(KEY, COST, config)) is plan
        share.dealt_share.plan(PlanJob(KEY, COST, replace(config, balance=False)))
        share.dealt_share.plan(PlanJob(KEY._replace(window=8), replace(COST, window=8), config))
        assert made.call_count == 2


@pytest.mark.parametrize("ping_pong", [False, True])
def test_a_dealt_batch_is_as_even_as_its_plans_are(ping_pong: bool) -> None:
    """A long document may lie on one rank, from where work moves."""
    lengths = np.array([1024, *[64] * 48])
    made = dealing(4, 1024, ping_pong=ping_pong)
    assert made.estimate_imbalance(made.deal_layouts(lengths)[0]) > 1.5
    assert made.estimate_dealt(lengths) < 1.05


def test_a_dealing_with_another_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement='random' must be one of 'dealt', 'in order'"):
        dealing(2, 8, "random")


def test_shares_are_planned_for_the_nodes_they_are_dealt_to() -> None:
    """Plans that a loader made are taken in the step, where ranks need not have found the same
    nodes.
    """
    cost = CostModel.make_analytic(SHAPE, device_type="cuda")
    made = Dealing(4, 4096, {KEY: cost}, DistCAConfig(ping_pong=False), ranks_per_node=2)
    with in_a_worker():
        share = made.make_share(np.array([9000, 4000, 3384]), (0, 0), 1)
    assert share.dealt_share is not None
    nodes = Ranks(per_node=share.dealt_share.per_node)
    assert nodes == Ranks(per_node=2)
    with patch.object(dealt_module, "balance", side_effect=AssertionError("planned again")):
        share.dealt_share.plan(PlanJob(KEY, cost, DistCAConfig(), nodes))
        with pytest.raises(AssertionError, match="planned again"):
            share.dealt_share.plan(PlanJob(KEY, cost, DistCAConfig()))
