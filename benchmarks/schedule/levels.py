"""Bytes between nodes and the slowest rank, for plans and dealing that know of nodes, beside those
that do not.

    python benchmarks/schedule/levels.py --placements data/workloads --json results.json

A placement is a JSON file as `hf-distca plan` reads it, with nodes of `--ranks-per-node` ranks. The
cost model is the built-in one for cuda and Llama-3-8B in bf16: 300 GB/s inside a node, 40 GB/s a
rank between nodes. *Before* is the plan that is made as if there were one level, *after* the one
that is made for two; both are measured on two. The slowest rank is divided by the mean compute of
all ranks: overlapped, for the longer of compute and exchange of the placement as a nano-batch;
serial, for both together. The same for the documents of the placement dealt anew. Ends with 1 if
the plan of a placement as given is slower after than before, by more than 1 % overlapped or 0.4 %
serial, or if more bytes travel between nodes over all placements.

With `--drawn`, also batches of two distributions by three seeds, dealt as if there were one level
and to nodes first, with the processor time of dealing and of planning.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCAError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.tools.cli.lengths import open_documents
from machine import describe
from output import add_json_option, put_out

LLAMA_3_8B = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
CUDA = replace(
    CostModel.make_analytic(LLAMA_3_8B, device_type="cuda"),
    exchange_bytes_per_second=4e10,
    node_bytes_per_second=3e11,
)
# Times that the slowest rank may end later; where exchanges are hidden, fewer bytes between nodes
# are all there is to gain.
_SAME = {"serial": 1.004, "overlapped": 1.01}


def figures(plan: Plan, ranks: Ranks, *, overlapped: bool) -> dict[str, float]:
    load = PlanLoad(plan, CUDA, overlapped=overlapped, ranks=ranks)
    moved = load.node_bytes
    return {
        "slowest": load.slowest_seconds / float(load.compute_seconds.mean()),
        "compute": float(load.compute_seconds.max() / load.compute_seconds.mean()),
        "gigabytes_between": float(moved.inter_node[0].sum() / 1e9),
        "gigabytes_inside": float(moved.intra_node[0].sum() / 1e9),
        "busiest_gigabytes_between": float(moved.inter_node.max() / 1e9),
    }


def lengths_of(layout: Layout) -> list[int]:
    """Tokens of each document."""
    documents, place = np.unique(layout.document, return_inverse=True)
    return [int(n) for n in np.bincount(place, weights=layout.length, minlength=len(documents))]


def measure(path: Path, per_node: int) -> dict[str, Any]:
    given = read_placement(path)
    count = given.world_size
    if count % per_node:
        raise DistCAError(f"its {count} ranks cannot be nodes of {per_node}.")
    ranks, result = Ranks(per_node=per_node), {"placement": path.stem, "ranks": count}
    lengths = lengths_of(given)
    tokens = [sum(lengths) // count + (rank < sum(lengths) % count) for rank in range(count)]
    for overlapped in (True, False):
        name, config = "overlapped" if overlapped else "serial", DistCAConfig(ping_pong=overlapped)
        dealt = [deal(lengths, count, tokens, CUDA, ranks_per_node=n) for n in (None, per_node)]
        plans = {
            f"given, {name}": (balance(given, CUDA, config), balance(given, CUDA, config, ranks)),
            f"dealt, {name}": tuple(
                balance(d, CUDA, config, on)
                for d, on in zip(dealt, (UNIFORM_RANKS, ranks), strict=True)
            ),
        }
        for way, pair in plans.items():
            before, after = (figures(plan, ranks, overlapped=overlapped) for plan in pair)
            result[way] = {"before": before, "after": after}
    return result


def overview(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over all placements: of the slowest rank median, nine in ten and worst; of bytes between
    nodes sum and median ratio.
    """
    found = {}
    for way in (name for name in results[0] if "," in name):
        pairs = [(row[way]["before"], row[way]["after"]) for row in results]
        line: dict[str, float] = {}
        for when, side in (("before", 0), ("after", 1)):
            slowest = [pair[side]["slowest"] for pair in pairs]
            line |= {
                f"slowest_median_{when}": statistics.median(slowest),
                f"slowest_nine_in_ten_{when}": float(np.percentile(slowest, 90, method="higher")),
                f"slowest_worst_{when}": max(slowest),
                f"gigabytes_between_{when}": sum(pair[side]["gigabytes_between"] for pair in pairs),
            }
        ratios = [
            b["gigabytes_between"] / a["gigabytes_between"]
            for a, b in pairs
            if a["gigabytes_between"]
        ]
        found[way] = {**line, "between_median_ratio": statistics.median(ratios) if ratios else 1.0}
    return found


def missed(results: list[dict[str, Any]], summary: dict[str, dict[str, float]]) -> list[str]:
    """Placements as given whose plan for two levels is slower, and ways that send more between
    nodes.
    """
    found = [
        f"{row['placement']}, {way}: slowest rank {row[way]['before']['slowest']:.4f} ->"
        f" {row[way]['after']['slowest']:.4f}"
        for row in results
        for way in summary
        if way.startswith("given")
        and row[way]["after"]["slowest"] > _SAME[way.split()[1]] * row[way]["before"]["slowest"]
    ]
    for way, line in summary.items():
        if line["gigabytes_between_after"] > line["gigabytes_between_before"]:
            before, after = line["gigabytes_between_before"], line["gigabytes_between_after"]
            found.append(
                f"{way}: {before:.1f} -> {after:.1f} GB between nodes, over all placements"
            )
    return found


