"""The published setting of MagiAttention, predicted: attention alone, on 8 to 64 H100, beside what
was measured there.

    python benchmarks/simulated/magi_setting.py --json
    python benchmarks/simulated/magi_setting.py --picture docs/magi.png

One row of packed causal documents, 8K tokens a GPU, 64 query and 8 key/value heads of 128,
bfloat16, flash-attention 3, 20 rows drawn as there. Figures are TFLOP/s of a GPU, of the attention
module alone, forward and backward. No constant is adjusted to them: kernel and links are the
profile ``h100_flash_attn_3``, copies are as fast as pytorch issue 178066 says, and how others share
attention is as the simulator has it. Which terms it has was chosen with these figures in view.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.schedule.cost import count_causal_pairs
from hf_distca.schedule.deal import deal_in_order
from machine import describe
from output import add_json_option, put_out
from packed_documents import SOURCE, packed_rows
from simulator import context
from simulator.disaggregated import compute_placement_work, deal_documents
from simulator.hardware import find_hardware
from simulator.model_shape import ModelShape
from simulator.setting import Setting
from simulator.work import MicroBatchWork

GPUS = (8, 16, 32, 64)
TOKENS = 8192  # of a GPU
# Attention alone: linear layers of next to no width, in which nothing hides.
MODEL = ModelShape("attention alone", 1, 1, 64, 8, 128, 1, 1)
DIRECTIONS = ("forward", "backward")
PUBLISHED = {
    "Ulysses": ((278, 199, 186, 163), (332, 294, 277, 248)),
    "ring all-gather": ((289, 293, 241, 180), (179, 155, 104, 55)),
    "ring p2p": ((89, 69, 47, 28), (97, 86, 57, 29)),
    "Magi, native": ((460, 426, 315, 237), (360, 371, 333, 264)),
    "Magi, all-to-all-v": ((387, 305, 276, 207), (335, 353, 325, 242)),
}
JUDGED = ("Ulysses", "ring all-gather")
PUBLISHED_BY = (
    "SandAI-org/MagiAttention, docs/source/blog/cp_benchmark.md, distributed level, H100, varlen"
    " causal: +-3 %"
)
Lengths = npt.NDArray[np.int64]


def setting_of(gpus: int) -> Setting:
    return Setting(MODEL, find_hardware("h100", "flash_attn_3"), gpus, TOKENS)


def one_row(lengths: Lengths) -> context.SharedRows:
    return context.SharedRows(lengths, np.zeros(len(lengths), dtype=np.int64), 1)


def ulysses(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return context.compute_ulysses(setting, one_row(lengths), setting.ranks)


def all_gather(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return context.compute_all_gather(setting, one_row(lengths), setting.ranks, again=True)


def ring(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return context.compute_ring(setting, one_row(lengths), setting.ranks)


def ours_in_order(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return compute_placement_work(
        setting, (deal_in_order(lengths, setting.group, setting.tokens_per_rank),)
    )


def ours_dealt(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return compute_placement_work(setting, deal_documents(setting, lengths, ping_pong=False))


def ours_ping_pong(setting: Setting, lengths: Lengths) -> MicroBatchWork:
    return compute_placement_work(setting, deal_documents(setting, lengths, ping_pong=True))


STRATEGIES: dict[str, Callable[[Setting, Lengths], MicroBatchWork]] = {
    "Ulysses": ulysses,
    "ring all-gather": all_gather,
    "ring p2p": ring,
    "hf-distca, in order": ours_in_order,
    "hf-distca, dealt": ours_dealt,
    "hf-distca, dealt, ping-pong": ours_ping_pong,
}


class Speed(NamedTuple):
    """TFLOP/s of a GPU, and milliseconds of attention and of waiting, forward and backward: shapes
    (2,).
    """

    tflops: npt.NDArray[np.float64]
    attention_ms: npt.NDArray[np.float64]
    exposed_ms: npt.NDArray[np.float64]


def speed(name: str, gpus: int, rows: list[Lengths]) -> Speed:
    setting, found = setting_of(gpus), []
    for lengths in rows:
        work = STRATEGIES[name](setting, lengths)
        flops = (
            setting.shape.pair_flops
            * count_causal_pairs(lengths, lengths).sum()
            * np.array([1.0, 2.5])
            / gpus
            / 1e12
        )
        tflops = flops / (work.attention + work.exposed).max(axis=1)
        found.append((tflops, 1e3 * work.attention.max(axis=1), 1e3 * work.exposed.max(axis=1)))
    return Speed(*np.mean(found, axis=0))


def measure(count: int) -> dict[str, Any]:
    rows = {gpus: packed_rows(gpus * TOKENS, count) for gpus in GPUS}
    cells: list[dict[str, Any]] = []
    for name, (place, gpus) in product(STRATEGIES, enumerate(GPUS)):
        found = speed(name, gpus, rows[gpus])
        for which, direction in enumerate(DIRECTIONS):
            figures = {part: float(values[which]) for part, values in found._asdict().items()}
            cell = {"strategy": name, "gpus": gpus, "direction": direction, **figures}
            if name in PUBLISHED:
                published = PUBLISHED[name][which][place]
                cell |= {"published": published, "error": cell["tflops"] / published - 1}
            cells.append(cell)
    errors = {
        name: statistics.median(abs(cell["error"]) for cell in cells if cell["strategy"] in names)
        for name, names in (("Ulysses and ring all-gather", JUDGED), ("ring p2p", ("ring p2p",)))
    }
    return {
        "machine": describe(),
        "rows": count,
        "documents": SOURCE,
        "published_by": PUBLISHED_BY,
        "median_error": errors,
        "cells": cells,
    }


def lines(result: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Figures by what they are, forward and backward, by GPUs."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, (forward, backward) in PUBLISHED.items():
        found[f"{name}: published"] = list(map(float, forward)), list(map(float, backward))
    for cell in result["cells"]:
        pair = found.setdefault(f"{cell['strategy']}: predicted", ([], []))
        pair[DIRECTIONS.index(cell["direction"])].append(cell["tflops"])
    return dict(sorted(found.items()))


def show(result: dict[str, Any]) -> None:
    table = Table(title="attention alone, TFLOP/s of a GPU at 8 / 16 / 32 / 64 H100")
    for column in ("", *DIRECTIONS):
        table.add_column(column)
    for name, both in lines(result).items():
        table.add_row(name, *(" / ".join(f"{value:.0f}" for value in values) for values in both))
    Console(width=120).print(table)
    print(
        "median size of the error:",
        {name: f"{size:.0%}" for name, size in result["median_error"].items()},
    )


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    colours = {"Ulysses": "tab:blue", "ring all-gather": "tab:orange", "Magi, native": "tab:green"}
    colours |= {"hf-distca, dealt": "tab:red", "hf-distca, dealt, ping-pong": "tab:purple"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, which in zip(axes, range(2), strict=True):
        for name, both in lines(result).items():
            strategy, _, kind = name.partition(": ")
            if strategy in colours:
                style = "-" if kind == "published" else "--"
                axis.plot(
                    GPUS,
                    both[which],
                    style,
                    marker="o",
                    markersize=3,
                    color=colours[strategy],
                    label=f"{strategy}, {kind}",
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axis.set_xlabel("H100")
        axis.set_title(DIRECTIONS[which], fontsize=10)
    axes[0].set_ylabel("TFLOP/s of a GPU, attention alone")
    axes[0].set_ylim(bottom=0)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20, help="rows of documents that are drawn")
    parser.add_argument("--picture", type=Path, help="also draw it, into this file")
    add_json_option(parser)
    arguments = parser.parse_args()
    result = measure(arguments.rows)
    if arguments.picture is not None:
        draw(result, arguments.picture)
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
