"""A picture of attention balanced over ranks, from measured kernel seconds: each of eight ranks,
and slowest / mean of several placements.

python benchmarks/gpu/balance_picture.py benchmarks/results --output docs/balance.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

# Label below the bars, folder of the results, placement.
PLACEMENTS = (
    ("8 ranks, 128K\nH200", "h200_2026-11-26", "wlbllm_raw_r8_t128k_s0"),
    ("8 ranks, 128K\nH100", "h100_2026-11-27", "wlbllm_raw_r8_t128k_s0"),
    ("64 ranks, 64K\nH200", "h200_2026-11-26_second", "wlbllm_raw_r64_t64k_s0"),
    ("64 ranks, 64K\nH200, prolong", "h200_2026-11-26_second", "prolong_e8_lcr03_shuf_r64_t64k_s0"),
)
COLOURS = {"without": "#64748b", "balanced as given": "#1d4ed8", "dealt": "#c2410c"}


def read_seconds(results: Path, folder: str, placement: str) -> dict[str, np.ndarray]:
    """Read the kernel seconds of each rank for a layer, forward and backward, by the way the work
    was shared.
    """
    figures = json.loads((results / folder / "emulator.json").read_text())["placements"]
    rows = {row["placement"]: row for row in figures if row["model"] == "Llama-8B"}
    given, dealt = rows[f"{placement}, as given"], rows[f"{placement}, dealt"]
    ways = zip(COLOURS, (given["before"], given["after"], dealt["after"]), strict=True)
    return {name: _both(measured) for name, measured in ways}


def _both(measured: dict[str, Any]) -> np.ndarray:
    return np.add(measured["forward"]["seconds"], measured["backward"]["seconds"])


def draw(results: Path, output: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=(1, 1.15))
    measured = [read_seconds(results, folder, placement) for _, folder, placement in PLACEMENTS]
    for place, (name, colour) in enumerate(COLOURS.items()):
        seconds = measured[0][name]
        left.bar(np.arange(len(seconds)) + 0.27 * (place - 1), seconds, 0.25, color=colour)
        ratios = [ways[name].max() / ways[name].mean() for ways in measured]
        bars = right.bar(
            np.arange(len(ratios)) + 0.28 * (place - 1), ratios, 0.26, color=colour, label=name
        )
        right.bar_label(bars, fmt="%.2f", fontsize=8)
    left.set(xlabel="rank", ylabel="attention of a layer, seconds", title="8 ranks, 128K, H200")
    right.set(ylabel="slowest rank / mean", title="1 is even")
    right.set_xticks(range(len(PLACEMENTS)), [name for name, *_ in PLACEMENTS], fontsize=9)
    right.axhline(1, color="black", linewidth=0.8, linestyle="--")
    right.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of results")
    parser.add_argument("--output", type=Path, default=Path("balance.png"), help="picture to write")
    arguments = parser.parse_args()
    draw(arguments.results, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
