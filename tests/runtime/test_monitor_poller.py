"""What a rank prints when others leave, also while it waits in a collective of other code."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import forks
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import FailureMonitor
from ranks import join_world
from scripts import find_free_port

LIMIT = 60.0


class NcclLink:
    """Imitate a communicator whose connections only `abort` breaks."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.aborted = store, 0

    def name(self) -> str:
        return "nccl"

    def get_group_store(self) -> dist.Store:
        return self.store

    def abort(self) -> None:
        self.aborted += 1


def make_monitors(ranks: int) -> tuple[list[FailureMonitor], list[NcclLink]]:
    store = dist.PrefixStore(
        "a group", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )
    links = [NcclLink(store) for _ in range(ranks)]
    every = tuple(range(ranks))
    return [FailureMonitor(every, rank, 1.0, (link,)) for rank, link in enumerate(links)], links  # type: ignore[arg-type]


def raise_in_attention(monitor: FailureMonitor) -> None:
    with pytest.raises(MemoryError), monitor.report_errors("computing layer 3 of micro-batch 7"):
        raise MemoryError("no room")


def test_the_first_failure_is_printed_once_and_aborts_nccl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (first, second, third), links = make_monitors(3)
    assert [monitor.poll() for monitor in (first, second, third)] == [True] * 3
    raise_in_attention(second)
    assert [monitor.poll() for monitor in (first, second, third)] == [False] * 3
    line = (
        "hf_distca: rank 1 has left the attention group of ranks (0, 1, 2): it raised MemoryError"
        " while computing layer 3 of micro-batch 7: no room\n"
    )
    assert capsys.readouterr().err == 2 * line
    assert [link.aborted for link in links] == [1, 1, 1]


def test_ranks_that_end_well_print_and_abort_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (first, second, third), links = make_monitors(3)
    first.announce_exit(None)
    second.announce_exit(None)
    assert not third.poll()
    assert capsys.readouterr().err == ""
    assert [link.aborted for link in links] == [0, 0, 0]


def test_a_failure_is_printed_if_other_ranks_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    (first, second, third), _ = make_monitors(3)
    raise_in_attention(second)
    first.announce_exit(None)
    assert not third.poll()
    assert "rank 1 has left" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", [b"no rank's", b"", b"1", b"99 gone", b"9" * 5000 + b" x", b"\xff\xfe 1"]
)
def test_malformed_reports_are_ignored(word: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Any process can write to the store; a rank's real report is still printed."""
    (first, second), links = make_monitors(2)
    links[0].store.set("distca word 1", word)
    assert first.poll()
    raise_in_attention(second)
    assert not first.poll()
    assert "rank 1 has left" in capsys.readouterr().err


def test_failure_texts_contain_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    (first, second), _ = make_monitors(2)
    second.leave("said \x1b[2J\x9b31m\u202e\x00, and\nmore of \u00e9")
    assert not first.poll()
    assert first.first_failure.removeprefix("rank 1 ") in capsys.readouterr().err
    assert first.first_failure == ("rank 1 said \\x1b[2J\\x9b31m\\u202e\\x00, and\nmore of \u00e9")


def keep_stderr(rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"stderr of rank {rank}", os.O_CREAT | os.O_WRONLY), 2)


def reduce_in_vain(rank: int, folder: Path, ended: Connection) -> None:
    """Let rank 1 fail and stay alive while rank 0 waits in a reduction of other code."""
    keep_stderr(rank, folder)
    join_world(rank, 2, folder / "store")
    group = AttentionGroup.find_or_create(timeout_seconds=30)
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
        return
    with (
        pytest.raises(ZeroDivisionError),
        group.report_errors("computing layer 0 of micro-batch 1"),
    ):
        raise ZeroDivisionError("1 / 0")
    ended.poll(LIMIT)
    os._exit(0)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_rank_in_a_foreign_collective_prints_why_others_left() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, (ours, theirs) = Path(name), Pipe()
        processes = [forks.start(reduce_in_vain, rank, folder, theirs) for rank in (0, 1)]
        try:
            shown = folder / "stderr of rank 0"
            wait_until(lambda: shown.exists() and "hf_distca: " in shown.read_text())
            assert (
                shown.read_text()
                == "hf_distca: rank 1 has left the attention group of ranks (0, 1): it raised"
                " ZeroDivisionError while computing layer 0 of micro-batch 1: 1 / 0\n"
            )
            assert processes[1].is_alive(), "printed before the other process has ended"
        finally:
            for process in processes:
                process.kill()
                process.join()
            ours.close()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def throw(error: BaseException) -> Callable[[AttentionGroup], object]:
    def way(group: AttentionGroup) -> None:
        raise error

    return way


