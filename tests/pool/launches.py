"""Launches with servers; their ranks stay up, and run functions with and without servers."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from threading import Thread
from typing import Any, NoReturn
from unittest.mock import patch

import torch.distributed as dist
from pool_forks import run_here
from torch._C._distributed_c10d import TCPStore

import forks
import hf_distca
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.integration.current_session import current_session
from hf_distca.pool import server as pool_server
from hf_distca.pool.observer import PoolObserver
from hf_distca.pool.protocol import JsonLineConnection
from hf_distca.runtime.group import AttentionGroup
from hf_distca.tools.run import Options, begin
from ranks import RankPool


@dataclass(frozen=True)
class Served:
    """The steps, kernel calls and sent bytes of a server since the last report, and the objects
    that the server keeps, by type.
    """

    steps: Counter[str]
    kernel_calls: int
    sent_bytes: int
    kept: Counter[str]


@dataclass(frozen=True)
class Trained:
    """What a function returned on a rank that trains, and its use of servers.

    Attributes:
        told: steps that rank 0 announced to each server.
        share: the part of the estimated seconds of attention that servers computed.
    """

    value: Any
    told: Counter[str] = field(default_factory=Counter)
    share: float = 0.0


class Launch(RankPool):
    """Ranks that train and servers, started like by torchrun; servers compute for `pooled`."""

    def __init__(self, trainers: int, servers: int, *, daemon: bool = True) -> None:
        self.trainers, self._written = trainers, tempfile.TemporaryDirectory()
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        join = partial(_join, trainers + servers, servers, self._store.port)
        self._asked: list[Connection] = []
        self._servers = []
        for number in range(servers):
            ours, theirs = Pipe()
            output = Path(self._written.name, f"server_{number}.txt")
            self._servers.append(
                forks.start(_be_server, trainers + number, join, theirs, output, daemon=daemon)
            )
            theirs.close()
            self._asked.append(ours)
        super().__init__(trainers, daemon=daemon, join=join)

    def ask_servers(self) -> list[Served]:
        """Ask each server for a report."""
        for asked in self._asked:
            asked.send(None)
        if not all(asked.poll(20.0) for asked in self._asked):
            raise AssertionError(f"a server does not answer: {self.read_outputs()}")
        return [asked.recv() for asked in self._asked]

    @property
    def outputs(self) -> list[Path]:
        """The output files of the servers."""
        return sorted(Path(self._written.name).glob("*.txt"))

    def read_outputs(self) -> list[str]:
        """Read the output of each server."""
        return [path.read_text() for path in self.outputs]

    def end(self) -> list[int | None]:
        """End the ranks like programs, and return the exit statuses of the servers."""
        for pipe in self._pipes:
            pipe.send((_end, ()))
        for process in (*self._processes, *self._servers):
            process.join(20.0)
        return [process.exitcode for process in self._servers]

    @property
    def alive(self) -> bool:
        return super().alive and all(process.is_alive() for process in self._servers)

    def close(self) -> None:
        """Kill all processes."""
        super().close()
        for process in self._servers:
            process.kill()
            process.join()
        for asked in self._asked:
            asked.close()
        self._servers, self._asked = [], []
        self._written.cleanup()


Launcher = Callable[[int, int], Launch]  # type of the fixture `launch`


def pooled(rank: int, function: Callable[..., Any], *args: Any) -> Trained:
    """Run a function on a rank that trains, with servers."""
    told: Counter[str] = Counter()
    computed: list[tuple[float, float]] = []
    announce, planned = PoolObserver.announce, History.record_plan

    def count(self: PoolObserver, group: AttentionGroup, step: str, *arguments: Any) -> None:
        told[step] += 1
        announce(self, group, step, *arguments)

    def note(self: History, plan: MicroBatchPlan) -> None:
        seconds = plan.estimated_after
        # Servers are the last ranks of the node.
        computed.append((seconds[dist.get_world_size() :].sum(), seconds.sum()))
        planned(self, plan)

    with (
        patch.object(PoolObserver, "announce", count),
        patch.object(History, "record_plan", note),
    ):
        hf_distca.configure()
        value = function(rank, *args)
    parts, wholes = zip(*computed, strict=True) if computed else ((0.0,), (1.0,))
    return Trained(value, told, float(sum(parts) / sum(wholes)))


def unpooled(rank: int, function: Callable[..., Any], *args: Any) -> Trained:
    """Run a function on the same rank, without servers."""
    with patch.object(AttentionGroup, "observer", None):
        hf_distca.configure()
        return Trained(function(rank, *args))


def run_both_ways(
    launch: Launch, function: Callable[..., Any], *args: Any, **options: Any
) -> tuple[list[Trained], list[Trained]]:
    """Run a function without and then with servers; return the results with and without."""
    theirs = launch(unpooled, function, *args, **options)
    return launch(pooled, function, *args, **options), theirs


def _join(size: int, servers: int, port: int, rank: int) -> None:
    """Become a process that torchrun would start: a rank that trains, or a server, which does not
    return.
    """
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    store = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.update(sizes | ranks | store, TORCHELASTIC_RESTART_COUNT="0")
    begin(Options(servers=servers, summary=False, server_wait=300.0))
    dist.init_process_group("gloo")


def _end(_rank: int) -> NoReturn:
    current_session().join_group()
    observer = AttentionGroup.observer
    assert isinstance(observer, PoolObserver)
    observer.end()
    os._exit(0)


def _be_server(rank: int, join: Callable[[int], None], asked: Connection, output: Path) -> None:
    log = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)

    class Answering(pool_server.Server):
        """A server that reports when it is idle."""

        def run(self, connection: JsonLineConnection) -> NoReturn:
            Thread(target=_answer, args=(self, connection, asked, steps), daemon=True).start()
            super().run(connection)

        def _receive_next(self, connection: JsonLineConnection) -> Any:
            steps["waits"] = True
            word = super()._receive_next(connection)
            steps["waits"] = False
            steps["told"][word[0]] += 1
            return word

    steps: dict[str, Any] = {"told": Counter(), "waits": False}

    with ExitStack() as stack:  # a fork saves the import of torch, which takes seconds
        stack.enter_context(patch.object(os, "execve", run_here))
        stack.enter_context(patch.object(pool_server, "Server", Answering))
        join(rank)


def _answer(
    server: pool_server.Server,
    connection: JsonLineConnection,
    asked: Connection,
    steps: dict[str, Any],
) -> None:
    before = Served(Counter(), 0, 0, Counter())
    while True:
        asked.recv()
        idle = 0
        while idle < 3:
            coming = connection._received or select([connection._socket], [], [], 0)[0]
            idle = idle + 1 if steps["waits"] and not coming else 0
            time.sleep(0.01)
        told, steps["told"] = steps["told"], Counter()
        meter, kept = (
            server._meter,
            [type(known).__name__ for known in (*server._known.values(), *server._calls.values())],
        )
        counts = Served(told, meter.kernel_calls, meter.sent_bytes, Counter(kept))
        asked.send(
            replace(
                counts,
                kernel_calls=meter.kernel_calls - before.kernel_calls,
                sent_bytes=meter.sent_bytes - before.sent_bytes,
            )
        )
        before = counts
