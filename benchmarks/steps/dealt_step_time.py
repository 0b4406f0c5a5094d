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
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from deal import over_all_ranks
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.layout import Layout
from machine import describe
from options import add_option
from output import add_json_option, put_out
from step_time import model_of

WAYS = {
    "dealt": ("dealt", True),
    "in order, balanced": ("in order", True),
    "in order, unbalanced": ("in order", False),
    "every document over all ranks": ("over all", False),
}


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


def lengths_of(tokens: int, ranks: int) -> list[int]:
    """Documents of a global batch, in a loader's order: one of half a rank, one of one and a
    quarter, and shorter ones.
    """
    total, lengths = tokens * ranks, [tokens // 2, tokens * 5 // 4]
    choose = np.random.default_rng(0)
    while sum(lengths) < total:
        lengths.append(
            min(int(choose.lognormal(np.log(tokens / 16), 0.8)) + 1, total - sum(lengths))
        )
    return lengths


def batch_of(lengths: list[int], packed: PackedDocuments) -> dict[str, Any]:
    """The tokens of a share of random documents."""
    documents = [
        torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(lengths)
    ]
    return share_of(documents, packed)


def share_of(documents: list[torch.Tensor], packed: PackedDocuments) -> dict[str, Any]:
    """A share of the documents, with the next token of each as its label."""
    targets = [torch.cat([document[1:], torch.tensor([-100])]) for document in documents]
    starts = packed.starts or (0,) * len(packed.lengths)
    numbers = packed.documents or tuple(range(len(packed.lengths)))
    runs = list(zip(numbers, starts, packed.lengths, strict=True))
    ids, labels = (
        torch.cat([rows[d][s : s + n] for d, s, n in runs])[None] for rows in (documents, targets)
    )
    positions = torch.from_numpy(packed.positions)[None]
    return {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": labels,
        "position_ids": positions,
        "distca_documents": packed,
    }


class Steps:
    """Times training steps of one rank, on documents of these lengths or of `lengths_of`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        rank: int,
        lengths: list[int] | None = None,
        config: hf_distca.DistCAConfig | None = None,
    ) -> None:
        self.rank, self.ranks = rank, arguments.ranks
        self.lengths = lengths or lengths_of(arguments.tokens, arguments.ranks)
        self.model = (
            hybrid_of(arguments)
            if getattr(arguments, "hybrid", False)
            else model_of(arguments, "distca")
        )
        self.targets = sum(length - 1 for length in self.lengths)
        config = hf_distca.configure(config)
        keys = list_layer_keys(self.model.module, None, "cpu")
        costs = {key: make_initial_cost(key, config) for key in keys}
        place = (self.ranks, arguments.tokens, costs, config)
        self.dealings = {
            "dealt": Dealing(*place),
            "in order": Dealing(*place, placement="in order"),
            "over all": OverAll(*place),
        }

    def batch(self, way: str) -> dict[str, Any]:
        """This rank's share of the global batch."""
        dealing = self.dealings[WAYS[way][0]]
        return batch_of(self.lengths, dealing.make_share(np.array(self.lengths), (0, 0), self.rank))

    def step(self, way: str, batch: dict[str, Any] | None = None) -> tuple[float, float]:
        """Seconds until all ranks are done, and the loss of the global batch."""
        batch = self.batch(way) if batch is None else batch
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(WAYS[way][1]):
            loss = self.model(**batch, use_cache=False, num_items_in_batch=self.targets).loss
            loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        self.model.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        return seconds, float(total)

    def alone(self) -> float:
        """Seconds of a rank that computes the whole global batch, the mean of all ranks, which do
        it at the same time.
        """
        batch = batch_of(self.lengths, PackedDocuments(self.lengths))
        self.model.eval()  # nobody else takes part
        dist.barrier()
        started = time.perf_counter()
        with self.model.no_sync():
            self.model(**batch, use_cache=False, num_items_in_batch=self.targets).loss.backward()
        taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(taken)
        self.model.train()
        self.model.zero_grad()
        return float(taken) / self.ranks


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    steps = Steps(arguments, rank)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    alone = []
    progress = (
        tqdm(total=arguments.rounds, desc="rounds", file=sys.stderr) if rank == 0 else nullcontext()
    )
    with progress as bar:
        steps.step("dealt")  # the first step pays for buffers and caches
        for round_ in range(arguments.rounds):
            for way in list(WAYS)[:: 1 if round_ % 2 == 0 else -1]:
                taken, losses[way] = steps.step(way)
                seconds[way].append(taken)
            alone.append(steps.alone())
            if bar is not None:
                bar.update()
    if rank == 0:
        tokens = {
            name: [
                sum(made.make_share(np.array(steps.lengths), (0, 0), r).lengths)
                for r in range(arguments.ranks)
            ]
            for name, made in steps.dealings.items()
        }
        Path(folder, "result.json").write_text(
            json.dumps(figures(arguments, seconds, losses, alone, tokens))
        )
    dist.barrier()
    dist.destroy_process_group()


def figures(
    arguments: argparse.Namespace,
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    alone: list[float],
    tokens: dict[str, list[int]],
) -> dict[str, Any]:
    """Ratios of one run. A ratio is the median over rounds of the ratio within a round."""

    def ratio(to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds["dealt"], seconds[to], strict=True))

    return {
        "machine": describe(),
        "setting": {"threads": 1, **{k: v for k, v in vars(arguments).items() if k != "json"}},
        "documents": lengths_of(arguments.tokens, arguments.ranks),
        "tokens_by_rank": tokens,
        "seconds": seconds,
        "median_seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "losses": losses,
        "seconds_of_all_by_one": alone,
        "dealt_to": {way: ratio(way) for way in WAYS if way != "dealt"},
        "share_of_ideal": {
            way: statistics.median(
                one / arguments.ranks / taken for one, taken in zip(alone, values, strict=True)
            )
            for way, values in seconds.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    setting = result["setting"]
    table = Table(title=f"step time, {setting['tokens']} tokens a rank, {setting['ranks']} ranks")
    for column in ("documents", "median seconds", "share of the ideal", "dealt takes of it"):
        table.add_column(column, justify="left" if column == "documents" else "right")
    for way, seconds in result["median_seconds"].items():
        to = result["dealt_to"].get(way)
        table.add_row(
            way,
            f"{seconds:.2f}",
            f"{result['share_of_ideal'][way]:.1%}",
            "" if to is None else f"{to:.3f}",
        )
    Console().print(table)
    losses = result["losses"].values()
    Console().print(f"largest difference of the loss: {max(losses) - min(losses):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_option(parser, "--ranks", 2, "processes")
    add_option(parser, "--tokens", 8192, "tokens a rank")
    add_option(parser, "--layers", 2, "decoder layers")
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="a Qwen3-Next of at least 4 layers in place of a Llama",
    )
    add_option(parser, "--heads", 4, "query heads of 64; half as many key/value heads")
    add_option(parser, "--rounds", 5, "rounds, each running every way once")
    add_json_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments, folder), nprocs=arguments.ranks)
        result = json.loads(Path(folder, "result.json").read_text())
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
