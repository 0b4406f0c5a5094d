"""Where a pool of attention servers pays: devices that own no tokens against the same devices all
training, predicted.

    python benchmarks/simulated/pool.py --json

Every row compares steps with the same documents. In place, all devices train and serve. In a pool,
some devices only serve, and the others hold all tokens. Both are simulated layer by layer
(`simulated_pool`), in one stream and in ping-pong, the pool with plans that count none, a quarter,
half or three quarters of the trainers' linear layers. What is fastest and fits in memory counts.
Between nodes a device sends 37 GB/s. Five tables:

- alike: 64 equal devices, Llama-3-8B, FSDP2, selective checkpointing, rates of kernels from the
  shipped profiles.
- paper: the settings of arXiv 2510.18121 without pipelines, H200, tensor parallelism of 8.
- longest: one document of 2M tokens, the others of 2K; full checkpointing.
- spare: 64 devices that train, and more that may serve, or train, too.
- unlike: some devices are slower. They train with as many tokens as the others or with fewer, or
  they serve, or are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.schedule.layout import IntArray
from hf_distca.tools.advise.document_lengths import DocumentSource, find_distribution, from_list
from ideal import ideal_seconds
from machine import describe
from output import add_json_option, put_out
from paper_table import PAPER, arrangements
from simulated_pool import COUNTED, Devices, Servers, pooled
from simulator.hardware import Hardware, find_hardware
from simulator.loader_rules import draw_steps
from simulator.model_shape import find_model
from simulator.predict import estimate_linear_seconds, predict_step
from simulator.setting import Setting
from simulator.strategies import Strategy

K = 1024
RANKS = 64
# Web text as it comes: mean and standard deviation of the logarithms of the list "wlbllm" of
# hao-ai-lab/DistCA, commit 2afd219.
WEB = "lognormal:2449:1.06"
LENGTHS = {"pretrain": "pretrain", "prolong": "prolong", "web": WEB}
KERNELS = {
    "h100 FA2": ("h100", "flash_attn_2"),
    "h100 FA3": ("h100", "flash_attn_3"),
    "b200 FA4": ("b200", None),
}
CONTEXTS = ((128 * K, 32 * K), (512 * K, 64 * K))  # longest document, and tokens of a rank
POOLS = (Servers(8), Servers(8, each_node=True), Servers(16), Servers(32))
SPARE = (8, 16, 32, 64)
UNLIKE = (
    ("h100 FA3", "a100", 8),
    ("h100 FA3", "a100", 32),
    ("b200 FA4", "h100 FA3", 8),
    ("b200 FA4", "h100 FA3", 32),
)
Batches = Sequence[Sequence[IntArray]]


class Way(NamedTuple):
    """A way to run the devices of a setting, and its figures, means over steps."""

    step_seconds: float
    idle_share: float
    exposed_share: float
    between_bytes: float
    peak_bytes: float
    fits: bool


def hardware(name: str) -> Hardware:
    return find_hardware(*KERNELS.get(name, (name, None)))


def arranged(device: Hardware, tokens: int, ranks: int = RANKS) -> Setting:
    return Setting(find_model("llama-3-8b"), device, ranks, tokens, checkpointing="selective")


def way(
    settings: Sequence[Setting],
    steps: Batches,
    devices_of: Callable[[Setting], Devices],
    counted: Any = COUNTED,
) -> Way:
    """The fastest arrangement, in one stream or in ping-pong, that fits in memory."""
    return min(
        (
            _way(setting, steps, devices_of, ping_pong, counted)
            for setting in settings
            for ping_pong in (False, True)
        ),
        key=lambda found: (not found.fits, found.step_seconds),
    )


def _way(
    setting: Setting,
    steps: Batches,
    devices_of: Callable[[Setting], Devices],
    ping_pong: bool,
    counted: Any,
) -> Way:
    strategy = Strategy(
        "pooled",
        "",
        partial(pooled, devices_of, ping_pong, counted=counted),
        "",
        disaggregated=True,
    )
    found = [
        step for batches in steps if (step := predict_step(setting, batches, strategy)) is not None
    ]

    def mean(name: str) -> float:
        return float(np.mean([getattr(step, name) for step in found]))

    return Way(
        *(
            mean(name)
            for name in (
                "step_seconds",
                "idle_share",
                "exposed_share",
                "between_bytes",
                "peak_bytes",
            )
        ),
        fits=all(step.fits for step in found),
    )


def attention_share(setting: Setting, steps: Batches) -> tuple[float, float]:
    """Seconds of a step in which all devices have equal parts of all work, and the part of them
    that is attention.
    """
    ideal = float(np.mean([ideal_seconds(setting, batches) for batches in steps]))
    seconds = [
        sum(float(setting.make_cost_model().estimate_seconds(n, n).sum()) for n in batches)
        for batches in steps
    ]
    return (
        ideal,
        float(np.mean(seconds)) * setting.model.layers / (setting.group * setting.stages) / ideal,
    )


def compared(
    settings: Sequence[Setting], documents: DocumentSource, batches: int, pools: Sequence[Servers]
) -> dict[str, Any]:
    """A setting in place, and with each pool."""

    def steps(setting: Setting) -> Batches:
        return list(draw_steps(documents, setting.tokens, setting.micro_batches, batches))

    def best(devices_of: Callable[[Setting], Devices]) -> Way:
        found = [way([one], steps(one), devices_of) for one in settings]
        return min(found, key=lambda one: (not one.fits, one.step_seconds))

    # With and without checkpointing; the lesser ideal is the one that counts.
    ideal, share = min(attention_share(setting, steps(setting)) for setting in settings)
    place = best(Devices.all_training)
    return {
        "attention_share": share,
        "ideal_seconds": ideal,
        "in_place": place._asdict(),
        "pools": [
            {
                "servers": servers.count,
                "each_node": servers.each_node,
                **(found := best(partial(Devices.with_servers, servers)))._asdict(),
                "over_in_place": found.step_seconds / place.step_seconds,
            }
            for servers in pools
        ],
    }


def alike(kernel: str, lengths: str, longest: int, tokens: int, batches: int) -> dict[str, Any]:
    found = compared(
        [arranged(hardware(kernel), tokens)],
        find_distribution(LENGTHS[lengths], longest),
        batches,
        POOLS,
    )
    return {"table": "alike", "kernel": kernel, "lengths": lengths, "longest": longest, **found}


def paper(number: int, lengths: str, batches: int) -> dict[str, Any]:
    row = PAPER[number]
    pools = [Servers(part) for part in (row.gpus // 8, row.gpus // 4)]
    found = compared(
        arrangements(row, stages=False),
        find_distribution(LENGTHS[lengths], row.longest),
        batches,
        pools,
    )
    return {"table": "paper", **row._asdict(), "lengths": lengths, **found}


def longest(kernel: str) -> dict[str, Any]:
    setting = replace(arranged(hardware(kernel), 64 * K), checkpointing="full")
    lengths = [2048 * K, *[2 * K] * ((setting.tokens - 2048 * K) // (2 * K))]
    found = compared([setting], from_list(lengths, "one of 2M, others of 2K"), 1, POOLS)
    return {"table": "longest", "kernel": kernel, **found}


def spare(kernel: str, lengths: str, longest: int, tokens: int, batches: int) -> dict[str, Any]:
    """As many documents as the devices that train hold, on more devices."""
    setting = arranged(hardware(kernel), tokens)
    steps = list(
        draw_steps(find_distribution(LENGTHS[lengths], longest), setting.tokens, 1, batches)
    )
    alone, rows = way([setting], steps, Devices.all_training).step_seconds, []
    for more in SPARE:
        wider, serve = (
            replace(setting, ranks=RANKS + more),
            partial(Devices.with_servers, Servers(more)),
        )
        serving, training = (
            way([wider], steps, devices_of).step_seconds
            for devices_of in (serve, Devices.all_training)
        )
        rows.append(
            {"more": more, "serving_speedup": alone / serving, "training_speedup": alone / training}
        )
    return {
        "table": "spare",
        "kernel": kernel,
        "lengths": lengths,
        "longest": longest,
        "alone_seconds": alone,
        "devices": rows,
    }


def unlike(
    names: tuple[str, str, int], lengths: str, longest: int, tokens: int, batches: int
) -> dict[str, Any]:
    """Some of 64 devices are of a slower kind."""
    fast, slow, many = names
    setting = arranged(hardware(fast), tokens)
    other = replace(setting, hardware=hardware(slow))
    steps = list(
        draw_steps(find_distribution(LENGTHS[lengths], longest), setting.tokens, 1, batches)
    )
    documents = np.concatenate([n for step in steps for n in step])
    attention = float(
        setting.make_cost_model().estimate_seconds(documents, documents).sum()
        / other.make_cost_model().estimate_seconds(documents, documents).sum()
    )
    held = np.full(1, float(tokens))
    linear = float(
        estimate_linear_seconds(setting, held).sum() / estimate_linear_seconds(other, held).sum()
    )
    slower = np.arange(RANKS) >= RANKS - many

    def devices(tokens_of_slower: float, _: Setting) -> Devices:
        return Devices(
            np.where(slower, tokens_of_slower, 1.0),
            np.where(slower, linear, 1.0),
            np.where(slower, attention, 1.0),
        )

    ways = {
        "left_out": ([replace(setting, ranks=RANKS - many)], Devices.all_training, COUNTED),
        "equal_tokens": ([setting], partial(devices, 1.0), (0.0,)),
        "equal_tokens_counted": ([setting], partial(devices, 1.0), COUNTED),
        "tokens_by_speed": ([setting], partial(devices, linear), COUNTED),
        "pool": ([setting], partial(devices, 0.0), COUNTED),
    }
    best = {
        name: way(settings, steps, of, counted) for name, (settings, of, counted) in ways.items()
    }
    return {
        "table": "unlike",
        "fast": fast,
        "slow": slow,
        "slower_devices": many,
        "attention_speed": attention,
        "linear_speed": linear,
        "lengths": lengths,
        "longest": longest,
        "seconds": {name: step.step_seconds for name, step in best.items()},
        "fits": {name: step.fits for name, step in best.items()},
    }


def _reaches(lengths: str, longest: int) -> bool:
    """Whether some documents are about so long: of web text hardly any is longer than 128K,
    whatever the bound is.
    """
    return lengths != "web" or longest == CONTEXTS[0][0]


def cases(tables: Sequence[str], batches: int, rows: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Functions with their arguments, in the order of tables."""
    each = [(lengths, *context, batches) for context in CONTEXTS for lengths in LENGTHS]
    everything = {
        "alike": [(alike, kernel, *case) for kernel in KERNELS for case in each],
        "paper": [
            (paper, row, lengths, batches)
            for row in rows
            for lengths in LENGTHS
            if _reaches(lengths, PAPER[row].longest)
        ],
        "longest": [(longest, kernel) for kernel in KERNELS],
        "spare": [(spare, "h100 FA3", *case) for case in each],
        "unlike": [(unlike, names, *case) for names in UNLIKE for case in each],
    }
    for table in tables:
        yield from everything[table]


