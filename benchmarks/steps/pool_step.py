"""Seconds of a training step of one process alone and of the same process with an attention server
beside it.

Both have one thread, so that on two cores the server has one of its own. Ways take turns within
each round, so that a drifting machine slows all of them; the figures are medians over rounds. A
server can take half of the seconds of attention at most. The result says how much of that was
gained, by the clock.

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
from rich.console import Console
from rich.table import Table

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.pool.observer import PoolObserver
from hf_distca.runtime.group import AttentionGroup
from machine import describe
from output import add_json_option, put_out
from processes import add_model_options, in_turns, rounds, setting_of
from step_time import plain_model_of

WAYS = {
    "one process": {"balance": False},
    "and a server": {},
    "and a server, ping-pong": {"ping_pong": True},
}
ALONE = "one process"


def start_server() -> None:
    """Start a server, which ends with this process, as a launcher would start both on one node."""
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
        self.model = plain_model_of(arguments, "distca")
        self.ids = torch.randint(0, 512, (1, arguments.tokens))

    def step(self, way: str) -> tuple[float, float, float]:
        """Seconds of a step, those in this process's attention kernels, and the loss."""
        session = current_session()
        session.config = replace(hf_distca.DistCAConfig(), **WAYS[way])
        before, started = session.meter.seconds, time.perf_counter()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        seconds = time.perf_counter() - started
        self.model.zero_grad()
        return seconds, session.meter.seconds - before, float(loss.detach())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of all ways."""
    torch.set_num_threads(1)
    taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    start_server()
    AttentionGroup.observer = PoolObserver(1, 1)
    hf_distca.configure()
    steps = Steps(arguments)
    for way in WAYS:
        steps.step(way)
    for number in rounds(0, arguments.rounds):
        for way in in_turns(WAYS, number):
            taken[way].append(steps.step(way))
    seconds, attention, losses = (
        {way: statistics.median(step[place] for step in taken[way]) for way in WAYS}
        for place in range(3)
    )
    most = attention[ALONE] / 2
    return {
        **describe(),
        **setting_of(arguments),
        "attention_share": attention[ALONE] / seconds[ALONE],
        "seconds": seconds,
        "own_attention_seconds": attention,
        "gained": {way: (seconds[ALONE] - seconds[way]) / most for way in WAYS if way != ALONE},
        "loss_difference": max(abs(loss / losses[ALONE] - 1) for loss in losses.values()),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['tokens']} tokens, one document, {result['layers']} layers",
        title_justify="left",
    )
    for name in ("way", "seconds of a step", "of it own attention", "gained of what can be"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, seconds in result["seconds"].items():
        gained = "" if way == ALONE else f"{result['gained'][way]:.0%}"
        table.add_row(way, f"{seconds:.3f}", f"{result['own_attention_seconds'][way]:.3f}", gained)
    console = Console()
    console.print(table)
    console.print(
        f"attention is {result['attention_share']:.0%} of a step; losses differ by"
        f" {result['loss_difference']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser, tokens=8192, layers=2)
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(measure(arguments), arguments.json, show)


if __name__ == "__main__":
    main()
