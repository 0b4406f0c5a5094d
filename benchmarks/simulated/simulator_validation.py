"""Predicted against measured seconds of training steps of 2 and 4 processes: placements, depths,
balanced or not, ping-pong.

Processes have one thread each. The simulator's rates are measured in between, in steps of other
documents (`machine_rates`); no step that is predicted is among them, and nothing is fitted to one.
Two things differ from a machine with GPUs: who computes carries messages, too, so that they hide
behind nothing; and processes may share cores, in equal parts until one is done.

Each case has two predictions: of the step, by the clock on the wall, which needs a machine that
does nothing else; and of the processor seconds of the busiest process, which other programs disturb
little. Rounds in which they took more than a twentieth of the cores are left out.

    python benchmarks/simulated/simulator_validation.py --json

Attention rates of the simulated GPUs are compared with published timings in
`benchmarks/simulated/published_timings.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from dealt_step_time import WAYS, Steps, lengths_of
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import CostModel
from machine import describe
from machine_rates import Machine, Sampler, planned
from output import add_json_option, put_out
from simulator.disaggregated import compute_placement_work
from simulator.model_shape import ModelShape
from simulator.predict import estimate_rank_seconds
from simulator.setting import Setting
from simulator.work import estimate_weight_exchange

GOAL = 0.10  # median error
DISTURBED = 0.05  # of the cores: rounds in which other programs take more are left out
VOCABULARY = 512
_CELLS = {
    "predicted_seconds": ".2f",
    "measured_seconds": ".2f",
    "error": "+.1%",
    "predicted_processor_seconds": ".2f",
    "measured_processor_seconds": ".2f",
    "processor_error": "+.1%",
}
_SHOWN = ("matmul_flops", "memory_rate", "link_gbps", "exchange_seconds", "forward", "backward")


class Case(NamedTuple):
    """A step: which documents lie where, and how attention is shared."""

    name: str
    ranks: int
    layers: int
    documents: str
    way: str
    ping_pong: bool = False


CASES = (
    Case("one long document, unbalanced", 2, 2, "one long", "in order, unbalanced"),
    Case("one long document, balanced", 2, 2, "one long", "in order, balanced"),
    Case("one long document, dealt, ping-pong", 2, 2, "one long", "dealt", ping_pong=True),
    Case("equal documents, balanced", 2, 4, "equal", "in order, balanced"),
    Case("mixed documents, dealt", 2, 2, "mixed", "dealt"),
    Case("mixed documents, dealt, ping-pong", 2, 4, "mixed", "dealt", ping_pong=True),
    Case("mixed documents, in order, unbalanced", 2, 1, "mixed", "in order, unbalanced"),
    Case("mixed documents, over all ranks", 2, 2, "mixed", "every document over all ranks"),
    Case("mixed documents, dealt", 4, 2, "mixed", "dealt"),
    Case("mixed documents, dealt, ping-pong", 4, 2, "mixed", "dealt", ping_pong=True),
    Case("mixed documents, in order, unbalanced", 4, 4, "mixed", "in order, unbalanced"),
    Case("one long document, balanced", 4, 1, "one long", "in order, balanced"),
)


def documents_of(case: Case, tokens: int) -> list[int]:
    """Lengths of the global batch."""
    if case.documents == "mixed":
        return lengths_of(tokens, case.ranks)
    return (
        [tokens // 8] * 8 * case.ranks
        if case.documents == "equal"
        else [tokens, *[tokens // 8] * 8 * (case.ranks - 1)]
    )


class Run(NamedTuple):
    """Seconds of a step by the clock on the wall, of its busiest process by the processor's, and of
    other programs meanwhile.
    """

    step: float
    processor: float
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other programs took more than a few percent of the cores."""
        return self.others > DISTURBED * self.step * (os.cpu_count() or 1)


def work(rank: int, arguments: argparse.Namespace, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, f"store{ranks}")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    sampler, cases = (
        Sampler(arguments, rank, ranks),
        [case for case in CASES if case.ranks == ranks],
    )
    steps = {case: steps_of(case, arguments, rank) for case in cases}
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    progress = (
        tqdm(total=arguments.rounds + 1, desc=f"{ranks} processes", file=sys.stderr)
        if rank == 0
        else nullcontext()
    )
    with progress as bar:
        for round_ in range(arguments.rounds + 1):  # the first one pays for buffers and caches
            sampler.round()
            for case in cases[:: 1 if round_ % 2 == 0 else -1]:
                runs[case].append(run(case, steps[case]))
            if bar is not None:
                bar.update()
    if rank == 0:
        machine = sampler.machine(model_shape(arguments, 1))
        rows = [
            row_of(case, rounds[1:], predict(case, arguments, machine, steps[case]))
            for case, rounds in runs.items()
        ]
        rates = {name: str(getattr(machine.hardware, name)) for name in _SHOWN}
        Path(folder, f"result{ranks}.json").write_text(
            json.dumps({"cases": rows, "machine": rates})
        )
    dist.barrier()
    dist.destroy_process_group()


def config_of(case: Case) -> hf_distca.DistCAConfig:
    """Settings of a case. Rates are not corrected while it trains, so that what is planned is known
    beforehand.
    """
    return hf_distca.DistCAConfig(ping_pong=case.ping_pong, measured_rates=False)


def steps_of(case: Case, arguments: argparse.Namespace, rank: int) -> Steps:
    of_case = argparse.Namespace(**{**vars(arguments), "layers": case.layers, "ranks": case.ranks})
    return Steps(of_case, rank, documents_of(case, arguments.tokens), config_of(case))


