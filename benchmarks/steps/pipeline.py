"""Seconds of a training step in pipeline stages: torch's 1F1B compared with stages that share
attention, in one run.

Every stage is a process with one thread. Micro-batches hold equally many tokens, in documents of
long-tailed or even lengths. Modes take turns within each round, so that a machine that slows down
slows all of them; seconds are medians over rounds. In all modes and for the ideal, processes keep
freed memory, like the allocator of a GPU: getting pages again in a virtual machine took 0.2 s of a
step.

    python benchmarks/steps/pipeline.py --json

The ideal spreads the attention of all stages over them in every tick at no cost, so that all end as
early as their linear work allows. Where processes share cores, a tick takes at least its work
divided by the number of cores. Work is the processor time of micro-batches in steps of 1F1B, with
the messages between stages. The share gained is the time that sharing saves over 1F1B, relative to
what the ideal saves.

Sizes: in a layer of the default model on a CPU core, attention to a document of about 1500 tokens
takes as long as everything else. For an 8B model on an H100, by the simulator's rates, such a
document has about 26 thousand tokens. So 24576 tokens here stand for 420 thousand there, and the
longest document has two thirds of them. Documents come from micro-batches of 65536 tokens,
shortened in proportion. With fewer tokens there is less to gain, and exchanges and planning take it
up.

With fewer cores than stages, the clock measures the cores. `--core-share 0.45` limits every stage
to 0.45 of a core, however little the others use: two cores become four slower ones. Reported
seconds are clock seconds times the measured share, that is, seconds of a whole core.

A second table is for machines with less than one core per stage, or with other programs: processor
time along the critical path. For shared ticks it is replayed from the time that every stage took
between its messages in the real run (`replay.py`). For 1F1B and the ideal it is simulated from the
work of micro-batches, with one core per stage and free messages. The table has the least of all
rounds, because other programs share caches and cores and only add processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from core_share import core_shares, join, measure_share
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, split
from hf_distca.pipeline.ticks import order_ticks
from hf_distca.runtime import meter
from models import make_plain_model
from processes import (
    add_model_options,
    add_rounds,
    compute_median_ratio,
    compute_medians,
    gather,
    iterate_rounds,
    order_modes,
    run_on_ranks,
)
from replay import Event, Recorder, replay
from script import add_option, make_parser, output_result, print_table

PLACEMENT = Path(__file__).parents[1] / "placements" / "long_tail_8_ranks.json"
VOCABULARY = 512
MODES = ("1f1b", "shared")
WARM_UP = 2  # steps in the mode "shared"


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def scale_lengths(lengths: list[int], tokens: int) -> list[int]:
    """Scale documents in proportion to `tokens` tokens in all."""
    ends, total, begin, found = 0, sum(lengths), 0, []
    for length in lengths:
        ends += length
        end = round(ends * tokens / total)
        if end > begin:
            found.append(end - begin)
        begin = end
    return found


def choose_lengths(arguments: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the document lengths of each micro-batch of a step."""
    real = json.loads(PLACEMENT.read_text())["lengths"]
    return {
        "long tail": [
            scale_lengths(real[at % len(real)], arguments.tokens)
            for at in range(arguments.micro_batches)
        ],
        "even": [[arguments.tokens // 8] * 8] * arguments.micro_batches,
    }


def make_batches(arguments: argparse.Namespace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Make token ids and position ids for the micro-batches of a step."""
    lengths = choose_lengths(arguments)
    ids = torch.randint(
        0,
        VOCABULARY,
        (arguments.micro_batches, arguments.tokens),
        generator=torch.Generator().manual_seed(0),
    )
    return {
        name: (ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]))
        for name, rows in lengths.items()
    }


def keep_memory() -> None:
    """Make this process keep freed memory, if its C library is glibc (mallopt(3): M_MMAP_MAX and
    M_TRIM_THRESHOLD).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(-4, 0)
        library.mallopt(-1, 2**31 - 1)


class Steps:
    """Times steps of one stage."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        mesh = init_device_mesh("cpu", (arguments.stages,), mesh_dim_names=("pp",))
        shape = (1, arguments.tokens, arguments.heads * 64)
        # Each schedule has its own stage object, and both share a module.
        self.stage = split(make_plain_model(arguments, "distca"), mesh)
        self.shared = Schedule(self.stage, arguments.micro_batches, compute_loss)
        classic_stage = self._classic_stage(mesh, shape)
        self.classic, self.chunks = (
            Schedule1F1B(classic_stage, arguments.micro_batches, compute_loss),
            Chunks(classic_stage),
        )
        self.batches, self.recorder = make_batches(arguments), Recorder(rank)

    def _classic_stage(self, mesh: Any, shape: tuple[int, ...]) -> PipelineStage:
        hidden = torch.empty(shape, device="meta", requires_grad=True)
        tokens = torch.empty(shape[:2], dtype=torch.long, device="meta")
        logits = torch.empty((*shape[:2], VOCABULARY), device="meta", requires_grad=True)
        inputs, outputs = (
            tokens if self.stage.is_first else hidden,
            logits if self.stage.is_last else hidden,
        )
        here = self.stage.stage_index, self.stage.num_stages, self.stage.device
        return PipelineStage(
            self.stage.submod, *here, input_args=inputs, output_args=outputs, group=mesh.get_group()
        )

    def step(self, lengths: str, mode: str) -> tuple[float, list[Event], list[list[float]]]:
        """Run a step; return the seconds until all stages are done, this stage's events, and the
        times of its micro-batches in 1F1B.
        """
        ids, positions = self.batches[lengths]
        # Under 1F1B, stages are in different micro-batches and must not wait for each other: a
        # module in eval mode computes alone.
        self.stage.submod.train(mode != "1f1b")
        schedule = self.classic if mode == "1f1b" else self.shared
        dist.barrier()
        started = time.perf_counter()
        self.recorder.start()
        with hf_distca.balancing(mode == "shared"):
            schedule.step(ids, position_ids=positions, target=ids, return_outputs=False)
        events, work = self.recorder.stop(), self.chunks.take()
        dist.barrier()
        seconds = time.perf_counter() - started
        self.stage.submod.zero_grad()
        return seconds, events, work


class Chunks:
    """Records the processor time of each micro-batch in 1F1B, until the next one begins.

    It includes layers, loss and the messages between stages.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.marks: list[tuple[bool, int, float, float]] = []
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(
                stage,
                name,
                self._noted(getattr(stage, name), backward=name == "backward_one_chunk"),
            )

    def _noted(self, run: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
        def noted(micro_batch: int, *args: Any, **more: Any) -> Any:
            self.marks.append((backward, micro_batch, *self._clocks()))
            return run(micro_batch, *args, **more)

        return noted

    @staticmethod
    def _clocks() -> tuple[float, float]:
        return time.process_time(), current_session().meter.seconds

    def take(self) -> list[list[float]]:
        """Return the seconds of linear layers and of attention for each micro-batch, forward and
        then backward.
        """
        marks, self.marks = [*self.marks, (False, -1, *self._clocks())], []
        found: dict[tuple[int, bool], list[float]] = {}
        for (backward, at, all_, kernel), (_, _, all_after, kernel_after) in pairwise(marks):
            attention = kernel_after - kernel
            found[at, backward] = [max(all_after - all_ - attention, 0.0), attention]
        return [found[at, False] + found[at, True] for at in range(len(found) // 2)]


def compute_shared_seconds(attention: list[float], linear: list[float]) -> float:
    """Return the seconds until all ranks are done that share one call of attention. Each rank
    reaches the call when its linear work is done.

    A rank with its own attention begins with that. The others cannot begin before the first of
    these ranks arrives. A rank keeps an even part of its attention, however late it arrives.
    """
    count, total = len(attention), sum(attention)
    begin = []
    for rank, (own, late) in enumerate(zip(attention, linear, strict=True)):
        others = [when for other, when in enumerate(linear) if other != rank and attention[other]]
        begin.append(max(late, min(others, default=0.0) - own))
    low, high = min(begin), max(begin) + total
    for _ in range(60):
        level = (low + high) / 2
        shares = [
            max(level - when, own / count) for when, own in zip(begin, attention, strict=True)
        ]
        low, high = (low, level) if sum(shares) > total else (level, high)
    return max(when + share for when, share in zip(begin, shares, strict=True))


def compute_ideal(work: list[list[list[float]]], cores: int) -> float:
    """Compute the seconds of a step with ideally shared ticks, from [stage][micro-batch] work."""
    seconds = 0.0
    for tick in order_ticks(len(work), len(work[0])):
        linear, attention = (
            [
                0.0 if at is None else work[stage][at][2 * tick.backward + kind]
                for stage, at in enumerate(tick.micro_batches)
            ]
            for kind in (0, 1)
        )
        seconds += max(
            compute_shared_seconds(attention, linear),
            *linear,
            (sum(linear) + sum(attention)) / cores,
        )
    return seconds


def compute_classic(work: list[list[list[float]]]) -> float:
    """Compute the seconds of 1F1B from the work of [stage][micro-batch], one core per stage."""
    stages, count = len(work), len(work[0])
    orders = []
    for stage in range(stages):
        ahead = min(count, stages - stage)
        pairs = [(way, at + ahead * (1 - way)) for at in range(count) for way in (1, 0)]
        orders.append(
            [(0, at) for at in range(ahead)] + [(way, at) for way, at in pairs if at < count]
        )
    done: dict[tuple[int, int, int], float] = {}
    free = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                way, at = order[0]
                source = stage + (1 if way else -1)
                if 0 <= source < stages and (way, source, at) not in done:
                    break
                start = max(free[stage], done.get((way, source, at), 0.0))
                free[stage] = done[way, stage, at] = start + sum(
                    work[stage][at][2 * way : 2 * way + 2]
                )
                order.pop(0)
    return max(free)


class _ProcessorClock:
    """Replaces the clock that times kernels by processor time, which excludes other programs."""

    perf_counter = staticmethod(time.process_time)


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    keep_memory()
    meter.time = _ProcessorClock
    steps = Steps(arguments, rank)
    cores, share = min(ranks, os.cpu_count() or 1), 1.0
    if arguments.groups:
        join(arguments.groups[rank])
        dist.barrier()
        cores, share = ranks, statistics.mean(gather(measure_share()))
    for mode in ("1f1b", *["shared"] * WARM_UP):  # the first steps set up buffers and connections
        steps.step("long tail", mode)
    seconds, paths = (
        {lengths: {name: list[float]() for name in (*MODES, "ideal")} for lengths in steps.batches}
        for _ in range(2)
    )
    for number in iterate_rounds(rank, arguments.rounds):
        for lengths, clock in seconds.items():
            path = paths[lengths]
            for mode in order_modes(MODES, number):
                taken, events, work = steps.step(lengths, mode)
                clock[mode].append(taken * share)
                if mode == "shared":
                    path["shared"].append(replay(gather(events)))
                else:
                    every = gather(work)
                    clock["ideal"].append(compute_ideal(every, cores))
                    path["1f1b"].append(compute_classic(every))
                    path["ideal"].append(compute_ideal(every, ranks))
    return {
        "core_share": share,
        "seconds": {
            lengths: summarize(compute_medians(taken))
            | {"ratio": compute_median_ratio(taken["shared"], taken["1f1b"])}
            for lengths, taken in seconds.items()
        },
        "critical_path": {
            lengths: summarize({name: min(values) for name, values in taken.items()})
            for lengths, taken in paths.items()
        },
        "each": {"seconds": seconds, "critical_path": paths},
    }


def summarize(row: dict[str, float]) -> dict[str, float]:
    """Add the gain of sharing relative to that of the ideal, and the ratio to 1F1B."""
    most = row["1f1b"] - row["ideal"]
    gained = (row["1f1b"] - row["shared"]) / most if most > 0 else 0.0
    return {**row, "gained": gained, "ratio": row["shared"] / row["1f1b"]}


def show(result: dict[str, Any]) -> None:
    stages, count = (result["setting"][name] for name in ("stages", "rounds"))
    share = result["core_share"]
    of_a_core = f" with {share:.3f} of a core each, times that" if share < 1 else ""
    columns = ("documents", "1F1B", "shared", "ideal")
    columns += ("share gained", "shared / 1F1B")
    for key, title in (
        ("seconds", f"seconds of a step, {stages} stages{of_a_core}, medians of {count} rounds"),
        (
            "critical_path",
            f"processor seconds along the critical path, {stages} stages, least of {count} rounds",
        ),
    ):
        rows = (
            (
                lengths,
                *(f"{row[name]:.2f}" for name in (*MODES, "ideal")),
                f"{row['gained']:.0%}",
                f"{row['ratio']:.2f}",
            )
            for lengths, row in result[key].items()
        )
        print_table(title, columns, rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--stages", 2, "number of stages, one process each")
    add_option(parser, "--micro-batches", 8, "micro-batches per step")
    add_model_options(parser, tokens=24576, layers=4, heads=2)
    add_rounds(parser, 3)
    add_option(parser, "--core-share", 1.0, "share of a core for each stage; 1: a whole core")
    arguments = parser.parse_args()
    stages, share = arguments.stages, arguments.core_share
    if arguments.tokens < 64 or arguments.layers < stages or min(stages, arguments.rounds) < 1:
        parser.error("give at least 64 tokens, one round, one stage and a layer for each stage")
    if not 0.01 <= share <= 1:
        parser.error(f"--core-share is {share}: give a share of a core from 0.01 to 1")
    with core_shares(stages * (share < 1), share) as groups:
        told = argparse.Namespace(**vars(arguments), groups=groups)
        output_result(arguments, run_on_ranks(measure, stages, told), show)


if __name__ == "__main__":
    main()
