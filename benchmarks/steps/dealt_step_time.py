"""Seconds of a training step on the same documents, placed on ranks in four ways, in one run.

One document is longer than a rank. Processes have one thread each. Ways take turns within each
round, so that a machine that slows down slows all of them; figures are medians over rounds. For the
ideal, all ranks compute the whole batch at the same time without exchanges, and the seconds are
divided by the number of ranks.

    python benchmarks/steps/dealt_step_time.py --json
    python benchmarks/steps/dealt_step_time.py --hybrid --layers 4 --tokens 4096 --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import draw_lengths, make_share
from deal import cut_over_all_ranks
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.layout import Layout
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

WAYS = {
    "dealt": ("dealt", True),
    "in order, balanced": ("in order", True),
    "in order, unbalanced": ("in order", False),
    "every document over all ranks": ("over all", False),
}
ALONE = "one rank"


def make_hybrid(arguments: argparse.Namespace) -> torch.nn.parallel.DistributedDataParallel:
    """Make a Qwen3-Next as wide as `make_model`: three gated delta rules before each attention."""
    torch.manual_seed(0)
    heads, layers, hidden = arguments.heads, arguments.layers, arguments.heads * 64
    config = Qwen3NextConfig(
        hidden_size=hidden,
        head_dim=64,
        intermediate_size=hidden * 172 // 64,
        num_hidden_layers=layers,
        layer_types=[
            "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)
        ],
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        linear_num_value_heads=heads,
        linear_num_key_heads=max(heads // 2, 1),
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        mlp_only_layers=list(range(layers)),
        vocab_size=512,
        attn_implementation="distca",
    )
    return torch.nn.parallel.DistributedDataParallel(Qwen3NextForCausalLM(config).train())


class OverAll(Dealing):
    """Deals every document head and tail over all ranks, like context parallelism."""

    def deal_layouts(self, lengths: np.ndarray) -> tuple[Layout, ...]:
        return (cut_over_all_ranks(lengths.tolist(), self.ranks),)


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.rank, self.ranks = rank, arguments.ranks
        self.lengths = draw_lengths(arguments.tokens, arguments.ranks)
        self.model = make_hybrid(arguments) if arguments.hybrid else make_model(arguments, "distca")
        self.targets = sum(length - 1 for length in self.lengths)
        config = hf_distca.configure()
        keys = list_layer_keys(self.model.module, None, "cpu")
        costs = {key: make_initial_cost(key, config) for key in keys}
        place = (self.ranks, arguments.tokens, costs, config)
        self.dealings = {
            "dealt": Dealing(*place),
            "in order": Dealing(*place, placement="in order"),
            "over all": OverAll(*place),
        }
        self.losses: dict[str, float] = {}

    def packed(self, placement: str, rank: int) -> PackedDocuments:
        """Return a rank's share of the global batch."""
        return self.dealings[placement].make_share(np.array(self.lengths), (0, 0), rank)

    def batch(self, packed: PackedDocuments) -> dict[str, Any]:
        """Make the batch of a share, with random tokens."""
        documents = [
            torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(i))
            for i, n in enumerate(self.lengths)
        ]
        return make_share(documents, packed) | {"num_items_in_batch": self.targets}

    def step(self, way: str) -> float:
        """Run a step; return the seconds until all ranks are done."""
        if way == ALONE:
            return self.time_alone()
        placement, balanced = WAYS[way]
        batch = self.batch(self.packed(placement, self.rank))
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(balanced):
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        self.model.zero_grad()
        self.losses[way] = sum(gather(float(loss.detach())))
        return seconds

    def time_alone(self) -> float:
        """Return the mean seconds of ranks that all compute the whole global batch at once."""
        batch = self.batch(PackedDocuments(self.lengths))
        self.model.eval()  # no other rank takes part
        dist.barrier()
        started = time.perf_counter()
        with self.model.no_sync():
            self.model(**batch, use_cache=False).loss.backward()
        taken = statistics.mean(gather(time.perf_counter() - started))
        self.model.train()
        self.model.zero_grad()
        return taken


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the figures of one run. A ratio is the median of the ratios within rounds."""
    steps = Steps(arguments, rank)
    steps.step("dealt")  # the first step allocates buffers and fills caches
    seconds = take_turns([*WAYS, ALONE], steps.step, rank, arguments.rounds)
    alone = seconds.pop(ALONE)
    return {
        "documents": steps.lengths,
        "tokens_by_rank": {
            name: [sum(steps.packed(name, other).lengths) for other in range(ranks)]
            for name in steps.dealings
        },
        "seconds": seconds,
        "median_seconds": compute_medians(seconds),
        "losses": steps.losses,
        "seconds_of_all_by_one": alone,
        "dealt_to": {
            way: compute_median_ratio(seconds["dealt"], seconds[way])
            for way in WAYS
            if way != "dealt"
        },
        "share_of_ideal": {
            way: compute_median_ratio(alone, taken) / ranks for way, taken in seconds.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    setting, dealt_to = result["setting"], result["dealt_to"]
    rows = (
        (
            way,
            f"{seconds:.2f}",
            f"{result['share_of_ideal'][way]:.1%}",
            f"{dealt_to[way]:.3f}" if way in dealt_to else "",
        )
        for way, seconds in result["median_seconds"].items()
    )
    columns = "documents", "median seconds", "share of the ideal", "dealt / this"
    title = f"step time, {setting['tokens']} tokens a rank, {setting['ranks']} ranks"
    print_table(title, columns, rows)
    losses = result["losses"].values()
    print(f"largest difference of the loss: {max(losses) - min(losses):.1e}")


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--ranks", 2, "processes")
    add_model_options(parser, tokens=8192, layers=2)
    text = "train a Qwen3-Next with at least 4 layers instead of a Llama"
    parser.add_argument("--hybrid", action="store_true", help=text)
    add_rounds(parser)
    arguments = parser.parse_args()
    output_result(arguments, run_on_ranks(measure, arguments.ranks, arguments), show)


if __name__ == "__main__":
    main()