def measure(tables: Sequence[str], batches: int, rows: Sequence[int], jobs: int) -> dict[str, Any]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: list[Future[dict[str, Any]]] = [
            pool.submit(*case) for case in cases(tables, batches, rows)
        ]
        rows_found = [future.result() for future in tqdm(waiting, "settings", file=sys.stderr)]
    return {"machine": describe(), "batches": batches, "rows": rows_found}


def label(servers: int, each: bool) -> str:
    return f"{servers}{' of each' if each else ''}"


def compared_cells(row: dict[str, Any]) -> dict[str, str]:
    place, pools = row["in_place"], row["pools"]
    about = {
        "setting": f"{row['model']}, {row['gpus']}" if "gpus" in row else row["kernel"],
        "lengths": (
            f"{row['lengths']} to {row['longest'] // K}K" if "lengths" in row else "one of 2M"
        ),
        "attention": f"{row['attention_share']:.0%}",
        "ideal": f"{row['ideal_seconds']:.3f}",
        "in place": f"{place['step_seconds']:.3f}",
    }
    names = ("1/8", "1/8 of each node", "1/4", "1/2") if len(pools) == 4 else ("1/8", "1/4")
    factors = {
        name: f"{pool['over_in_place']:.3f}{'' if pool['fits'] else ' (full)'}"
        for name, pool in zip(names, pools, strict=True)
    }
    first = pools[0]

    def both(name: str, scale: float, unit: str) -> str:
        return f"{place[name] * scale:.0f} -> {first[name] * scale:.0f}{unit}"

    return {
        **about,
        **factors,
        "idle, 1/8": both("idle_share", 100, " %"),
        "between nodes": (
            f"{place['between_bytes'] / 1e12:.2f} -> {first['between_bytes'] / 1e12:.2f} TB"
        ),
        "memory": both("peak_bytes", 1e-9, " GB"),
    }


