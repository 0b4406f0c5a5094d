"""The ranks that share attention on a device mesh; a mesh that cuts sequences is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hf_distca
from hf_distca import UnsupportedError
from hf_distca.borrowed import get_mesh
from hf_distca.integration.current_session import current_session
from hf_distca.integration.processes import find_data_parallel_ranks, find_members
from ranks import RankPools
from tiny_runs import tiny_llama

try:
    from transformers.distributed.utils import TransformersDeviceMesh
except ImportError:
    TransformersDeviceMesh = None


def count_new_groups(rank: int, names: tuple[str, ...]) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    counts = []
    for _ in range(3):
        before = len(c10d._world.pg_map)
        hf_distca.configure(hf_distca.DistCAConfig(timeout_seconds=47.0), group=mesh)
        assert current_session().join_group().size == (2 if "tp" in names else 4)
        counts.append(len(c10d._world.pg_map) - before)
    return counts


@pytest.mark.parametrize("names", [("dp_replicate", "fsdp"), ("dp", "tp")])
def test_configuring_the_same_mesh_again_makes_no_process_groups(
    rank_pool: RankPools, names: tuple[str, ...]
) -> None:
    for counts in rank_pool(4)(count_new_groups, names):
        assert counts == [2, 0, 0]  # one for dispatch and return, one for planning


def find_ranks(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], extra: str | None
) -> tuple[tuple[int, ...], str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    before = len(c10d._world.pg_map)
    found = find_data_parallel_ranks(mesh, extra_dimension=extra)
    assert len(c10d._world.pg_map) == before
    return found.ranks, found.backend


@pytest.mark.parametrize(
    ("shape", "names", "groups"),
    [
        ((2, 2), ("dp", "tp"), [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ((2, 2), ("pp", "dp"), [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ((2, 2, 1), ("dp_replicate", "dp_shard", "cp"), [(0, 1, 2, 3)] * 4),
        ((4,), ("tp",), [(0,), (1,), (2,), (3,)]),
        ((1, 2, 2), ("dp_shard", "tp", "pp"), [(0,), (1,), (2,), (3,)]),
        ((2, 2), ("one", "other"), [(0, 1, 2, 3)] * 4),
        ((2, 2), ("dp", "stage"), [(0, 1, 2, 3)] * 4),
    ],
)
def test_data_parallel_ranks_are_read_from_a_mesh(
    rank_pool: RankPools,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    groups: list[tuple[int, ...]],
) -> None:
    """The dimension of pipeline stages may have any name, here "stage"."""
    extra = "stage" if "stage" in names else None
    assert rank_pool(4)(find_ranks, shape, names, extra) == [(ranks, "gloo") for ranks in groups]


def join_group_of_an_unordered_mesh(rank: int) -> tuple[int, ...]:
    mesh = DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]), mesh_dim_names=("dp", "tp"))
    hf_distca.configure(group=mesh)
    return current_session().join_group().ranks


def test_attention_groups_follow_the_order_of_ranks_in_a_mesh(rank_pool: RankPools) -> None:
    assert rank_pool(4)(join_group_of_an_unordered_mesh) == [(0, 2), (1, 3), (0, 2), (1, 3)]


def catch_mesh_refusal(rank: int, names: tuple[str, ...]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        find_data_parallel_ranks(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    return str(caught.value)


@pytest.mark.parametrize(
    "names", [("dp_shard", "cp"), ("tp", "ulysses"), ("fsdp", "strange"), ("sp", "unknown")]
)
def test_unsupported_mesh_dimensions_are_refused_by_name(
    rank_pool: RankPools, names: tuple[str, ...]
) -> None:
    name = next(name for name in names if name not in ("dp_shard", "tp", "fsdp"))
    for message in rank_pool(4)(catch_mesh_refusal, names):
        assert f'the device mesh has a dimension "{name}" of 2 ranks' in message


@contextmanager
def set_up_accelerate(sizes: dict[str, int]) -> Iterator[None]:
    """Set up accelerate with a mesh, without its check that refuses meshes of CPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with patch.object(ParallelismConfig, "_validate_accelerator"):
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def catch_loop_refusal(rank: int, sizes: dict[str, int]) -> str:
    """Return the error of `join_group`, which the first training forward calls."""
    hf_distca.configure()
    with set_up_accelerate(sizes), pytest.raises(UnsupportedError) as caught:
        current_session().join_group()
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"dp_shard_size": 2, "cp_size": 2}, "cp"),
        ({"cp_size": 4}, "cp"),
        pytest.param(
            {"dp_shard_size": 2, "sp_size": 2},  # by DeepSpeed, for which accelerate makes no mesh
            "sp",
            marks=pytest.mark.skipif(
                not hasattr(ParallelismConfig(), "sp_size"),
                reason="this release of accelerate has no sp_size",
            ),
        ),
    ],
)
def test_an_accelerate_loop_that_cuts_sequences_is_refused(
    rank_pool: RankPools, sizes: dict[str, int], name: str
) -> None:
    for message in rank_pool(4)(catch_loop_refusal, sizes):
        assert f'a dimension "{name}" of {sizes[f"{name}_size"]} ranks' in message
        assert "cp_size=1, sp_size=1 in accelerate's ParallelismConfig" in message


def catch_model_refusal(rank: int) -> str:
    model = tiny_llama("sdpa")
    mesh = init_device_mesh(
        "cpu", (1, 1, 2, 1, 2), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp", "cp")
    )
    model._mesh_manager = TransformersDeviceMesh(mesh, mesh)
    found = get_mesh(model)
    assert found is not None
    with pytest.raises(UnsupportedError) as caught:
        find_data_parallel_ranks(found)
    return str(caught.value)


@pytest.mark.skipif(
    TransformersDeviceMesh is None,
    reason="this version of transformers keeps no mesh on its models",
)
def test_a_model_whose_mesh_cuts_sequences_is_refused(rank_pool: RankPools) -> None:
    for message in rank_pool(4)(catch_model_refusal):
        assert 'a dimension "cp" of 2 ranks' in message


def find_ranks_in_a_loop(rank: int) -> tuple[int, ...]:
    with set_up_accelerate({"dp_shard_size": 2, "tp_size": 2}):
        found = find_members()
    assert found is not None
    return found.ranks


def test_accelerate_loop_shares_attention_between_data_parallel_ranks(rank_pool: RankPools) -> None:
    assert rank_pool(4)(find_ranks_in_a_loop) == [(0, 2), (1, 3), (0, 2), (1, 3)]
