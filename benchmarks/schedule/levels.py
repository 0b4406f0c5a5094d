"""Bytes between nodes and the slowest rank, for plans and dealing that know nodes and for those
that do not.

    python benchmarks/schedule/levels.py --placements data/workloads --json results.json

A placement is a JSON file that `hf-distca plan` reads, with nodes of `--ranks-per-node` ranks. The
cost model is the built-in one for cuda and Llama-3-8B in bf16: 300 GB/s inside a node, 40 GB/s per
rank between nodes. *Before* is a plan that knows one level of links, *after* one that knows two;
both are evaluated on two levels. The slowest rank is divided by the mean compute of all ranks.
Overlapped figures take the longer of compute and exchange, with the placement as a nano-batch;
serial figures take the sum. Dealt figures are the same after dealing the placement's documents.
Exits with status 1 if the plan of a given placement is slower after than before (more than 1 %
overlapped, 0.4 % serial), or if more bytes travel between nodes over all placements.

`--drawn` adds batches of two distributions with three seeds each, dealt with one level of links and
to nodes first, and the processor time of dealing and planning.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCAError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.tools.cli.lengths import open_documents
from placed import TWO_LEVELS as CUDA
from placed import add_placements, list_lengths, measure_placements, spread_tokens, summarize
from script import add_option, end, make_parser, output_result, print_table

# Largest ratio of the slowest ranks, after / before. With hidden exchanges, fewer bytes between
# nodes are the only gain.
_SAME = {"serial": 1.004, "overlapped": 1.01}


def compute_figures(plan: Plan, ranks: Ranks, *, overlapped: bool) -> dict[str, float]:
    load = PlanLoad(plan, CUDA, overlapped=overlapped, ranks=ranks)
    moved = load.node_bytes
    return {
        "slowest": load.slowest_seconds / float(load.compute_seconds.mean()),
        "compute": float(load.compute_seconds.max() / load.compute_seconds.mean()),
        "gigabytes_between": float(moved.inter_node[0].sum() / 1e9),
        "gigabytes_inside": float(moved.intra_node[0].sum() / 1e9),
        "busiest_gigabytes_between": float(moved.inter_node.max() / 1e9),
    }


def measure(path: Path, per_node: int) -> dict[str, Any]:
    given = read_placement(path)
    count = given.world_size
    if count % per_node:
        raise DistCAError(f"its {count} ranks cannot be divided into nodes of {per_node}.")
    ranks, result = Ranks(per_node=per_node), {"placement": path.stem, "ranks": count}
    lengths, tokens = list_lengths(given), spread_tokens(given)
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
            before, after = (compute_figures(plan, ranks, overlapped=overlapped) for plan in pair)
            result[way] = {"before": before, "after": after}
    return result


def summarize_ways(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize all placements before and after: median, 90th percentile and worst of the slowest
    rank, total bytes between nodes, and the median ratio of these bytes.
    """
    found = {}
    for way in (name for name in results[0] if "," in name):
        line: dict[str, Any] = {}
        for when in ("before", "after"):
            rows = [row[way][when] for row in results]
            line[when] = {
                "slowest": summarize([row["slowest"] for row in rows]),
                "gigabytes_between": sum(row["gigabytes_between"] for row in rows),
            }
        pairs = [
            [row[way][when]["gigabytes_between"] for when in ("before", "after")] for row in results
        ]
        ratios = [after / before for before, after in pairs if before]
        found[way] = {**line, "between_median_ratio": statistics.median(ratios) if ratios else 1.0}
    return found


def list_missed(results: list[dict[str, Any]], summary: dict[str, dict[str, float]]) -> list[str]:
    """List the given placements whose plan for two levels is slower, and the ways that send more
    between nodes.
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
        before, after = (line[when]["gigabytes_between"] for when in ("before", "after"))
        if after > before:
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


def measure_drawn(sizes: Sequence[tuple[int, int, int]], per_node: int) -> list[dict[str, Any]]:
    """Measure batches of both distributions with three seeds each, dealt with one level of links
    and to nodes first.
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
            row[when] = compute_figures(plan, ranks, overlapped=False) | seconds
        rows.append(row)
    return rows


def show_drawn(rows: list[dict[str, Any]]) -> None:
    cells = (
        ("slowest", 1, 3),
        ("busiest_gigabytes_between", 1, 2),
        ("deal_seconds", 1e3, 0),
        ("plan_seconds", 1e3, 0),
    )
    print_table(
        "drawn batches, serial: one level -> nodes first; GB are those of the busiest rank",
        (
            "ranks x tokens, longest, text, seed",
            "slowest",
            "GB between nodes",
            "deal ms",
            "plan ms",
        ),
        (
            (
                f"{row['ranks']} x {row['tokens']}, {row['longest']}, {row['text']}, {row['seed']}",
                *(
                    f"{row['one_level'][key] * scale:.{n}f} ->"
                    f" {row['nodes_first'][key] * scale:.{n}f}"
                    for key, scale, n in cells
                ),
            )
            for row in rows
        ),
    )


def show(report: dict[str, Any]) -> None:
    ways, rows = list(report["overview"]), []
    for row in report["placements"]:
        cells = []
        for way in ways:
            before, after = row[way]["before"], row[way]["after"]
            between = f"{before['gigabytes_between']:.0f} -> {after['gigabytes_between']:.0f}"
            cells.append(f"{before['slowest']:.3f} -> {after['slowest']:.3f}  {between}")
        rows.append((row["placement"], *cells))
    title = "slowest rank / mean compute, and GB between nodes of a layer: one level -> two levels"
    print_table(title, ("placement", *ways), rows, width=170)
    rows = []
    for way, line in report["overview"].items():
        before, after = line["before"], line["after"]
        slowest = zip(before["slowest"].values(), after["slowest"].values(), strict=True)
        pairs = [f"{one:.3f} -> {other:.3f}" for one, other in slowest]
        between = f"{before['gigabytes_between']:.0f} -> {after['gigabytes_between']:.0f}"
        rows.append((way, *pairs, between, f"{line['between_median_ratio']:.3f}"))
    columns = "", "slowest: median", "nine in ten", "worst", "GB between nodes"
    print_table("over all placements", (*columns, "median after / before"), rows)
    if "drawn" in report:
        show_drawn(report["drawn"])


def main() -> None:
    parser = make_parser(__doc__)
    add_placements(parser)
    add_option(parser, "--ranks-per-node", 8, "ranks per node")
    text = "add batches drawn from distributions"
    parser.add_argument("--drawn", action="store_true", help=text)
    arguments = parser.parse_args()
    per_node = arguments.ranks_per_node
    results = measure_placements(parser, arguments.placements, lambda path: measure(path, per_node))
    summary = summarize_ways(results)
    report = {"overview": summary, "placements": results}
    if arguments.drawn:
        report["drawn"] = measure_drawn(_DRAWN, per_node)
    output_result(arguments, report, show)
    end(list_missed(results, summary))


if __name__ == "__main__":
    sys.exit(main())
