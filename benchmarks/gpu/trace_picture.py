r"""A picture of a step from torch's profiler: what the host calls and what the GPU runs, attention
apart from all else.

python benchmarks/gpu/trace_picture.py \
    trace_distca.json.gz trace_plain_varlen.json.gz --output traces.png
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {"attention": "#c2410c", "matrix products": "#1d4ed8", "everything else": "#94a3b8"}


def kind_of(name: str) -> str:
    if "flash" in name.lower():
        return "attention"
    return "matrix products" if "nvjet" in name or "gemm" in name.lower() else "everything else"


def read(path: Path) -> tuple[list[Any], list[Any]]:
    """Calls of the host's outermost operations and kernels, each (start, seconds, kind), from the
    first one on, in ms.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    calls = sorted(
        (e for e in events if e.get("cat") == "cpu_op"),
        key=lambda e: (e["tid"], e["ts"], -e["dur"]),
    )
    outermost, end = [], {}
    for call in calls:
        if call["ts"] >= end.get(call["tid"], 0.0):
            outermost.append(call)
            end[call["tid"]] = call["ts"] + call["dur"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    first = min(call["ts"] for call in outermost)

    def rows(found: list[Any]) -> list[tuple[float, float, str]]:
        return [((e["ts"] - first) / 1e3, e["dur"] / 1e3, kind_of(e["name"])) for e in found]

    return rows(outermost), rows(kernels)


def draw(paths: Sequence[Path], output: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(paths), 1, figsize=(11, 1.6 * len(paths) + 0.8), sharex=True, squeeze=False
    )
    for axis, path in zip(axes[:, 0], paths, strict=True):
        for height, rows in enumerate(read(path)[::-1]):
            for kind, colour in COLOURS.items():
                spans = [(start, length) for start, length, one in rows if one == kind]
                axis.broken_barh(spans, (height, 0.8), color=colour, linewidth=0)
        axis.set_yticks([0.4, 1.4], ["GPU", "host"])
        axis.set_title(path.name.split(".")[0].removeprefix("trace_"), loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="upper right", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "traces", type=Path, nargs="+", help="chrome traces of torch's profiler, gzipped"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("traces.png"),
        help="picture to write (default: %(default)s)",
    )
    arguments = parser.parse_args()
    draw(arguments.traces, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
