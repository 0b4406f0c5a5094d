"""Gatherings for which no rank waits, and what happens if ranks turn out not to do the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import IntArray
from ranks import RankPool

LATE = 0.5


def attend(rank: int) -> tuple[float, bool, list[list[int]], list[list[int]]]:
    """Seconds until a rank goes on, whether the meeting was over then, the rows, and what was gathered meanwhile."""
    group = AttentionGroup.create(timeout_seconds=20)
    group.gather(np.zeros(1, dtype=np.int64), doing="beginning together")
    if rank == 1:
        time.sleep(LATE)
    began = time.perf_counter()
    meeting = group.gather_async(np.arange(rank + 1), doing="meeting", agree=lambda _: None)
    seconds, done = time.perf_counter() - began, meeting.done
    between = group.gather(np.array([10 * rank]), doing="gathering")
    meeting.wait()
    group.raise_pending()
    return seconds, done, [row.tolist() for row in meeting.rows], [row.tolist() for row in between]


def test_nobody_waits_for_a_meeting(rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2)(attend)
    assert max(seconds for seconds, *_ in results) < LATE / 2
    assert not results[0][1], "the other rank is late"
    for _, _, rows, between in results:
        assert rows == [[0], [0, 1]]
        assert between == [[0], [10]]


def disagree(rank: int) -> tuple[str, str, float]:
    """The error of a rank that waits for a message that never comes, and of one that only looks."""
    group = AttentionGroup.create(timeout_seconds=60)

    def agree(rows: Sequence[IntArray]) -> None:
        raise DistCADesyncError(f"ranks have {[int(row[0]) for row in rows]}")

    began = time.monotonic()
    meeting = group.gather_async(np.array([rank]), doing="meeting", agree=agree)
    received, peer = torch.empty(8, dtype=torch.uint8), 1 - rank
    found: list[Any] = []
    with pytest.raises(DistCADesyncError) as caught:
        group.data.at(f"something of rank {rank}", 1).start(received, received.clone(), {peer: 8}, {peer: 8}).wait()
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


def crash(error: Exception, group: AttentionGroup) -> list[str]:
    """What a rank learns of a comparison that raises this, when it looks and when it waits."""

    def agree(rows: Sequence[IntArray]) -> None:
        raise error

    meeting = group.gather_async(np.array([1]), doing="meeting", agree=agree)
    found = []
    for learn in (meeting.wait, lambda: meeting.done):
        with pytest.raises(type(error)) as caught:
            learn()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("error", [IndexError("too short"), RuntimeError("a bug")])
def test_a_comparison_that_crashes_is_no_agreement(error: Exception) -> None:
    assert crash(error, AttentionGroup()) == [str(error)] * 2


def crash_in_a_group(rank: int) -> list[str]:
    return crash(RuntimeError("a bug"), AttentionGroup.create(timeout_seconds=20))


def test_a_comparison_that_crashes_is_not_a_rank_that_did_not_come(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2)(crash_in_a_group) == [["a bug"] * 2] * 2
