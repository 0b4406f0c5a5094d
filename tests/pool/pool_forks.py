"""Launches of ranks that train and servers. Each process is a fork with its own process group."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trains_with_servers

import forks
from hf_distca.tools.run import Options, begin
from scripts import find_free_port

LIMIT = 60.0  # seconds, after which a process counts as stuck


class Started:
    """A process, its output, and the times of its faults and end, in seconds since the epoch."""

    def __init__(
        self, folder: Path, name: str, function: Callable[..., object], *args: Any, **changes: str
    ) -> None:
        self.name, self._file = name, folder / f"{name}.txt"
        self._file.touch()
        self._signals: list[float] = []
        self.end = 0.0
        self._process: ForkServerProcess = forks.start(
            _run_in_group, self._file, function, args, daemon=False, **changes
        )

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")

    @property
    def faults(self) -> list[float]:
        return [*self._signals, *map(float, re.findall(r"^fault (\S+)", self.output, re.MULTILINE))]

    def wait_for(self, text: str, seconds: float = LIMIT) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self._process.is_alive(), f"{self.name} ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, (
                f"{self.name} has no {text!r} after {seconds:g} s:\n{self.output}"
            )
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        self._signals.append(time.time())
        os.kill(self._process.pid, number)

    def join(self, seconds: float = LIMIT) -> int:
        """Wait for the end of the process, and return its exit status."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self.send(signal.SIGUSR1)  # prints where the process hangs
            self._process.join(1.0)
            raise AssertionError(f"{self.name} still runs after {seconds:g} s:\n{self.output}")
        self.end = self.end or time.time()
        return self._process.exitcode

    def kill(self) -> None:
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


class Forks:
    """The processes of one launch on one node."""

    def __init__(self, folder: Path, trainers: int = 2, servers: int = 1) -> None:
        self.folder, self.started = folder, list[Started]()
        self._trainers, self._servers = trainers, servers
        self._port = find_free_port()

    def start(self, name: str, function: Callable[..., object], *args: Any, rank: int) -> Started:
        size = str(self._trainers + self._servers)
        started = Started(
            self.folder,
            f"{name} (process {len(self.started)})",
            function,
            *args,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=self._port,
        )
        self.started.append(started)
        return started

    def start_server(
        self, *, version: str | None = None, stuck_in: str | None = None, **options: Any
    ) -> Started:
        """Start the server: with another version, or with a step that never ends, if given."""
        given = Options(servers=self._servers, **options)
        rank = self._trainers + self._servers - 1
        return self.start("server", _serve, given, version, stuck_in, rank=rank)

    def start_trainers(self, *train: Any, **options: Any) -> list[Started]:
        """Start the ranks that train, with arguments of `trains_with_servers.main`."""
        given = Options(summary=False, servers=self._servers, **options)
        return [
            self.start(f"rank{rank}", _train, given, train, rank=rank)
            for rank in range(self._trainers)
        ]

    @property
    def seconds_to_end(self) -> float | None:
        """Seconds from the first fault to the last end that a test waited for."""
        faults = [seconds for process in self.started for seconds in process.faults]
        return max(process.end for process in self.started) - min(faults) if faults else None


@contextmanager
def kill_at_end(folder: Path, trainers: int = 2, servers: int = 1) -> Iterator[Forks]:
    """Make a launch with output in a folder, and kill all processes at the end."""
    running = Forks(folder, trainers, servers)
    try:
        yield running
    finally:
        for process in running.started:
            process.kill()


def read_losses(output: str) -> list[float]:
    """Read the losses that rank 0 printed."""
    return [float(loss) for loss in re.findall(r"rank 0 step \d+ loss (\S+)", output)]


def run_here(_program: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """Run the code of a server in this process; stands for `os.execve`."""
    os.environ.update(environment)
    exec(arguments[-1], {})


def _run_in_group(output: Path, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    # Background jobs of a shell and their children ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    function(*args)


def _serve(options: Options, version: str | None, stuck_in: str | None) -> None:
    from hf_distca.pool import meeting, server

    if version is not None:
        patch.object(meeting, "version", lambda _: version).start()
    if stuck_in is not None:
        patch.dict(server.STEPS, {stuck_in: lambda *_, **__: time.sleep(10**6)}).start()
        patch.object(server, "_LONGER_SECONDS", 1.0).start()
    patch.object(os, "execve", run_here).start()  # saves the import of torch
    begin(options)


def _train(options: Options, arguments: tuple[Any, ...]) -> None:
    begin(options)
    try:
        trains_with_servers.main(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.last_value = error  # as the interpreter does
        raise
