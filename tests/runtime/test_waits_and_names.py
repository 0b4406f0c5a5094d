"""Limits of waits, tags of messages, names of communicators and polls of the store."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_distca.runtime import channel, listener, members
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import BREAK_TAG, FailureMonitor
from ranks import RankPools

SECONDS = 1.0


def exchange_late(rank: int) -> tuple[list[int], bool]:
    """Exchange bytes: rank 0 is busy for longer than the timeout before it waits, and rank 1
    launches later still.
    """
    group = AttentionGroup.create(timeout_seconds=SECONDS)
    assert group.data is not None
    received = torch.zeros(2, dtype=torch.uint8)
    sent = torch.full((2,), rank + 1, dtype=torch.uint8)
    one = {1 - rank: 2}
    if rank:
        time.sleep(1.6 * SECONDS)
    transfer = group.data.start(received, sent, one, one)
    if not rank:
        time.sleep(1.3 * SECONDS)
    transfer.wait()
    return received.tolist(), transfer.tag < BREAK_TAG


def make_again(rank: int) -> int:
    """Make a communicator that fails on rank 1, then the next; return the sum over its ranks."""
    tried: list[str] = []

    def made(_: Any, __: Any, ___: Any, name: str, ____: Any) -> Any:
        tried.append(name)
        # Rank 0 must begin before rank 1 fails; else it takes the next name and fails, too.
        dist.barrier()
        if rank:
            raise RuntimeError("lost connection")

    def make() -> dist.ProcessGroup:
        return members.make_communicator(
            (0, 1), "gloo", timedelta(seconds=3 * SECONDS), "distca-control"
        )

    with (
        patch.object(members, "group_of_members", made),
        pytest.raises(RuntimeError) if rank else nullcontext(),
    ):
        make()
    dist.barrier()
    taken = members.list_group_names()
    with patch.object(members, "list_group_names", lambda: taken | set(() if rank else tried)):
        group = make()
    number = torch.tensor([rank + 1])
    dist.all_reduce(number, group=group)
    return int(number)


def test_a_wait_that_begins_late_has_its_full_timeout(rank_pool: RankPools) -> None:
    assert rank_pool(2)(exchange_late, timeout=30.0) == [([2, 2], True), ([1, 1], True)]


def test_ranks_take_a_new_group_name_after_some_failed_to_make_one(rank_pool: RankPools) -> None:
    assert rank_pool(2)(make_again, timeout=30.0) == [3, 3]


@pytest.mark.parametrize("checksum", [0, 2**31 - 2, 2**31 - 1, 2**32 - 1])
def test_no_message_has_the_tag_that_breaks_connections(
    monkeypatch: pytest.MonkeyPatch, checksum: int
) -> None:
    tags: list[int] = []

    def launch(_: Any, transfer: Any, *__: Any) -> None:
        tags.append(transfer.tag)

    monkeypatch.setattr(channel.zlib, "crc32", lambda *_: checksum)
    monkeypatch.setattr(channel.Channel, "_start_tagged", launch)
    group = SimpleNamespace(name=lambda: "gloo", rank=lambda: 0)
    alone = channel.Channel(group, SimpleNamespace(under_way=set()), 1.0)  # type: ignore[arg-type]
    alone.start(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), {}, {})
    assert 0 <= tags[0] < BREAK_TAG


@pytest.mark.parametrize(
    ("ranks", "world", "seconds"),
    [(2, 2, 0.25), (512, 4096, 2.0), (1024, 1024, 0.5), (2, None, 0.25)],
)
def test_the_poll_pause_grows_with_the_ranks_of_the_world(
    monkeypatch: pytest.MonkeyPatch, ranks: int, world: int | None, seconds: float
) -> None:
    """All groups of a world share one store, which they poll at most 2,048 times a second."""
    monkeypatch.setattr(dist, "is_initialized", lambda: world is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    link: Any = SimpleNamespace(get_group_store=dist.HashStore)
    assert listener._poll_pause(FailureMonitor(tuple(range(ranks)), 0, 1.0, (link,))) == seconds
