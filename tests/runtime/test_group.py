"""What making a group and talking in it costs, and whom it waits for."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from ranks import RankPool

SHORT, LONG = 60, 4 + 3 * 1024  # numbers that a rank announces with 20 documents, and with 1024


def bytes_received() -> int:
    """Bytes that have come in over the connections that this process has open."""
    total = 0
    for path in tuple(Path("/proc/self/fd").iterdir()):
        if not path.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += int.from_bytes(information[128:136], "little")  # tcpi_bytes_received
    return total


def gathered(rank: int, lengths: list[int]) -> int:
    group = AttentionGroup.find_or_create(timeout_seconds=30)
    row = np.arange(lengths[rank]) - 2**40
    row.flags.writeable = False
    expected = [(np.arange(length) - 2**40).tolist() for length in lengths]
    assert [row.tolist() for row in group.gather(row, activity="testing")] == expected
    dist.barrier()
    before = bytes_received()
    for _ in range(10):
        group.gather(row, activity="testing")
    dist.barrier()
    return (bytes_received() - before) // 10


@pytest.mark.parametrize(
    "lengths",
    [[SHORT, LONG, SHORT, SHORT], [LONG, LONG - 300, LONG - 9, LONG], [0, LONG, 1, 5 * LONG]],
)
def test_rows_are_not_padded_to_the_longest(
    rank_pool: Callable[[int], RankPool], lengths: list[int]
) -> None:
    received = rank_pool(4)(gathered, lengths)
    # 129 numbers of each of three ranks, and what is left; gloo adds about 50 bytes to a message.
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
def test_rows_of_any_length_are_gathered(
    rank_pool: Callable[[int], RankPool], lengths: list[int]
) -> None:
    rank_pool(2)(gathered, lengths)


def compared(rank: int) -> list[bool]:
    group, ends = (
        AttentionGroup.find_or_create(timeout_seconds=30),
        [np.iinfo(np.int64).min, np.iinfo(np.int64).max],
    )
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
def test_numbers_are_compared_in_one_collective(
    rank_pool: Callable[[int], RankPool], world: int
) -> None:
    assert rank_pool(world)(compared) == [[True, False, True, False, False, False]] * world


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)

    def link(self) -> Any:
        return SimpleNamespace(
            name=lambda: "no gloo", get_group_store=lambda: self, abort=lambda: None
        )


def gives_up(monitor: FailureMonitor) -> str:
    return str(monitor.give_up("planning", RuntimeError("lost")))


def test_a_rank_that_waits_for_words_looks_at_one_key() -> None:
    store, ranks = CountedStore(), tuple(range(512))
    monitor = FailureMonitor(ranks, 3, 5.0, (store.link(),))  # 0.5 s for the words of others
    assert not monitor.leave_after_others()
    store.calls.clear()
    assert gives_up(monitor).count("is silent") == 511
    assert sum(store.calls.values()) < 30  # 25 looks at 20 ms; asking for each rank took 511 each


class LateStore(CountedStore):
    """A store that takes a moment for an answer."""

    def __getattr__(self, name: str) -> Any:
        def answer(*args: Any) -> Any:
            time.sleep(0.02)
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return answer


def test_no_word_is_read_once_a_rank_has_given_up() -> None:
    """Its thread would come back from the store while the interpreter ends, which aborts the
    process.
    """
    store = LateStore()
    for _ in range(3):
        # 0.3 s for the words of the other.
        gives_up(FailureMonitor((0, 1), 1, 3.0, (store.link(),)))
        before = store.calls.total()
        time.sleep(0.3)
        assert store.calls.total() == before


def test_every_word_is_read_once() -> None:
    store, ranks = CountedStore(), tuple(range(100, 140))
    for rank in range(39):
        FailureMonitor(ranks, rank, 0.0, (store.link(),)).give_up(f"thing {rank}", RuntimeError())
    store.calls.clear()
    message = gives_up(FailureMonitor(ranks, 39, 20.0, (store.link(),)))
    assert all(
        f"rank {100 + rank} waited in vain while thing {rank};" in message for rank in range(38)
    )
    # counts, writes, counts again; then two for each word.
    assert sum(store.calls.values()) == 3 + 2 * 40


def test_a_rank_that_counted_and_did_not_write_hides_no_other() -> None:
    store, ranks = CountedStore(), (0, 1, 2)
    store.add("distca words", 1)  # then it died
    FailureMonitor(ranks, 1, 0.0, (store.link(),)).give_up("saving", RuntimeError())
    message = gives_up(FailureMonitor(ranks, 2, 1.0, (store.link(),)))
    assert "rank 0 is silent" in message
    assert "rank 1 waited in vain while saving" in message


def cannot_connect(rank: int) -> str:
    with (
        patch.dict(os.environ, GLOO_SOCKET_IFNAME="none"),
        pytest.raises(DistCADesyncError) as caught,
    ):
        AttentionGroup.create(timeout_seconds=10)
    return str(caught.value)


def test_ranks_that_cannot_connect_are_told_of_the_interface(
    rank_pool: Callable[[int], RankPool],
) -> None:
    for message in rank_pool(2)(cannot_connect):
        assert "set GLOO_SOCKET_IFNAME to the network interface that connects the nodes" in message


class SilentStore(CountedStore):
    """A store on a node that is lost: no call of it ends."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: Event().wait(60)


