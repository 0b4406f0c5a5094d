from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_distca import DistCADesyncError
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.runtime.messages import MessagePart, RowRun, Rows, launch
from ranks import RankPool, RankPools


def count_rows(world: int) -> list[list[int]]:
    """Return rows[sender][receiver]: uneven, some zero, and none from the last rank."""
    return [
        [(3 * a + 5 * b) % 4 if a < world - 1 else 0 for b in range(world)] for a in range(world)
    ]


def payload(rank: int, to: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * width).view(rows, width) + 100 * rank + 10 * to).to(dtype)


def send_and_return(rank: int, world: int) -> None:
    group = AttentionGroup.create(timeout_seconds=30)
    table = count_rows(world)
    send, receive = tuple(table[rank]), tuple(row[rank] for row in table)
    # 5 bfloat16 numbers do not fill 16 bytes: padding is needed.
    kinds = [(torch.float32, 3), (torch.bfloat16, 5), (torch.float64, 1)]
    parts = []
    for dtype, width in kinds:
        ordered = torch.cat([payload(rank, to, rows, width, dtype) for to, rows in enumerate(send)])
        shuffled = torch.randperm(len(ordered))
        own = torch.empty_like(ordered)
        own[shuffled] = ordered
        to = (rank for rank, rows in enumerate(send) for _ in range(rows))
        runs = tuple(
            RowRun(rank, start, 1) for rank, start in zip(to, shuffled.tolist(), strict=True)
        )
        parts.append(
            MessagePart(own, Rows(runs, {rank: rows for rank, rows in enumerate(receive) if rows}))
        )
    first, second = launch(group.data, parts), launch(group.data, parts)  # two may be under way
    for pending in (first, second):
        received = [
            torch.cat([part.tensor[:0], *came])
            for part, came in zip(parts, pending.receive_sections(), strict=True)
        ]
        for got, (dtype, width) in zip(received, kinds, strict=True):
            expected = torch.cat(
                [payload(source, rank, rows, width, dtype) for source, rows in enumerate(receive)]
            )
            assert torch.equal(got, expected)
    back = launch(
        group.data,
        [MessagePart(t, part.rows.way_back) for t, part in zip(received, parts, strict=True)],
    ).receive_sections()
    for sections, part in zip(back, parts, strict=True):
        sent = [part.tensor[run.start : run.start + run.rows] for run in part.rows.runs]
        assert torch.equal(
            torch.cat([part.tensor[:0], *sections]), torch.cat([part.tensor[:0], *sent])
        )


WAYS: dict[str, tuple[Any, ...]] = {
    "as they are": (),
    "through the host": ("_is_staged", lambda channel, message: True),  # as a GPU's over gloo
    "as one all-to-all": ("is_gloo", property(lambda channel: False)),  # as over NCCL
}


def send_and_return_by_way(rank: int, world: int, way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if WAYS[way]:
            patch.setattr(Channel, *WAYS[way])
        send_and_return(rank, world)


@pytest.mark.parametrize(
    ("way", "world"),
    [
        *[("as they are", world) for world in (2, 3, 4)],
        ("through the host", 2),
        *[("as one all-to-all", world) for world in (2, 3)],
    ],
)
def test_uneven_rows_of_several_dtypes_travel_there_and_back(
    rank_pool: RankPools, way: str, world: int
) -> None:
    rank_pool(world)(send_and_return_by_way, world, way)


def compute_checksums(rank: int, skipped: list[int]) -> list[int]:
    """Return the checksum before and after each of three layers, of which this rank skips one."""
    group = AttentionGroup.create(timeout_seconds=30)
    assert group.data is not None
    found = [group.data.checksum]
    nothing = torch.empty(0, dtype=torch.uint8)
    for layer in range(3):
        for _ in range(4 if layer != skipped[rank] else 0):
            purpose = f"exchange of layer {layer} of micro-batch 1"
            group.data.start(nothing, nothing, {}, {}, purpose).wait()
        found.append(group.data.checksum)
    return found


def test_checksums_differ_if_equal_messages_belong_to_different_layers(
    rank_pool: RankPools,
) -> None:
    pool = rank_pool(2)
    one, other = pool(compute_checksums, [1, 2])
    assert one[:2] == other[:2]
    assert one[3] != other[3], "as many exchanges of the same sizes, but in different layers"
    one, other = pool(compute_checksums, [1, 1])
    assert one == other
    assert len(set(one)) == 3, "each layer that ran changed the checksum"
    assert all(0 <= value < 2**63 for value in one)


def test_a_group_of_one_rank_needs_no_torch_distributed() -> None:
    rows = Rows((RowRun(0, 2, 1), RowRun(0, 0, 1)), {0: 2})
    tensor = torch.arange(6.0).view(3, 2)
    ((section,),) = launch(None, [MessagePart(tensor, rows)]).receive_sections()
    assert torch.equal(section, tensor[[2, 0]])
    group = AttentionGroup.create()
    assert (group.size, group.rank, group.data) == (1, 0, None)
    for gather in (group.gather, group.gather_same_length):
        assert gather(np.array([4, 5]), activity="testing")[0].tolist() == [4, 5]


def create_group(rank: int, how: str) -> tuple[tuple[int, ...], int, list[list[int]]]:
    """Create a group; return its ranks, this rank's index and what the group gathers."""
    given: Any = None
    if how == "pairs":  # ranks of equal tensor-parallel coordinates
        given = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    if how == "out of order":
        given = Members((2, 0, 1), "gloo")
    if how == "after other groups":  # ranks are in different numbers of groups
        for ranks in ([0], [0], [1, 2], [0]):
            dist.new_group(ranks)
    group = AttentionGroup.create(given, timeout_seconds=30)
    rows = group.gather(np.array([rank]), activity="testing")
    return group.ranks, group.rank, [row.tolist() for row in rows]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("pairs", [(0, 2), (1, 3)] * 2),
        ("out of order", [(0, 1, 2)] * 3),
        ("after other groups", [(0, 1, 2)] * 3),
    ],
)
def test_groups_hold_their_members_in_ascending_order(
    rank_pool: RankPools, how: str, expected: list[tuple[int, ...]]
) -> None:
    assert rank_pool(len(expected))(create_group, how) == [
        (ranks, ranks.index(rank), [[one] for one in ranks]) for rank, ranks in enumerate(expected)
    ]


