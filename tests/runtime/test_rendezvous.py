"""Gatherings for which no rank waits, and what happens if ranks turn out not to do the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from io import StringIO
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import IntArray
from ranks import RankPool

LATE = 0.5


def attend(rank: int) -> tuple[float, list[list[int]], list[list[int]]]:
    """Seconds until a rank goes on, the rows, and what was gathered meanwhile."""
    group = AttentionGroup.create(timeout_seconds=20)
    group.gather(np.zeros(1, dtype=np.int64), doing="beginning together")
    if rank == 1:
        time.sleep(LATE)
    began = time.perf_counter()
    meeting = group.gather_async(np.arange(rank + 1), doing="meeting", on_arrival=lambda _: None)
    seconds = time.perf_counter() - began
    between = group.gather(np.array([10 * rank]), doing="gathering")
    rows = meeting.wait()
    group.raise_pending()
    return seconds, [row.tolist() for row in rows], [row.tolist() for row in between]


def test_nobody_waits_for_a_meeting(rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2)(attend)
    assert max(seconds for seconds, *_ in results) < LATE / 2
    for _, rows, between in results:
        assert rows == [[0], [0, 1]]
        assert between == [[0], [10]]


def disagree(rank: int) -> tuple[str, str, float]:
    """The error of a rank that waits for a message that never comes, and of one that only looks."""
    group = AttentionGroup.create(timeout_seconds=60)

    def agree(rows: Sequence[IntArray]) -> None:
        raise DistCADesyncError(f"ranks have {[int(row[0]) for row in rows]}")

    began = time.monotonic()
    meeting = group.gather_async(np.array([rank]), doing="meeting", on_arrival=agree)
    received, peer = torch.empty(8, dtype=torch.uint8), 1 - rank
    found: list[Any] = []
    purpose = f"exchange in forward of something of rank {rank}"
    with pytest.raises(DistCADesyncError) as caught:
        group.data.start(received, received.clone(), {peer: 8}, {peer: 8}, purpose).wait()
    found.append(str(caught.value))
    with pytest.raises(DistCADesyncError) as caught:
        group.raise_pending()
    found.append(str(caught.value))
    with pytest.raises(DistCADesyncError):
        meeting.wait()
    return (*found, time.monotonic() - began)


def test_a_rank_is_woken_where_it_waits_in_vain(rank_pool: Callable[[int], RankPool]) -> None:
    for waiting, looking, seconds in rank_pool(2)(disagree):
        assert waiting == looking == "ranks have [0, 1]"
        assert seconds < 15, "not after the timeout of 60 s"


class NcclData:
    """A communicator over which nothing arrives; waits for it end when it is aborted, as over
    NCCL.
    """

    def __init__(self) -> None:
        self.aborted = Event()

    def name(self) -> str:
        return "nccl"

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborted.set()

    def wait(self) -> None:
        """Of an exchange."""
        assert self.aborted.wait(30), "nobody has woken this rank"
        raise RuntimeError("NCCL communicator was aborted on rank 0")


def disagree_over_nccl(rank: int, host_waits_for_gpu: bool) -> tuple[str, str]:
    """The error of a rank that waits over NCCL while the ranks turn out to disagree, and what it
    showed before.
    """
    group, data, shown = AttentionGroup.create(timeout_seconds=60), NcclData(), StringIO()
    watch = group.monitor
    watch._links = (data, group.control)
    channel = Channel(data, watch, 60)  # type: ignore[arg-type]

    def agree(rows: Sequence[IntArray]) -> None:
        raise DistCADesyncError(
            f"rank 0 was in step {int(rows[0][0])}, rank 1 in step {int(rows[1][0])}"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: data)
        empty = torch.empty(8, dtype=torch.uint8)
        purpose = "exchange in forward of layer 3 of micro-batch 7"
        transfer = channel.start(empty, empty, {}, {}, purpose)
        patch.undo()
        patch.setattr(sys, "stderr", shown)
        group.gather_async(np.array([rank + 4]), doing="meeting", on_arrival=agree)
        if host_waits_for_gpu:  # which goes on when the exchange is aborted, and raises nothing
            assert data.aborted.wait(30)
        with pytest.raises(DistCADesyncError) as caught:
            (group.raise_pending if host_waits_for_gpu else transfer.wait)()
    return str(caught.value), shown.getvalue()


@pytest.mark.parametrize("host_waits_for_gpu", [False, True])
def test_a_rank_is_woken_over_nccl_and_says_who_was_where(
    rank_pool: Callable[[int], RankPool], host_waits_for_gpu: bool
) -> None:
    for error, shown in rank_pool(2)(disagree_over_nccl, host_waits_for_gpu):
        assert error == "rank 0 was in step 4, rank 1 in step 5"
        assert f"hf_distca: {error}\n" in shown


def crash(error: Exception, group: AttentionGroup) -> list[str]:
    """What a rank learns of a comparison that raises this, whenever it waits."""

    def agree(rows: Sequence[IntArray]) -> None:
        raise error

    meeting = group.gather_async(np.array([1]), doing="meeting", on_arrival=agree)
    found = []
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            meeting.wait()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("error", [IndexError("too short"), RuntimeError("a bug")])
def test_a_comparison_that_crashes_is_no_agreement(error: Exception) -> None:
    assert crash(error, AttentionGroup()) == [str(error)] * 2


def crash_in_a_group(rank: int) -> list[str]:
    return crash(RuntimeError("a bug"), AttentionGroup.create(timeout_seconds=20))


def test_crashed_comparison_is_not_reported_as_a_missing_rank(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """A comparison that crashes is not a rank that did not come."""
    assert rank_pool(2)(crash_in_a_group) == [["a bug"] * 2] * 2
