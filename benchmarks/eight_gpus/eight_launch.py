"""Processes of ranks, which may die or hang without ending the run."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpu_ranks import ON_ONE_CARD, find_port

# Seconds in which the other ranks must end after one failed.
_GRACE = 10.0
_RAISED = 1  # exit code of a rank that wrote a traceback


class Launch(NamedTuple):
    """How ranks are started.

    Attributes:
        ranks, device: number of processes, and type of their device.
        folder: where their output goes.
        alive: file that the ranks change as they make progress.
        patience: seconds without a change after which the ranks count as hanging.
    """

    ranks: int
    device: str
    folder: Path
    alive: Path
    patience: float

    def run(self, work: Callable[..., None], *arguments: Any) -> str | None:
        """Run ``work(rank, *arguments)`` on every rank in a group; return an error or None."""
        # A fork inherits all imports, but would lose a GPU.
        context = get_context("spawn" if self.device == "cuda" else "fork")
        for path in self.folder.glob("failed-*.txt"):
            path.unlink()
        port = find_port()
        processes = [
            context.Process(target=_be_rank, args=(self, rank, port, work, arguments), daemon=True)
            for rank in range(self.ranks)
        ]
        for process in processes:
            process.start()
        hung = self._wait(processes)
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        for process in processes:
            _end(process)
        if hung:
            return f"nothing happened for {self.patience:.0f} s"
        # A rank without a traceback died; tracebacks of the others may be consequences.
        died = {rank: code for rank, code in codes.items() if code not in (0, _RAISED, None)}
        if died:
            return f"ranks ended, with these codes: {died}"
        failed = [path.read_text() for path in sorted(self.folder.glob("failed-*.txt"))]
        return (
            min(failed, key=lambda text: "Connection" in text).strip()[-1500:] if failed else None
        )

    def _wait(self, processes: list[BaseProcess]) -> bool:
        """Wait until all ranks ended, or until one failed and the others had time to end; return
        whether they hang.
        """
        started, deadline = time.time(), float("inf")
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.time() + _GRACE)
            changed = self.alive.stat().st_mtime if self.alive.exists() else started
            if time.time() > deadline:
                return False
            if time.time() - max(changed, started) > self.patience:
                return True
            time.sleep(0.05)
        return False


def _end(process: BaseProcess) -> None:
    """Kill a process and everything it started."""
    if process.is_alive() and process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _be_rank(
    launch: Launch, rank: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.setpgid(0, 0)
    output = os.open(launch.folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    size = str(launch.ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    on_gpu = launch.device == "cuda"
    try:
        if on_gpu:
            cards = torch.cuda.device_count()
            if cards < launch.ranks:
                os.environ.update(ON_ONE_CARD, NCCL_HOSTID=f"host{rank}")
            torch.cuda.set_device(rank % cards)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=launch.patience)
        )
        work(rank, *arguments)
        dist.destroy_process_group()
    except BaseException:
        (launch.folder / f"failed-{rank}.txt").write_text(traceback.format_exc())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(_RAISED)  # other ranks may never reach a collective, and a normal end waits for it
