"""The imbalance that is left when ranks share attention in groups: the slowest rank of all.

Documents lie on ranks in three ways:

- in order: as drawn. A document that does not fit is cut and continues as a separate document on
  the next rank.
- rows placed: the same rows, one for each rank; heavy rows go to the nodes with the least work.
- dealt: each group is dealt its own global batch, as `document_shares` does.

Each group is planned separately, for Llama-3-8B in bf16 by the built-in figures for CUDA, on nodes
of 8. Figures are estimates; only the processor time of planning is measured. `--placements` adds
the placements of a folder as given, in groups of a node and in one group.

    python benchmarks/schedule/group_size.py --json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.data.row_placement import StepPlaces
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.cli.lengths import open_documents
from placed import TWO_LEVELS as CUDA
from script import add_option, make_parser, output_result, print_table

NODE = 8
NODES = Ranks(per_node=NODE)
WAYS = ("in order", "rows placed", "dealt")


def pack_documents(lengths: np.ndarray, ranks: int, tokens: int) -> list[list[int]]:
    """List the documents of each rank."""
    cuts = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, ranks) * tokens]))
    ends = np.searchsorted(cuts, np.arange(1, ranks) * tokens, side="right")
    rows = np.split(np.diff(cuts, prepend=0), ends)
    return [row.tolist() for row in rows]


def order_rows(rows: list[list[int]]) -> list[list[int]]:
    """Order rows for even nodes, like `hf_distca.place_rows` in a step of one micro-batch."""
    seconds = np.array([CUDA.estimate_seconds(np.array(row), np.array(row)).sum() for row in rows])
    order = StepPlaces(len(rows) // NODE, NODE).place(np.rint(seconds * 1e9).astype(np.int64))
    return [rows[row] for row in order.tolist()]


def make_groups(way: str, lengths: np.ndarray, ranks: int, tokens: int, size: int) -> list[Layout]:
    """Make the layout of each group of `size` ranks."""
    if way == "dealt":
        batches = pack_documents(lengths, ranks // size, tokens * size)
        return [deal(batch, size, tokens, CUDA, ranks_per_node=NODE) for batch in batches]
    rows = pack_documents(lengths, ranks, tokens)
    rows = order_rows(rows) if way == "rows placed" else rows
    return [Layout.from_lengths(rows[first : first + size]) for first in range(0, ranks, size)]


def count_peers(plan: Plan) -> int:
    """Count the ranks that the busiest rank sends to or receives from."""
    away = plan.home != plan.server
    pairs = np.unique(np.stack([plan.home[away], plan.server[away]]), axis=1)
    pairs = np.unique(np.concatenate([pairs, pairs[::-1]], axis=1), axis=1)
    return int(np.bincount(pairs[0]).max(initial=0))


def compute_figures(layouts: list[Layout], config: DistCAConfig) -> dict[str, float]:
    """Compute the figures of plans for groups; seconds are relative to the mean of all ranks."""
    plans, milliseconds = [], []
    for layout in layouts:
        started = time.process_time()
        plans.append(balance(layout, CUDA, config, NODES))
        milliseconds.append((time.process_time() - started) * 1e3)
    loads = [PlanLoad(plan, CUDA, overlapped=config.ping_pong, ranks=NODES) for plan in plans]
    local = [PlanLoad(Plan.make_local(layout), CUDA) for layout in layouts]
    mean = float(np.mean([load.compute_seconds.mean() for load in local]))
    return {
        "unbalanced": max(load.slowest_seconds for load in local) / mean,
        "slowest": max(load.slowest_seconds for load in loads) / mean,
        "if_even_inside": max(float(load.compute_seconds.mean()) for load in local) / mean,
        "peers": max(map(count_peers, plans)),
        "gigabytes_between": max(float(load.node_bytes.inter_node.max()) for load in loads) / 1e9,
        "plan_milliseconds": statistics.median(milliseconds),
    }


def average_rows(rows: list[dict[str, float]]) -> dict[str, float]:
    """Compute the mean of each figure over batches, and the largest number of peers."""
    names = rows[0].keys()
    means = {name: statistics.mean(row[name] for row in rows) for name in names}
    return {**means, "peers": max(row["peers"] for row in rows)}


def split_groups(layout: Layout, size: int) -> list[Layout]:
    """Split a placement into groups of `size` ranks; no document may lie in two groups."""
    firsts, segments = range(0, layout.world_size, size), layout.offsets
    bounds = [(first, slice(int(segments[first]), int(segments[first + size]))) for first in firsts]
    return [
        Layout(
            layout.document[own],
            layout.start[own],
            layout.length[own],
            segments[first : first + size + 1] - own.start,
        )
        for first, own in bounds
    ]


def measure_batches(
    arguments: argparse.Namespace, text: str, ranks: int, way: str
) -> dict[str, Any]:
    """Compute the figures of drawn batches, by the size of groups."""
    config, found = DistCAConfig(ping_pong=arguments.ping_pong), {}
    documents, total = (
        open_documents(text, "input_ids", arguments.longest),
        ranks * arguments.tokens,
    )
    batches = [
        next(replace(documents, seed=seed).draw_batches(total, 1))
        for seed in range(arguments.seeds)
    ]
    for size in [*(n for n in arguments.sizes if n < ranks and ranks % n == 0), ranks]:
        groups = [make_groups(way, lengths, ranks, arguments.tokens, size) for lengths in batches]
        found[str(size)] = average_rows([compute_figures(layouts, config) for layouts in groups])
    return found


def measure_placement(path: Path, config: DistCAConfig) -> dict[str, Any]:
    """Compute the figures of a given placement, in groups of a node and in one group."""
    given = read_placement(path)
    sizes = NODE, given.world_size
    found = {str(size): compute_figures(split_groups(given, size), config) for size in sizes}
    return {str(given.world_size): {"as given": found}}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    jobs = list(itertools.product(arguments.documents, arguments.ranks, WAYS))
    for text, ranks, way in tqdm(jobs, desc="documents, ranks and ways", file=sys.stderr):
        ways = found.setdefault(text, {}).setdefault(str(ranks), {})
        ways[way] = measure_batches(arguments, text, ranks, way)
    for path in sorted(arguments.placements.glob("*.json")) if arguments.placements else ():
        found[path.stem] = measure_placement(path, DistCAConfig(ping_pong=arguments.ping_pong))
    return {"documents": found}


def show(result: dict[str, Any]) -> None:
    rows = []
    for text, by_ranks in result["documents"].items():
        for (ranks, ways), way in ((pair, way) for pair in by_ranks.items() for way in pair[1]):
            for size, row in ways[way].items():
                seconds = row["unbalanced"], row["slowest"], row["if_even_inside"]
                ratios = (f"{value:.3f}" for value in seconds)
                rest = f"{row['gigabytes_between']:.2f}", f"{row['plan_milliseconds']:.1f}"
                rows.append((text, way, ranks, size, *ratios, f"{row['peers']:.0f}", *rest))
    names = "unbalanced", "slowest", "if groups were even", "most peers", "GB", "a plan, ms"
    columns = "documents", "placement", "ranks", "group", *names
    title = "slowest rank / mean, estimated; GB of the busiest rank between nodes"
    print_table(title, columns, rows, texts=2)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(
        parser, "--documents", ["pretrain", "prolong"], "names of distributions, or JSON lists"
    )
    add_option(parser, "--longest", 2**16, "tokens of the longest document")
    add_option(parser, "--tokens", 2**16, "tokens a rank")
    add_option(parser, "--ranks", [512, 4096], "numbers of ranks, in whole nodes of 8")
    add_option(parser, "--sizes", [8, 64, 128, 256, 512], "ranks per group")
    add_option(parser, "--seeds", 1, "number of batches; figures are means")
    parser.add_argument("--ping-pong", action="store_true", help="hide exchanges behind compute")
    text = "folder of placements in JSON whose documents lie on one node each"
    parser.add_argument("--placements", type=Path, help=text)
    arguments = parser.parse_args()
    output_result(arguments, measure(arguments), show)


if __name__ == "__main__":
    main()
