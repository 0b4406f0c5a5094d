"""Draw a layer of the traces that `hf_distca.trace` wrote: what each rank's nano-batches compute
while their messages travel.

    python benchmarks/network/timeline.py FOLDER timeline.png

With --record, the traces are made first: two ranks on this machine, one long document against eight
short ones, ping-pong, and exchanges that take longer than they do here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from overlap import data_parallel, exchanges, step
from step_time import RANKS

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

COLORS = {
    "linear": "#9aa7b5",
    "server": "#2f6fb0",
    "pack": "#c7d3df",
    "unpack": "#c7d3df",
    "wait": "#d1495b",
    "dispatch": "#e9b44c",
    "return": "#7fb069",
}
NAMES = {
    "linear": "linear layers",
    "server": "attention tasks",
    "pack": "packing",
    "wait": "waiting",
}


def record(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    run = data_parallel(arguments, rank)
    for _ in range(2):
        step(run, "ping-pong", 0.0)
    with hf_distca.trace(arguments.folder), exchanges(0.0):
        step(run, "ping-pong", arguments.latency / 1e3)
    dist.barrier()
    dist.destroy_process_group()


def spans_of(path: Path, call: int) -> list[dict[str, Any]]:
    """Spans of one call of each nano-batch and of the linear work around it, with the lane's name,
    in milliseconds.
    """
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [
        {**event, **event["args"], "lane": lanes[event["tid"]]}
        for event in events
        if event["ph"] == "X"
    ]
    return [span for span in spans if span["call"] == call]


def draw(arguments: argparse.Namespace) -> None:
    paths = sorted(arguments.folder.glob("rank_*.json"))
    figure, axes = plt.subplots(
        len(paths), 2, figsize=(13, 2.1 * len(paths) + 0.8), squeeze=False, sharey=True
    )
    lanes = [f"nano-batch {nano}{what}" for nano in (1, 2) for what in ("", ", messages")]
    for path, row in zip(paths, axes, strict=True):
        for direction, axis in zip(("forward", "backward"), row, strict=True):
            spans = [
                span
                for span in spans_of(path, arguments.call)
                if span["direction"] == direction and span["lane"] in lanes
            ]
            if not spans:
                sys.exit(
                    f"{path}: no nano-batches in call {arguments.call}, {direction}: the plan moved"
                    " nothing, try more tokens."
                )
            origin = min(span["ts"] for span in spans)
            for span in spans:
                lane = lanes.index(span["lane"])
                thin = "messages" in span["lane"]
                place = {"y": lane, "height": 0.45 if thin else 0.8}
                axis.barh(
                    width=span["dur"] / 1e3,
                    left=(span["ts"] - origin) / 1e3,
                    color=COLORS[span["name"]],
                    **place,
                )
            axis.set_title(f"{path.stem.replace('_', ' ')}, {direction}", fontsize=10, loc="left")
            axis.set_yticks(range(len(lanes)), lanes, fontsize=8)
            axis.set_ylim(len(lanes) - 0.4, -0.6)
            axis.set_xlabel("milliseconds", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(color=COLORS[name], label=NAMES.get(name, name))
        for name in COLORS
        if name != "unpack"
    ]
    figure.legend(
        handles=handles, loc="upper center", ncols=len(handles), fontsize=9, frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(arguments.picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with rank_*.json")
    parser.add_argument("picture", type=Path, help="image to write")
    parser.add_argument(
        "--call",
        type=int,
        default=2,
        help="call of core attention, 1 for the first (default: %(default)s)",
    )
    parser.add_argument("--record", action="store_true", help="make the traces first")
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help="for --record: tokens a rank (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=3, help="for --record: decoder layers (default: %(default)s)"
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=4,
        help="for --record: query heads of 64; half as many key/value heads",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=50.0,
        help="for --record: milliseconds an exchange takes at least",
    )
    arguments = parser.parse_args()
    if arguments.record:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        mp.spawn(record, (arguments,), nprocs=RANKS)
    if not list(arguments.folder.glob("rank_*.json")):
        parser.error(
            f"no rank_*.json in {arguments.folder}: record them with hf_distca.trace, or use"
            " --record"
        )
    draw(arguments)


if __name__ == "__main__":
    main()