def test_a_store_that_no_longer_answers_keeps_nobody_waiting() -> None:
    """TCP would wait a quarter of an hour."""
    # 0.3 s for the words of others.
    watches = [FailureMonitor((0, 1), 1, 3.0, (SilentStore().link(),)) for _ in range(2)]
    started = time.monotonic()
    assert "rank 0 is silent" in gives_up(watches[0])
    assert watches[1].leave_after_others(), "nobody can know"
    assert time.monotonic() - started < 3.0


def receives_of_breaking(rank: int) -> int:
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


def test_breaking_connections_does_not_walk_the_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(4)(receives_of_breaking)[0] == 2  # one for each of two communicators


# NCCL makes the communicator of a subset from that of a world which is bound to a device, and all
# ranks of the world take part. This stand-in is gloo that does the same.
SPLITTING = "splitting"


def splitting_communicator(options: Any, _: object) -> Any:
    if dist.GroupMember.WORLD.bound_device_id is not None:
        dist.all_reduce(torch.zeros(1))
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timedelta(seconds=5)
    )


def register_splitting() -> None:
    if not hasattr(dist.Backend, SPLITTING.upper()):
        dist.Backend.register_backend(
            SPLITTING, splitting_communicator, extended_api=True, devices=["cpu", "cuda"]
        )


@contextmanager
def bound_world() -> Iterator[None]:
    world = dist.GroupMember.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    try:
        yield
    finally:
        world.bound_device_id = None


def token(source: int, destination: int) -> None:
    if dist.get_rank() == source:
        dist.send(torch.zeros(1), destination)
    if dist.get_rank() == destination:
        dist.recv(torch.zeros(1), source)


def stages(rank: int, members: str) -> list[int]:
    """Ranks 2 and 3 make their group after 0 and 1 have used theirs, as stages of a pipeline do
    that wait for activations.
    """
    ranks = (0, 1) if rank < 2 else (2, 3)
    register_splitting()
    groups = [dist.new_group(ranks, backend=SPLITTING) for ranks in ((0, 1), (2, 3))]
    given: Any = groups[rank // 2] if members == "process group" else Members(ranks, SPLITTING)
    with bound_world():
        if rank < 2:
            group = AttentionGroup.create(given, timeout_seconds=10)
            rows = group.gather(np.array([rank]), activity="testing")
        token(0, 2), token(1, 3)
        if rank >= 2:
            group = AttentionGroup.create(given, timeout_seconds=10)
            rows = group.gather(np.array([rank]), activity="testing")
        assert dist.GroupMember.WORLD.bound_device_id == torch.device("cuda", 0)
        sent, received = (
            torch.full((2,), rank, dtype=torch.uint8),
            torch.empty(2, dtype=torch.uint8),
        )
        assert group.data is not None
        group.data.start(received, sent, {0: 1, 1: 1}, {0: 1, 1: 1}).wait()
    assert received.tolist() == list(ranks)
    return [int(row[0]) for row in rows]


@pytest.mark.parametrize("members", ["ranks", "process group"])
def test_groups_of_a_device_bound_world_are_made_by_members(members: str) -> None:
    pool = RankPool(4)  # of its own: if it fails, ranks hang
    try:
        assert pool(stages, members, timeout=200) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    finally:
        pool.close()


def fails_late(rank: int) -> list[bool]:
    first = AttentionGroup.find_or_create(timeout_seconds=20)
    again = AttentionGroup.find_or_create(timeout_seconds=20)
    if rank == 1:  # the others ask for the group before they can know
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
    rank_pool: Callable[[int], RankPool], world: int
) -> None:
    assert rank_pool(world)(fails_late) == [[True, False, False, True]] * world


def goes_on(rank: int) -> float:
    """Seconds until a rank has its group, where the other one is late with the last step of making
    it.
    """
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


def test_no_rank_goes_on_before_all_have_made_the_group(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """One that did, and failed at once, would break its connections while others still connect to
    it.
    """
    assert min(rank_pool(2)(goes_on)) >= 0.4


def patient(rank: int) -> list[float]:
    groups = [
        AttentionGroup.find_or_create(),
        AttentionGroup.create(),
        AttentionGroup.find_or_create(timeout_seconds=7),
    ]
    return [group.timeout_seconds for group in groups]


def test_ranks_wait_as_long_as_their_world_does(rank_pool: Callable[[int], RankPool]) -> None:
    world = dist.default_pg_timeout.total_seconds()
    assert rank_pool(2)(patient) == [[world, world, 7]] * 2
