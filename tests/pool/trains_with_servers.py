"""A script that trains a tiny model: `train.py STEPS [FAULT]`. With the fault raises:1, rank 1
raises an error in step 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_distca
from tiny_runs import documents, settings, tiny_llama

FAULT_STEP = 3


def main(steps: int, fault: str = "", waits: float = 40.0, pause: float = 0.0) -> None:
    """Train, and print losses. Ranks begin after `pause` seconds and wait up to `waits` seconds."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=waits))
    time.sleep(pause)
    rank = dist.get_rank() if dist.is_initialized() else 0
    hf_distca.configure(settings(timeout_seconds=waits))
    model: torch.nn.Module = tiny_llama("distca")
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    name, _, failing_rank = fault.partition(":")
    for step in range(steps):
        if step == FAULT_STEP and failing_rank == str(rank):
            fail(name)
        lengths = (24, 24, 24, 24) if rank else (96,)
        loss = model(
            **hf_distca.PackingCollator()([{"documents": documents(*lengths, seed=step)}]),
            use_cache=False,
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # One write a line: ranks under torchrun share a pipe, and their Python is unbuffered.
        print(f"rank {rank} step {step} loss {loss.item():.6f}\n", end="", flush=True)  # noqa: T201


def fail(fault: str) -> None:
    """Cause a fault on this rank."""
    print(f"fault {time.time()}\n", end="", flush=True)  # noqa: T201
    match fault:
        case "raises":
            raise ValueError("a bad batch")
        case "exits":
            sys.exit()
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3])
