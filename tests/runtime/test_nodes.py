"""Nodes are found from variables of launchers and host names; all ranks find the same."""

from __future__ import annotations

import os
import socket
from unittest.mock import patch

import pytest

from hf_distca import ConfigError
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.runtime.members import find_launched_per_node, find_node_number, find_ranks_per_node
from ranks import RankPools
from tiny_runs import logged


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([7, 7, 9, 9], 2),
        ([7, 7, 7, 7], 4),
        ([7, 8, 9], 1),
        ([5, 5, 5, 2], None),  # nodes of different sizes
        ([5, 2, 5, 2], None),  # interleaved
        ([5, 5, 2, 2, 5, 5], None),
        ([3], 1),
    ],
)
def test_nodes_must_have_equal_sizes_and_consecutive_ranks(
    nodes: list[int], expected: int | None
) -> None:
    assert find_ranks_per_node(nodes) == expected


def test_node_number_comes_from_launcher_or_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    here = find_node_number()
    assert 0 <= here < 2**56
    # torchrun and accelerate start several ranks per node.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    numbers = []
    for node in ("0", "0", "1"):
        monkeypatch.setenv("GROUP_RANK", node)
        numbers.append(find_node_number())
    assert numbers[0] == numbers[1] != numbers[2]
    # One launcher per rank: some start torchrun once for every GPU.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find_node_number() == here
    with patch.object(socket, "gethostname", return_value="another"):
        assert find_node_number() != here


def find_nodes(
    rank: int, nodes: list[int], members: tuple[int, ...]
) -> tuple[int | None, list[str]]:
    """Return the ranks per node that a rank finds, and its log messages."""
    environment = {"GROUP_RANK": str(nodes[rank]), "LOCAL_WORLD_SIZE": "2"}
    with logged() as said, patch.dict(os.environ, environment):
        if rank not in members:
            return None, []
        group = AttentionGroup.create(Members(members, "gloo"), timeout_seconds=30)
        return group.per_node, said


@pytest.mark.parametrize(
    ("nodes", "members", "expected"),
    [
        ([0, 0, 1, 1], (0, 1, 2, 3), 2),
        ([0, 0, 0, 0], (0, 1, 2, 3), 4),
        ([0, 0, 1, 1], (0, 2), 1),  # one rank of each node, as with tensor parallelism in nodes
        ([0, 0, 1, 1], (2, 3), 2),
    ],
)
def test_ranks_of_a_group_find_their_nodes(
    rank_pool: RankPools, nodes: list[int], members: tuple[int, ...], expected: int
) -> None:
    for rank, (per_node, said) in enumerate(rank_pool(4)(find_nodes, nodes, members)):
        assert per_node == (expected if rank in members else None)
        assert not said


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 1, 0, 1]], ids=["uneven", "interleaved"])
def test_uneven_or_interleaved_nodes_are_ignored_and_logged_once(
    rank_pool: RankPools, nodes: list[int]
) -> None:
    (first, said), *others = rank_pool(4)(find_nodes, nodes, (0, 1, 2, 3))
    assert first is None
    assert others == [(None, [])] * 3
    assert len(said) == 1
    assert (
        "4 ranks share attention on 2 nodes, but nodes differ in size or their ranks do not follow"
        in said[0]
    )


def find_group_of_size(rank: int, size: int) -> tuple[tuple[int, ...], int]:
    group = AttentionGroup.find_or_create(timeout_seconds=30, size=size)
    assert AttentionGroup.find_or_create(timeout_seconds=30, size=size) is group
    return group.ranks, group.rank


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [(0,), (1,), (2,), (3,)]), (2, [(0, 1)] * 2 + [(2, 3)] * 2), (4, [(0, 1, 2, 3)] * 4)],
)
def test_group_size_cuts_ranks_into_consecutive_groups(
    rank_pool: RankPools, size: int, expected: list[tuple[int, ...]]
) -> None:
    assert rank_pool(4)(find_group_of_size, size) == [
        (ranks, ranks.index(rank)) for rank, ranks in enumerate(expected)
    ]


def fail_to_divide(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        AttentionGroup.find_or_create(timeout_seconds=30, size=3)
    return str(caught.value)


def test_group_size_must_divide_the_number_of_ranks(rank_pool: RankPools) -> None:
    assert all(
        "group_size=3 does not divide the 4 ranks" in message
        for message in rank_pool(4)(fail_to_divide)
    )


@pytest.mark.parametrize(
    ("launched", "ranks", "expected"),
    [("8", 64, 8), ("8", 4, 4), ("8", 12, None), ("2", 2, 2), (None, 8, None), ("x", 8, None)],
)
def test_ranks_per_node_follow_local_world_size(
    monkeypatch: pytest.MonkeyPatch, launched: str | None, ranks: int, expected: int | None
) -> None:
    if launched is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    assert find_launched_per_node(ranks) == expected
