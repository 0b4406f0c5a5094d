"""How processes end that never destroy their process groups: most scripts leave them open."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import create_server
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import forks
from hf_distca.runtime import listener
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import AwaitedThread
from ranks import join_world


def run_two_ranks(ends: Callable[[int, Path], None], folder: Path) -> list[int | None]:
    """Run a function on two ranks and return their exit statuses."""
    ranks = [forks.start(ends, rank, folder) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(60)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def ends_with_a_late_thread(rank: int, folder: Path) -> None:
    """End while a thread still runs, like one of gloo that releases the last collective's tensors.

    The interpreter does not wait for the thread. A thread of gloo that runs while the interpreter
    ends aborts the process.
    """
    # Ending a fork takes a moment anyway, so the limit must be longer.
    patch.object(listener, "LATE_SECONDS", 1.0).start()
    join_world(rank, 2, folder / "store")
    last = threading.Event()

    def let_go() -> None:
        last.wait()
        time.sleep(0.7)
        (folder / f"{rank} let go").touch()

    threading.Thread(target=let_go, daemon=True).start()
    AttentionGroup.find_or_create().gather(np.arange(5), activity="a test")
    last.set()


class SlowStore:
    """A store whose counter answers slowly."""

    def __init__(self, store: Any, answered: Path) -> None:
        self._store, self._answered = store, answered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        time.sleep(0.8)  # longer than a rank of this timeout waits for an answer
        count = int(self._store.add(key, amount))
        self._answered.touch()
        return count


def ends_while_a_store_is_asked(rank: int, folder: Path) -> None:
    """End after the rank has given up waiting, while its threads still wait for the store."""
    join_world(rank, 2, folder / "store")
    group = AttentionGroup.find_or_create(timeout_seconds=1.0)
    assert group.monitor is not None
    patch.object(
        group.monitor, "_store", SlowStore(group.monitor._store, folder / f"{rank} came back")
    ).start()
    group.monitor.give_up("a test", RuntimeError("nobody came"))


def ends_while_a_thread_runs(rank: int, folder: Path) -> None:
    """End while a thread runs that no code waits for, as at the end of training."""

    def come_back() -> None:
        time.sleep(0.3)
        (folder / f"{rank} came back").touch()

    AwaitedThread(come_back, "test at the end")


def ends_where_no_thread_starts(rank: int, folder: Path) -> None:
    """End where no thread can start: Python 3.12 starts none while exit functions run. The store is
    a TCPStore, as under torchrun.
    """

    def refuse() -> None:
        patch.object(
            threading.Thread,
            "start",
            side_effect=RuntimeError("no new thread at interpreter shutdown"),
        ).start()

    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    AttentionGroup.find_or_create()
    atexit.register(refuse)
    ends_while_a_thread_runs(rank, folder)


@pytest.mark.parametrize(
    "ends", [ends_while_a_store_is_asked, ends_while_a_thread_runs, ends_where_no_thread_starts]
)
def test_process_ends_after_threads_of_hf_distca_return(
    ends: Callable[[int, Path], None], tmp_path: Path
) -> None:
    """The process aborts if a thread returns from a call of torch while the interpreter ends."""
    with create_server(("127.0.0.1", 0)) as listening:
        (tmp_path / "port").write_text(str(listening.getsockname()[1]))
    assert run_two_ranks(ends, tmp_path) == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("*came back")) == [
        "0 came back",
        "1 came back",
    ]


def test_process_ends_after_late_threads_of_libraries_return(tmp_path: Path) -> None:
    assert run_two_ranks(ends_with_a_late_thread, tmp_path) == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("*let go")) == ["0 let go", "1 let go"]
