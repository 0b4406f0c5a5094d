"""The slowest rank with whole rows of TRL's packing, when the rows of each optimizer step are in
random order and when they are placed.

    python benchmarks/schedule/row_order.py --json

Documents are drawn from two distributions with long tails, up to the length of a row. TRL packs
them best-fit (``bfd_split``), a Trainer's shuffle orders them, and each rank reads a row.
`hf_distca.place_rows` then orders the rows of each step. Both orders are planned for all ranks
together, for Llama-3-8B in bf16 by the built-in figures for CUDA: 300 GB/s inside a node, 40
between nodes. Figures are estimates; only the processor time of planning and placing is measured.
Each figure is a sum over all micro-batches, each of which ends with its slowest rank, divided by
the mean over ranks; ranks compute and then exchange. Exits with status 1 if placed rows are slower
than rows in random order in any case, or make nodes less even.
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
from placed import TWO_LEVELS as CUDA
from script import add_option, end, make_parser, output_result, print_table


def pack_rows(text: str, tokens: int, rows: int, seed: int) -> list[np.ndarray]:
    """Pack at least `rows` rows by TRL, and return the document lengths of each."""
    drawn = replace(open_documents(text, "input_ids", tokens), seed=seed)
    lengths = next(drawn.draw_batches(tokens * rows, 1))
    documents = Dataset.from_dict(
        {"input_ids": [np.zeros(length, dtype=np.int8) for length in lengths]}
    )
    found, row = find_row_documents(pack_dataset(documents, tokens, "bfd_split"), quiet=True)
    return np.split(found, np.flatnonzero(np.diff(row)) + 1)


def compute_figures(rows: list[np.ndarray], places: StepPlaces) -> dict[str, float]:
    """Compute the figures of one order of rows over all micro-batches."""
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
        rows = pack_rows(text, tokens, count, seed)
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
            name: compute_figures([rows[row] for row in way], places)
            for name, way in (("random", order), ("placed", placed))
        }
        cases.append(case | both)
    return {"cases": cases}


def list_missed(cases: list[dict[str, Any]]) -> list[str]:
    """List the cases that placing made worse."""
    return [
        f"{case['ranks']} x {case['tokens']}, {case['text']}, {case['seed']}: {name}"
        f" {case['random'][name]:.4f} -> {case['placed'][name]:.4f}"
        for case in cases
        for name in ("slowest", "busiest_node")
        if case["placed"][name] > case["random"][name]
    ]


def show(result: dict[str, Any]) -> None:
    figures = (
        ("slowest", 1, 3),
        ("busiest_node", 1, 3),
        ("busiest_gigabytes_between", 1, 2),
        ("plan_seconds", 1e3, 0),
    )
    rows = []
    for case in result["cases"]:
        before, after = case["random"], case["placed"]
        size = f"{case['ranks']} x {case['tokens']}"
        name = f"{size}, {case['accumulation']}, {case['text']}, {case['seed']}"
        pairs = (
            f"{before[key] * scale:.{n}f} -> {after[key] * scale:.{n}f}"
            for key, scale, n in figures
        )
        rows.append((name, *pairs, f"{case['place_seconds'] * 1e3:.1f}"))
    columns = "ranks x tokens, accumulation, text, seed", "slowest / mean", "node / mean"
    title = "rows of TRL's packing, random order -> placed; GB are those of the busiest rank"
    print_table(title, (*columns, "GB between nodes", "plan ms", "place ms"), rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(
        parser, "--documents", ["pretrain", "prolong"], "names of distributions, or JSON lists"
    )
    sizes = ["64x65536", "64x32768", "512x65536", "512x32768"]
    add_option(parser, "--sizes", sizes, "number of ranks x tokens per row")
    add_option(parser, "--accumulation", [1, 4], "micro-batches per step")
    add_option(parser, "--micro-batches", 8, "micro-batches of each case, in whole steps")
    add_option(parser, "--ranks-per-node", 8, "ranks per node")
    add_option(parser, "--seeds", 3, "number of seeds for each distribution")
    arguments = parser.parse_args()
    result = measure(arguments)
    output_result(arguments, result, show)
    end(list_missed(result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
