"""The settings of the DistCA paper, predicted: hf-distca and the published planner against WLB-LLM,
each at its best.

    python benchmarks/simulated/paper_table.py --json

Settings are tables 3 and 4 of arXiv 2510.18121: Llama-8B and 34B on 64 to 512 H200, tensor
parallelism of 8, as many tokens as the paper has. WLB-LLM gets its best context-parallel degree,
and every strategy its best checkpointing and, with pipelines, its best number of stages and
micro-batches that fit in memory. "ideal" is an equal part of all work for each device, and no
waiting; with pipelines, "bound" adds what even attention cannot avoid: linear layers of a stage
that has no micro-batch. "even ticks" could avoid some of it, and are not built (`even_ticks.py`).
"either way" is the speedup if both may also do without pipelines and accumulate gradients. The
paper's ranges are those of its section 6.2, over all settings of a model and its lengths, measured
on H200.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from even_ticks import EVEN_TICKS
from hf_distca.tools.advise.document_lengths import DISTRIBUTIONS, DocumentSource, find_distribution
from ideal import ideal_seconds
from machine import describe
from output import add_json_option, put_out
from published_planner import PUBLISHED as PUBLISHED_PLANNER
from simulator.assumptions import list_assumptions
from simulator.hardware import find_hardware
from simulator.loader_rules import draw_steps
from simulator.memory import find_fullest_moment
from simulator.model_shape import find_model
from simulator.predict import Prediction, estimate_linear_seconds, simulate
from simulator.setting import Setting

K = 1024
TENSOR = 8
OURS = ("dealt", "dealt-ping-pong")
STRATEGIES = ("wlb", PUBLISHED_PLANNER, *OURS)
STAGES = (2, 4)
MICRO_BATCHES = (4, 8, 16, 32, 64)
ACCUMULATED = (1, 2, 4, 8)


class Row(NamedTuple):
    """One of the paper's settings: documents of up to `longest` tokens, `batch` times as many
    tokens in a step.
    """

    model: str
    longest: int
    batch: int
    gpus: int
    pipeline: bool


def rows(
    model: str, pipeline: bool, settings: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> list[Row]:
    return [
        Row(model, k * K, batch, gpus, pipeline)
        for k, batches, many in settings
        for batch, gpus in zip(batches, many, strict=True)
    ]


SMALL, LARGE = (64, 128, 256), (128, 256, 512)
PAPER = [
    *rows(
        "llama-3-8b",
        False,
        [(128, (8, 16, 32), SMALL), (256, (4, 8, 16), SMALL), (512, (2, 4, 8), SMALL)],
    ),
    *rows(
        "llama-34b",
        False,
        [(128, (4, 8, 16), SMALL), (256, (2, 4, 8), SMALL), (512, (2, 4, 8), SMALL)],
    ),
    *rows(
        "llama-3-8b",
        True,
        [(128, (32, 64, 128), SMALL), (256, (16, 32, 32), SMALL), (512, (8, 8, 16), SMALL)],
    ),
    *rows(
        "llama-34b",
        True,
        [(128, (32, 64, 128), LARGE), (256, (16, 32, 32), LARGE), (384, (8, 8, 16), LARGE)],
    ),
]
# Speedup over WLB-LLM by model, lengths and whether with pipelines; without a lower end the paper
# says "up to".
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


def arrangements(row: Row, *, stages: bool) -> list[Setting]:
    """All that are tried, with linear layers repeated and not; without stages, as few micro-batches
    as fit.
    """
    tokens, found = row.batch * row.longest, []
    for depth, count in (
        ((s, m) for s in STAGES for m in MICRO_BATCHES) if stages else ((1, m) for m in ACCUMULATED)
    ):
        group = row.gpus // TENSOR // depth
        each = tokens // (group * count) if group else 0
        # A micro-batch must hold the longest document.
        if not each or tokens % (group * count) or each * group < row.longest or count < depth:
            continue
        one = Setting(
            find_model(row.model),
            find_hardware("h200"),
            row.gpus,
            each,
            TENSOR,
            depth,
            count,
            sharding="zero1",
        )
        fit = [
            two
            for two in (one, replace(one, checkpointing="selective"))
            if find_fullest_moment(two, each).total <= one.hardware.memory_bytes
        ]
        found += fit
        if not stages and one in fit:
            break
    return found


def best(row: Row, documents: DocumentSource, batches: int, *, stages: bool) -> dict[str, Any]:
    """The best arrangement of every strategy, the ideal of the best arrangement of all, and the
    bound of its stages.
    """
    found: dict[str, tuple[Prediction, Setting]] = {}
    ideals, bounds = [], []
    for setting in arrangements(row, stages=stages):
        steps = list(draw_steps(documents, setting.tokens, setting.micro_batches, batches))
        ideals.append(float(np.mean([ideal_seconds(setting, one) for one in steps])))
        bounds.append(ideals[-1] + idle_linear_seconds(setting))
        for one in simulate(
            setting, documents, (*STRATEGIES, EVEN_TICKS) if stages else STRATEGIES, batches=batches
        ):
            if one.fits and (
                one.strategy not in found or one.step_seconds < found[one.strategy][0].step_seconds
            ):
                found[one.strategy] = (one, setting)
    steps_of = {name: one.step_seconds for name, (one, _) in found.items()}
    wlb = steps_of.get("wlb")
    ours, best_of_ours = min(
        (found[name] for name in OURS if name in found), key=lambda way: way[0].step_seconds
    )
    excess = {
        "all": ours.step_seconds - min(ideals),
        "messages": ours.exposed_seconds,
        "idle linear layers": idle_linear_seconds(best_of_ours),
    }
    return {
        "ideal_seconds": min(ideals),
        "bound_seconds": min(bounds),
        "wlb_seconds": wlb,
        "ours_seconds": ours.step_seconds,
        "ours_over_ideal": {name: seconds / min(ideals) for name, seconds in excess.items()},
        "speedup": None if wlb is None else wlb / ours.step_seconds,
        "published_planner_speedup": None if wlb is None else wlb / steps_of["published"],
        "ideal_speedup": None if wlb is None else wlb / min(ideals),
        "ours_over_bound": ours.step_seconds / min(bounds),
        "strategies": {
            name: {
                **asdict(one),
                "stages": setting.stages,
                "micro_batches": setting.micro_batches,
                "checkpointing": setting.checkpointing,
            }
            for name, (one, setting) in found.items()
        },
    }


def idle_linear_seconds(setting: Setting) -> float:
    """Seconds in which a device has no linear layers to run, as its stage has no micro-batch:
    warm-up, and the end of a step.
    """
    seconds = float(
        estimate_linear_seconds(setting, np.full(1, float(setting.tokens_per_rank))).sum()
    )
    return seconds / setting.stages * (setting.stages - 1)


def case(row: Row, name: str, batches: int) -> dict[str, Any]:
    """A setting of the paper, with one of its distributions."""
    documents = find_distribution(name, row.longest)
    batches = max(batches // 10, 1) if row.pipeline else batches
    low, high = PUBLISHED[row.model, name, row.pipeline]
    found = {
        **row._asdict(),
        "lengths": name,
        **best(row, documents, batches, stages=row.pipeline),
        "paper": [low, high],
    }
    if not row.pipeline:
        return found
    without = best(row, documents, batches, stages=False)
    both = {
        name: [one[name] for one in (found, without) if one[name]]
        for name in ("wlb_seconds", "ours_seconds")
    }
    return found | {
        "no_stages": without,
        "any_speedup": min(both["wlb_seconds"]) / min(both["ours_seconds"]),
    }


def measure(batches: int, chosen: list[Row], jobs: int) -> dict[str, Any]:
    cases = [(row, name) for row in chosen for name in DISTRIBUTIONS]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(case, row, name, batches) for row, name in cases]
        found = [one.result() for one in tqdm(waiting, "settings", file=sys.stderr)]
    setting = arrangements(chosen[0], stages=chosen[0].pipeline)[0]
    facts = list_assumptions(setting, find_distribution("pretrain", chosen[0].longest), STRATEGIES)
    versions = {name: version(name) for name in ("hf-distca", "numpy")}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": versions,
        "machine": describe(),
        "batches": batches,
        "rows": found,
        "ranges": ranges(found),
        "assumptions": facts,
    }


def ranges(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speedups over all settings of a model and its lengths, beside the paper's."""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["model"], row["lengths"], row["pipeline"]), []).append(row)
    result = []
    for (model, lengths, pipeline), group in groups.items():

        def span(name: str, rows: list[dict[str, Any]]) -> list[float]:
            values = [row[name] for row in rows if row[name]]
            return [min(values), max(values)]

        result.append(
            {
                "model": model,
                "lengths": lengths,
                "pipeline": pipeline,
                "hf_distca": span("speedup", group),
                "published_planner": span("published_planner_speedup", group),
                "ideal": span("ideal_speedup", group),
                "ours_over_bound": span("ours_over_bound", group),
                "any": span("any_speedup", group) if pipeline else None,
                "paper": list(PUBLISHED[model, lengths, pipeline]),
            }
        )
    return result


