"""Seconds of a training step with and without the meter of `hf-distca run --observe`, in turns in
one run under sdpa.

Two processes have one thread each: one has a long document, the other eight short ones. Runs of
steps with and without the meter take turns. Each run with the meter ends with a log, whose seconds
count. Figures are ratios of medians: of seconds, and of the processor time of rank 0, which other
programs hardly change.

    python benchmarks/steps/observe.py --json results.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from batches import choose_lengths, make_batch
from hf_distca.tools.observe.run_observer import Observer
from models import make_model
from processes import add_model_options, add_rounds, run_on_ranks, take_turns
from script import make_parser, output_result

RANKS = 2
STEPS = 10  # between logs
Steps = list[tuple[float, float]]  # wall seconds and processor seconds of each step


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    model = make_model(arguments, "sdpa")
    batch = make_batch(choose_lengths(arguments.tokens, rank), rank)
    del batch["distca_documents"]
    figures: dict[str, float] = {}

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad()

    def run(name: str) -> Steps:
        nonlocal figures
        observer = Observer() if name == "with" else None
        if observer is not None:
            observer.begin()
        dist.barrier()
        taken = []
        for number in range(STEPS):
            started, busy = time.perf_counter(), time.process_time()
            step()
            if observer is not None and number == STEPS - 1:
                observer.gather()
                figures = observer.take_figures()
            busy = time.process_time() - busy
            dist.barrier()
            taken.append((time.perf_counter() - started, busy))
        if observer is not None:
            observer.end()
        return taken

    step()  # the first step allocates buffers, the first plan loads compiled code
    run("with")
    runs = take_turns(("with", "without"), run, rank, arguments.rounds)
    seconds, processor = (
        {name: [step[place] for step in chain(*steps)] for name, steps in runs.items()}
        for place in range(2)
    )
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio_of_seconds": ratio(statistics.median, seconds),
        "ratio_of_processor_seconds": ratio(statistics.median, processor),
        "ratio_of_all_processor_seconds": ratio(sum, processor),
        "figures": figures,
    }


def ratio(combine: Callable[[list[float]], float], values: dict[str, list[float]]) -> float:
    return combine(values["with"]) / combine(values["without"])


def show(result: dict[str, Any]) -> None:
    for name, value in result["median_seconds"].items():
        print(f"{name:<8}the meter: {value:.4f} s a step (median)")
    for name in ("seconds", "processor_seconds", "all_processor_seconds"):
        print(f"ratio of {name.replace('_', ' ')}: {result[f'ratio_of_{name}']:.4f}")


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=1024, layers=2)
    add_rounds(parser, 10)
    arguments = parser.parse_args()
    output_result(
        arguments, run_on_ranks(measure, RANKS, arguments), show, ranks=RANKS, steps=STEPS
    )


if __name__ == "__main__":
    main()
