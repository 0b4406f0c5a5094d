"""Real placements after dealing: tokens, slowest rank and bytes, compared with other ways to place
the same documents.

    python benchmarks/schedule/deal.py --placements data/workloads --json results.json

A placement is a JSON file that `hf-distca plan` reads; only its document lengths are dealt. Figures
are those of the built-in cuda cost model for Llama-3-8B in bf16: the slowest rank divided by the
mean compute of all ranks. Serial figures add compute and exchange. Overlapped figures take the
longer of both, for separately dealt nano-batches of ping-pong, summed over both halves. The other
ways are the placement as given, whole documents on ranks (longest first, with unequal tokens), and
every document cut head and tail over all ranks. A file ``workloads_reference.json`` next to the
folder adds the balance of causal pairs of a published planner. Exits with status 1 if a figure
misses its limit.
"""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, compute_imbalance
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from placed import CUDA, add_placements, list_lengths, measure_placements, summarize
from script import add_option, end, make_parser, output_result, print_table

SERIAL, PING_PONG = DistCAConfig(), DistCAConfig(ping_pong=True)
WAYS = ("dealt", "given", "given_planned", "whole", "over_all_ranks")
# Limit for cutting every document over all ranks: with more pieces, planning alone takes minutes.
_MOST_PIECES = 2**17
# Limits for public placements.
LIMITS = {
    "serial": {"median": 1.13, "nine_in_ten": 1.29, "worst": 1.3},
    "overlapped": {"nine_in_ten": 1.02, "worst": 1.02},
}
# Limits for the made-up placements of this repository.
MADE_UP = Path(__file__).parents[1] / "placements"
MADE_UP_LIMITS = {"serial": {"median": 1.24, "worst": 1.26}, "overlapped": {"worst": 1.02}}
# Limits for batches of real lengths in their given order (`--lengths`).
RAW_LIMITS = {
    "serial": {"median": 1.27, "nine_in_ten": 1.5, "worst": 1.65},
    "overlapped": {"nine_in_ten": 1.06, "worst": 1.12},
}
_RAW_BATCHES = ((16, 65536), (64, 65536), (512, 65536), (64, 32768))


def place_whole_documents(lengths: list[int], ranks: int) -> Layout:
    """Place whole documents, longest first, each on the rank with the least attention so far."""
    seconds = CUDA.estimate_seconds(np.array(lengths), np.array(lengths)).tolist()
    heap = [(0.0, rank) for rank in range(ranks)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + seconds[document], rank))
        rows[rank].append((document, 0, lengths[document]))
    return Layout.from_segments(rows)


