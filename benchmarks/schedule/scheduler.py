"""Balance, traffic and planning time of the scheduler on real placements, beside a published
planner's.

    python benchmarks/schedule/scheduler.py --placements data/workloads --json results.json
    python benchmarks/schedule/scheduler.py --placements data/workloads --others 2 --dealt --json

A placement is a JSON file as `hf-distca plan` reads it. A file ``workloads_reference.json`` beside
the folder holds the published planner's results at its tolerances 0.05 and 0.0. Balance is that of
causal pairs, as the published planner's is; the imbalance of estimated seconds on a GPU comes from
a second plan. With `--window`, the plans are for layers with a sliding window, which the published
planner does not know. Ends with 1 if any placement stays above the limit.

"serial" and "overlapped" are plans for the built-in cuda figures, exchanges after and behind
compute: the slowest rank by the mean compute of all. Bytes are those of all ranks and of the
busiest sender, by the published planner's at tolerance 0.05. "4 GB/s" is a tenth of the built-in
network. Where the published planner's results are known, these have limits, too. `--others` adds
each placement's documents in other orders, cut and placed as the given ones are. `--dealt` adds
what planning takes where the same documents were dealt, and `--copies` lets it be so many times as
many ranks and documents; with peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from deal import lengths_of
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCAError
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from machine import describe

LIMIT = 1.02
# With a window, ranks are so even that the plan of one placement gains less than the smallest gain,
# 0.02, and is not made.
WINDOW_LIMIT = 1.03
# Exchanges after compute and behind it, over a fast and a slow network.
KINDS = ("serial", "overlapped", "serial, 4 GB/s", "overlapped, 4 GB/s")
# Of the placements that the published planner's results are known of, without others.
LIMITS = {
    "serial": {"median": 1.14, "nine_in_ten": 1.42, "worst": 1.43},
    "overlapped": {"median": 1.02, "nine_in_ten": 1.02, "worst": 1.03},
    "serial, 4 GB/s": {"median": 2.3, "nine_in_ten": 7.7, "worst": 8.1},
    "bytes by the published planner's": {"median": 0.58, "nine_in_ten": 0.8, "worst": 0.96},
}
LLAMA_3_8B = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)


def plan_and_time(
    layout: Layout, cost: CostModel, config: DistCAConfig, repeats: int
) -> tuple[Plan, float]:
    """A plan, and the median seconds of making it from columns alone."""
    seconds = []
    for _ in range(repeats):
        # A layout caches what it derives: a fresh one each time, as every micro-batch has.
        fresh = Layout(layout.document, layout.start, layout.length, layout.offsets)
        begin = time.perf_counter()
        plan = balance(fresh, cost, config)
        seconds.append(time.perf_counter() - begin)
    return plan, statistics.median(seconds)


def measure(path: Path, config: DistCAConfig, repeats: int, window: int | None) -> dict[str, Any]:
    layout = read_placement(path)
    pairs = replace(CostModel.make_of_pairs(LLAMA_3_8B), window=window)
    cuda = replace(CostModel.make_analytic(LLAMA_3_8B, device_type="cuda"), window=window)
    plan, seconds = plan_and_time(layout, pairs, config, repeats)
    summary = summarize_plan(plan, pairs)
    cuda_plan, cuda_seconds = plan_and_time(layout, cuda, config, repeats)
    return {
        "placement": path.stem,
        "segments": len(layout.document),
        "planning_seconds": seconds,
        **summary,
        "analytic_cuda": {"planning_seconds": cuda_seconds, **summarize_plan(cuda_plan, cuda)},
    }


def slowest(layout: Layout, kind: str) -> dict[str, Any]:
    """The slowest rank by the mean compute, bytes, and processor seconds of a plan and of one
    rank's route.
    """
    overlapped, cost = (
        kind.startswith("overlapped"),
        CostModel.make_analytic(LLAMA_3_8B, device_type="cuda"),
    )
    config = DistCAConfig(ping_pong=overlapped)
    if kind.endswith("4 GB/s"):
        cost = replace(cost, exchange_bytes_per_second=4e9)
    plan, seconds = processor_seconds(layout, cost, config)
    load = PlanLoad(plan, cost, overlapped=overlapped)
    return {
        "slowest": load.slowest_seconds / float(load.compute_seconds.mean()),
        "relayed": plan.relays is not None,
        "bytes": float(load.exchange_bytes[0].sum()),
        "busiest_sender_bytes": float(load.exchange_bytes[0].max(initial=0.0)),
        "plan_and_route_processor_seconds": seconds,
    }


def processor_seconds(layout: Layout, cost: CostModel, config: DistCAConfig) -> tuple[Plan, float]:
    """A plan, and the least seconds of making it and a route: of three times, or of as many as take
    50 ms together.
    """
    found: list[float] = []
    while len(found) < 3 or sum(found) < 0.05:
        fresh = Layout(layout.document, layout.start, layout.length, layout.offsets)
        begin = time.process_time()
        plan = balance(fresh, cost, config)
        Route.build(plan, layout.world_size // 2)
        found.append(time.process_time() - begin)
    return plan, min(found)


def as_loaded(lengths: list[int], ranks: int) -> Layout:
    """Documents one after another; one that crosses ranks is cut head and tail, as the given
    placements are.
    """
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    tokens = -(-sum(lengths) // ranks)
    rank, room = 0, tokens
    for document, length in enumerate(lengths):
        first, last = 0, length
        while first < last:
            if not room:
                rank, room = rank + 1, tokens
            part = min(room, last - first)
            head = (part + 1) // 2 if part < last - first else part
            rows[rank].append((document, first, head))
            if part > head:
                rows[rank].append((document, last - part + head, part - head))
            first, last, room = first + head, last - part + head, room - part
    return Layout.from_segments(rows)


def others(path: Path, count: int) -> dict[str, Any]:
    """A placement's documents in other orders: the slowest ranks."""
    layout = read_placement(path)
    lengths, found = lengths_of(layout), {}
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(len(lengths))
        placed = as_loaded([lengths[at] for at in order], layout.world_size)
        found[f"order {seed}"] = {kind: slowest(placed, kind) for kind in KINDS}
    return found


