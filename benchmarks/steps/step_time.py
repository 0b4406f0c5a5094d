"""Seconds of a training step on two ranks, balanced and not, side by side in one run.

Two processes with one thread each hold equally many tokens: one long document against eight short
ones. Modes take turns within each round, so that a drifting machine slows all of them; the figures
are medians over rounds.

    python benchmarks/steps/step_time.py --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import BatchRebalanceSampler

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from machine import describe
from options import add_option
from output import add_json_option, put_out
from processes import add_model_options, in_turns, on_ranks, rounds, setting_of

RANKS = 2
EVEN_PAIRS = 4


def model_of(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> torch.nn.parallel.DistributedDataParallel:
    """A Llama with heads of 64, and as wide as they are together, or `hidden`."""
    return torch.nn.parallel.DistributedDataParallel(
        plain_model_of(arguments, implementation, hidden)
    )


def plain_model_of(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> LlamaForCausalLM:
    """The same, before an engine takes it."""
    torch.manual_seed(0)
    hidden = hidden or arguments.heads * 64
    config = LlamaConfig(
        hidden_size=hidden,
        head_dim=64,
        intermediate_size=hidden * 172 // 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=max(arguments.heads // 2, 1),
        vocab_size=512,
        max_position_embeddings=arguments.tokens,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).train()


def batch_of(lengths: list[int], rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    documents = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]
    return hf_distca.PackingCollator()([{"documents": documents}])


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.models = {name: model_of(arguments, name) for name in ("distca", "sdpa")}
        self.rank = rank

    def step(
        self, batch: dict[str, Any], implementation: str, balance: bool
    ) -> tuple[float, float]:
        """Seconds until all ranks are done, and the loss."""
        model = self.models[implementation]
        batch = (
            dict(batch)
            if implementation == "distca"
            else {k: v for k, v in batch.items() if k != "distca_documents"}
        )
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(balance):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        model.zero_grad()
        return seconds, float(loss.detach())

    def busy(self, batch: dict[str, Any]) -> list[float]:
        """Seconds each rank computes on its own batch alone, waiting for nobody."""
        model = self.models["distca"]
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(False), model.no_sync():
            model(**batch, use_cache=False).loss.backward()
        taken = torch.zeros(RANKS, dtype=torch.float64)
        taken[self.rank] = time.perf_counter() - started
        dist.all_reduce(taken)
        model.zero_grad()
        return taken.tolist()


def rebalanced(lengths: list[list[int]], rank: int) -> list[int]:
    """The documents that transformers' batch_rebalance gives this rank, from the same documents."""
    flat = [n for row in lengths for n in row]
    sampler = BatchRebalanceSampler(flat, len(flat), RANKS, 1, shuffle=False, rank=rank)
    return [flat[index] for index in next(iter(sampler))]


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    steps = Steps(arguments, rank)
    short = [arguments.tokens // 8] * 8
    skewed = [[arguments.tokens], short]
    batches = {
        "skewed": batch_of(skewed[rank], rank),
        "even": batch_of(short, rank),
        "rebalanced": batch_of(rebalanced(skewed, rank), rank),
    }
    modes = {
        "unbalanced": ("skewed", "distca", False),
        "balanced": ("skewed", "distca", True),
        "batch_rebalance": ("rebalanced", "distca", False),
    }
    # The short steps of an even batch differ by next to nothing: more of them, in pairs, for a
    # steady ratio.
    even = {"even_unbalanced": ("even", "distca", False), "even_balanced": ("even", "distca", True)}
    seconds: dict[str, list[float]] = {name: [] for name in (*modes, "sdpa", *even)}
    losses: dict[str, float] = {}
    busy: list[list[float]] = []

    def turn(round_: int, group: dict[str, tuple[str, str, bool]]) -> None:
        for name, mode in in_turns(group.items(), round_):
            taken, losses[name] = steps.step(batches[mode[0]], *mode[1:])
            seconds[name].append(taken)

    steps.step(batches["even"], "distca", True)  # the first step pays for buffers and caches
    for round_ in rounds(rank, arguments.rounds):
        turn(round_, modes)
        busy.append(steps.busy(batches["skewed"]))
        for pair in range(EVEN_PAIRS):
            turn(pair, even)
        if round_ < arguments.sdpa_rounds:
            taken, losses["sdpa"] = steps.step(batches["skewed"], "sdpa", False)
            seconds["sdpa"].append(taken)
    return figures(arguments, seconds, losses, busy)


def figures(
    arguments: argparse.Namespace,
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    busy: list[list[float]],
) -> dict[str, Any]:
    """Ratios of one run. A ratio of modes is the median over rounds of the ratio within a round."""

    def ratio(mode: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[mode], seconds[to], strict=False))

    ideal = statistics.median(statistics.mean(row) / max(row) for row in busy)
    measured = ratio("balanced", "unbalanced")
    return {
        "machine": describe(),
        "setting": setting_of(arguments, ranks=RANKS),
        "seconds": seconds,
        "median_seconds": {
            name: statistics.median(values) for name, values in seconds.items() if values
        },
        "losses_rank_0": losses,
        "busy_seconds": busy,
        "balanced_to_unbalanced": measured,
        "ideal_to_unbalanced": ideal,
        "share_of_ideal": ideal / measured,
        "even_balanced_to_unbalanced": ratio("even_balanced", "even_unbalanced"),
        "balanced_to_batch_rebalance": ratio("balanced", "batch_rebalance"),
        "balanced_to_sdpa": ratio("balanced", "sdpa") if seconds["sdpa"] else None,
        "unbalanced_to_sdpa": ratio("unbalanced", "sdpa") if seconds["sdpa"] else None,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"step time, {result['setting']['tokens']} tokens a rank, 2 ranks")
    for column in ("mode", "median seconds", "to unbalanced"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    base = result["median_seconds"]
    for name, value in base.items():
        against = base["even_unbalanced" if name.startswith("even") else "unbalanced"]
        table.add_row(name, f"{value:.2f}", f"{value / against:.3f}")
    table.add_row("ideal (mean busy / slowest)", "", f"{result['ideal_to_unbalanced']:.3f}")
    console = Console()
    console.print(table)
    console.print(f"share of the ideal reached: {result['share_of_ideal']:.1%}")
    console.print(f"overhead on an even batch:  {result['even_balanced_to_unbalanced'] - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, tokens=16384, layers=2)
    add_option(parser, "--sdpa-rounds", 1, "rounds that also run stock sdpa")
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(on_ranks(measure, RANKS, arguments), arguments.json, show)


if __name__ == "__main__":
    main()