COLUMNS = {
    "model": "left",
    "context": "right",
    "GPUs": "right",
    "lengths": "left",
    "WLB-LLM, s": "right",
    "shared by": "right",
    "idle": "right",
    "waits": "right",
    "hf-distca, s": "right",
    "speedup": "right",
    "its planner": "right",
    "ideal": "right",
    "over bound": "right",
    "either way": "right",
    "paper": "right",
}


def show(result: dict[str, Any]) -> None:
    console = Console(width=160)
    about = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    print(
        f"{result['date']}, {about}, {result['batches']} batches; speedups over WLB-LLM; idle and"
        " waits are WLB-LLM's"
    )
    for pipeline in sorted({row["pipeline"] for row in result["rows"]}):
        table = Table(title=f"{'with' if pipeline else 'without'} pipelines")
        for column, justify in COLUMNS.items():
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for row in (row for row in result["rows"] if row["pipeline"] == pipeline):
            table.add_row(*cells(row))
        console.print(table)
        print(over_ideal([row for row in result["rows"] if row["pipeline"] == pipeline]))
    for one in result["ranges"]:
        print(
            f"{one['model']}, {one['lengths']}, {'with' if one['pipeline'] else 'without'}"
            f" pipelines: hf-distca {spelled(one['hf_distca'])}, {either_way(one)}the published"
            f" planner {spelled(one['published_planner'])}, ideal {spelled(one['ideal'])}, paper"
            f" {spelled(one['paper'])}, hf-distca over its bound {spelled(one['ours_over_bound'])}"
        )


