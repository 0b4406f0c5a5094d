"""What is left of the imbalance when ranks share attention in groups: the slowest rank of all, for groups of several sizes.

Ranks are packed with documents in the order in which they are drawn; what does not fit is cut, and goes on as a document on the
next rank. Each group is planned by itself, for Llama-3-8B in bf16 by the built-in figures for CUDA, on nodes of 8. Estimates, not
measurements, but for the processor time of planning.

    python benchmarks/group_size.py --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_distca.cli.lengths import open_documents
from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from levels import CUDA
from machine import describe
from output import add_json_option, put_out

NODES = Ranks(per_node=8)


def packed(lengths: np.ndarray, ranks: int, tokens: int) -> list[list[int]]:
    """The documents of each rank."""
    cuts = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, ranks) * tokens]))
    rows = np.split(np.diff(cuts, prepend=0), np.searchsorted(cuts, np.arange(1, ranks) * tokens, side="right"))
    return [row.tolist() for row in rows]


def peers(plan: Plan) -> int:
    """Ranks that the busiest one sends to or receives from."""
    away = plan.home != plan.server
    pairs = np.unique(np.stack([plan.home[away], plan.server[away]]), axis=1)
    pairs = np.unique(np.concatenate([pairs, pairs[::-1]], axis=1), axis=1)
    return int(np.bincount(pairs[0]).max(initial=0))


def figures(rows: list[list[int]], size: int, config: DistCAConfig) -> dict[str, float]:
    """Of plans for groups of so many ranks; seconds by the mean of all ranks."""
    plans, milliseconds = [], []
    for first in range(0, len(rows), size):
        started = time.process_time()
        plans.append(balance(Layout.from_lengths(rows[first : first + size]), CUDA, config, NODES))
        milliseconds.append((time.process_time() - started) * 1e3)
    loads = [PlanLoad(plan, CUDA, overlapped=config.ping_pong, ranks=NODES) for plan in plans]
    local = [PlanLoad(Plan.local(plan.layout), CUDA) for plan in plans]
    mean = float(np.mean([load.compute_seconds.mean() for load in local]))
    return {
        "unbalanced": max(load.slowest_seconds for load in local) / mean,
        "slowest": max(load.slowest_seconds for load in loads) / mean,
        "if_even_inside": max(float(load.compute_seconds.mean()) for load in local) / mean,
        "peers": max(map(peers, plans)),
        "plan_milliseconds": statistics.median(milliseconds),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    config, found = DistCAConfig(ping_pong=arguments.ping_pong), {}
    jobs = [(text, ranks) for text in arguments.documents for ranks in arguments.ranks]
    for text, ranks in tqdm(jobs, desc="documents and ranks", file=sys.stderr):
        documents = open_documents(text, "input_ids", arguments.longest)
        rows = packed(next(documents.batches(ranks * arguments.tokens, 1)), ranks, arguments.tokens)
        sizes = [size for size in arguments.sizes if size < ranks and ranks % size == 0]
        found.setdefault(text, {})[str(ranks)] = {str(size): figures(rows, size, config) for size in [*sizes, ranks]}
    setting = {name: value for name, value in vars(arguments).items() if name != "json"}
    return {"machine": describe(), "shape": "Llama-3-8B, bf16", "setting": setting, "documents": found}


def show(result: dict[str, Any]) -> None:
    table = Table(title="slowest rank / mean of all ranks, estimated")
    for name in ("documents", "ranks", "group", "unbalanced", "slowest", "if groups were even", "most peers", "a plan, ms"):
        table.add_column(name, justify="left" if name == "documents" else "right")
    for text, by_ranks in result["documents"].items():
        for ranks, sizes in by_ranks.items():
            for size, row in sizes.items():
                seconds = (f"{row[name]:.2f}" for name in ("unbalanced", "slowest", "if_even_inside"))
                table.add_row(text, ranks, size, *seconds, str(row["peers"]), f"{row['plan_milliseconds']:.0f}")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--documents",
        nargs="+",
        default=["pretrain", "prolong"],
        help="names of distributions, or JSON lists (default: both names)",
    )
    parser.add_argument("--longest", type=int, default=2**16, help="tokens of the longest document (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2**16, help="tokens a rank (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="ranks (default: 512 to 4096)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512], help="of groups (default: 64 to 512)")
    parser.add_argument("--ping-pong", action="store_true", help="exchanges behind compute")
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(measure(arguments), arguments.json, show)


if __name__ == "__main__":
    main()
