"""Seconds of a training step with the meter of `hf-distca run --observe` and without, side by side
in one run under sdpa.

Two processes with one thread each; one has a long document, the other eight short ones. Runs of
steps with the meter and without take turns, and after each run with it there is a log, whose
seconds count. The figures are ratios of medians: of seconds, and of processor time of rank 0,
which other programs hardly change.

    python benchmarks/steps/observe.py --json results.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.tools.observe.run_observer import Observer
from machine import describe
from output import add_json_option, put_out
from processes import add_model_options, in_turns, on_ranks, rounds, setting_of
from step_time import RANKS, batch_of, model_of

STEPS = 10  # between logs


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    model = model_of(arguments, "sdpa")
    lengths = [[arguments.tokens], [arguments.tokens // 8] * 8]
    batch = batch_of(lengths[rank], rank)
    del batch["distca_documents"]
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    processor: dict[str, list[float]] = {"with": [], "without": []}
    figures: dict[str, float] = {}

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad()

    def run(name: str) -> None:
        nonlocal figures
        observer = Observer() if name == "with" else None
        if observer is not None:
            observer.begin()
        dist.barrier()
        for number in range(STEPS):
            started, busy = time.perf_counter(), time.process_time()
            step()
            if observer is not None and number == STEPS - 1:
                observer.gather()
                figures = observer.take_figures()
            processor[name].append(time.process_time() - busy)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
        if observer is not None:
            observer.end()

    step()  # the first step pays for buffers, the first plan for compiled code
    run("with")
    seconds["with"].clear()
    processor["with"].clear()
    for round_ in rounds(rank, arguments.rounds):
        for name in in_turns(seconds, round_):
            run(name)
    return {
        "machine": describe(),
        "setting": setting_of(arguments, ranks=RANKS, steps=STEPS),
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, tokens=1024, layers=2, rounds=10)
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(on_ranks(measure, RANKS, arguments), arguments.json, show)


if __name__ == "__main__":
    main()