def over_ideal(rows: list[dict[str, Any]]) -> str:
    """How much longer than the ideal hf-distca takes, and for what; and against the published
    planner.
    """
    excess = [row["ours_over_ideal"] for row in rows]
    parts = (
        f"{name} {np.median([one[name] for one in excess]):.1%}"
        for name in excess[0]
        if name != "all"
    )
    whole = sorted(one["all"] for one in excess)
    ahead = sum(
        row["ours_seconds"] <= row["strategies"]["published"]["step_seconds"] for row in rows
    )
    text = (
        f"over the ideal: {whole[0]:.1%} to {whole[-1]:.1%}, median {np.median(whole):.1%}"
        f" (medians: {', '.join(parts)}), at most 8 % in {sum(one <= 0.08 for one in whole)} of"
        f" {len(whole)}; ahead of the published planner in {ahead}"
    )
    if not rows[0]["pipeline"]:
        return text
    even = [
        row["strategies"]["even-ticks"]["step_seconds"] / row["ideal_seconds"] - 1 for row in rows
    ]
    return (
        f"{text}; even ticks: median {np.median(even):.1%}, at most 8 % in"
        f" {sum(one <= 0.08 for one in even)}"
    )


def either_way(one: dict[str, Any]) -> str:
    return f"either way {spelled(one['any'])}, " if one["any"] else ""


def spelled(span: list[float | None]) -> str:
    low, high = span
    return f"{f'{low:.2f}' if low else 'up'} to {high:.2f}"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    wlb, ours = row["strategies"].get("wlb"), row["ours_seconds"]
    factors = [
        f"{row[name]:.2f}" if row[name] else "-"
        for name in ("speedup", "published_planner_speedup", "ideal_speedup")
    ]
    alone = (
        f"{wlb['step_seconds']:.2f} {wlb['degree']} {wlb['idle_share']:.0%}"
        f" {wlb['exposed_share']:.0%}"
        if wlb
        else "- - - -"
    )
    either = f"{row['any_speedup']:.2f}" if row["pipeline"] else ""
    return [
        *(row["model"], f"{row['longest'] // K}K", str(row["gpus"]), row["lengths"]),
        *(
            *alone.split(),
            f"{ours:.2f}",
            *factors,
            f"{row['ours_over_bound']:.2f}",
            either,
            spelled(row["paper"]),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=10,
        help="global batches of each setting, with pipelines a tenth (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", help="numbers of settings, from 0; all if left out"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="processes that predict (default: one for each core)",
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    chosen = PAPER if arguments.rows is None else [PAPER[row] for row in arguments.rows]
    put_out(measure(arguments.batches, chosen, arguments.jobs), arguments.json, show)


if __name__ == "__main__":
    main()
