"""The form of the cost model on published timings of a GPU: fitted to half of them, compared with the other half.

    python benchmarks/published_timings.py --profiles data/profiles

Reads ``attention_forward_fa2_h100.csv`` (one document a call) and ``attention_forward_fa2_h100_packed.psv`` (equal documents of
32K tokens in all): forward of flash-attention 2 on an H100, 64 query and 4 key/value heads of 128.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from machine import describe
from output import add_json_option, put_out

ANALYTIC = CostModel.analytic(AttentionShape(64, 4, 128, 128, 2), device_type="cuda")


class Timing(NamedTuple):
    """Seconds of one call for so many documents of a length."""

    documents: int
    length: int
    seconds: float


def single(path: Path) -> list[Timing]:
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["cp"] == row["tp"] == "1"]
    return [Timing(1, int(row["L"]), float(row["duration_per_doc"]) / 1e3) for row in rows]


def packed(path: Path) -> list[Timing]:
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="|") if row["cp"] == row["tp"] == "1"]
    sizes = [(int(row["batch_size"]), int(row["total_len"]), float(row["total_latency(ms)"]) / 1e3) for row in rows]
    return [Timing(count, total // count, seconds) for count, total, seconds in sizes]


def fitted(timings: list[Timing]) -> CostModel:
    counts = np.concatenate([ANALYTIC.counts(row.length, row.length) * row.documents for row in timings])
    return replace(ANALYTIC, forward=KernelCost.fit(counts, np.array([row.seconds for row in timings])))


def error(model: CostModel, timings: list[Timing]) -> dict[str, Any]:
    """Estimate over published seconds, less one."""
    off = [float(model.forward_seconds(row.length, row.length)[0]) * row.documents / row.seconds - 1 for row in timings]
    size = [abs(x) for x in off]
    return {
        "median": statistics.median(size),
        "largest": max(size),
        "by_length": {t.length: x for t, x in zip(timings, off, strict=True)},
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title="size of relative errors of forward")
    for column in ("model", "on", "median", "largest"):
        table.add_column(column)
    for model, sets in result["errors"].items():
        for name, found in sets.items():
            table.add_row(model, name, f"{found['median']:.1%}", f"{found['largest']:.1%}")
    Console().print(table)
    for name, cost in result["coefficients"].items():
        print(f"{name}: {cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=Path, required=True, help="folder of the published timings")
    add_json_option(parser)
    arguments = parser.parse_args()
    one = single(arguments.profiles / "attention_forward_fa2_h100.csv")
    many = packed(arguments.profiles / "attention_forward_fa2_h100_packed.psv")
    models = {"built in": ANALYTIC, "fitted to single documents": fitted(one[::2]), "fitted to packed ones": fitted(many[::2])}
    held = {"held-out single documents": one[1::2], "held-out packed ones": many[1::2]}
    result = {
        "machine": describe(),
        "coefficients": {name: str(model.forward) for name, model in models.items()},
        "errors": {name: {what: error(model, rows) for what, rows in held.items()} for name, model in models.items()},
    }
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