def cut_over_all_ranks(lengths: list[int], ranks: int) -> Layout:
    """Cut every document into two pieces for each rank, head and tail, like context parallelism."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        cuts = [length * cut // (2 * ranks) for cut in range(2 * ranks + 1)]
        for rank in range(ranks):
            for piece in (rank, 2 * ranks - 1 - rank):
                if cuts[piece + 1] > cuts[piece]:
                    rows[rank].append((document, cuts[piece], cuts[piece + 1] - cuts[piece]))
    return Layout.from_segments(rows)


def compute_figures(plan: Plan) -> dict[str, float]:
    load = PlanLoad(plan, CUDA)
    compute, exchange = load.compute_seconds, load.exchange_seconds
    return {
        "serial": float((compute + exchange).max() / compute.mean()),
        "overlapped": float(np.maximum(compute, exchange).max() / compute.mean()),
        "gigabytes": float(load.exchange_bytes[0].sum() / 1e9),
        "busiest_gigabytes": float(max(side.max() for side in load.exchange_bytes) / 1e9),
        "token_imbalance": compute_imbalance(plan.layout.query_tokens.astype(np.float64)),
    }


def measure_nano_batches(halves: tuple[Layout, Layout]) -> dict[str, float]:
    """Compute the figures of both halves in sequence: the sum of their slowest ranks divided by the
    sum of their means.
    """
    slowest = mean = worst = 0.0
    for half in halves:
        load = PlanLoad(balance(half, CUDA, PING_PONG), CUDA, overlapped=True)
        slowest += load.slowest_seconds
        mean += float(load.compute_seconds.mean())
        if load.slowest_seconds:  # with a single document, the second half is empty
            worst = max(worst, load.slowest_seconds / float(load.compute_seconds.mean()))
    tokens = [half.query_tokens for half in halves]
    return {
        "overlapped": slowest / mean,
        "worse_half": worst,
        "halves_equal": float((tokens[0] == tokens[1]).all()),
        "tokens_equal": float(len(set((tokens[0] + tokens[1]).tolist())) == 1),
    }


def time_making(make: Callable[[], Any], repeats: int) -> tuple[Any, float, float]:
    """Return the result of `make`, its median seconds and its processor seconds."""
    wall, processor = [], []
    result = None
    for _ in range(repeats):
        begin = time.perf_counter(), time.process_time()
        result = make()
        wall.append(time.perf_counter() - begin[0])
        processor.append(time.process_time() - begin[1])
    return result, statistics.median(wall), statistics.median(processor)


def iterate_raw_batches(folder: Path) -> Iterator[tuple[str, list[int], int, int]]:
    """Yield name, lengths, ranks and tokens per rank of batches from each file of lengths, in two
    orders; the last document is cut.
    """
    for path in sorted(folder.glob("*.json")):
        lengths = np.array(json.loads(path.read_text(encoding="utf-8")))
        for (ranks, tokens), seed in itertools.product(_RAW_BATCHES, (0, 1)):
            order = np.random.default_rng(seed).permutation(len(lengths))
            batch = np.tile(lengths[order], -(-ranks * tokens // int(lengths.sum())))
            ends = np.cumsum(batch)
            batch = batch[: int(np.searchsorted(ends, ranks * tokens)) + 1]
            batch[-1] -= ends[len(batch) - 1] - ranks * tokens
            yield f"{path.stem}, {ranks} x {tokens}, order {seed}", batch.tolist(), ranks, tokens


def measure_raw(name: str, lengths: list[int], ranks: int, tokens: int) -> dict[str, Any]:
    """Deal and measure a batch of raw lengths."""
    plan = balance(deal(lengths, ranks, tokens, CUDA), CUDA, SERIAL)
    halves = deal_nano_batches(lengths, ranks, tokens, CUDA)
    return {
        "batch": name,
        "dealt": compute_figures(plan),
        "nano_batches": measure_nano_batches(halves),
        "reference": None,
    }


def measure(path: Path, repeats: int) -> dict[str, Any]:
    given = read_placement(path)
    lengths, ranks = list_lengths(given), given.world_size
    tokens = sum(lengths) // ranks

    def dealt_and_planned() -> Plan:
        return balance(deal(lengths, ranks, tokens, CUDA), CUDA, SERIAL)

    plan, wall, processor = time_making(dealt_and_planned, repeats)
    halves, halves_wall, halves_processor = time_making(
        lambda: deal_nano_batches(lengths, ranks, tokens, CUDA), repeats
    )
    held = set(plan.layout.query_tokens.tolist())
    return {
        "placement": path.stem,
        "ranks": ranks,
        "tokens_per_rank": tokens,
        "documents": len(lengths),
        "tokens_equal": held == {tokens},
        "dealt": compute_figures(plan),
        "nano_batches": measure_nano_batches(halves),
        "seconds": wall,
        "processor_seconds": processor,
        "nano_batches_seconds": halves_wall,
        "nano_batches_processor_seconds": halves_processor,
        "given": compute_figures(Plan.make_local(given)),
        "given_planned": compute_figures(balance(given, CUDA, SERIAL)),
        "whole": compute_figures(balance(place_whole_documents(lengths, ranks), CUDA, SERIAL)),
        "over_all_ranks": (
            compute_figures(Plan.make_local(cut_over_all_ranks(lengths, ranks)))
            if len(lengths) * ranks < _MOST_PIECES
            else None
        ),
    }


def summarize_ways(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute the median, 90th percentile and worst of each way to place documents."""
    columns: dict[str, list[float]] = {}
    for row in results:
        for name in WAYS:
            for kind in ("serial", "overlapped"):
                if row.get(name):
                    columns.setdefault(f"{name} {kind}", []).append(row[name][kind])
        columns.setdefault("nano_batches overlapped", []).append(row["nano_batches"]["overlapped"])
        columns.setdefault("nano_batches worse half", []).append(row["nano_batches"]["worse_half"])
        if row["reference"]:
            name = "published planner, imbalance of causal pairs"
            columns.setdefault(name, []).append(row["reference"])
    return {name: summarize(values) for name, values in columns.items()}


