"""Seconds of a training step while every exchange takes longer: layers whole, in ping-pong, and
without communication.

Two processes with one thread each hold equally many tokens: one long document against eight short
ones. A message arrives no earlier than the injected latency after its launch. "no communication"
computes the same tasks on rows that were never sent (its numbers mean nothing, its time does).
Modes take turns within each round; the figures are medians over rounds.

    python benchmarks/network/overlap.py --json

With `--stages`, the processes are two stages of a pipeline, and the documents are those of its four
micro-batches, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, split
from hf_distca.runtime.channel import Channel
from machine import describe
from output import add_json_option, put_out
from processes import add_model_options, in_turns, on_ranks, rounds, setting_of
from slow_network import Late
from step_time import RANKS, batch_of, model_of, plain_model_of

MICRO_BATCHES = 4  # with stages
MODES = ("unbalanced", "single-stream", "ping-pong", "no communication")


class Never:
    """A message that is not sent."""

    def wait(self) -> None:
        pass


@contextmanager
def exchanges(seconds: float | None) -> Iterator[None]:
    """Let every exchange take `seconds` at least, or send nothing if None."""
    original = Channel.start

    def start(channel: Channel, received: torch.Tensor, *args: Any) -> Late | Never:
        if seconds is None:
            received.zero_()
            return Never()
        return Late(original(channel, received, *args), time.perf_counter() + seconds)

    with patch.object(Channel, "start", start):
        yield


def data_parallel(arguments: argparse.Namespace, rank: int) -> Callable[[], None]:
    """What runs a step of one rank, whose tokens are one long document or eight short ones."""
    model, batch = model_of(arguments, "distca"), batch_of(lengths_of(arguments, rank), rank)

    def run() -> None:
        model(**dict(batch), use_cache=False).loss.backward()
        model.zero_grad()

    return run


def staged(arguments: argparse.Namespace, _rank: int) -> Callable[[], None]:
    """What runs a step of one stage."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    stage = split(plain_model_of(arguments, "distca"), mesh)
    schedule = Schedule(
        stage,
        MICRO_BATCHES,
        lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    batches = [
        batch_of(lengths_of(arguments, number % 2), number) for number in range(MICRO_BATCHES)
    ]
    ids, positions = (
        torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "position_ids")
    )

    def run() -> None:
        schedule.step(ids, position_ids=positions, target=ids)
        stage.submod.zero_grad()

    return run


def lengths_of(arguments: argparse.Namespace, number: int) -> list[int]:
    """One long document, or eight short ones."""
    return [[arguments.tokens], [arguments.tokens // 8] * 8][number]


def step(run: Callable[[], None], mode: str, latency: float) -> float:
    """Seconds until all ranks are done."""
    session = current_session()
    session.config = hf_distca.DistCAConfig(
        balance=mode != "unbalanced", ping_pong=mode == "ping-pong"
    )
    dist.barrier()
    started = time.perf_counter()
    with exchanges(None if mode == "no communication" else latency):
        run()
    dist.barrier()
    return time.perf_counter() - started


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    run = (staged if arguments.stages else data_parallel)(arguments, rank)
    keys = [
        (mode, latency)
        for latency in arguments.latencies
        for mode in MODES
        if mode != "no communication" or not latency
    ]
    seconds: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    for mode in MODES:
        step(run, mode, 0.0)  # the first steps pay for buffers and caches
    for round_ in rounds(rank, arguments.rounds):
        for mode, latency in in_turns(keys, round_):
            seconds[mode].setdefault(str(latency), []).append(step(run, mode, latency / 1e3))
    return figures(arguments, seconds)


def figures(
    arguments: argparse.Namespace, seconds: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    """Medians over rounds, and ratios within rounds to the step without communication."""
    free = seconds["no communication"][str(arguments.latencies[0])]
    ratios = {
        mode: {
            ms: statistics.median(a / b for a, b in zip(row, free, strict=True))
            for ms, row in rows.items()
        }
        for mode, rows in seconds.items()
    }
    return {
        "machine": describe(),
        "setting": setting_of(arguments, ranks=RANKS),
        "seconds": seconds,
        "median_seconds": {
            mode: {ms: statistics.median(row) for ms, row in rows.items()}
            for mode, rows in seconds.items()
        },
        "to_no_communication": ratios,
        "ping_pong_to_single_stream": {
            ms: statistics.median(
                a / b for a, b in zip(row, seconds["single-stream"][ms], strict=True)
            )
            for ms, row in seconds["ping-pong"].items()
        },
    }


def show(result: dict[str, Any]) -> None:
    latencies = [str(ms) for ms in result["setting"]["latencies"]]
    where = f"{RANKS} {'stages' if result['setting']['stages'] else 'ranks'}"
    table = Table(
        title=(
            f"step time by latency of an exchange, {result['setting']['tokens']} tokens a rank,"
            f" {where}"
        )
    )
    table.add_column("mode")
    for ms in latencies:
        table.add_column(f"{ms} ms", justify="right")
    for mode, rows in result["median_seconds"].items():
        cells = [
            (
                f"{rows[ms]:.2f} s ({result['to_no_communication'][mode][ms]:.2f}x)"
                if ms in rows
                else ""
            )
            for ms in latencies
        ]
        table.add_row(mode, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, tokens=8192, layers=4)
    parser.add_argument(
        "--latencies",
        type=int,
        nargs="+",
        default=[0, 5, 20, 80],
        metavar="MS",
        help="milliseconds added to an exchange; 0 first",
    )
    parser.add_argument(
        "--stages", action="store_true", help="two stages of a pipeline instead of two ranks"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.latencies[0] != 0:
        parser.error(
            f"--latencies {arguments.latencies} must begin with 0, which the others are compared"
            " with"
        )
    put_out(on_ranks(measure, RANKS, arguments), arguments.json, show)


if __name__ == "__main__":
    main()