def spare_cells(row: dict[str, Any]) -> dict[str, str]:
    devices = {
        f"+{one['more']}": f"{one['serving_speedup']:.2f} | {one['training_speedup']:.2f}"
        for one in row["devices"]
    }
    return {
        "lengths": f"{row['lengths']} to {row['longest'] // K}K",
        "64 alone": f"{row['alone_seconds']:.3f}",
        **devices,
    }


def unlike_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "devices": (
            f"{RANKS - row['slower_devices']} {row['fast']} + {row['slower_devices']} {row['slow']}"
        ),
        "lengths": f"{row['lengths']} to {row['longest'] // K}K",
        **{
            name.replace("_", " "): f"{seconds:.3f}{'' if row['fits'][name] else ' (full)'}"
            for name, seconds in row["seconds"].items()
        },
    }


CELLS = {
    "alike": compared_cells,
    "paper": compared_cells,
    "longest": compared_cells,
    "spare": spare_cells,
    "unlike": unlike_cells,
}
TITLES = {
    "alike": (
        "64 equal devices: the pool's step over that in place, by the part of devices that serve"
    ),
    "paper": "the paper's settings without pipelines: the pool's step over that in place",
    "longest": "one document of 2M tokens: the pool's step over that in place",
    "spare": "speedup of 64 devices by more that serve | that train",
    "unlike": "seconds of a step on unlike devices",
}


