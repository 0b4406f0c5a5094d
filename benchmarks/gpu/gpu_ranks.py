"""Ranks that share one device: processes that import while another part measures, then work over
NCCL, or gloo on a CPU.

NCCL refuses two ranks on one card of one host. Therefore each rank claims to be a separate host
(`NCCL_HOSTID`), and NCCL's sockets carry the messages. Values, streams, aborts and faults are then
those of NCCL; seconds are not those of a real link.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from socket import socket
from typing import Any

import torch
import torch.distributed as dist

from gpu_setting import Setting

# A function of rank, ranks, setting, and a function that records figures; only those of rank 0 are
# read.
Work = Callable[[int, int, Setting, Callable[..., None]], None]
ON_ONE_CARD = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Seconds in which ranks must end after one failed: the timeout of a collective.
_GRACE = 40.0


def find_port() -> int:
    """Find a free port."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def make_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Make the environment of a rank that shares its card with the others."""
    there = {"NCCL_HOSTID": f"host{rank}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"RANK": str(rank), "LOCAL_RANK": "0"}
    return ON_ONE_CARD | there | place | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}


class Ranks:
    """Processes that start when this is made, and then wait for `run`."""

    def __init__(self, setting: Setting, work: Work, ranks: int) -> None:
        context = get_context("spawn" if setting.device.type == "cuda" else "fork")
        self._folder = tempfile.TemporaryDirectory()
        self._turn, self._seconds = context.Event(), context.Value("d", 0.0)
        port = find_port()
        shared = (ranks, setting, work, self._folder.name, port, self._turn, self._seconds)
        self._processes = [
            context.Process(target=_be_rank, args=(rank, *shared), daemon=True)
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def run(self, seconds: float) -> dict[str, Any]:
        """Let the ranks run for `seconds` at most; return rank 0's records and an error or None."""
        self._seconds.value = seconds
        self._turn.set()
        deadline = time.monotonic() + seconds
        while (
            any(process.is_alive() for process in self._processes) and time.monotonic() < deadline
        ):
            if any(process.exitcode for process in self._processes):
                deadline = min(deadline, time.monotonic() + _GRACE)
            time.sleep(0.05)
        stopped = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        for process in self._processes:
            process.kill()
            process.join()
        folder = Path(self._folder.name)
        kept = folder / "kept.json"
        figures = json.loads(kept.read_text()) if kept.exists() else {}
        failed = {
            path.stem: path.read_text()[-2500:] for path in sorted(folder.glob("failed*.txt"))
        }
        if stopped:
            failed["stopped"] = f"ranks {stopped} after {seconds:.0f} s"
        self._folder.cleanup()
        return {**figures, "failed": failed or None}


def _be_rank(
    rank: int,
    ranks: int,
    setting: Setting,
    work: Work,
    folder: str,
    port: int,
    turn: Any,
    seconds: Any,
) -> None:
    os.environ.update(make_environment(rank, ranks, port))
    torch.set_num_threads(1)
    try:
        import transformers.trainer  # noqa: F401  # what takes longest, before the turn

        turn.wait()
        setting = replace(setting, seconds=seconds.value, started=time.monotonic())
        if setting.device.type == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group("nccl" if setting.device.type == "cuda" else "gloo")
        figures: dict[str, Any] = {}

        def keep(**found: Any) -> None:
            figures.update(found)
            if rank == 0:
                part = Path(folder, "kept.part")
                part.write_text(json.dumps(figures))
                part.rename(Path(folder, "kept.json"))

        work(rank, ranks, setting, keep)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failed{rank}.txt").write_text(traceback.format_exc())
        raise
