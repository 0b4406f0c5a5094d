"""Shipped profiles of GPUs against timings, published and our own, cell by cell: those that they
are fitted to, and others.

    python benchmarks/simulated/published_timings.py --json
    python benchmarks/simulated/published_timings.py --write benchmarks/simulated/profiles

The second command fits them anew.

A call of a kernel takes ``max(least, call + bytes / rate + flops / rate)`` seconds, bytes and flops
as in `schedule.cost`, and no byte comes faster than the data sheet of the memory says. Of all rates
that are within our bound of every timing that they are fitted to, a profile has those with the
least squares of errors. Fitted to: single causal sequences of 1K to 32K tokens, and packed rows of
1K (which show the launch), 4K and 16K. Kept aside: packed rows of other lengths, and all timings by
others. Packed documents and single ones differ in tiles, bytes and flops alone. With ``--profiles``
it also reads a folder with ``attention_forward_fa2_h100_packed.psv`` of hao-ai-lab/DistCA: equal
documents of 32K tokens in all, down to 32 tokens each.

Our own are of an H100: whole documents, and batches of slices of 128 rows and more. Every second
one is fitted to, the others are kept aside. With FlashAttention 4, NVIDIA's of an H200 are fitted
to as well: its bytes come as much faster as its memory is. One slice alone in its call leaves part
of the GPU idle, which the model has no term for, and in calls of less than half a millisecond the
host was timed: these timings are shown apart, and neither fitted to nor among the errors.

What a call takes besides its tasks is what the GPU waits for the host, so it depends on how calls
are timed. MagiAttention's program asks the driver for the memory in use between the two events of a
call (magi_attention/benchmarking/bench.py): the GPU waits in each. That of flash-attention 2 issues
30 calls, and waits once (benchmarks/benchmark_flash_attention.py). In triton's do_bench, by which
flash-attention 3 and 4 are timed, the GPU has other work while the host issues a call, and so it
has in ours.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.optimize import NonlinearConstraint, minimize

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.schedule.cost import AttentionShape, CostModel, count_causal_pairs
from machine import describe
from output import add_json_option, put_out
from packed_documents import SOURCE as PACKED_SOURCE
from packed_documents import packed_rows
from simulator.fits import FittedCost, add_call_overhead
from simulator.hardware import REACHED, find_hardware
from simulator.profiles import ExchangeRates, KernelRates, Profile

Counts = npt.NDArray[np.float64]
Costs = tuple[FittedCost, FittedCost]  # forward and backward
Bounds = Sequence[tuple[float | None, float | None]]
K = 1024
DRAWN = 200  # packed rows of each length
FITTED_PACKED = (K, 4 * K, 16 * K)
GQA, MHA, DISTCA = (
    AttentionShape(64, 8, 128, 128, 2),
    AttentionShape(16, 16, 128, 128, 2),
    AttentionShape(64, 4, 128, 128, 2),
)
MAGI = (
    "SandAI-org/MagiAttention, commit 2c641357, docs/source/blog/cp_benchmark.md, kernel level:"
    " read off the charts, +-3 %"
)
FLASH = "Dao-AILab/flash-attention, commit 0251105a, assets: hidden size 2048, 16K tokens in all"
LENGTHS = [2**n * K for n in range(6)]
SHORTER = [2**n * K // 2 for n in range(6)]  # those of flash-attention's charts
# TFLOP/s forward and backward, of one causal sequence and of packed rows, by length of the whole.
# None: not published.
CHARTS: dict[str, dict[str, tuple[list[int], list[int] | None]]] = {
    "h100_flash_attn_2": {
        "single": ([187, 271, 328, 352, 363, 366], [141, 209, 266, 302, 323, 330]),
        "packed": ([46, 147, 228, 303, 331, 344], [48, 95, 150, 205, 241, 263]),
    },
    "h100_flash_attn_3": {
        "single": ([282, 584, 663, 657, 672, 680], [208, 353, 462, 518, 562, 586]),
        "packed": ([60, 218, 357, 483, 543, 584], [53, 114, 205, 318, 375, 425]),
    },
    "b200_flash_attn_4": {
        "single": ([100, 397, 1333, 1377, 1367, 1390], [75, 247, 611, 938, 1032, 1091]),
        "packed": ([20, 78, 290, 838, 1022, 1080], None),
    },
}
# Charts of flash-attention: equal sequences of each of `SHORTER`, 16K tokens in all.
EQUAL = (
    ("h100_flash_attn_2", "forward", "causal", [191, 260, 298, 319, 333, 335]),
    ("h100_flash_attn_2", "forward", "full", [309, 350, 362, 368, 370, 370]),
    ("h100_flash_attn_2", "both", "causal", [163, 221, 265, 294, 308, 328]),
    ("h100_flash_attn_3", "forward", "causal", [292, 423, 521, 579, 602, 616]),
    ("h100_flash_attn_3", "forward", "full", [467, 565, 625, 638, 646, 648]),
    ("a100_flash_attn_2", "both", "causal", [99, 133, 155, 173, 182, 189]),
    ("a100_flash_attn_2", "both", "full", [151, 173, 187, 196, 201, 203]),
)
# Four causal sequences of 8K, 16 heads: dense, and the same as varlen; backward without and with
# pairs of SMs, varlen.
FA4 = "FA#2150, #2280"  # pull requests of Dao-AILab/flash-attention
FA4_FORWARD = (("dense", 1418), ("varlen", 1388))
FA4_BACKWARD = (("dense", 1123), ("dense, 2 CTAs", 1208), ("varlen", 1081))


# NVIDIA's of an H200: two causal sequences of each length, 64 query heads, 8 key heads (cuDNN front
# end, llama3.1, 2026-09-28).
H200 = {
    2 * K: (522, 446),
    4 * K: (619, 558),
    8 * K: (675, 629),
    16 * K: (702, 606),
    32 * K: (638, 610),
}
NVIDIA_H200 = (
    "NVIDIA/cudnn-frontend,"
    " benchmark/attention_training/results/llama3.1/h200/llama3.1_20260928_130009.csv"
)
# Ours, of one H100 (80 GB HBM3, 700 W) on 2026-11-26 with torch 2.11: 32 query heads, 8 key heads
# of 128, bfloat16. Whole documents of a length, 16K tokens or one of them in all; slices of so many
# rows behind 8K others, 16K rows in all; one slice alone with 64K keys; and so many equal tasks of
# rows and keys. Batches of rows that are no whole tiles, which plans cut at the ends of documents
# only, are shown only: backward has other tiles than forward. Left out are slices of fewer rows.
OURS = (
    "one H100 80GB HBM3, 2026-11-26, torch 2.11, flash-attn-4 4.0.0b36: every second of whole"
    " documents and batches of slices"
)
LLAMA = AttentionShape(32, 8, 128, 128, 2)
WHOLE = {
    "h100_flash_attn_2": {
        2 * K: (281, 199),
        8 * K: (338, 285),
        32 * K: (343, 322),
        64 * K: (354, 324),
    },
    "h100_flash_attn_4": {
        2 * K: (500, 378),
        8 * K: (656, 557),
        32 * K: (686, 599),
        64 * K: (645, 605),
    },
}
SLICES = {
    "h100_flash_attn_2": (
        [301, 342, 357, 335, 338, 332, 345, 330],
        [146, 201, 245, 282, 291, 298, 312, 307],
    ),
    "h100_flash_attn_4": (
        [623, 650, 656, 662, 631, 669, 633, 650],
        [180, 283, 384, 473, 543, 538, 537, 581],
    ),
}
ALONE = {
    "h100_flash_attn_2": (
        [74, 146, 293, 357, 343, 336, 344, 333],
        [154, 204, 256, 288, 292, 314, 310, 314],
    ),
    "h100_flash_attn_4": (
        [193, 381, 702, 679, 660, 640, 579, 660],
        [111, 200, 336, 448, 541, 564, 572, 607],
    ),
}
BATCHES = {
    (32, 512, 1536): (306, 208),
    (15, 1024, 66560): (354, 274),
    (8, 2048, 3072): (324, 253),
    (1, 32768, 40960): (352, 312),
    (15, 128, 65664): (334, 149),
    (2, 8192, 16384): (335, 315),
    (7, 192, 131264): (212, 184),
    (1, 65536, 68608): (338, 318),
    (7, 1536, 132608): (332, 296),
    (4, 4096, 4096): (319, 257),
    (128, 128, 128): (76, 40),
    (32, 512, 512): (146, 124),
}
ROWS = [128 * 2**n for n in range(8)]
FITTED = (*CHARTS, "h100_flash_attn_4")  # profiles, but that of A100
# How often bytes of rows count in backward. Flash-attention 2 adds up dq in float32: one kernel
# reads o and do and clears it, and another one reads it and writes dq, which makes 7 of the 4 that
# are counted. 3 and 4 add up dk and dv in float32, too, so bytes of rows and of keys are as much
# more.
PASSES = {"flash_attn_2": 7 / 4}
HOST_SECONDS = 5e-4  # in calls of ours that took less, the host was timed
LARGEST = 0.0995  # error of a timing that is fitted to: our bound is 10 %


class Cell(NamedTuple):
    """A published figure, or one of ours.

    Attributes:
        profile, direction: which kernel; "both" for forward and backward together.
        timing, tokens: what was timed, in words, and tokens of a row, or of a sequence where they
            are equal.
        fitted: whether the profile is fitted to it; None if it is shown only.
        tflops: published, in 10**12 flops a second.
        counts: columns bytes of rows, of keys, flops, and flops of seen pairs of drawn calls,
            forward and backward: shape (2, calls, 4).
        in_a_row: calls that are timed together, of which the first waits for the host; 0 where none
            does.
    """

    profile: str
    direction: str
    timing: str
    tokens: int
    fitted: bool | None
    tflops: float
    counts: Counts
    in_a_row: int = 0

    @property
    def ways(self) -> list[int]:
        """Directions that were timed together: 0 is forward, 1 is backward."""
        return {"forward": [0], "backward": [1], "both": [0, 1]}[self.direction]

    @property
    def seconds(self) -> float:
        """Of a mean call."""
        return float(self.counts[self.ways, :, 3].sum(axis=0).mean()) / self.tflops / 1e12

    def modelled(self, costs: Sequence[FittedCost]) -> float:
        """Seconds of a mean call, by what a kernel costs forward and backward."""
        taken = 0.0
        for way in self.ways:
            cost = costs[way]
            rows, keys, flops, _ = self.counts[way].T
            seconds = (
                rows * cost.row_passes + keys
            ) / cost.bytes_per_second + flops / cost.flops_per_second
            taken += float(
                (
                    add_call_overhead(cost, seconds * self.in_a_row) / self.in_a_row
                    if self.in_a_row
                    else seconds
                ).mean()
            )
        return taken

    def error(self, costs: Sequence[FittedCost]) -> float:
        """Modelled over published seconds, less one."""
        return self.modelled(costs) / self.seconds - 1


def counts(
    shape: AttentionShape,
    rows: npt.ArrayLike,
    keys: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
) -> Counts:
    """A call for tasks of so many rows and keys, or for whole sequences, as `Cell.counts`: shape
    (2, 1, 4).
    """
    n, m = np.asarray(rows), np.asarray(rows if keys is None else keys)
    _, moved, flops = CostModel.make_analytic(shape).count_work(n, m).sum(axis=1).T
    own = n.sum() * shape.row_bytes * np.array([1.0, 2.0])
    seen = (
        (count_causal_pairs(n, m) if causal else n.astype(np.float64) * m).sum()
        * shape.pair_flops
        * np.array([1, 2.5])
    )
    return np.stack([own, moved - own, flops if causal else seen, seen], axis=1)[:, None]


@cache
def packed_counts(tokens: int) -> Counts:
    return np.concatenate([counts(GQA, row) for row in packed_rows(tokens, DRAWN)], axis=1)


def chart_cells() -> list[Cell]:
    cells = []
    for (profile, kinds), (kind, n) in product(
        CHARTS.items(), product(("single", "packed"), range(6))
    ):
        tokens = LENGTHS[n]
        drawn = counts(GQA, [tokens]) if kind == "single" else packed_counts(tokens)
        for direction, figures in zip(("forward", "backward"), kinds[kind], strict=True):
            if figures is not None:
                fitted = kind == "single" or tokens in FITTED_PACKED
                cells.append(
                    Cell(profile, direction, kind, tokens, fitted, figures[n], drawn, in_a_row=1)
                )
    return cells


def other_cells(folder: Path | None) -> list[Cell]:
    cells = []
    for profile, direction, mask, figures in EQUAL:
        for n, (length, tflops) in enumerate(zip(SHORTER, figures, strict=True)):
            fitted = profile.startswith("a100") and mask == "causal" and n % 2 == 0
            row = counts(MHA, np.full(16 * K // length, length), causal=mask == "causal")
            cells.append(
                Cell(
                    profile,
                    direction,
                    f"equal, {mask}",
                    length,
                    fitted,
                    tflops,
                    row,
                    30 * profile.endswith("2"),
                )
            )
    four = counts(MHA, np.full(4, 8 * K))
    for direction, figures in (("forward", FA4_FORWARD), ("backward", FA4_BACKWARD)):
        cells += [
            Cell("b200_flash_attn_4", direction, f"{FA4}: {what}", 8 * K, False, tflops, four)
            for what, tflops in figures
        ]
    if folder is not None:
        with (folder / "attention_forward_fa2_h100_packed.psv").open() as lines:
            for row in (
                row for row in csv.DictReader(lines, delimiter="|") if row["cp"] == row["tp"] == "1"
            ):
                number, total = int(row["batch_size"]), int(row["total_len"])
                drawn = counts(DISTCA, np.full(number, total // number))
                tflops = float(drawn[0, 0, 3]) / float(row["total_latency(ms)"]) * 1e3 / 1e12
                cells.append(
                    Cell(
                        "h100_flash_attn_2",
                        "forward",
                        "equal, DistCA",
                        total // number,
                        False,
                        tflops,
                        drawn,
                    )
                )
    return cells


def our_cells() -> list[Cell]:
    """Those of an H100, and of an H200; every second of ours is fitted to."""
    cells = []

    def add(
        profile: str,
        timing: str,
        tasks: tuple[int, int, int],
        fitted: bool | None,
        figures: Sequence[int],
    ) -> None:
        shape = LLAMA if timing != "H200" else GQA
        drawn = counts(shape, np.full(tasks[0], tasks[1]), np.full(tasks[0], tasks[2]))
        if timing == "H200":  # as the simulator has it
            drawn[..., :2] *= memory_rate("h100") / memory_rate("h200")
        for direction, tflops in zip(("forward", "backward"), figures, strict=True):
            cell = Cell(profile, direction, timing, tasks[1], fitted, tflops, drawn)
            waits = shape is LLAMA and cell.seconds < HOST_SECONDS
            cells.append(cell._replace(fitted=None) if waits else cell)

    for profile, whole in WHOLE.items():
        for place, (length, figures) in enumerate(whole.items()):
            add(
                profile,
                "ours, whole",
                (max(1, 16 * K // length), length, length),
                place % 2 == 0,
                figures,
            )
        for place, (rows, *figures) in enumerate(zip(ROWS, *SLICES[profile], strict=True)):
            add(
                profile,
                "ours, slices",
                (16 * K // rows, rows, rows + 8 * K),
                place % 2 == 0,
                figures,
            )
        for rows, *figures in zip(ROWS, *ALONE[profile], strict=True):
            add(profile, "ours, alone", (1, rows, 64 * K), None, figures)
    for place, (tasks, figures) in enumerate(BATCHES.items()):
        add(
            "h100_flash_attn_2",
            "ours, batches",
            tasks,
            None if tasks[1] % 128 else place % 2 == 0,
            figures,
        )
    for length, figures in H200.items():
        add("h100_flash_attn_4", "H200", (2, length, length), True, figures)
    return cells


def memory_rate(device: str) -> float:
    """Of the data sheet, in bytes a second."""
    return find_hardware(device).memory_rate / REACHED


def fit(
    cells: list[Cell],
    starts: Iterable[Sequence[float]],
    of: Callable[[Sequence[float]], Costs],
    free: Bounds,
) -> Costs:
    """The costs with the least squares of errors of which none is larger than `LARGEST`.

    Args:
        cells: what they are fitted to.
        starts: numbers to begin with.
        of: makes costs of numbers.
        free: least and most of each number.

    Raises:
        ValueError: if there are no such costs.
    """

    def errors(numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        costs = of(numbers)
        return np.array([cell.error(costs) for cell in cells])

    def squares(numbers: Sequence[float]) -> float:
        return float(np.square(errors(numbers)).sum())

    within = NonlinearConstraint(errors, -LARGEST, LARGEST)
    ends = [
        minimize(squares, start, method="SLSQP", bounds=free, constraints=within)
        for start in starts
    ]
    found = [end for end in ends if end.success]
    if not found:
        raise ValueError(
            f"{cells[0].profile}: no rates are within {LARGEST:.2%} of all {len(cells)} timings:"
            f" {ends}"
        )
    return of(min(found, key=lambda end: end.fun).x)


def fit_direction(cells: list[Cell]) -> FittedCost:
    """One direction of a kernel. No byte comes faster than the data sheet of the memory says; only
    calls in a row wait.
    """
    device, kernel = cells[0].profile.split("_", 1)
    passes = PASSES.get(kernel, 1.0) if cells[0].ways == [1] else 1.0

    def of(numbers: Sequence[float]) -> Costs:
        # Seconds of 10**12 bytes and of 10**15 flops, and 10 us each.
        byte, flop, call, least = map(float, numbers)
        return (FittedCost(0.0, 1e12 / byte, 1e15 / flop, passes, call / 1e5, least / 1e5),) * 2

    byte, flop = 1e12 / memory_rate(device), 1e3 / max(cell.tflops for cell in cells)
    waiting = [1e5 * cell.seconds for cell in cells if cell.in_a_row]
    shortest, most = (min(waiting), None) if waiting else (0.0, 0.0)
    starts = [(byte, flop, 0, part * shortest) for part in (0, 0.75, 1)]
    cost, _ = fit(cells, starts, of, [(byte, None), (flop / 2, None), (0, most), (0, most)])
    return replace(
        cost, call_seconds=round(cost.call_seconds, 9), least_seconds=round(cost.least_seconds, 9)
    )


def fit_scaled(cells: list[Cell], rates: KernelRates) -> Costs:
    """Those of another device: bytes of both directions are slower by one factor, or as memory is,
    and flops by another.
    """
    memory = memory_rate(cells[0].profile.partition("_")[0])

    def of(numbers: Sequence[float]) -> Costs:
        byte, flop = map(float, numbers)

        def slower(cost: FittedCost) -> FittedCost:
            bytes_per_second = min(cost.bytes_per_second / byte, memory)
            return replace(
                cost,
                bytes_per_second=bytes_per_second,
                flops_per_second=cost.flops_per_second / flop,
            )

        return slower(rates.forward), slower(rates.backward)

    return fit(cells, [(1.0, 2.0)], of, [(0.1, None), (0.1, None)])


def fitted(cells: list[Cell]) -> dict[str, KernelRates]:
    """The rates of each profile."""
    found = {}
    for profile in (*FITTED, "a100_flash_attn_2"):
        mine = [cell for cell in cells if cell.profile == profile and cell.fitted]
        if profile in FITTED:
            directions = [
                fit_direction([cell for cell in mine if cell.ways == [way]]) for way in (0, 1)
            ]
        else:
            directions = fit_scaled(mine, found["h100_flash_attn_2"])
        found[profile] = KernelRates(profile.partition("_")[2], 2, 128, 128, *directions)
        others = [cell for cell in cells if cell.profile == profile and cell.fitted is False]
        rates = found[profile]
        errors = {**dict(summary(rates, mine, "fitted_")), **dict(summary(rates, others, ""))}
        found[profile] = replace(rates, errors=errors, fitted=len(mine), kept_aside=len(others))
    return found


def summary(rates: KernelRates, cells: list[Cell], which: str) -> Iterable[tuple[str, float]]:
    """Median, 90th percentile and largest size of errors in each direction; timings of both
    together count in both.
    """
    for way, direction in enumerate(("forward", "backward")):
        sizes = [
            abs(cell.error((rates.forward, rates.backward))) for cell in cells if way in cell.ways
        ]
        yield f"{which}{direction}_median", round(statistics.median(sizes), 4)
        yield f"{which}{direction}_90", round(float(np.percentile(sizes, 90)), 4)
        yield f"{which}{direction}_largest", round(max(sizes), 4)


NVIDIA = "NVIDIA GTC25 S72583 (in stas00/ml-engineering, network)"
FIXED = (
    "fixed seconds: NVIDIA/nccl issue 1531, all-to-all of 8 MiB over 64 H800 in 338 us, where 30 us"
    " and the bytes make 228"
)
PEER_SECONDS = (338e-6 - 30e-6 - 2**23 * 56 / 64 / 3.7e10) / 63
# Bytes a second inside a node and between nodes, and where they come from.
LINKS = {
    "a100": (
        2.1e11,
        1.8e10,
        f"{NVIDIA}: all-to-all bus of 8 GPUs 210 GB/s, of 32 24 GB/s, of which 3/4 leaves a node",
    ),
    "h100": (
        3.0e11,
        3.7e10,
        (
            f"{NVIDIA}: all-to-all bus of 8 GPUs 320 GB/s; between nodes nccl-tests issue 130, 48"
            " GB/s of 4 nodes"
        ),
    ),
    "b200": (
        6.4e11,
        3.7e10,
        (
            f"{NVIDIA}: all-to-all bus of 8 GPUs 640 GB/s; between nodes ml-engineering, P6-B200"
            " over EFA"
        ),
    ),
}
PROCESSORS = {
    "a100": "NVIDIA A100 80GB SXM4",
    "h100": "NVIDIA H100 80GB SXM5 (also stands for H200)",
    "b200": "NVIDIA B200",
}


# Bus GB/s of an all-gather on 8 H200 by MiB, nccl-tests in hao-ai-lab/DistCA, commit 2afd219. None
# is fitted to.
GATHERS = {8: 97, 16: 167, 32: 236, 64: 284, 128: 331, 1024: 363, 8192: 368}


def link_cells() -> list[dict[str, float]]:
    """Seconds of these all-gathers by what the simulator takes for an H200."""
    hardware, cells = find_hardware("h200"), []
    for size, bus in GATHERS.items():
        moved = size * 2**20 * 7 / 8
        seconds = (
            moved / hardware.gather_rate + hardware.exchange_seconds + 7 * hardware.peer_seconds
        )
        cells.append(
            {
                "mebibytes": size,
                "published_seconds": moved / bus / 1e9,
                "error": seconds / (moved / bus / 1e9) - 1,
            }
        )
    return cells


def profile_of(name: str, rates: KernelRates) -> Profile:
    device = name.partition("_")[0]
    inside, between, source = LINKS[device]
    forward = "forward and backward apart"
    if device == "a100":
        forward = (
            "rates of h100_flash_attn_2, bytes and flops scaled: only forward and backward together"
            " are published"
        )
    kernel = (
        f"{FLASH}; {forward}"
        if device == "a100"
        else f"{MAGI}; {forward}; packed rows drawn from {PACKED_SOURCE}"
    )
    if name in WHOLE:
        kernel = f"{OURS}; {kernel if name in CHARTS else f'{NVIDIA_H200}; {forward}'}"
    return Profile(
        name=name,
        device="cuda",
        processor=PROCESSORS[device],
        date="2026-11-26" if name in WHOLE else "2026-11-25",
        versions={},
        made_by=(
            "python benchmarks/simulated/published_timings.py --write benchmarks/simulated/profiles"
        ),
        kernels=(rates,),
        inside=ExchangeRates(inside, 3e-5, 8, peer_seconds=PEER_SECONDS),
        between=ExchangeRates(between, 3e-5, 32, peer_seconds=PEER_SECONDS),
        sources={"kernel": kernel, "links": f"{source}; {FIXED}"},
    )


def show(result: dict[str, Any]) -> None:
    table = Table(title="modelled over published seconds, less one")
    for column in ("profile", "direction", "timing", "by length"):
        table.add_column(column)
    rows: dict[tuple[str, ...], list[str]] = {}
    for cell in result["cells"]:
        key = (cell["profile"], cell["direction"], cell["timing"])
        mark = {True: "*", False: "", None: "-"}[cell["fitted"]]
        rows.setdefault(key, []).append(f"{cell['error']:+.0%}{mark}")
    for key, errors in rows.items():
        table.add_row(*key, " ".join(errors))
    Console(width=140).print(table)
    print(
        "all-gathers on 8 H200, MiB:",
        ", ".join(f"{cell['mebibytes']} {cell['error']:+.0%}" for cell in result["links"]),
    )
    print("* fitted to, - shown only. Errors of those fitted to, and of the others:")
    for name, found in result["profiles"].items():
        print(name, found["errors"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=Path, help="folder of the timings of hao-ai-lab/DistCA")
    parser.add_argument(
        "--write", type=Path, help="fit the profiles, and write them into this folder"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    cells = [*chart_cells(), *our_cells(), *other_cells(arguments.profiles)]
    if arguments.write is None:
        found = {name: Profile.load(name).kernels[0] for name in (*FITTED, "a100_flash_attn_2")}
    else:
        found = fitted([*chart_cells(), *our_cells(), *other_cells(None)])
        for name, rates in found.items():
            (arguments.write / f"{name}.json").write_text(
                profile_of(name, rates).to_json() + "\n", encoding="utf-8"
            )
    costs = {name: (rates.forward, rates.backward) for name, rates in found.items()}
    shown = [{**cell._asdict(), "error": cell.error(costs[cell.profile])} for cell in cells]
    for cell in shown:
        del cell["counts"]
    profiles = {name: asdict(rates) for name, rates in found.items()}
    result = {"machine": describe(), "profiles": profiles, "cells": shown, "links": link_cells()}
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
