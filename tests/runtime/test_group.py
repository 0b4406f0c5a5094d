"""Messages and waits while a group is made and while it gathers numbers."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_distca import DistCADesyncError
from hf_distca.runtime import group as group_module
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.runtime.monitor import FailureMonitor
from ranks import RankPool, RankPools

SHORT, LONG = 60, 4 + 3 * 1024  # numbers that a rank announces with 20 documents, and with 1024


def count_received_bytes() -> int:
    """Count the bytes received over this process's open connections."""
    total = 0
    for path in tuple(Path("/proc/self/fd").iterdir()):
        if not path.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += int.from_bytes(information[128:136], "little")  # tcpi_bytes_received
    return total


def gather_rows(rank: int, lengths: list[int]) -> int:
    group = AttentionGroup.find_or_create(timeout_seconds=30)
    row = np.arange(lengths[rank]) - 2**40
    row.flags.writeable = False
    expected = [(np.arange(length) - 2**40).tolist() for length in lengths]
    assert [row.tolist() for row in group.gather(row, activity="testing")] == expected
    dist.barrier()
    before = count_received_bytes()
    for _ in range(10):
        group.gather(row, activity="testing")
    dist.barrier()
    return (count_received_bytes() - before) // 10


@pytest.mark.parametrize(
    "lengths",
    [[SHORT, LONG, SHORT, SHORT], [LONG, LONG - 300, LONG - 9, LONG], [0, LONG, 1, 5 * LONG]],
)
def test_gathered_rows_are_not_padded_to_the_longest(
    rank_pool: RankPools, lengths: list[int]
) -> None:
    received = rank_pool(4)(gather_rows, lengths)
    # Three ranks send 129 numbers each, then the rest. gloo adds about 50 bytes to a message.
    assert (
        3000
        < max(received)
        <= 8 * (3 * 129 + sum(max(length - 128, 0) for length in lengths)) + 2000
    )


@pytest.mark.parametrize(
    "lengths",
    [
        [128, 129],
        [129, 0],
        [128, 128],
        [127, 4096],
        [0, 0],
        [3, 0],
        [512, 1],
        [513, 2000],
    ],
)
def test_rows_of_any_length_are_gathered(rank_pool: RankPools, lengths: list[int]) -> None:
    rank_pool(2)(gather_rows, lengths)


