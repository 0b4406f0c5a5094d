"""Seconds of a training step of one process, alone and with an attention server.

Both processes have one thread, so that on two cores the server has a core to itself. Ways take
turns within each round, so that a machine that slows down slows both; figures are medians over
rounds. A server can save at most half of the seconds of attention. The result is the saved part of
them, by the clock.

    python benchmarks/steps/pool_step.py --json
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.pool.observer import PoolObserver
from hf_distca.runtime.group import AttentionGroup
from models import make_plain_model
from processes import add_model_options, add_rounds, take_turns
from script import make_parser, output_result, print_table

ALONE = "one process"
WAYS = {
    ALONE: {"balance": False},
    "and a server": {},
    "and a server, ping-pong": {"ping_pong": True},
}


def start_server() -> None:
    """Start a server that ends with this process, as if a launcher started both on one node."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {**launch, "RANK": "0", "WORLD_SIZE": "1"}
    served = launch | {"RANK": "1", "OMP_NUM_THREADS": "1"}
    code = "from hf_distca.pool.server import serve; serve(0, 1, 120.0)"
    subprocess.Popen([sys.executable, "-c", code], env=os.environ | served)


class Steps:
    """Times training steps on one document."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = make_plain_model(arguments, "distca")
        self.ids = torch.randint(0, 512, (1, arguments.tokens))

    def step(self, way: str) -> tuple[float, float, float]:
        """Run a step; return its seconds, those of its attention kernels, and the loss."""
        session = current_session()
        session.config = replace(hf_distca.DistCAConfig(), **WAYS[way])
        before, started = session.meter.seconds, time.perf_counter()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        seconds = time.perf_counter() - started
        self.model.zero_grad()
        return seconds, session.meter.seconds - before, float(loss.detach())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the medians of all ways."""
    torch.set_num_threads(1)
    start_server()
    AttentionGroup.observer = PoolObserver(1, 1)
    hf_distca.configure()
    steps = Steps(arguments)
    for way in WAYS:
        steps.step(way)
    taken = take_turns(WAYS, steps.step, 0, arguments.rounds)
    seconds, attention, losses = (
        {way: statistics.median(step[place] for step in taken[way]) for way in WAYS}
        for place in range(3)
    )
    most = attention[ALONE] / 2
    return {
        "attention_share": attention[ALONE] / seconds[ALONE],
        "seconds": seconds,
        "own_attention_seconds": attention,
        "gained": {way: (seconds[ALONE] - seconds[way]) / most for way in WAYS if way != ALONE},
        "loss_difference": max(abs(loss / losses[ALONE] - 1) for loss in losses.values()),
    }


def show(result: dict[str, Any]) -> None:
    attention, gained, setting = (
        result[name] for name in ("own_attention_seconds", "gained", "setting")
    )
    rows = (
        (
            way,
            f"{seconds:.3f}",
            f"{attention[way]:.3f}",
            f"{gained[way]:.0%}" if way in gained else "",
        )
        for way, seconds in result["seconds"].items()
    )
    columns = "way", "seconds of a step", "own attention, s", "share gained"
    print_table(
        f"{setting['tokens']} tokens, one document, {setting['layers']} layers", columns, rows
    )
    print(
        f"attention is {result['attention_share']:.0%} of a step; losses differ by"
        f" {result['loss_difference']:.1e}"
    )


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=8192, layers=2)
    add_rounds(parser)
    arguments = parser.parse_args()
    output_result(arguments, measure(arguments), show)


if __name__ == "__main__":
    main()
