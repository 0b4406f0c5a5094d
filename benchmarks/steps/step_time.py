"""Seconds of a training step on two ranks, balanced and not, in one run.

Two processes with one thread each hold equally many tokens: one long document on one rank, eight
short ones on the other. Modes take turns within each round, so that a machine that slows down slows
all of them; figures are medians over rounds.

    python benchmarks/steps/step_time.py --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_pt_utils import BatchRebalanceSampler

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import choose_lengths, make_batch
from models import make_model
from processes import (
    add_model_options,
    add_rounds,
    compute_median_ratio,
    compute_medians,
    gather,
    run_on_ranks,
    take_turns,
)
from script import add_option, make_parser, output_result, print_table

RANKS = 2
EVEN_PAIRS = 4  # per round, because steps of an even batch differ very little
# Mode: batch, attention, whether attention is balanced.
MODES = {
    "unbalanced": ("skewed", "distca", False),
    "balanced": ("skewed", "distca", True),
    "batch_rebalance": ("rebalanced", "distca", False),
    "busy": ("skewed", "distca", False),
}
EVEN = {"even_unbalanced": ("even", "distca", False), "even_balanced": ("even", "distca", True)}
SDPA = {"sdpa": ("skewed", "sdpa", False)}


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.models = {name: make_model(arguments, name) for name in ("distca", "sdpa")}
        lengths = [choose_lengths(arguments.tokens, number) for number in range(RANKS)]
        self.batches = {
            "skewed": make_batch(lengths[rank], rank),
            "even": make_batch(lengths[1], rank),
            "rebalanced": make_batch(rebalance(lengths, rank), rank),
        }
        self.losses: dict[str, float] = {}

    def step(self, mode: str) -> float:
        """Run a step; return the seconds until all ranks are done."""
        name, attention, balanced = (MODES | EVEN | SDPA)[mode]
        model, batch = self.models[attention], dict(self.batches[name])
        if attention == "sdpa":
            del batch["distca_documents"]
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(balanced):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        self.losses[mode] = float(loss.detach())
        model.zero_grad()
        return seconds

    def time_busy(self) -> list[float]:
        """Return the seconds that each rank needs for its own batch without waiting."""
        model = self.models["distca"]
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(False), model.no_sync():
            model(**self.batches["skewed"], use_cache=False).loss.backward()
        taken = gather(time.perf_counter() - started)
        model.zero_grad()
        return taken


def rebalance(lengths: list[list[int]], rank: int) -> list[int]:
    """Return the documents that transformers' batch_rebalance gives to this rank."""
    flat = [n for row in lengths for n in row]
    sampler = BatchRebalanceSampler(flat, len(flat), RANKS, 1, shuffle=False, rank=rank)
    return [flat[index] for index in next(iter(sampler))]


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    steps = Steps(arguments, rank)
    steps.step("even_balanced")  # the first step allocates buffers and fills caches

    def run(mode: str) -> Any:
        return steps.time_busy() if mode == "busy" else steps.step(mode)

    seconds = take_turns(MODES, run, rank, arguments.rounds)
    busy = seconds.pop("busy")
    seconds |= take_turns(EVEN, run, rank, EVEN_PAIRS * arguments.rounds)
    seconds |= take_turns(SDPA, run, rank, arguments.sdpa_rounds)
    return compute_figures(seconds, busy) | {"losses_rank_0": steps.losses}


def compute_figures(seconds: dict[str, list[float]], busy: list[list[float]]) -> dict[str, Any]:
    """Compute the ratios of one run. A ratio of modes is the median of those within rounds."""
    middle = compute_medians(seconds)
    sdpa = middle.get("sdpa")
    ideal = statistics.median(statistics.mean(row) / max(row) for row in busy)
    measured = compute_median_ratio(seconds["balanced"], seconds["unbalanced"])
    return {
        "seconds": seconds,
        "median_seconds": middle,
        "busy_seconds": busy,
        "balanced_to_unbalanced": measured,
        "ideal_to_unbalanced": ideal,
        "share_of_ideal": ideal / measured,
        "even_balanced_to_unbalanced": compute_median_ratio(
            *(seconds[name] for name in list(EVEN)[::-1])
        ),
        "balanced_to_batch_rebalance": compute_median_ratio(
            seconds["balanced"], seconds["batch_rebalance"]
        ),
        "balanced_to_sdpa": sdpa and middle["balanced"] / sdpa,
        "unbalanced_to_sdpa": sdpa and middle["unbalanced"] / sdpa,
    }


def show(result: dict[str, Any]) -> None:
    base = result["median_seconds"]
    rows = [
        (name, f"{value:.2f}", f"{value / base['even_' * (name in EVEN) + 'unbalanced']:.3f}")
        for name, value in base.items()
    ]
    rows.append(("ideal (mean busy / slowest)", "", f"{result['ideal_to_unbalanced']:.3f}"))
    title = f"step time, {result['setting']['tokens']} tokens a rank, 2 ranks"
    print_table(title, ("mode", "median seconds", "/ unbalanced"), rows)
    print(f"share of the ideal reached: {result['share_of_ideal']:.1%}")
    print(f"overhead on an even batch:  {result['even_balanced_to_unbalanced'] - 1:+.1%}")


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=16384, layers=2)
    add_rounds(parser)
    add_option(parser, "--sdpa-rounds", 1, "final rounds with stock sdpa")
    arguments = parser.parse_args()
    output_result(arguments, run_on_ranks(measure, RANKS, arguments), show, ranks=RANKS)


if __name__ == "__main__":
    main()
