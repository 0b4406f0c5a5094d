from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tiny_llama import load_sharded, micro_batch, settings

import hf_distca
from hf_distca.integration.current_session import current_session
from ranks import RankPools

PAIRS_OF_TWO = [(0, 2), (1, 3), (0, 2), (1, 3)]
ALL = [(0, 1, 2, 3)] * 4


def find_group(rank: int, sizes: dict[str, int]) -> tuple[int, ...]:
    hf_distca.configure(settings())
    with tempfile.TemporaryDirectory() as folder:
        model = load_sharded(sizes, "distca", Path(folder)).train()
    model(**micro_batch(rank // sizes.get("tp_size", 1)), use_cache=False)
    return current_session().join_group().ranks


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"tp_size": 2, "fsdp_size": 2}, PAIRS_OF_TWO),
        ({"fsdp_size": 2, "dp_replicate_size": 2}, ALL),
    ],
)
def test_attention_group_of_a_mesh_has_ranks_with_different_tokens(
    rank_pool: RankPools, sizes: dict[str, int], groups: list[tuple[int, ...]]
) -> None:
    assert rank_pool(4)(find_group, sizes) == groups
