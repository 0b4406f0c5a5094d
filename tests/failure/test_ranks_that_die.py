"""If a rank dies, or raises and exits, the others end in an error at once, and every process ends
by itself.
"""

from __future__ import annotations

import os
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import forks
import hf_distca
from hf_distca.kernels.cpu import CpuKernel
from ranks import join_world
from tiny_runs import settings, tiny_llama

TIMEOUT = 20.0
WORLD = 3
# Seconds after which a process counts as stuck.
LIMIT = 120.0


def train(rank: int, store: Path, culprit: int, doom: str, pipe: Connection) -> None:
    join_world(rank, WORLD, store)
    hf_distca.configure(settings(kernel="cpu", timeout_seconds=TIMEOUT))
    model = tiny_llama("distca")
    documents = [[7] * length for length in ([96], [16] * 2, [8])[rank]]
    batch = hf_distca.PackingCollator()([{"documents": documents}])
    model(**batch, use_cache=False).loss.backward()
    dist.barrier()
    started = time.monotonic()
    if rank == culprit:
        # Local tasks run between a dispatch and its return.
        doomed = {"dies": lambda *_: os._exit(9), "raises": lambda *_: 1 / 0}[doom]
        with patch.object(CpuKernel, "forward", doomed):
            model(**batch, use_cache=False)
    try:
        model(**batch, use_cache=False).loss.backward()
    except hf_distca.DistCADesyncError as error:
        pipe.send((str(error), time.monotonic() - started))
    # No clean-up: the process of a script that fails must end although its groups stay open.


def run(doom: str, culprit: int) -> tuple[dict[int, tuple[str, float]], list[int | None]]:
    """Run the ranks. Return the error that each survivor caught, with its seconds, and the exit
    codes of all.
    """
    found: dict[int, tuple[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [Pipe(duplex=False) for _ in range(WORLD)]
        store = Path(folder, "store")
        processes = [
            forks.start(train, rank, store, culprit, doom, pipes[rank][1]) for rank in range(WORLD)
        ]
        deadline = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        for rank, (ours, _) in enumerate(pipes):
            if ours.poll():
                found[rank] = ours.recv()
    return found, codes


def check_survivors(found: dict[int, tuple[str, float]], culprit: int, layers: str = "0") -> None:
    assert sorted(found) == [rank for rank in range(WORLD) if rank != culprit]
    for rank, (message, seconds) in found.items():
        assert f"rank {rank} was waiting for the " in message
        assert "when a connection among ranks (0, 1, 2) was closed" in message
        assert any(f"of layer {layer} of micro-batch 2" in message for layer in layers)
        assert "last together when comparing plans of micro-batch 2" in message
        assert seconds < TIMEOUT / 2, "a closed connection ends the wait before the timeout"


def test_survivors_raise_at_once_when_a_rank_dies_during_an_exchange() -> None:
    found, codes = run("dies", 1)
    check_survivors(found, 1)
    assert all(
        "rank 1 has closed its connection without a word: look at its log" in message
        for message, _ in found.values()
    )
    assert codes == [0, 9, 0]


def test_survivors_name_the_error_of_a_rank_that_raised() -> None:
    found, codes = run("raises", 0)
    check_survivors(found, 0, layers="01")  # a rank that has served rank 0 may be in the next layer
    for message, _ in found.values():
        assert (
            "rank 0 raised ZeroDivisionError while computing layer 0 of micro-batch 2: division by"
            " zero" in message
        )
    assert codes == [1, 0, 0]
