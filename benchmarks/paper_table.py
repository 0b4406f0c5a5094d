"""The settings of the DistCA paper, predicted: hf-distca and the published planner against WLB-LLM, each at its best.

    python benchmarks/paper_table.py --json

Settings are tables 3 and 4 of arXiv 2510.18121: Llama-8B and 34B on 64 to 512 H200, tensor parallelism of 8, as many tokens as
the paper has. WLB-LLM gets its best context-parallel degree and, with pipelines, every strategy its best number of stages and
micro-batches that fit in memory. "ideal" is an equal part of all work for each device, and no waiting. The paper's ranges are
those of its section 6.2, over all settings of a model and its lengths, as it measured them on H200.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_distca.simulate.assumptions import assumptions
from hf_distca.simulate.hardware import find_hardware
from hf_distca.simulate.lengths import DISTRIBUTIONS, Documents
from hf_distca.simulate.memory import peak_bytes
from hf_distca.simulate.models import find_model
from hf_distca.simulate.predict import Prediction, ideal_seconds, simulate
from hf_distca.simulate.setting import Setting
from machine import describe
from output import add_json_option, put_out

K = 1024
TENSOR = 8
STRATEGIES = ("wlb", "published", "dealt", "dealt-ping-pong")
STAGES = (2, 4)
MICRO_BATCHES = (8, 16, 32)


class Row(NamedTuple):
    """One of the paper's settings: documents of up to `longest` tokens, `batch` times as many tokens in a step."""

    model: str
    longest: int
    batch: int
    gpus: int
    pipeline: bool


