"""Balance, traffic and planning time of the scheduler on real placements, and a published
planner's.

    python benchmarks/schedule/scheduler.py --placements data/workloads --json results.json
    python benchmarks/schedule/scheduler.py --placements data/workloads --others 2 --dealt --json

A placement is a JSON file as `hf-distca plan` reads it. A file ``workloads_reference.json`` next to
the folder holds the published planner's results at its tolerances 0.05 and 0.0. Balance is that of
causal pairs, as the published planner's is; the imbalance of estimated seconds on a GPU comes from
a second plan. Ends with 1 if any placement stays above the limit.

"serial" and "overlapped" are plans for the built-in cuda figures, exchanges after and behind
compute: the slowest rank by the mean compute of all. Bytes are those of all ranks and of the
busiest sender, by the published planner's at tolerance 0.05. "4 GB/s" is a tenth of the built-in
network. Where the published planner's results are known, these have limits, too. `--others` adds
each placement's documents in other orders, cut and placed as the given ones are. `--dealt` adds
what planning takes where the same documents were dealt, with peak memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, summarize_plan
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from placed import CUDA, LLAMA_3_8B, add_placements, lengths_of, measure_placements, summarize
from script import add_option, end, make_parser, print_table, put_out

LIMIT = 1.02
# Exchanges after compute and behind it, over a fast and a slow network.
KINDS = ("serial", "overlapped", "serial, 4 GB/s", "overlapped, 4 GB/s")
# Of the placements that the published planner's results are known of, without others.
LIMITS = {
    "serial": {"median": 1.14, "nine_in_ten": 1.42, "worst": 1.43},
    "overlapped": {"median": 1.02, "nine_in_ten": 1.02, "worst": 1.03},
    "serial, 4 GB/s": {"median": 2.3, "nine_in_ten": 7.7, "worst": 8.1},
    "bytes by the published planner's": {"median": 0.58, "nine_in_ten": 0.8, "worst": 0.96},
}
PAIRS = CostModel.make_of_pairs(LLAMA_3_8B)
CONFIG = DistCAConfig(tile=128)


def plan_and_time(layout: Layout, cost: CostModel, repeats: int) -> tuple[Plan, float]:
    """A plan, and the median seconds of making it from columns alone."""
    seconds = []
    for _ in range(repeats):
        # A layout caches what it derives: a fresh one each time, as every micro-batch has.
        fresh = Layout(layout.document, layout.start, layout.length, layout.offsets)
        begin = time.perf_counter()
        plan = balance(fresh, cost, CONFIG)
        seconds.append(time.perf_counter() - begin)
    return plan, statistics.median(seconds)


def measure(path: Path, repeats: int) -> dict[str, Any]:
    layout = read_placement(path)
    plan, seconds = plan_and_time(layout, PAIRS, repeats)
    cuda_plan, cuda_seconds = plan_and_time(layout, CUDA, repeats)
    return {
        "placement": path.stem,
        "segments": len(layout.document),
        "planning_seconds": seconds,
        **summarize_plan(plan, PAIRS),
        "analytic_cuda": {"planning_seconds": cuda_seconds, **summarize_plan(cuda_plan, CUDA)},
        **{kind: slowest(layout, kind) for kind in KINDS},
    }


def slowest(layout: Layout, kind: str) -> dict[str, Any]:
    """The slowest rank by the mean compute, bytes, and processor seconds of a plan and of one
    rank's route.
    """
    overlapped, cost = kind.startswith("overlapped"), CUDA
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


def dealt(path: Path) -> dict[str, Any]:
    """What planning dealt documents takes: processor seconds, and peak memory in MB of a plan and a
    route.
    """
    layout = read_placement(path)
    lengths, ranks = lengths_of(layout), layout.world_size
    placed = deal(lengths, ranks, -(-sum(lengths) // ranks), CUDA)
    tracemalloc.start()
    Route.build(balance(placed, CUDA, DistCAConfig()), 0)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return {"ranks": ranks, "peak_megabytes": peak} | {
        kind: processor_seconds(placed, CUDA, DistCAConfig(ping_pong=kind == "overlapped"))[1]
        for kind in ("serial", "overlapped")
    }


def overview(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, nine in ten and worst over all placements, given and in other orders."""
    found: dict[str, list[float]] = {}
    for row in results:
        for kind in KINDS:
            for one in (row, *row.get("others", {}).values()):
                found.setdefault(kind, []).append(one[kind]["slowest"])
        if published := row["reference"].get("0.05"):
            for ours, queries, keys in (
                ("bytes", "q_tokens_moved", "kv_tokens_moved"),
                ("busiest_sender_bytes", "max_send_q", "max_send_kv"),
            ):
                theirs = (
                    published[queries] * LLAMA_3_8B.moved_query_bytes
                    + published[keys] * LLAMA_3_8B.moved_key_bytes
                )
                name = f"{ours} by the published planner's"
                found.setdefault(name, []).append(row["overlapped"][ours] / theirs)
    return {
        name: {**summarize(values), "placements": len(values)} for name, values in found.items()
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


def show(report: dict[str, Any]) -> None:
    rows = []
    for row in report["placements"]:
        cells, published = [], row["reference"].get("0.0", {})
        for ours, theirs in (
            ("query_tokens_moved", "q_tokens_moved"),
            ("key_tokens_sent", "kv_tokens_moved"),
            ("max_sent_key_tokens", "max_send_kv"),
        ):
            known = f" ({published[theirs] / 1e6:.3f})" if theirs in published else ""
            cells.append(f"{row[ours] / 1e6:.3f}{known}")
        cuda = row["analytic_cuda"]
        known = f" ({published['greedy_seconds'] * 1e3:.1f})" if published else ""
        rows.append(
            (
                row["placement"],
                f"{row['pairs_imbalance_before']:.3f} -> {row['pairs_imbalance_after']:.4f}",
                *cells,
                f"{row['planning_seconds'] * 1e3:.1f}{known}",
                f"{cuda['seconds_imbalance_before']:.3f} -> {cuda['seconds_imbalance_after']:.4f}",
            )
        )
    columns = "placement", "imbalance", "q moved", "K/V sent", "busiest K/V sender", "plan ms"
    brackets = "in brackets the published planner at tolerance 0.0"
    title = f"causal pairs; tokens in millions; {brackets}"
    print_table(title, (*columns, "cuda seconds"), rows, width=170)


def main() -> None:
    parser = make_parser(__doc__)
    add_placements(parser)
    add_option(parser, "--repeats", 5, "plans per placement; the median time counts")
    add_option(parser, "--others", 0, "other orders of each placement's documents")
    text = "add what planning dealt documents takes"
    parser.add_argument("--dealt", action="store_true", help=text)
    arguments = parser.parse_args()
    reference = reference_of(arguments.placements)

    def measure_one(path: Path) -> dict[str, Any]:
        result = measure(path, max(arguments.repeats, 1))
        result |= {"others": others(path, arguments.others)} if arguments.others else {}
        result |= {"dealt": dealt(path)} if arguments.dealt else {}
        return {**result, "reference": reference.get(path.stem, {})}

    results = measure_placements(parser, arguments.placements, measure_one)
    summary = overview(results)
    put_out(arguments, {"limit": LIMIT, "overview": summary, "placements": results}, show)
    misses = missed(summary) if reference and not arguments.others else []
    end(
        [
            *(
                f"{row['placement']} is above {LIMIT} max/mean of causal pairs"
                for row in results
                if row["pairs_imbalance_after"] > LIMIT
            ),
            *misses,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
