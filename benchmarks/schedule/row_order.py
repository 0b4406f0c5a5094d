"""The slowest rank where rows of TRL's packing stay whole, with the rows of each optimizer step in
random order and placed.

    python benchmarks/schedule/row_order.py --json

Documents of two distributions with long tails, up to a row long, are packed best-fit by TRL
(``bfd_split``), shuffled as a Trainer shuffles them, and read a row a rank. `hf_distca.place_rows`
then orders the rows of each step. Both orders are planned for all ranks together, for Llama-3-8B in
bf16 by the built-in figures for CUDA: 300 GB/s inside a node, 40 between. Estimates, not
measurements, but for the processor time of planning and placing. Figures are sums over all
micro-batches, each of which ends with its slowest rank, by the mean of all ranks; ranks compute and
then exchange. Ends with 1 if rows placed are slower than in random order in any case, or nodes less
even.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from torch.utils.data import BatchSampler
from tqdm import tqdm
from trl import pack_dataset

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.data.row_placement import RowPlacement, StepPlaces, find_row_documents
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.cli.lengths import open_documents
from levels import CUDA
from machine import describe
from output import add_json_option, put_out


def packed(text: str, tokens: int, rows: int, seed: int) -> list[np.ndarray]:
    """At least so many rows, as TRL packs documents: the tokens of the documents of each."""
    drawn = replace(open_documents(text, "input_ids", tokens), seed=seed)
    lengths = next(drawn.draw_batches(tokens * rows, 1))
    documents = Dataset.from_dict(
        {"input_ids": [np.zeros(length, dtype=np.int8) for length in lengths]}
    )
    found, row = find_row_documents(pack_dataset(documents, tokens, "bfd_split"), quiet=True)
    return np.split(found, np.flatnonzero(np.diff(row)) + 1)


def figures(rows: list[np.ndarray], places: StepPlaces) -> dict[str, float]:
    """Of one order of rows, over all micro-batches."""
    ranks, config = Ranks(per_node=places.ranks_per_node), DistCAConfig()
    slowest, busiest, mean, between, planning = 0.0, 0.0, 0.0, 0.0, 0.0
    for first in range(0, len(rows), places.ranks):
        layout = Layout.from_lengths([row.tolist() for row in rows[first : first + places.ranks]])
        started = time.process_time()
        plan = balance(layout, CUDA, config, ranks)
        planning += time.process_time() - started
        load = PlanLoad(plan, CUDA, overlapped=False, ranks=ranks)
        work = np.array(
            [CUDA.estimate_seconds(row, row).sum() for row in rows[first : first + places.ranks]]
        )
        busiest += work.reshape(places.nodes, -1).sum(axis=1).max() / places.ranks_per_node
        slowest, mean = slowest + load.slowest_seconds, mean + work.mean()
        between = max(between, float(load.node_bytes.inter_node.max() / 1e9))
    count = len(rows) / places.ranks
    return {
        "slowest": slowest / mean,
        "busiest_node": busiest / mean,
        "busiest_gigabytes_between": between,
        "plan_seconds": planning / count,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    disable_progress_bars()
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes]
    jobs = list(
        itertools.product(
            sizes, arguments.accumulation, arguments.documents, range(arguments.seeds)
        )
    )
    cases = []
    for (ranks, tokens), accumulation, text, seed in tqdm(jobs, desc="cases", file=sys.stderr):
        places = StepPlaces(
            ranks // arguments.ranks_per_node, arguments.ranks_per_node, 1, accumulation
        )
        count = max(arguments.micro_batches // accumulation, 1) * accumulation * ranks
        rows = packed(text, tokens, count, seed)
        order = np.random.default_rng(seed).permutation(len(rows))[:count].tolist()
        work = [CUDA.estimate_seconds(row, row).sum() for row in rows]
        started = time.process_time()
        placed = [
            row for (row,) in RowPlacement(BatchSampler(order, 1, drop_last=True), work, places)
        ]
        placing = (time.process_time() - started) / (count // (ranks * accumulation))
        case = {
            "ranks": ranks,
            "tokens": tokens,
            "accumulation": accumulation,
            "text": text,
            "seed": seed,
        }
        case |= {
            "filled": float(sum(row.sum() for row in rows) / len(rows) / tokens),
            "place_seconds": placing,
        }
        both = {
            name: figures([rows[row] for row in way], places)
            for name, way in (("random", order), ("placed", placed))
        }
        cases.append(case | both)
    setting = {name: value for name, value in vars(arguments).items() if name != "json"}
    return {"machine": describe(), "shape": "Llama-3-8B, bf16", "setting": setting, "cases": cases}


def missed(cases: list[dict[str, Any]]) -> list[str]:
    """Cases in which placing made something worse."""
    return [
        f"{case['ranks']} x {case['tokens']}, {case['text']}, {case['seed']}: {name}"
        f" {case['random'][name]:.4f} -> {case['placed'][name]:.4f}"
        for case in cases
        for name in ("slowest", "busiest_node")
        if case["placed"][name] > case["random"][name]
    ]


def show(result: dict[str, Any]) -> None:
    table = Table(
        title="rows of TRL's packing, random order -> placed; GB are those of the busiest rank"
    )
    columns = (
        "ranks x tokens, accumulation, text, seed",
        "slowest / mean",
        "node / mean",
        "GB between nodes",
        "plan ms",
        "place ms",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", no_wrap=True)
    for case in result["cases"]:
        before, after = case["random"], case["placed"]
        name = (
            f"{case['ranks']} x {case['tokens']}, {case['accumulation']}, {case['text']},"
            f" {case['seed']}"
        )
        cells = (
            ("slowest", 1, 3),
            ("busiest_node", 1, 3),
            ("busiest_gigabytes_between", 1, 2),
            ("plan_seconds", 1e3, 0),
        )
        pairs = (
            f"{before[key] * scale:.{n}f} -> {after[key] * scale:.{n}f}" for key, scale, n in cells
        )
        table.add_row(name, *pairs, f"{case['place_seconds'] * 1e3:.1f}")
    Console(width=130).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["pretrain", "prolong"]
    parser.add_argument(
        "--documents",
        nargs="+",
        default=names,
        help="names of distributions, or JSON lists (default: both names)",
    )
    sizes = ["64x65536", "64x32768", "512x65536", "512x32768"]
    parser.add_argument(
        "--sizes", nargs="+", default=sizes, help="ranks x tokens of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        nargs="+",
        default=[1, 4],
        help="micro-batches of a step (default: 1 4)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=8,
        help="of each case, in whole steps (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=8, help="ranks of a node (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="corpora of each distribution (default: %(default)s)"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    result = measure(arguments)
    put_out(result, arguments.json, show)
    misses = missed(result["cases"])
    print("\n".join(misses), file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