def exchange_or_raise(
    rank: int, table: list[list[int]], starts: list[float | None], culprit: int
) -> tuple[str, float]:
    group = AttentionGroup.create(timeout_seconds=20)
    assert group.data is not None
    sizes, start = dict(enumerate(table[rank])), starts[rank]
    sent, received = torch.zeros(2, sum(table[rank]), dtype=torch.uint8)
    group.gather(np.array([0]), activity="testing")
    began = time.monotonic()
    try:
        with group.report_errors("testing"):
            if start is not None:
                time.sleep(start)
                transfer = group.data.start(received, sent, sizes, sizes)
            if rank == culprit:
                time.sleep(0.05)
                raise ValueError("unlucky")
        transfer.wait()
        group.data.start(received, sent, sizes, sizes).wait()
    except (ValueError, DistCADesyncError) as error:
        return str(error), time.monotonic() - began
    return "", 0.0


LARGE = 2**28  # bytes, which take about 0.1 s


@pytest.mark.parametrize(
    ("table", "starts", "culprit"),
    [
        ([[0, LARGE], [LARGE, 0]], [0, 0], 1),
        # Rank 2 learns of rank 1's failure only through rank 0, which notices when it waits.
        ([[0, 9, LARGE], [9, 0, 0], [LARGE, 0, 0]], [0, None, 0], 1),
        # Rank 1 learns of rank 2's failure only through rank 0, which notices after it has started
        # to send to rank 1.
        ([[0, LARGE, 9], [LARGE, 0, 0], [9, 0, 0]], [0.3, 0.2, None], 2),
    ],
)
def test_no_rank_waits_for_a_rank_that_raises_during_messages(
    rank_pool: RankPools,
    table: list[list[int]],
    starts: list[float | None],
    culprit: int,
) -> None:
    results = rank_pool(len(table))(exchange_or_raise, table, starts, culprit)
    assert results.pop(culprit)[0] == "unlucky"
    for error, seconds in results:
        assert f"rank {culprit} raised ValueError while testing: unlucky" in error
        assert seconds < 5


# Calls of rank 0 while rank 1 stays away, by the error that rank 0 gets.
ALONE: dict[str, Callable[[AttentionGroup], object]] = {
    "rank 0 waited up to 2 s for ranks (0, 1) while planning micro-batch 7": (
        lambda group: group.gather(np.array([1]), activity="planning micro-batch 7")
    ),
    "while comparing plans of micro-batch 7, and not all came": (
        lambda group: group.gather_same_length(
            np.array([1]), activity="comparing plans of micro-batch 7"
        )
    ),
    "while making the attention group again, and not all came": (
        lambda group: AttentionGroup.find_or_create(timeout_seconds=2)
    ),
}


def call_alone(rank: int, said: str) -> str:
    group = AttentionGroup.find_or_create(timeout_seconds=2)
    if rank == 1:
        return ""
    with pytest.raises(DistCADesyncError) as caught:
        ALONE[said](group)
    return str(caught.value)


@pytest.mark.parametrize("said", ALONE)
def test_a_missing_rank_causes_an_error_that_names_the_wait(said: str) -> None:
    with closing(RankPool(2)) as pool:  # not shared: the control group is broken afterwards
        message = pool(call_alone, said, timeout=60)[0]
    assert said in message
    assert "rank 1 is silent" in message