def list_missed(
    results: list[dict[str, Any]],
    summary: dict[str, dict[str, float]],
    limits: dict[str, dict[str, float]],
) -> list[str]:
    found = [
        f"{row['placement']}: tokens differ between ranks"
        for row in results
        if not row.get("tokens_equal", True)
    ]
    for kind, column in (("serial", "dealt serial"), ("overlapped", "nano_batches overlapped")):
        for name, limit in limits[kind].items():
            if summary[column][name] > limit:
                found.append(f"{column}, {name}: {summary[column][name]:.3f} is above {limit}")
    return found


def show(report: dict[str, Any]) -> None:
    def pair(entry: dict[str, float] | None) -> str:
        return f"{entry['serial']:.3f} ({entry['overlapped']:.3f})" if entry else "not made"

    rows = (
        (
            row["placement"],
            *(pair(row[name]) for name in WAYS),
            f"({row['nano_batches']['overlapped']:.3f})",
            *(f"{row[name] * 1e3:.0f}" for name in ("seconds", "processor_seconds")),
        )
        for row in report["placements"]
    )
    columns = ("placement", *(name.replace("_", " ") for name in WAYS), "nano-batches")
    title = "slowest rank / mean compute: compute + exchange (the longer of both)"
    print_table(title, (*columns, "ms", "CPU ms"), rows)
    summary = (
        (name, *(f"{value:.3f}" for value in values.values()))
        for name, values in report["overview"].items()
    )
    print_table("over all placements", ("", "median", "nine in ten", "worst"), summary)


def main() -> None:
    parser = make_parser(__doc__)
    add_placements(parser)
    add_option(parser, "--repeats", 3, "repetitions of dealing; the median time counts")
    text = "folder of document lengths in JSON, dealt in their order (default: none)"
    parser.add_argument("--lengths", type=Path, help=text)
    arguments = parser.parse_args()
    folder: Path = arguments.placements.resolve()
    beside = folder.parent / "workloads_reference.json"
    reference = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}

    def measure_one(path: Path) -> dict[str, Any]:
        published = reference.get(path.name, {}).get("0.0", {}).get("imbalance_after")
        return {**measure(path, max(arguments.repeats, 1)), "reference": published}

    results = measure_placements(parser, folder, measure_one)
    summary = summarize_ways(results)
    limits = MADE_UP_LIMITS if folder == MADE_UP.resolve() else LIMITS
    report = {"limits": limits, "overview": summary, "placements": results}
    misses = list_missed(results, summary, limits)
    if arguments.lengths:
        raw = [measure_raw(*batch) for batch in iterate_raw_batches(arguments.lengths)]
        report |= {"raw_limits": RAW_LIMITS, "raw_overview": summarize_ways(raw), "raw": raw}
        misses += list_missed(raw, summarize_ways(raw), RAW_LIMITS)
    output_result(arguments, report, show)
    end(misses)


if __name__ == "__main__":
    sys.exit(main())
