"""Plans of real placements under each shipped profile of a GPU, against those made with the
built-in figures for any GPU.

    python benchmarks/schedule/profile_plans.py FOLDER --json
    python benchmarks/schedule/profile_plans.py FOLDER --before PROFILES --json

Each plan of the built-in figures is priced by the profile, too: what it would take on that GPU with
that kernel. Of Llama-3-8B in bfloat16, a layer forward and backward, nodes of 8 ranks. *Whole to
tasks* is what whole documents of as many pairs would take, as a part of what the tasks of all ranks
take, by the rates of the profile: below 1, slices are slower than what they are cut from.

With `--before`, the plans that are compared are those of earlier profiles: PROFILES is a folder of
them, by their names of today, such as `src/hf_distca/schedule/profiles_data` of an earlier commit.
Where a profile did not exist, plans were made with the built-in figures. All plans are made by the
scheduler of today and priced by the rates of today.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, compute_imbalance
from hf_distca.schedule.placement import parse_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.profiles import Profile
from hf_distca.schedule.ranks import Ranks
from machine import describe
from output import add_json_option, put_out

SHAPE = AttentionShape(32, 8, 128, 128, 2)
NAMES = [name for name in Profile.list_shipped() if Profile.load(name).device == "cuda"]
NODES = Ranks(per_node=8)
CONFIG = DistCAConfig()
BUILT_IN = CostModel.make_analytic(SHAPE)


def figures(plan: Plan, cost: CostModel) -> dict[str, float]:
    load = PlanLoad(plan, cost, ranks=NODES)
    return {
        "gigabytes": float(load.exchange_bytes[0].sum() / 1e9),
        "busiest_gigabytes": float(load.exchange_bytes.max() / 1e9),
        "imbalance": compute_imbalance(load.compute_seconds),
        "slowest_ms": load.slowest_seconds * 1e3,
    }


def whole_to_tasks(layout: Layout, plan: Plan, cost: CostModel) -> list[float]:
    """Seconds of whole documents by those of all tasks, forward and backward."""
    tasks = cost.estimate_directions(plan.end - plan.start, plan.end, plan.heads)
    lengths = np.zeros(int(layout.document.max()) + 1, dtype=np.int64)
    np.maximum.at(lengths, layout.document, layout.end)
    lengths = lengths[lengths > 0]
    whole = cost.estimate_directions(lengths, lengths)
    return [float(ratio) for ratio in whole.sum(axis=1) / tasks.sum(axis=1)]


def costs_before(name: str, profiles: Path | None) -> CostModel:
    """Costs by the profile of this name in the folder; without one, by the built-in figures."""
    file = profiles / f"{name}.json" if profiles else None
    return Profile.load(file).make_cost_model(SHAPE) if file and file.exists() else BUILT_IN


def of_placement(layout: Layout, profiles: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "built_in": figures(balance(layout, BUILT_IN, CONFIG, NODES), BUILT_IN)
    }
    for name in NAMES:
        cost = Profile.load(name).make_cost_model(SHAPE)
        local = PlanLoad(Plan.make_local(layout), cost, ranks=NODES)
        plan, before = (
            balance(layout, made_with, CONFIG, NODES)
            for made_with in (cost, costs_before(name, profiles))
        )
        found[name] = {
            "with_profile": figures(plan, cost),
            "whole_to_tasks": whole_to_tasks(layout, plan, cost),
            "before": figures(before, cost),
            "whole_to_tasks_before": whole_to_tasks(layout, before, cost),
            "unmoved_ms": local.slowest_seconds * 1e3,
        }
    return found


def show(result: dict[str, Any]) -> None:
    other = "earlier profiles" if result["before"] else "built-in figures"
    table = Table(
        title=f"plans made with a profile; in brackets those made with {other}, on that GPU"
    )
    for column in ("placement", "built in", *NAMES):
        table.add_column(column)
    for placement, row in result["placements"].items():
        cells = [f"{row['built_in']['gigabytes']:.1f} GB"]
        for name in NAMES:
            ours, before = row[name]["with_profile"], row[name]["before"]
            cells.append(
                f"{ours['gigabytes']:.1f} GB\n{ours['slowest_ms']:.1f} ms"
                f" ({before['slowest_ms']:.1f})"
            )
        table.add_row(placement, *cells)
    Console(width=150).print(table)
    for name, row in result["summary"].items():
        print(f"{name}: {row}")


def summary(placements: dict[str, Any]) -> dict[str, Any]:
    """Plans made with a profile, as a part of those before: over placements."""
    found = {}
    for name in NAMES:
        pairs = [(row[name]["with_profile"], row[name]["before"]) for row in placements.values()]
        seconds = [ours["slowest_ms"] / other["slowest_ms"] for ours, other in pairs]
        moved = [
            ours["gigabytes"] / other["gigabytes"] for ours, other in pairs if other["gigabytes"]
        ]
        whole, whole_before = (
            np.mean([row[name][key] for row in placements.values()], axis=0).round(3).tolist()
            for key in ("whole_to_tasks", "whole_to_tasks_before")
        )
        found[name] = {
            "slowest_median": round(statistics.median(seconds), 3),
            "slowest_best": round(min(seconds), 3),
            "slowest_worst": round(max(seconds), 3),
            "bytes_median": round(statistics.median(moved), 3),
            "whole_to_tasks_forward_backward": whole,
            "whole_to_tasks_forward_backward_before": whole_before,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="folder of placements, as `hf-distca plan` reads them"
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="PROFILES",
        help="folder of earlier profiles, whose plans are compared",
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    layouts = {
        path.stem: parse_placement(path.read_bytes(), path.name)
        for path in sorted(arguments.folder.glob("*.json"))
    }
    placements = {name: of_placement(layout, arguments.before) for name, layout in layouts.items()}
    before = arguments.before and str(arguments.before)
    result = {
        "machine": describe(),
        "before": before,
        "placements": placements,
        "summary": summary(placements),
    }
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
