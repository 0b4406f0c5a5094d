"""Pools of gloo ranks: processes that stay up and run one function after another."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

import forks


class RankPool:
    """`world_size` processes in one gloo world. Call it with a module-level function and arguments.

    `join` makes a process the rank with a given index, by default in a world that meets in a file.
    """

    def __init__(
        self, world_size: int, *, daemon: bool = True, join: Callable[[int], None] | None = None
    ) -> None:
        self.world_size, self.calls = world_size, 0
        self._folder = tempfile.TemporaryDirectory()
        join = join or partial(
            join_world, world_size=world_size, store=Path(self._folder.name, "store")
        )
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            self._processes.append(forks.start(_serve, rank, join, theirs, daemon=daemon))
            theirs.close()  # otherwise the pipe of a rank that dies would not end
            self._pipes.append(ours)

    def __call__(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0
    ) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank; return the results in rank order, or raise
        the first failure.
        """
        self.calls += 1
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    process = self._processes[rank]
                    process.join(5.0)  # the pipe may end before the process
                    ok, value = False, f"died with exit status {process.exitcode}"
                results[rank] = value
                if not ok:
                    failures.append(f"rank {rank}: {value}")
            # Other ranks may wait for the one that failed: give them a moment to fail by
            # themselves.
            if failures:
                deadline = min(deadline, time.monotonic() + 5.0)
        missing = sorted(set(range(self.world_size)) - set(results))
        if missing or failures:
            self.close()
            raise AssertionError(
                "\n".join(
                    [
                        *failures,
                        *(f"rank {rank}: no result of {function.__name__}" for rank in missing),
                    ]
                )
            )
        return [results[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


RankPools = Callable[[int], RankPool]  # type of the fixture `rank_pool`


def _serve(rank: int, join: Callable[[int], None], pipe: Connection) -> None:
    join(rank)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def join_world(rank: int, world_size: int, store: Path) -> None:
    """Make this process a rank of a gloo world that meets in a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never used: the store is a file
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size
    )
