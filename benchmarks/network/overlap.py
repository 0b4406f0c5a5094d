"""Seconds of a training step by the latency of exchanges: whole layers, ping-pong, and no
communication.

Two processes with one thread each hold equally many tokens: one long document on one rank, eight
short ones on the other. A message arrives no earlier than the added latency after its launch. "no
communication" computes the same tasks on rows that were never sent: only its seconds mean anything.
Modes take turns within each round, and figures are medians over rounds.

    python benchmarks/network/overlap.py --json

With `--stages`, the processes are two stages of a pipeline. Its four micro-batches alternate
between one long document and eight short ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import choose_lengths, make_batch
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, split
from hf_distca.runtime.channel import Channel
from models import make_model, make_plain_model
from processes import add_model_options, add_rounds, compute_median_ratio, run_on_ranks, take_turns
from script import add_option, make_parser, output_result, print_table
from slow_network import late_messages

RANKS = 2
MICRO_BATCHES = 4  # with stages
FREE = "no communication"
MODES = ("unbalanced", "single-stream", "ping-pong", FREE)


class Never:
    """A message that is not sent."""

    def wait(self) -> None:
        pass


def never_send(channel: Channel, received: torch.Tensor, *_: Any) -> Never:
    received.zero_()
    return Never()


def make_data_parallel(arguments: argparse.Namespace, rank: int) -> Callable[[], None]:
    """Make the function that runs a step of a rank with one long document or eight short ones."""
    model = make_model(arguments, "distca")
    batch = make_batch(choose_lengths(arguments.tokens, rank), rank)

    def run() -> None:
        model(**dict(batch), use_cache=False).loss.backward()
        model.zero_grad()

    return run


def make_staged(arguments: argparse.Namespace, _rank: int) -> Callable[[], None]:
    """Make the function that runs a step of a pipeline stage."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    stage = split(make_plain_model(arguments, "distca"), mesh)
    schedule = Schedule(
        stage,
        MICRO_BATCHES,
        lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    batches = [
        make_batch(choose_lengths(arguments.tokens, number % 2), number)
        for number in range(MICRO_BATCHES)
    ]
    ids, positions = (
        torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "position_ids")
    )

    def run() -> None:
        schedule.step(ids, position_ids=positions, target=ids)
        stage.submod.zero_grad()

    return run


def step(run: Callable[[], None], key: tuple[str, int]) -> float:
    """Run a step of a mode and latency; return the seconds until all ranks are done."""
    mode, latency = key
    session = current_session()
    session.config = hf_distca.DistCAConfig(
        balance=mode != "unbalanced", ping_pong=mode == "ping-pong"
    )
    exchanges = (
        patch.object(Channel, "start", never_send)
        if mode == FREE
        else late_messages(lambda _: latency / 1e3)
    )
    dist.barrier()
    started = time.perf_counter()
    with exchanges:
        run()
    dist.barrier()
    return time.perf_counter() - started


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute medians over rounds, and ratios to the time without communication in each round."""
    run = (make_staged if arguments.stages else make_data_parallel)(arguments, rank)
    for mode in MODES:
        step(run, (mode, 0))  # the first steps allocate buffers and fill caches
    keys = [(mode, ms) for ms in arguments.latencies for mode in MODES if mode != FREE or not ms]
    taken = take_turns(keys, partial(step, run), rank, arguments.rounds)
    free = taken[FREE, 0]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (mode, ms), seconds in taken.items():
        figures = {"seconds": seconds, "median_seconds": statistics.median(seconds)}
        figures["to_no_communication"] = compute_median_ratio(seconds, free)
        if mode == "ping-pong":
            figures["to_single_stream"] = compute_median_ratio(seconds, taken["single-stream", ms])
        found.setdefault(mode, {})[str(ms)] = figures
    return {"modes": found}


def show(result: dict[str, Any]) -> None:
    setting = result["setting"]
    latencies = [str(ms) for ms in setting["latencies"]]
    where = f"{RANKS} {'stages' if setting['stages'] else 'ranks'}"

    def cell(row: dict[str, Any] | None) -> str:
        return f"{row['median_seconds']:.2f} s ({row['to_no_communication']:.2f}x)" if row else ""

    print_table(
        f"step time by latency of an exchange, {setting['tokens']} tokens a rank, {where}",
        ("mode", *(f"{ms} ms" for ms in latencies)),
        (
            (mode, *(cell(rows.get(ms)) for ms in latencies))
            for mode, rows in result["modes"].items()
        ),
    )


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=8192, layers=4)
    add_rounds(parser)
    add_option(parser, "--latencies", [0, 5, 20, 80], "milliseconds added to an exchange; 0 first")
    text = "two stages of a pipeline instead of two ranks"
    parser.add_argument("--stages", action="store_true", help=text)
    arguments = parser.parse_args()
    if arguments.latencies[0] != 0:
        parser.error(
            f"--latencies {arguments.latencies} must begin with 0, which the others are compared"
            " with"
        )
    output_result(arguments, run_on_ranks(measure, RANKS, arguments), show, ranks=RANKS)


if __name__ == "__main__":
    main()
