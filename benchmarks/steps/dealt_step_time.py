"""Seconds of a training step on the same documents, placed on ranks in four ways, side by side in
one run.

One document is longer than what a rank holds. Processes have one thread each. Ways take turns
within each round, so that a drifting machine slows all of them; the figures are medians over
rounds. The ideal is what ranks take that each compute all of it by themselves at the same time,
exchanging nothing, divided by their number.

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
from batches import draw_lengths, share_of
from deal import over_all_ranks
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.layout import Layout
from models import model_of
from processes import (
    add_model_options,
    add_rounds,
    gather,
    median_ratio,
    medians,
    on_ranks,
    take_turns,
)
from script import add_option, make_parser, print_table, put_out

WAYS = {
    "dealt": ("dealt", True),
    "in order, balanced": ("in order", True),
    "in order, unbalanced": ("in order", False),
    "every document over all ranks": ("over all", False),
}
ALONE = "one rank"


def hybrid_of(arguments: argparse.Namespace) -> torch.nn.parallel.DistributedDataParallel:
    """A Qwen3-Next as wide as `model_of`: three layers of a gated delta rule before each layer of
    attention.
    """
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
    """Every document head and tail over all ranks, as context parallelism does."""

    def deal_layouts(self, lengths: np.ndarray) -> tuple[Layout, ...]:
        return (over_all_ranks(lengths.tolist(), self.ranks),)


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.rank, self.ranks = rank, arguments.ranks
        self.lengths = draw_lengths(arguments.tokens, arguments.ranks)
        self.model = hybrid_of(arguments) if arguments.hybrid else model_of(arguments, "distca")
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
        """A rank's share of the global batch."""
        return self.dealings[placement].make_share(np.array(self.lengths), (0, 0), rank)

    def batch(self, packed: PackedDocuments) -> dict[str, Any]:
        """The tokens of a share of random documents."""
        documents = [
            torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(i))
            for i, n in enumerate(self.lengths)
        ]
        return share_of(documents, packed) | {"num_items_in_batch": self.targets}

    def step(self, way: str) -> float:
        """Seconds until all ranks are done."""
        if way == ALONE:
            return self.alone()
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

    def alone(self) -> float:
        """Seconds of a rank that computes the whole global batch, the mean of all ranks, which do
        it at the same time.
        """
        batch = self.batch(PackedDocuments(self.lengths))
        self.model.eval()  # nobody else takes part
        dist.barrier()
        started = time.perf_counter()
        with self.model.no_sync():
            self.model(**batch, use_cache=False).loss.backward()
        taken = statistics.mean(gather(time.perf_counter() - started))
        self.model.train()
        self.model.zero_grad()
        return taken


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run. A ratio is the median over rounds of the ratio within a round."""
    steps = Steps(arguments, rank)
    steps.step("dealt")  # the first step pays for buffers and caches
    seconds = take_turns([*WAYS, ALONE], steps.step, rank, arguments.rounds)
    alone = seconds.pop(ALONE)
    return {
        "documents": steps.lengths,
        "tokens_by_rank": {
            name: [sum(steps.packed(name, other).lengths) for other in range(ranks)]
            for name in steps.dealings
        },
        "seconds": seconds,
        "median_seconds": medians(seconds),
        "losses": steps.losses,
        "seconds_of_all_by_one": alone,
        "dealt_to": {
            way: median_ratio(seconds["dealt"], seconds[way]) for way in WAYS if way != "dealt"
        },
        "share_of_ideal": {
            way: median_ratio(alone, taken) / ranks for way, taken in seconds.items()
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
    columns = "documents", "median seconds", "share of the ideal", "dealt takes of it"
    title = f"step time, {setting['tokens']} tokens a rank, {setting['ranks']} ranks"
    print_table(title, columns, rows)
    losses = result["losses"].values()
    print(f"largest difference of the loss: {max(losses) - min(losses):.1e}")


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--ranks", 2, "processes")
    add_model_options(parser, tokens=8192, layers=2)
    text = "a Qwen3-Next of at least 4 layers instead of a Llama"
    parser.add_argument("--hybrid", action="store_true", help=text)
    add_rounds(parser)
    arguments = parser.parse_args()
    put_out(arguments, on_ranks(measure, arguments.ranks, arguments), show)


if __name__ == "__main__":
    main()