def rows(model: str, pipeline: bool, settings: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[Row]:
    return [
        Row(model, k * K, batch, gpus, pipeline)
        for k, batches, many in settings
        for batch, gpus in zip(batches, many, strict=True)
    ]


SMALL, LARGE = (64, 128, 256), (128, 256, 512)
PAPER = [
    *rows("llama-3-8b", False, [(128, (8, 16, 32), SMALL), (256, (4, 8, 16), SMALL), (512, (2, 4, 8), SMALL)]),
    *rows("llama-34b", False, [(128, (4, 8, 16), SMALL), (256, (2, 4, 8), SMALL), (512, (2, 4, 8), SMALL)]),
    *rows("llama-3-8b", True, [(128, (32, 64, 128), SMALL), (256, (16, 32, 32), SMALL), (512, (8, 8, 16), SMALL)]),
    *rows("llama-34b", True, [(128, (32, 64, 128), LARGE), (256, (16, 32, 32), LARGE), (384, (8, 8, 16), LARGE)]),
]
# Speedup over WLB-LLM by model, lengths and whether with pipelines; without a lower end the paper says "up to".
PUBLISHED: dict[tuple[str, str, bool], tuple[float | None, float]] = {
    ("llama-3-8b", "pretrain", False): (1.07, 1.20),
    ("llama-34b", "pretrain", False): (1.07, 1.20),
    ("llama-3-8b", "prolong", False): (1.05, 1.12),
    ("llama-34b", "prolong", False): (1.05, 1.12),
    ("llama-3-8b", "pretrain", True): (1.15, 1.30),
    ("llama-3-8b", "prolong", True): (1.10, 1.35),
    ("llama-34b", "pretrain", True): (None, 1.15),
    ("llama-34b", "prolong", True): (None, 1.25),
}


def arrangements(row: Row) -> list[Setting]:
    """All that are tried."""
    tokens, found = row.batch * row.longest, []
    for stages, count in ((s, m) for s in STAGES for m in MICRO_BATCHES) if row.pipeline else ((1, 1),):
        group = row.gpus // TENSOR // stages
        each = tokens // (group * count)
        # A micro-batch must hold the longest document.
        if group < 1 or tokens % (group * count) or each * group < row.longest or count < stages:
            continue
        setting = Setting(find_model(row.model), find_hardware("h200"), row.gpus, each, TENSOR, stages, count, sharding="zero1")
        full = peak_bytes(setting, each, 0.0) > setting.hardware.memory_bytes
        found.append(replace(setting, checkpointing="selective") if full else setting)
    return found


def best(row: Row, documents: Documents, batches: int) -> dict[str, Any]:
    """The best arrangement of every strategy, and the ideal of the best arrangement of all."""
    found: dict[str, tuple[Prediction, Setting]] = {}
    ideals = []
    for setting in arrangements(row):
        drawn = documents.batches(setting.tokens, batches * setting.micro_batches)
        steps = [[next(drawn) for _ in range(setting.micro_batches)] for _ in range(batches)]
        ideals.append(float(np.mean([ideal_seconds(setting, one) for one in steps])))
        for one in simulate(setting, documents, STRATEGIES, batches=batches):
            if one.fits and (one.strategy not in found or one.step_seconds < found[one.strategy][0].step_seconds):
                found[one.strategy] = (one, setting)
    return {
        "ideal_seconds": min(ideals),
        "strategies": {
            name: {
                **one.to_dict(),
                "stages": setting.stages,
                "micro_batches": setting.micro_batches,
                "checkpointing": setting.checkpointing,
            }
            for name, (one, setting) in found.items()
        },
    }


def measure(batches: int, chosen: list[Row]) -> dict[str, Any]:
    found = []
    cases = [(row, name) for row in chosen for name in DISTRIBUTIONS]
    for row, name in tqdm(cases, "settings", file=sys.stderr):
        one = best(row, DISTRIBUTIONS[name](row.longest), batches)
        steps = {strategy: figures["step_seconds"] for strategy, figures in one["strategies"].items()}
        wlb, ours = steps.get("wlb"), min(steps["dealt"], steps["dealt-ping-pong"])
        low, high = PUBLISHED[row.model, name, row.pipeline]
        found.append(
            {
                **row._asdict(),
                "lengths": name,
                **one,
                "speedup": None if wlb is None else wlb / ours,
                "published_planner_speedup": None if wlb is None else wlb / steps["published"],
                "ideal_speedup": None if wlb is None else wlb / one["ideal_seconds"],
                "paper": [low, high],
            }
        )
    setting = arrangements(chosen[0])[0]
    facts = assumptions(setting, DISTRIBUTIONS["pretrain"](chosen[0].longest), STRATEGIES)
    return {"machine": describe(), "batches": batches, "rows": found, "ranges": ranges(found), "assumptions": facts}


def ranges(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speedups over all settings of a model and its lengths, beside the paper's."""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["model"], row["lengths"], row["pipeline"]), []).append(row)
    result = []
    for (model, lengths, pipeline), group in groups.items():
        ours = [row["speedup"] for row in group if row["speedup"]]
        theirs = [row["published_planner_speedup"] for row in group if row["published_planner_speedup"]]
        result.append(
            {
                "model": model,
                "lengths": lengths,
                "pipeline": pipeline,
                "hf_distca": [min(ours), max(ours)],
                "published_planner": [min(theirs), max(theirs)],
                "paper": list(PUBLISHED[model, lengths, pipeline]),
            }
        )
    return result


def show(result: dict[str, Any]) -> None:
    console = Console(width=130)
    for pipeline in sorted({row["pipeline"] for row in result["rows"]}):
        table = Table(title=f"{'with' if pipeline else 'without'} pipelines, {result['batches']} batches; speedups over WLB-LLM")
        columns = (
            "model",
            "context",
            "GPUs",
            "lengths",
            "WLB-LLM, s",
            "shared by",
            "hf-distca, s",
            "speedup",
            "its planner",
            "ideal",
            "paper",
        )
        for column in columns:
            table.add_column(column, justify="left" if column in ("model", "lengths") else "right")
        for row in (row for row in result["rows"] if row["pipeline"] == pipeline):
            wlb, steps = row["strategies"].get("wlb"), row["strategies"]
            ours = min(steps["dealt"]["step_seconds"], steps["dealt-ping-pong"]["step_seconds"])
            low, high = row["paper"]
            factors = [
                f"{row[name]:.2f}" if row[name] else "-" for name in ("speedup", "published_planner_speedup", "ideal_speedup")
            ]
            table.add_row(
                *(row["model"], f"{row['longest'] // K}K", str(row["gpus"]), row["lengths"]),
                *(("no memory", "") if wlb is None else (f"{wlb['step_seconds']:.2f}", f"{wlb['degree']} ranks")),
                *(f"{ours:.2f}", *factors, f"{f'{low:.2f}' if low else 'up'} to {high:.2f}"),
            )
        console.print(table)
    for one in result["ranges"]:
        low, high = one["paper"]
        print(
            f"{one['model']}, {one['lengths']}, {'with' if one['pipeline'] else 'without'} pipelines: "
            f"hf-distca {one['hf_distca'][0]:.2f} to {one['hf_distca'][1]:.2f}, the published planner "
            f"{one['published_planner'][0]:.2f} to {one['published_planner'][1]:.2f}, "
            f"paper {f'{low:.2f} to' if low else 'up to'} {high:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10, help="global batches of each setting (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of settings, from 0; all if left out")
    add_json_option(parser)
    arguments = parser.parse_args()
    chosen = PAPER if arguments.rows is None else [PAPER[row] for row in arguments.rows]
    put_out(measure(arguments.batches, chosen), arguments.json, show)


if __name__ == "__main__":
    main()
