"""Plans made with one factor per GPU and kernel, as in training, compared with plans made with the
rates of its profile: for tasks, bytes and flops, forward and backward.

    python benchmarks/schedule/one_factor.py [FOLDER ...] [--json]

Factors come from `hf_distca.schedule.gpus`, profiles from
benchmarks/simulated/simulator/profiles.py. The profile prices both plans. The figure is the end of
the last rank under the plan with one factor, divided by that under the other plan. Plans are for
Llama-3-8B in bfloat16, one layer forward and backward, nodes of 8 ranks; exchanges follow compute
or, in ping-pong, are hidden. For comparison, the script prints plans with the built-in figures, and
the factor with which all documents of a placement take as long as by the profile.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.gpus import find_factor, make_gpu_cost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.ranks import Ranks
from placed import LLAMA_3_8B as SHAPE
from script import make_parser, output_result, print_table
from simulator.profiles import find_profile

FOLDERS = [Path(__file__).resolve().parents[1] / "placements" / name for name in ("", "public")]
# Profile: the device and kernel that it describes.
GPUS = {
    "a100_flash_attn_2": ("A100", "flash_attn"),
    "h100_flash_attn_2": ("H100", "flash_attn"),
    "h100_flash_attn_3": ("H100", "flash_attn_3"),
    "h100_flash_attn_4": ("H100", "flash_attn_4"),
    "b200_flash_attn_4": ("B200", "flash_attn_4"),
}


def compute_last_end(
    layout: Layout, planned_with: CostModel, true: CostModel, ping_pong: bool
) -> float:
    """Return the time at which the last rank ends by the true costs, in seconds."""
    ranks = Ranks(per_node=8) if layout.world_size > 8 else Ranks()
    plan = balance(layout, planned_with, DistCAConfig(ping_pong=ping_pong), ranks)
    return PlanLoad(plan, true, overlapped=ping_pong, ranks=ranks).slowest_seconds


def compare(name: str, layouts: dict[str, Layout]) -> dict[str, Any]:
    """Compare the plans of one GPU and kernel."""
    true = find_profile(name).make_cost_model(SHAPE)
    row = find_factor(*GPUS[name])
    one, built_in = make_gpu_cost(SHAPE, *GPUS[name]), CostModel.make_analytic(SHAPE)
    found: dict[str, Any] = {"factor": row and row[1], "learned": [], "ratios": {}, "built_in": {}}
    for (place, layout), ping_pong in itertools.product(layouts.items(), (False, True)):
        best = compute_last_end(layout, true, true, ping_pong)
        key = f"{place}{', ping-pong' * ping_pong}"
        found["ratios"][key] = compute_last_end(layout, one, true, ping_pong) / best
        found["built_in"][key] = compute_last_end(layout, built_in, true, ping_pong) / best
        if not ping_pong:
            seconds = [
                float(cost.estimate_seconds(layout.length, layout.end).sum())
                for cost in (true, built_in)
            ]
            found["learned"].append(seconds[0] / seconds[1])
    return found


def describe(ratios: list[float]) -> str:
    return f"mean {statistics.mean(ratios):.4f}, {min(ratios):.3f} to {max(ratios):.3f}"


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, row in result["gpus"].items():
        learned = f"{min(row['learned']):.2f} to {max(row['learned']):.2f}"
        both = (describe(list(row[key].values())) for key in ("ratios", "built_in"))
        rows.append((name, f"{row['factor']:.2f}", learned, *both))
    columns = "profile", "factor", "factor by placement", "one factor", "built-in figures"
    title = "end of the last rank, relative to plans of the profile"
    print_table(title, columns, rows, texts=5)
    for name, text in result["summary"].items():
        print(f"{name}, {result['plans']} plans: {text}")


def main() -> None:
    parser = make_parser(__doc__)
    text = "folders of placements"
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS, help=text)
    arguments = parser.parse_args()
    paths = [path for folder in arguments.folders for path in sorted(folder.glob("*.json"))]
    layouts = {path.stem: read_placement(path) for path in paths}
    gpus = {name: compare(name, layouts) for name in GPUS}
    summary = {
        name: describe([ratio for row in gpus.values() for ratio in row[key].values()])
        for name, key in (("one factor", "ratios"), ("built-in figures", "built_in"))
    }
    plans = 2 * len(layouts) * len(gpus)
    output_result(arguments, {"gpus": gpus, "plans": plans, "summary": summary}, show)


if __name__ == "__main__":
    main()
