"""The proof of a family notices faults: each of them, put into the library, makes the comparison fail that passes without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from measure import measure
from mutations import MUTATIONS, mutated
from two_ranks import check_two_ranks

from ranks import RankPool

ONE_RANK = {
    "window one key too wide": "mistral",
    "window one key too narrow": "mistral",
    "chunk one token too long": "llama4_text",
    "scale wrong by 1 %": "llama",
    "softcap dropped": "gemma2",
    "sink dropped": "gpt_oss",
    "gradient of the sink dropped": "gpt_oss",
    "documents of a row leak": "llama",
}
TWO_RANKS = {
    "documents leak over ranks": "llama",
    "dk of one copy lost": "llama",
    "dv of one copy lost": "llama",
    "scale wrong by 1 %": "deepseek_v3",
    "window one key too wide": "mistral",
    "gradient of the sink dropped": "gpt_oss",
}


HALVES = {
    "second half without the keys of the first": "llama",
    "gradient of the keys handed over lost": "llama",
}


def test_every_fault_is_tried() -> None:
    assert {*ONE_RANK, *TWO_RANKS, *HALVES} == set(MUTATIONS)


@pytest.mark.parametrize("mutation", ONE_RANK)
def test_a_fault_on_one_rank_is_noticed(mutation: str) -> None:
    model_type = ONE_RANK[mutation]
    assert measure(model_type).status == "proven"
    with mutated(mutation):
        result = measure.__wrapped__(model_type)
    assert result.status == "wrong", result


@pytest.mark.parametrize("mutation", TWO_RANKS)
def test_a_fault_on_two_ranks_is_noticed(mutation: str, rank_pool: Callable[[int], RankPool]) -> None:
    check_two_ranks(rank_pool(2), TWO_RANKS[mutation])
    with pytest.raises(AssertionError, match="differs by"):
        check_two_ranks(rank_pool(2), TWO_RANKS[mutation], mutation)


@pytest.mark.parametrize("mutation", HALVES)
def test_a_fault_between_halves_is_noticed(mutation: str) -> None:
    model_type = HALVES[mutation]
    assert measure(model_type).halves
    with mutated(mutation):
        result = measure.__wrapped__(model_type)
    assert result.status == "proven"
    assert not result.halves
    assert max(result.differences.values()) > 1e-4
