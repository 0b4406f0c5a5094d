"""On meshes of four ranks, core attention is shared by the ranks that hold different tokens and the
same heads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from case import Case
from matrix import compare
from tiny_llama import micro_batch, natively_sharded, settings
from torch.distributed.device_mesh import init_device_mesh

import hf_distca
from engines import train
from hf_distca.integration.current_session import current_session
from ranks import RankPool

PAIRS_OF_TWO = [(0, 2), (1, 3), (0, 2), (1, 3)]
ALL = [(0, 1, 2, 3)] * 4


def group_of_a_model(rank: int, sizes: dict[str, int]) -> tuple[int, ...]:
    hf_distca.configure(settings())
    with tempfile.TemporaryDirectory() as folder:
        model = natively_sharded(sizes, "distca", Path(folder)).train()
    model(**micro_batch(rank // sizes.get("tp_size", 1)), use_cache=False)
    return current_session().join_group().ranks


def group_of_a_mesh(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    hf_distca.configure(settings(), group=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return current_session().join_group().ranks


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"tp_size": 2, "fsdp_size": 2}, PAIRS_OF_TWO),
        ({"fsdp_size": 2, "dp_replicate_size": 2}, ALL),
    ],
)
def test_group_of_a_model(
    rank_pool: Callable[[int], RankPool], sizes: dict[str, int], groups: list[tuple[int, ...]]
) -> None:
    assert rank_pool(4)(group_of_a_model, sizes) == groups


@pytest.mark.parametrize(
    ("shape", "names", "groups"),
    [
        ((2, 2), ("dp_shard", "tp"), PAIRS_OF_TWO),
        ((2, 1, 2), ("dp_replicate", "fsdp", "tp"), PAIRS_OF_TWO),
        ((1, 2, 2, 1), ("pp", "dp_replicate", "fsdp", "tp"), ALL),
        ((2, 2), ("dp_replicate", "dp_shard"), ALL),
        ((2, 2), ("one", "other"), ALL),
    ],
)
def test_group_of_a_mesh(
    rank_pool: Callable[[int], RankPool],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    groups: list[tuple[int, ...]],
) -> None:
    assert rank_pool(4)(group_of_a_mesh, shape, names) == groups


@pytest.mark.slow
def test_tensor_parallel_is_equal_to_sdpa(rank_pool: Callable[[int], RankPool]) -> None:
    case = Case(
        "TP 2 x FSDP2 2, transformers", "non-reentrant", precision="float32", ping_pong=True
    )
    outcome = compare(rank_pool(4), case, rank_pool(4)(train, case, "sdpa"))
    assert outcome.loss_difference is not None
    assert outcome.loss_difference <= 1e-5
    assert outcome.grad_norm_difference is not None
    assert outcome.grad_norm_difference <= 4e-5