def run(case: Case, steps: Steps) -> Run:
    current_session().config = config_of(case)
    batch = steps.batch(case.way)
    dist.barrier()
    everything, started = machine_seconds(), time.process_time()
    wall, _ = steps.step(case.way, batch)
    busy = torch.zeros(case.ranks, dtype=torch.float64)
    busy[steps.rank] = time.process_time() - started
    dist.all_reduce(busy)
    return Run(wall, float(busy.max()), machine_seconds() - everything - float(busy.sum()))


def machine_seconds() -> float:
    """Seconds in which cores of this machine did anything, of all programs."""
    times = psutil.cpu_times()
    return float(
        sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    )


def model_shape(arguments: argparse.Namespace, layers: int) -> ModelShape:
    heads = arguments.heads
    return ModelShape(
        "small llama", heads * 64, layers, heads, max(heads // 2, 1), 64, heads * 172, VOCABULARY
    )


def predict(case: Case, arguments: argparse.Namespace, machine: Machine, steps: Steps) -> Run:
    model, ranks = model_shape(arguments, case.layers), case.ranks
    setting = Setting(
        model, machine.hardware, ranks, arguments.tokens, ranks_per_node=ranks, sharding="ddp"
    )
    plans = iter(
        planned(
            steps,
            case.way,
            CostModel.make_analytic(setting.shape, device_type="cpu"),
            config_of(case),
        )
    )
    share = compute_placement_work(
        setting,
        steps.dealings[WAYS[case.way][0]].deal_layouts(np.array(steps.lengths)),
        lambda *_: next(plans),
    )
    # Nothing hides a message that is carried by those who compute.
    share = replace(share, exposed=np.stack([share.exposed[0], share.wire - share.exposed[0]]))
    forward, backward = estimate_rank_seconds(setting, share)
    weights, _ = estimate_weight_exchange(setting, float(forward.mean()), float(backward.mean()))
    phases = [forward, backward, np.full(ranks, machine.beside + weights)]
    busy = np.sum(phases, axis=0)
    # Ranks that exchange meet in every layer; others only at the end.
    return Run(sum(map(on_cores, phases if share.wire.any() else [busy])), float(busy.max()))


def on_cores(seconds: npt.NDArray[np.float64], cores: int = os.cpu_count() or 1) -> float:
    """Seconds until processes are done that take these seconds each and share cores equally while
    they run.
    """
    now = done = 0.0
    for left, one in zip(range(len(seconds), 0, -1), np.sort(seconds), strict=True):
        now += (float(one) - done) * max(left / cores, 1.0)
        done = float(one)
    return now


def row_of(case: Case, rounds: list[Run], predicted: Run) -> dict[str, Any]:
    """A case beside what was measured: medians over rounds of seconds, and of the busiest process's
    processor seconds.
    """
    quiet = [one for one in rounds if not one.disturbed] or rounds
    wall, processor, _ = (statistics.median(column) for column in zip(*quiet, strict=True))
    return {
        **case._asdict(),
        "predicted_seconds": predicted.step,
        "measured_seconds": wall,
        "error": predicted.step / wall - 1,
        "predicted_processor_seconds": predicted.processor,
        "measured_processor_seconds": processor,
        "processor_error": predicted.processor / processor - 1,
        "all_seconds": rounds,
        "disturbed_rounds": sum(one.disturbed for one in rounds),
    }


def figures(arguments: argparse.Namespace, groups: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for group in groups for row in group["cases"]]
    sizes, of_processor = (
        [abs(row[name]) for row in rows] for name in ("error", "processor_error")
    )
    return {
        "machine": describe(),
        "setting": {"threads": 1, **{k: v for k, v in vars(arguments).items() if k != "json"}},
        "rates": {f"{group['cases'][0]['ranks']} processes": group["machine"] for group in groups},
        "cases": rows,
        "median_error": statistics.median(sizes),
        "largest_error": max(sizes),
        "median_processor_error": statistics.median(of_processor),
        "largest_processor_error": max(of_processor),
        "goal_met": statistics.median(sizes) <= GOAL,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=(
            f"steps of {result['setting']['tokens']} tokens a process on"
            f" {result['machine']['cores']} cores"
        )
    )
    for column in (
        "case",
        "processes",
        "layers",
        "predicted, s",
        "measured, s",
        "error",
        "processor, s",
        "measured, s",
        "error",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in result["cases"]:
        cells = [f"{row[name]:{form}}" for name, form in _CELLS.items()]
        table.add_row(row["name"], str(row["ranks"]), str(row["layers"]), *cells)
    Console(width=130).print(table)
    print(
        f"step: median error {result['median_error']:.1%}, largest {result['largest_error']:.1%};"
        f" goal: median at most {GOAL:.0%}"
    )
    disturbed = sum(row["disturbed_rounds"] for row in result["cases"])
    print(
        f"rounds in which other programs took more than {DISTURBED:.0%} of the cores: {disturbed},"
        " left out if others are left"
    )
    print(
        f"processor: median error {result['median_processor_error']:.1%}, largest"
        f" {result['largest_processor_error']:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens a process (default: %(default)s)"
    )
    parser.add_argument(
        "--heads", type=int, default=4, help="query heads of 64; half as many key/value heads"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds, each running every case once (default: %(default)s)",
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    groups = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in CASES}):
            mp.spawn(work, (arguments, ranks, folder), nprocs=ranks)
            groups.append(json.loads(Path(folder, f"result{ranks}.json").read_text()))
    put_out(figures(arguments, groups), arguments.json, show)


if __name__ == "__main__":
    main()