def dealt(path: Path, copies: int) -> dict[str, Any]:
    """What planning dealt documents takes: processor seconds, and peak memory in MB of a plan and a
    route.
    """
    layout = read_placement(path)
    lengths, ranks = lengths_of(layout) * copies, layout.world_size * copies
    cost = CostModel.make_analytic(LLAMA_3_8B, device_type="cuda")
    placed = deal(lengths, ranks, -(-sum(lengths) // ranks), cost)
    tracemalloc.start()
    Route.build(balance(placed, cost, DistCAConfig()), 0)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return {"ranks": ranks, "peak_megabytes": peak} | {
        kind: processor_seconds(placed, cost, DistCAConfig(ping_pong=kind == "overlapped"))[1]
        for kind in ("serial", "overlapped")
    }


def overview(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, nine in ten and worst over all placements, given and in other orders."""
    found: dict[str, list[float]] = {}
    for row in results:
        for kind in KINDS:
            for one in (row, *row.get("others", {}).values()):
                found.setdefault(kind, []).append(one[kind]["slowest"])
        if beside := row["reference"].get("0.05"):
            shape = LLAMA_3_8B
            for ours, keys in (
                ("bytes", ("q_tokens_moved", "kv_tokens_moved")),
                ("busiest_sender_bytes", ("max_send_q", "max_send_kv")),
            ):
                theirs = (
                    beside[keys[0]] * shape.moved_query_bytes
                    + beside[keys[1]] * shape.moved_key_bytes
                )
                found.setdefault(f"{ours} by the published planner's", []).append(
                    row["overlapped"][ours] / theirs
                )
    return {
        name: {
            "median": statistics.median(values),
            "nine_in_ten": float(np.percentile(values, 90, method="higher")),
            "worst": max(values),
            "placements": len(values),
        }
        for name, values in found.items()
    }


def missed(summary: dict[str, Any]) -> list[str]:
    """Figures above their limits."""
    return [
        f"{kind}, {name}: {summary[kind][name]:.3f} is above {limit}"
        for kind, limits in LIMITS.items()
        for name, limit in limits.items()
        if summary[kind][name] > limit
    ]


def reference_of(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The published planner's results by placement and tolerance; empty if there are none."""
    path = folder.resolve().parent / "workloads_reference.json"
    if not path.exists():
        print(f"no {path}: nothing to compare with.", file=sys.stderr)
        return {}
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return {name.removesuffix(".json"): result for name, result in results.items()}


def table_of(results: list[dict[str, Any]], window: int | None) -> Table:
    beside = (
        "in brackets the published planner at tolerance 0.0"
        if window is None
        else f"window of {window} keys"
    )
    table = Table(title=f"causal pairs; tokens in millions; {beside}")
    for name in (
        "placement",
        "imbalance",
        "q moved",
        "K/V sent",
        "busiest K/V sender",
        "plan ms",
        "cuda seconds",
    ):
        table.add_column(name, justify="left" if name == "placement" else "right", no_wrap=True)
    for row in results:
        beside = row["reference"].get("0.0", {})

        def pair(
            ours: str,
            theirs: str,
            unit: float,
            row: dict[str, Any] = row,
            beside: dict[str, Any] = beside,
        ) -> str:
            known = f" ({beside[theirs] / unit:.3f})" if theirs in beside else ""
            return f"{row[ours] / unit:.3f}{known}"

        cuda = row["analytic_cuda"]
        known = f" ({beside['greedy_seconds'] * 1e3:.1f})" if beside else ""
        table.add_row(
            row["placement"],
            f"{row['pairs_imbalance_before']:.3f} -> {row['pairs_imbalance_after']:.4f}",
            pair("query_tokens_moved", "q_tokens_moved", 1e6),
            pair("key_tokens_sent", "kv_tokens_moved", 1e6),
            pair("max_sent_key_tokens", "max_send_kv", 1e6),
            f"{row['planning_seconds'] * 1e3:.1f}{known}",
            f"{cuda['seconds_imbalance_before']:.3f} -> {cuda['seconds_imbalance_after']:.4f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--placements", type=Path, required=True, help="folder of placements in JSON"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON to a file, or to standard output",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="plans per placement; the median time counts (default: 5)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DistCAConfig().tolerance,
        help="of the plans (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=int,
        help="keys that a position sees, of layers with a sliding window (default: all)",
    )
    parser.add_argument(
        "--others",
        type=int,
        default=0,
        help="other orders of each placement's documents (default: none)",
    )
    parser.add_argument(
        "--dealt", action="store_true", help="add what planning dealt documents takes"
    )
    parser.add_argument(
        "--copies", type=int, default=1, help="of ranks and documents that are dealt (default: 1)"
    )
    arguments = parser.parse_args()
    paths = sorted(arguments.placements.glob("*.json"))
    if not paths:
        parser.error(
            f"--placements {arguments.placements} is no folder with .json files: there is nothing"
            " to measure."
        )
    config = DistCAConfig(tolerance=arguments.tolerance, tile=128)
    reference = reference_of(arguments.placements) if arguments.window is None else {}
    limit = LIMIT if arguments.window is None else WINDOW_LIMIT
    results = []
    for path in tqdm(paths, desc="placements", unit="placement", file=sys.stderr):
        try:
            result = measure(path, config, max(arguments.repeats, 1), arguments.window)
            if arguments.window is None:
                layout = read_placement(path)
                result |= {kind: slowest(layout, kind) for kind in KINDS}
                result |= {"others": others(path, arguments.others)} if arguments.others else {}
                result |= {"dealt": dealt(path, arguments.copies)} if arguments.dealt else {}
            results.append({**result, "reference": reference.get(path.stem, {})})
        except DistCAError as error:
            parser.error(str(error))
    if arguments.json:
        report = {
            "machine": describe(),
            "shape": "Llama-3-8B, bf16",
            "tolerance": config.tolerance,
            "tile": config.tile,
        }
        report |= {} if arguments.window is None else {"window": arguments.window}
        report |= {"overview": overview(results)} if arguments.window is None else {}
        text = json.dumps({**report, "limit": limit, "placements": results}, indent=1)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    else:
        Console(width=170).print(table_of(results, arguments.window))
    above = [row["placement"] for row in results if row["pairs_imbalance_after"] > limit]
    if above:
        print(f"above {limit} max/mean of causal pairs: {', '.join(above)}", file=sys.stderr)
    misses = missed(overview(results)) if reference and not arguments.others else []
    print("\n".join(misses), file=sys.stderr)
    return 1 if above or misses else 0


if __name__ == "__main__":
    sys.exit(main())