def reported(error: BaseException) -> Callable[[AttentionGroup], object]:
    def way(group: AttentionGroup) -> None:
        with group.report_errors("computing layer 0"):
            raise error

    return way


def close_generator(group: AttentionGroup) -> None:
    def steps() -> Iterator[int]:
        with group.report_errors("computing layer 0"):
            yield 1

    generator = steps()
    next(generator)
    generator.close()


def end_by_signal(_: AttentionGroup) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LIMIT)


def fail_and_clean_up(_: AttentionGroup) -> None:
    try:
        raise OSError("no space")
    finally:
        dist.destroy_process_group()


# Ways to leave while rank 0 waits, and the text that rank 0 gets.
WAYS = [
    (reported(SystemExit(3)), "raised SystemExit while computing layer 0: 3"),
    (reported(KeyboardInterrupt()), "raised KeyboardInterrupt while computing layer 0"),
    (
        reported(UnprintableError()),
        "raised UnprintableError while computing layer 0: (its text cannot be printed: Runtime",
    ),
    (
        reported(ValueError("\ud800\x1b[31m" + "x" * 10**6)),
        r"raised ValueError while computing layer 0: \ud800\x1b[31mxxx",
    ),
    (close_generator, "raised GeneratorExit while computing layer 0"),
    (throw(ValueError("bad loss")), "ended with ValueError: bad loss"),
    (throw(KeyboardInterrupt()), "ended with KeyboardInterrupt"),
    (throw(UnprintableError()), "ended with UnprintableError: (its text cannot be printed"),
    (fail_and_clean_up, "ended with OSError: no space"),
    (throw(SystemExit(0)), "has ended: its script was over, or called sys.exit"),
    (end_by_signal, "has ended: its script was over, or called sys.exit"),
    (lambda _: os._exit(9), "has closed its connection without a word"),
]


def leave(rank: int, folder: Path) -> None:
    join_world(rank, 1 + len(WAYS), folder / "store")
    group = AttentionGroup.find_or_create(timeout_seconds=30)
    row = np.zeros(1, dtype=np.int64)
    if rank:
        group.gather(row, activity="planning micro-batch 1")
        WAYS[rank - 1][0](group)
        return
    group.gather(row, activity="planning micro-batch 1")
    started = time.monotonic()
    with pytest.raises(DistCADesyncError) as error:
        group.gather(row, activity="planning micro-batch 2")
    (folder / "message").write_text(f"{time.monotonic() - started < 20} {error.value}")


def test_the_error_names_every_way_to_leave(tmp_path: Path) -> None:
    join_all(*(forks.start(leave, rank, tmp_path) for rank in range(1 + len(WAYS))))
    message = (tmp_path / "message").read_text()
    assert "True rank 0 was planning micro-batch 2 when a connection among ranks" in message
    for rank, (_, text) in enumerate(WAYS, start=1):
        assert f"rank {rank} {text}" in message
    assert len(message) < 4000


def reduce_alone(rank: int, folder: Path) -> None:
    """Let ranks 1 and 2 leave while rank 0 waits in a reduction of other code."""
    keep_stderr(rank, folder)
    join_world(rank, 3, folder / "store")
    AttentionGroup.find_or_create(timeout_seconds=30)
    if rank == 0:
        time.sleep(1)
        dist.all_reduce(torch.zeros(1))
    if rank == 1:
        os._exit(9)


def test_ranks_that_left_are_printed_if_a_foreign_collective_fails(tmp_path: Path) -> None:
    join_all(*(forks.start(reduce_alone, rank, tmp_path) for rank in range(3)))
    printed = (tmp_path / "stderr of rank 0").read_text()
    assert (
        "hf_distca: before rank 0 ended: rank 1 has closed its connection without a word: look at"
        " its log; rank 2 has ended: its script was over, or called sys.exit\n" in printed
    )


def join_all(*processes: Any) -> list[int | None]:
    """Wait for processes and return their exit codes."""
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def end_in_turn(rank: int, port: str, folder: Path) -> None:
    keep_stderr(rank, folder)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    AttentionGroup.find_or_create(timeout_seconds=30)
    time.sleep(1.5 * rank)


def test_ranks_that_end_one_after_the_other_print_nothing(tmp_path: Path) -> None:
    """The store ends with the process of rank 0."""
    port = find_free_port()
    assert join_all(*(forks.start(end_in_turn, rank, port, tmp_path) for rank in (0, 1))) == [0, 0]
    printed = [(tmp_path / f"stderr of rank {rank}").read_text() for rank in (0, 1)]
    # If Triton is installed, it lists leaks of its bindings when a process ends.
    assert [text.split("nanobind: leaked")[0] for text in printed] == ["", ""]
