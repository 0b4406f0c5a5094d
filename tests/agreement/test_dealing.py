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


def make_dealing(ranks: int, tokens: int, placement: str = "dealt", **settings: object) -> Dealing:
    config = DistCAConfig(**{"tile": 4, "min_gain": 0.0, **settings})
    return Dealing(ranks, tokens, {KEY: COST}, config, placement=placement)


def simulate_worker() -> Any:
    """Make shares as in a worker of a loader."""
    return patch.object(dealt_module, "get_worker_info", return_value="a worker")


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(st.integers(1, 5), LENGTHS, st.booleans(), st.sampled_from(["dealt", "in order"]))
def test_shares_of_all_ranks_form_the_dealt_layout(
    ranks: int, lengths: list[int], ping_pong: bool, placement: str
) -> None:
    lengths.append((-sum(lengths)) % ranks + ranks)
    tokens, more = divmod(sum(lengths), ranks)
    assert not more
    made = make_dealing(ranks, tokens, placement, ping_pong=ping_pong)
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


def test_pickled_plans_are_remade_only_under_other_settings() -> None:
    with simulate_worker():
        share = pickle.loads(
            pickle.dumps(make_dealing(2, 32).make_share(np.array([40, 24]), (0, 0), 1))
        )
    config = DistCAConfig(tile=4, min_gain=0.0)
    with patch.object(dealt_module, "balance", wraps=dealt_module.balance) as made:
        plan = share.dealt_share.plan(PlanJob(KEY, COST, config))
        assert not made.called
        assert share.dealt_share.plan(PlanJob(KEY, COST, config)) is plan
        share.dealt_share.plan(PlanJob(KEY, COST, replace(config, balance=False)))
        share.dealt_share.plan(PlanJob(KEY._replace(window=8), replace(COST, window=8), config))
        assert made.call_count == 2


@pytest.mark.parametrize("ping_pong", [False, True])
def test_estimate_of_a_dealt_batch_includes_its_plan(ping_pong: bool) -> None:
    """A long document may lie on one rank, because the plan moves its work."""
    lengths = np.array([1024, *[64] * 48])
    made = make_dealing(4, 1024, ping_pong=ping_pong)
    assert made.estimate_imbalance(made.deal_layouts(lengths)[0]) > 1.5
    assert made.estimate_dealt(lengths) < 1.05


def test_dealing_with_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement='random' must be one of 'dealt', 'in order'"):
        make_dealing(2, 8, "random")


def test_workers_plan_shares_for_the_nodes_of_the_deal() -> None:
    """A step uses the plan of a worker only if the step has the same nodes."""
    cost = CostModel.make_analytic(SHAPE, device_type="cuda")
    made = Dealing(4, 4096, {KEY: cost}, DistCAConfig(ping_pong=False), ranks_per_node=2)
    with simulate_worker():
        share = made.make_share(np.array([9000, 4000, 3384]), (0, 0), 1)
    assert share.dealt_share is not None
    nodes = Ranks(per_node=share.dealt_share.per_node)
    assert nodes == Ranks(per_node=2)
    with patch.object(dealt_module, "balance", side_effect=AssertionError("planned again")):
        share.dealt_share.plan(PlanJob(KEY, cost, DistCAConfig(), nodes))
        with pytest.raises(AssertionError, match="planned again"):
            share.dealt_share.plan(PlanJob(KEY, cost, DistCAConfig()))
