"""Slowest rank / mean of real placements under an earlier checkout and under this one.

    python benchmarks/schedule/plans_before.py FOLDER --before CHECKOUT --json

Documents lie as given or are dealt, exchanges follow compute or are hidden, with nodes of 8 and
without nodes; for dealt documents also both nano-batches. Each checkout estimates its own plans,
with the built-in rates of a GPU. Exits with status 1 if a figure is worse than before by more than
1 %.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

# Import nothing else from the package: an earlier checkout must have all of these names.
from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.ranks import Ranks
from placed import CUDA as COST
from placed import list_lengths, spread_tokens
from script import end, make_parser, output_result, print_table

MOST = 1.01
# Earlier checkouts deal differently if exchanges are hidden.
_KNOWS_OVERLAPPED = "overlapped" in inspect.signature(deal).parameters

Figures = dict[str, dict[str, float]]  # by kind, then by placement


def find_imbalance(layout: Layout, overlapped: bool, ranks: Ranks) -> float:
    """Compute the slowest rank, exchanges included, divided by the mean compute."""
    plan = balance(layout, COST, DistCAConfig(ping_pong=overlapped), ranks)
    load = PlanLoad(plan, COST, overlapped=overlapped, ranks=ranks)
    mean = float(load.compute_seconds.mean())
    return load.slowest_seconds / mean if mean else 1.0


def measure(folder: Path) -> Figures:
    """Compute the figures of every placement of a folder."""
    figures: Figures = {}
    for path in sorted(folder.glob("*.json")):
        given = read_placement(path)
        count, lengths, tokens = given.world_size, list_lengths(given), spread_tokens(given)
        for size in (8, None):
            ranks, nodes = Ranks(per_node=size), "nodes of 8" if size else "no nodes"
            for overlapped, kind in ((False, "after compute"), (True, "hidden")):
                options = {"overlapped": overlapped} if _KNOWS_OVERLAPPED else {}
                dealt = deal(lengths, count, tokens, COST, ranks_per_node=size, **options)
                for name, layout in (("as given", given), ("dealt", dealt)):
                    found = find_imbalance(layout, overlapped, ranks)
                    figures.setdefault(f"{name}, {kind}, {nodes}", {})[path.stem] = found
            halves = deal_nano_batches(lengths, count, tokens, COST, ranks_per_node=size)
            worse = max(
                find_imbalance(half, True, ranks) for half in halves if half.query_tokens.any()
            )
            figures.setdefault(f"dealt, nano-batches, {nodes}", {})[path.stem] = worse
    return figures


def measure_checkout(folder: Path, checkout: Path) -> Figures:
    """Compute the figures of an earlier checkout, in a process that imports its package."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    command = [sys.executable, __file__, str(folder.resolve())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout} could not be measured: {done.stderr.strip()[-1500:]}")
    found: Figures = json.loads(done.stdout)
    return found


def show(result: dict[str, Any]) -> None:
    rows = []
    for kind, before in result["before"].items():
        now, ratios = result["now"][kind], result["ratios"][kind]
        medians = (float(np.median(list(figures.values()))) for figures in (before, now))
        worst = (max(figures.values()) for figures in (before, now))
        name = max(ratios, key=lambda placement: ratios[placement])
        shown = (" -> ".join(f"{value:.3f}" for value in pair) for pair in (medians, worst))
        rows.append((kind, *shown, f"{ratios[name]:.4f}", name))
    columns = "", "median", "worst", "largest after / before", "placement"
    print_table("slowest rank / mean: median, worst; before -> after", columns, rows, texts=5)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of placements")
    text = "an earlier checkout; without it, print the figures of this one"
    parser.add_argument("--before", type=Path, help=text)
    arguments = parser.parse_args()
    now = measure(arguments.folder)
    if not now:
        parser.error(f"{arguments.folder} has no placements.")
    if arguments.before is None:
        print(json.dumps(now))
        return
    before = measure_checkout(arguments.folder, arguments.before)
    ratios = {
        kind: {name: now[kind][name] / value for name, value in figures.items()}
        for kind, figures in before.items()
    }
    output_result(arguments, {"before": before, "now": now, "ratios": ratios}, show)
    end(
        [
            f"{kind}, {name}: {ratio:.4f} times as before"
            for kind, figures in ratios.items()
            for name, ratio in figures.items()
            if ratio > MOST
        ]
    )


if __name__ == "__main__":
    main()