def compare_numbers(rank: int) -> list[bool]:
    group = AttentionGroup.find_or_create(timeout_seconds=30)
    ends = [np.iinfo(np.int64).min, np.iinfo(np.int64).max]
    sizes = []

    def all_to_all(
        *args: Any, original: Callable[..., Any] = dist.all_to_all_single, **options: Any
    ) -> None:
        sizes.append(args[1].numel() // group.size)
        original(*args, **options)

    with patch.object(dist, "all_to_all_single", all_to_all):
        same = [
            len(set(map(tuple, group.gather_same_length(np.array(numbers), activity="testing"))))
            == 1
            for numbers in (
                [7],
                [rank],
                [0, *ends],
                [7, 0, 7 - (rank == 1)],
                [ends[rank % 2]],
                [-rank // 3, 0],
            )
        ]
    assert sizes == [1, 1, 3, 3, 1, 2]  # one collective each, without padding
    return same


@pytest.mark.parametrize("world", [2, 4])
def test_numbers_are_compared_in_one_collective(rank_pool: RankPools, world: int) -> None:
    assert rank_pool(world)(compare_numbers) == [[True, False, True, False, False, False]] * world


class CountedStore:
    """A store that counts its calls."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)

    def link(self) -> Any:
        return SimpleNamespace(
            name=lambda: "no gloo", get_group_store=lambda: self, abort=lambda: None
        )


def give_up(monitor: FailureMonitor) -> str:
    return str(monitor.give_up("planning", RuntimeError("lost")))


def test_a_rank_that_waits_for_failure_reports_polls_one_key() -> None:
    store, ranks = CountedStore(), tuple(range(512))
    monitor = FailureMonitor(ranks, 3, 5.0, (store.link(),))  # waits 0.5 s for reports of others
    assert not monitor.leave_after_others()
    store.calls.clear()
    assert give_up(monitor).count("is silent") == 511
    assert sum(store.calls.values()) < 30  # 25 polls of one key; polls of each rank were 511 each


class LateStore(CountedStore):
    """A store that answers after 20 ms."""

    def __getattr__(self, name: str) -> Any:
        def answer(*args: Any) -> Any:
            time.sleep(0.02)
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return answer


def test_a_rank_reads_no_failure_reports_after_giving_up() -> None:
    """A thread that returns from the store while the interpreter ends would abort the process."""
    store = LateStore()
    for _ in range(3):
        # Waits 0.3 s for the other rank's report.
        give_up(FailureMonitor((0, 1), 1, 3.0, (store.link(),)))
        before = store.calls.total()
        time.sleep(0.3)
        assert store.calls.total() == before


def test_each_failure_report_is_read_once() -> None:
    store, ranks = CountedStore(), tuple(range(100, 140))
    for rank in range(39):
        FailureMonitor(ranks, rank, 0.0, (store.link(),)).give_up(f"thing {rank}", RuntimeError())
    store.calls.clear()
    message = give_up(FailureMonitor(ranks, 39, 20.0, (store.link(),)))
    assert all(
        f"rank {100 + rank} waited in vain while thing {rank};" in message for rank in range(38)
    )
    # Count, write and count again; then two calls for each report.
    assert sum(store.calls.values()) == 3 + 2 * 40


def test_a_rank_that_dies_before_its_report_does_not_hide_others() -> None:
    store, ranks = CountedStore(), (0, 1, 2)
    store.add("distca words", 1)  # then it died
    FailureMonitor(ranks, 1, 0.0, (store.link(),)).give_up("saving", RuntimeError())
    message = give_up(FailureMonitor(ranks, 2, 1.0, (store.link(),)))
    assert "rank 0 is silent" in message
    assert "rank 1 waited in vain while saving" in message


def fail_to_connect(rank: int) -> str:
    with (
        patch.dict(os.environ, GLOO_SOCKET_IFNAME="none"),
        pytest.raises(DistCADesyncError) as caught,
    ):
        AttentionGroup.create(timeout_seconds=10)
    return str(caught.value)


def test_the_error_of_a_failed_connection_names_gloo_socket_ifname(rank_pool: RankPools) -> None:
    for message in rank_pool(2)(fail_to_connect):
        assert "set GLOO_SOCKET_IFNAME to the network interface that connects the nodes" in message


class SilentStore(CountedStore):
    """The store of a lost node: no call returns."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: Event().wait(60)


def test_no_rank_waits_for_a_store_that_no_longer_answers() -> None:
    """Without a limit, TCP would wait for a quarter of an hour."""
    # Each waits 0.3 s for reports of others.
    watches = [FailureMonitor((0, 1), 1, 3.0, (SilentStore().link(),)) for _ in range(2)]
    started = time.monotonic()
    assert "rank 0 is silent" in give_up(watches[0])
    assert watches[1].leave_after_others(), "no rank can know whether others wait"
    assert time.monotonic() - started < 3.0


def count_receives_of_break(rank: int) -> int:
    group = AttentionGroup.create(timeout_seconds=10)
    assert group.monitor is not None
    group.gather(np.array([1]), activity="testing")
    with patch.object(dist, "irecv", wraps=dist.irecv) as irecv:
        if rank == 0:
            group.monitor.give_up("testing", RuntimeError("unlucky"))
        else:
            with pytest.raises(DistCADesyncError, match="rank 0 waited in vain while testing"):
                group.gather(np.array([1]), activity="testing")
    return irecv.call_count


def test_breaking_connections_takes_one_receive_per_communicator(rank_pool: RankPools) -> None:
    assert rank_pool(4)(count_receives_of_break)[0] == 2  # one for each of two communicators


# If the world is bound to a device, NCCL splits its communicator for a subset, and all ranks of the
# world must take part. This stand-in does the same over gloo.
SPLITTING = "splitting"


def make_splitting_communicator(options: Any, _: object) -> Any:
    if dist.GroupMember.WORLD.bound_device_id is not None:
        dist.all_reduce(torch.zeros(1))
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timedelta(seconds=5)
    )


def register_splitting() -> None:
    if not hasattr(dist.Backend, SPLITTING.upper()):
        dist.Backend.register_backend(
            SPLITTING, make_splitting_communicator, extended_api=True, devices=["cpu", "cuda"]
        )


@contextmanager
def bound_world() -> Iterator[None]:
    world = dist.GroupMember.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    try:
        yield
    finally:
        world.bound_device_id = None


def pass_token(source: int, destination: int) -> None:
    if dist.get_rank() == source:
        dist.send(torch.zeros(1), destination)
    if dist.get_rank() == destination:
        dist.recv(torch.zeros(1), source)


def make_groups_by_stage(rank: int, members: str) -> list[int]:
    """Make the group of ranks 2 and 3 after ranks 0 and 1 have used theirs, as in a pipeline whose
    later stages wait for activations.
    """
    ranks = (0, 1) if rank < 2 else (2, 3)
    register_splitting()
    groups = [dist.new_group(ranks, backend=SPLITTING) for ranks in ((0, 1), (2, 3))]
    given: Any = groups[rank // 2] if members == "process group" else Members(ranks, SPLITTING)
    with bound_world():
        if rank < 2:
            group = AttentionGroup.create(given, timeout_seconds=10)
            rows = group.gather(np.array([rank]), activity="testing")
        pass_token(0, 2), pass_token(1, 3)
        if rank >= 2:
            group = AttentionGroup.create(given, timeout_seconds=10)
            rows = group.gather(np.array([rank]), activity="testing")
        assert dist.GroupMember.WORLD.bound_device_id == torch.device("cuda", 0)
        sent = torch.full((2,), rank, dtype=torch.uint8)
        received = torch.empty(2, dtype=torch.uint8)
        assert group.data is not None
        group.data.start(received, sent, {0: 1, 1: 1}, {0: 1, 1: 1}).wait()
    assert received.tolist() == list(ranks)
    return [int(row[0]) for row in rows]


@pytest.mark.parametrize("members", ["ranks", "process group"])
def test_only_members_make_a_group_in_a_device_bound_world(members: str) -> None:
    with closing(RankPool(4)) as pool:  # not shared: ranks hang if the test fails
        assert pool(make_groups_by_stage, members, timeout=200) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def fail_late(rank: int) -> list[bool]:
    first = AttentionGroup.find_or_create(timeout_seconds=20)
    again = AttentionGroup.find_or_create(timeout_seconds=20)
    if rank == 1:  # the others ask for the group before they can know of the failure
        time.sleep(0.5)
        with pytest.raises(ValueError, match="unlucky"), first.report_errors("testing"):
            raise ValueError("unlucky")
    made = AttentionGroup.find_or_create(timeout_seconds=20)
    rows = made.gather(np.array([rank]), activity="testing again")
    other = AttentionGroup.find_or_create(timeout_seconds=21)
    same = [again is first, made is first, other is made]
    return [
        *same,
        [row.tolist() for row in rows] == [[one] for one in range(dist.get_world_size())],
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_is_made_again_on_all_ranks_if_one_has_left_it(
    rank_pool: RankPools, world: int
) -> None:
    assert rank_pool(world)(fail_late) == [[True, False, False, True]] * world


def time_creation(rank: int) -> float:
    """Return the seconds until this rank has its group, while rank 1 delays the last step."""
    make = group_module.make_communicator

    def late(
        ranks: tuple[int, ...], backend: str, timeout: timedelta, purpose: str
    ) -> dist.ProcessGroup:
        made = make(ranks, backend, timeout, purpose)
        if rank == 1 and purpose == "distca-control":
            time.sleep(0.5)
        return made

    started = time.monotonic()
    with patch.object(group_module, "make_communicator", late):
        AttentionGroup.create(timeout_seconds=20)
    return time.monotonic() - started


def test_no_rank_has_its_group_before_all_ranks_have_made_the_group(rank_pool: RankPools) -> None:
    """A rank that returned early and failed would break connections while others connect."""
    assert min(rank_pool(2)(time_creation)) >= 0.4


def list_timeouts(rank: int) -> list[float]:
    groups = [
        AttentionGroup.find_or_create(),
        AttentionGroup.create(),
        AttentionGroup.find_or_create(timeout_seconds=7),
    ]
    return [group.timeout_seconds for group in groups]


def test_default_timeout_is_that_of_the_world(rank_pool: RankPools) -> None:
    world = dist.default_pg_timeout.total_seconds()
    assert rank_pool(2)(list_timeouts) == [[world, world, 7]] * 2