def show(result: dict[str, Any]) -> None:
    for name, title in TITLES.items():
        rows = [CELLS[name](row) for row in result["rows"] if row["table"] == name]
        if rows:
            table = Table(title=title, title_justify="left")
            for column in rows[0]:
                table.add_column(column)
            for row in rows:
                table.add_row(*row.values())
            Console(width=190).print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """The pool's step over that in place by the part of devices that serve, and what to do with
    slower devices.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    colors = dict(zip(LENGTHS, ("#2f6fb0", "#d1495b", "#7fb069"), strict=True))
    for row in (
        row for row in result["rows"] if row["table"] == "alike" and row["kernel"] == "h100 FA3"
    ):
        pools = [pool for pool in row["pools"] if not pool["each_node"]]
        far = row["longest"] == CONTEXTS[-1][0]
        left.plot(
            [0, *(pool["servers"] / RANKS for pool in pools)],
            [1, *(pool["over_in_place"] for pool in pools)],
            *("o-" if far else "o--",),
            color=colors[row["lengths"]],
            label=(
                f"{row['lengths']} to {row['longest'] // K}K, attention"
                f" {row['attention_share']:.0%}"
            ),
        )
    left.axhline(1, color="#9aa7b5", linewidth=1)
    left.set(
        title="64 H100, flash-attention 3: step with a pool / step in place",
        xlabel="part of the devices that only serve",
    )
    left.legend(frameon=False, fontsize=8)
    rows = [
        row
        for row in result["rows"]
        if row["table"] == "unlike"
        and row["lengths"] == "pretrain"
        and row["longest"] == CONTEXTS[0][0]
    ]
    names = ("left_out", "equal_tokens", "tokens_by_speed", "pool")
    shades = ("#9aa7b5", "#e9b44c", "#7fa7d1", "#2f6fb0")
    for place, (name, color) in enumerate(zip(names, shades, strict=True)):
        values = [row["seconds"][name] / row["seconds"]["tokens_by_speed"] for row in rows]
        right.bar(
            np.arange(len(rows)) + (place - 1.5) / 5,
            values,
            0.19,
            color=color,
            label=name.replace("_", " "),
        )
    right.set_xticks(
        range(len(rows)),
        [
            f"{RANKS - row['slower_devices']} {row['fast']}\n+ {row['slower_devices']}"
            f" {row['slow']}"
            for row in rows
        ],
    )
    right.set(title="unlike devices, pretrain to 128K: step / step with tokens by speed")
    right.tick_params(axis="x", labelsize=8)
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e3e7ec")
        axis.set_axisbelow(True)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables", nargs="+", choices=list(TITLES), default=list(TITLES), help="what is compared"
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=2,
        help="global batches of each setting (default: %(default)s)",
    )
    alone = [number for number, row in enumerate(PAPER) if not row.pipeline]
    parser.add_argument(
        "--rows", type=int, nargs="+", default=alone, help="settings of the paper, from 0"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="processes that predict (default: one for each core)",
    )
    parser.add_argument("--picture", type=Path, help="draw the tables of alike and unlike devices")
    add_json_option(parser)
    arguments = parser.parse_args()
    result = measure(arguments.tables, arguments.batches, arguments.rows, arguments.jobs)
    put_out(result, arguments.json, show)
    if arguments.picture:
        draw(result, arguments.picture)


if __name__ == "__main__":
    main()