# Ranks, tokens of a rank, and tokens of the longest document.
_DRAWN = (
    (64, 65536, 65536),
    (512, 65536, 65536),
    (512, 32768, 65536),
    (64, 32768, 131072),
    (64, 65536, 262144),
    (512, 65536, 524288),
)


def drawn(sizes: Sequence[tuple[int, int, int]], per_node: int) -> list[dict[str, Any]]:
    """Batches of both distributions by three seeds, dealt as if there were one level and to nodes
    first.
    """
    rows, ranks = [], Ranks(per_node=per_node)
    for (count, tokens, longest), text, seed in itertools.product(
        sizes, ("pretrain", "prolong"), range(3)
    ):
        documents = replace(open_documents(text, "input_ids", longest), seed=seed)
        lengths = next(documents.draw_batches(count * tokens, 1))
        row: dict[str, Any] = {
            "ranks": count,
            "tokens": tokens,
            "longest": longest,
            "text": text,
            "seed": seed,
        }
        for when, nodes in (("one_level", None), ("nodes_first", per_node)):
            started = time.process_time()
            layout = deal(lengths, count, tokens, CUDA, ranks_per_node=nodes)
            dealt = time.process_time()
            plan = balance(layout, CUDA, DistCAConfig(), ranks)
            seconds = {"deal_seconds": dealt - started, "plan_seconds": time.process_time() - dealt}
            row[when] = figures(plan, ranks, overlapped=False) | seconds
        rows.append(row)
    return rows


def show_drawn(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="drawn batches, serial: one level -> nodes first; GB are those of the busiest rank"
    )
    for name in (
        "ranks x tokens, longest, text, seed",
        "slowest",
        "GB between nodes",
        "deal ms",
        "plan ms",
    ):
        table.add_column(
            name, justify="left" if name.startswith("ranks") else "right", no_wrap=True
        )
    for row in rows:
        before, after = row["one_level"], row["nodes_first"]
        name = f"{row['ranks']} x {row['tokens']}, {row['longest']}, {row['text']}, {row['seed']}"
        cells = (
            ("slowest", 1, 3),
            ("busiest_gigabytes_between", 1, 2),
            ("deal_seconds", 1e3, 0),
            ("plan_seconds", 1e3, 0),
        )
        table.add_row(
            name,
            *(
                f"{before[key] * scale:.{n}f} -> {after[key] * scale:.{n}f}"
                for key, scale, n in cells
            ),
        )
    Console(width=130).print(table)


def show(report: dict[str, Any]) -> None:
    console = Console(width=170)
    table = Table(
        title=(
            "slowest rank / mean compute, and GB between nodes, for one layer: one level -> two"
            " levels"
        )
    )
    ways = list(report["overview"])
    for name in ("placement", *ways):
        table.add_column(name, justify="left" if name == "placement" else "right", no_wrap=True)
    for row in report["placements"]:
        cells = []
        for way in ways:
            before, after = row[way]["before"], row[way]["after"]
            between = f"{before['gigabytes_between']:.0f} -> {after['gigabytes_between']:.0f}"
            cells.append(f"{before['slowest']:.3f} -> {after['slowest']:.3f}  {between}")
        table.add_row(row["placement"], *cells)
    console.print(table)
    summary = Table(title="over all placements")
    for name in (
        "",
        "slowest: median",
        "nine in ten",
        "worst",
        "GB between nodes",
        "median after / before",
    ):
        summary.add_column(name, justify="right" if name else "left")
    for way, line in report["overview"].items():
        pairs = [
            f"{line[f'slowest_{name}_before']:.3f} -> {line[f'slowest_{name}_after']:.3f}"
            for name in _STATISTICS
        ]
        between = f"{line['gigabytes_between_before']:.0f} -> {line['gigabytes_between_after']:.0f}"
        summary.add_row(way, *pairs, between, f"{line['between_median_ratio']:.3f}")
    console.print(summary)
    if "drawn" in report:
        show_drawn(report["drawn"])


_STATISTICS = ("median", "nine_in_ten", "worst")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--placements", type=Path, required=True, help="folder of placements in JSON"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=8, help="ranks of a node (default: 8)"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="add batches that are drawn from distributions"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    paths = sorted(arguments.placements.glob("*.json"))
    if not paths:
        parser.error(
            f"--placements {arguments.placements} is no folder with .json files: there is nothing"
            " to measure."
        )
    results = []
    for path in tqdm(paths, desc="placements", unit="placement", file=sys.stderr):
        try:
            results.append(measure(path, arguments.ranks_per_node))
        except DistCAError as error:
            parser.error(f"{path}: {error}")
    summary = overview(results)
    report = {
        "machine": describe(),
        "shape": "Llama-3-8B, bf16",
        "ranks_per_node": arguments.ranks_per_node,
        "overview": summary,
        "placements": results,
    }
    if arguments.drawn:
        report["drawn"] = drawn(_DRAWN, arguments.ranks_per_node)
    put_out(report, arguments.json, show)
    misses = missed(results, summary)
    print("\n".join(misses), file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
