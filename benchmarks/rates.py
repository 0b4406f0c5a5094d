"""Measured rates: estimates that began wrong by a factor of three, a rank that is slower, and exchanges that do not pay.

Gloo processes with one thread each train a small Llama on new documents in every step. With ``--kernel timed`` kernels sleep for
as long as a cost model says instead of computing: a rank then has a processor to itself whatever else runs, and what is tested is
what the ranks make of it. With ``--kernel real`` kernels compute, and need as many idle cores as ranks.

    python benchmarks/rates.py --json
    python benchmarks/rates.py --slow-network --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import hf_distca
from hf_distca.integration import session
from hf_distca.kernels.base import TaskBatch
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.profiles import KernelRates, Profile
from machine import describe
from output import add_json_option, put_out
from step_time import batch_of, model_of

SLOWNESS = 1.5
WRONG = 3.0
FIRST = 12  # steps in which rates are learned


def truth(arguments: argparse.Namespace) -> CostModel:
    """What timed kernels take."""
    shape = AttentionShape(arguments.heads, max(arguments.heads // 2, 1), 64, 64, 4)
    return CostModel.analytic(shape, device_type="cpu")


def scaled(cost: KernelCost, task: float, flop: float) -> KernelCost:
    """A kernel whose tasks take so many times as long, and whose flops do."""
    return KernelCost(cost.task_seconds * task, cost.bytes_per_second, cost.flops_per_second / flop)


@contextmanager
def kernels(arguments: argparse.Namespace, slowness: float) -> Iterator[None]:
    """Kernels of this rank, so many times slower than those of others."""
    cost, forward, backward = truth(arguments), CpuKernel.forward, CpuKernel.backward
    timed = arguments.kernel == "timed"

    def late(tasks: TaskBatch, started: float, backwards: bool) -> None:
        if timed:
            each = cost.backward_seconds if backwards else cost.forward_seconds
            seconds = float(each(tasks.query_length, tasks.key_length).sum()) * slowness
            time.sleep(max(0.0, seconds - (time.perf_counter() - started)))
        else:
            time.sleep((slowness - 1) * (time.perf_counter() - started))

    def slow_forward(self: CpuKernel, q: Any, k: Any, v: Any, tasks: TaskBatch, scores: Any) -> Any:
        started = time.perf_counter()
        empty = (q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[:2]))
        found = empty if timed else forward(self, q, k, v, tasks, scores)
        late(tasks, started, backwards=False)
        return found

    def slow_backward(self: CpuKernel, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, tasks: TaskBatch, scores: Any) -> Any:
        started = time.perf_counter()
        found = tuple(map(torch.zeros_like, (q, k, v))) if timed else backward(self, do, q, k, v, o, lse, tasks, scores)
        late(tasks, started, backwards=True)
        return found

    with patch.object(CpuKernel, "forward", slow_forward), patch.object(CpuKernel, "backward", slow_backward):
        yield


class Late:
    """A message that arrives so many seconds after its launch at the earliest."""

    def __init__(self, transfer: Transfer, seconds: float) -> None:
        self.transfer, self.earliest = transfer, time.perf_counter() + seconds

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(max(0.0, self.earliest - time.perf_counter()))


@contextmanager
def network(megabytes_per_second: float | None) -> Iterator[None]:
    """Messages take as long as their bytes need at this rate; None to leave them alone."""
    original = Channel.start

    def start(channel: Channel, received: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> Late:
        return Late(
            original(channel, received, sent, *sizes), max(received.nbytes, sent.nbytes) / (megabytes_per_second or 1) / 1e6
        )

    with patch.object(Channel, "start", start) if megabytes_per_second else nullcontext():
        yield


def lengths_of(step: int, rank: int, ranks: int, tokens: int) -> list[int]:
    """Documents of a rank: one rank has one long one, another in each step, and the others have many."""
    generator = np.random.default_rng([step, rank])
    if (step + rank) % ranks == 0:
        long = int(tokens * generator.uniform(0.8, 1.0)) // 128 * 128
        return [long, *([tokens - long] if long < tokens else [])]
    count = int(generator.integers(4, 12))
    cuts = np.sort(generator.choice(np.arange(1, tokens // 64), count - 1, replace=False)) * 64
    return np.diff([0, *cuts.tolist(), tokens]).tolist()


class Steps:
    """Steps of one rank, which begin and end with those of all."""

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int) -> None:
        self.arguments, self.rank, self.ranks = arguments, rank, ranks
        self.model = model_of(arguments, "distca")

    def step(self, number: int) -> dict[str, float]:
        """Seconds of the step; and what was estimated and measured of the one before."""
        batch = batch_of(lengths_of(number, self.rank, self.ranks, self.arguments.tokens), self.rank)
        before = hf_distca.metrics()
        dist.barrier()
        started = time.perf_counter()
        self.model(**batch, use_cache=False).loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        self.model.zero_grad()
        done = (hf_distca.metrics() - before).balance
        found = {"seconds": seconds, "kernel": (hf_distca.metrics() - before).attention_seconds}
        if done.measured_after:
            found |= {"estimate": done.promised / done.measured_after, "slowest": done.measured_after, "moved": done.moved}
        return found


def wrong(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """Estimates that begin wrong: everything too fast, everything too slow, and tasks and flops in opposite directions."""
    true, found = truth(arguments), {}
    for name, task, flop in (("3x too slow", WRONG, WRONG), ("3x too fast", 1 / WRONG, 1 / WRONG), ("mixed", WRONG, 1 / WRONG)):
        rates = KernelRates("cpu", 4, 64, 64, scaled(true.forward, task, flop), scaled(true.backward, task, flop))
        profile = Profile(name, "cpu", "made up", "", {}, "", (rates,))
        hf_distca.configure(hf_distca.DistCAConfig(cost_model=profile))
        with kernels(arguments, 1.0):
            rows = [steps.step(number) for number in range(arguments.steps)]
        ratios = [row["estimate"] for row in rows if "estimate" in row]
        last = [abs(ratio - 1) for ratio in ratios[FIRST:]]
        found[name] = {
            "estimate_to_measured": ratios,
            "first": ratios[0],
            "error_median": statistics.median(last),
            "error_90%": sorted(last)[int(0.9 * len(last))],
        }
    return found


def slow_rank(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank's kernels are slower: seconds of a step with measured rates, without, and what its speed allows."""
    slowness = SLOWNESS if steps.rank == 0 else 1.0
    modes = {
        "all alike": (1.0, hf_distca.DistCAConfig()),
        "unbalanced": (slowness, hf_distca.DistCAConfig(balance=False)),
        "speeds not measured": (slowness, hf_distca.DistCAConfig(measured_rates=False)),
        "speeds measured": (slowness, hf_distca.DistCAConfig()),
    }
    sessions = {name: session.Session(config) for name, (_, config) in modes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    kernel: list[float] = []
    for number in range(arguments.steps):  # modes take turns, so that a drifting machine slows all of them
        for name, (factor, _) in list(modes.items())[:: 1 if number % 2 == 0 else -1]:
            with kernels(arguments, factor), patch.object(session, "_session", sessions[name]):
                row = steps.step(number)
            if number >= FIRST:
                seconds[name].append(row["seconds"])
                kernel += [row["kernel"]] if name == "all alike" else []
    mean = torch.tensor(kernel, dtype=torch.float64)
    dist.all_reduce(mean)
    # Where ranks are alike, a step is what it is without attention and the mean of attention; the slow rank stretches the latter.
    stretch = steps.ranks / (steps.ranks - 1 + 1 / SLOWNESS) - 1
    allowed = [taken + float(one) * stretch for taken, one in zip(seconds["all alike"], mean / steps.ranks, strict=True)]
    speeds = sessions["speeds measured"].planner.rates.ranks.speeds
    return {
        "median_seconds": {name: statistics.median(row) for name, row in seconds.items()},
        "allowed_seconds": statistics.median(allowed),
        "to_allowed": {
            name: statistics.median(a / b for a, b in zip(row, allowed, strict=True))
            for name, row in seconds.items()
            if name != "all alike"
        },
        "speeds": speeds,
    }


def slow_network(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """Exchanges take so long that none pays: steps with balancing on and off, in turns."""
    hf_distca.configure(hf_distca.DistCAConfig())
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with kernels(arguments, 1.0), network(arguments.megabytes_per_second):
        for number in range(2 * arguments.steps):
            names = ["on", "off"][:: 1 if number % 4 < 2 else -1]
            for name in names if number % 2 == 0 else ():
                with hf_distca.balancing(name == "on"):
                    seconds[name].append(steps.step(number)["seconds"])
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "seconds": seconds,
        "on_to_off": ratios,
        "first_step": ratios[0],
        "first_steps_together": sum(seconds["on"][:FIRST]) / sum(seconds["off"][:FIRST]),
        "later_median": statistics.median(ratios[FIRST:]),
        "later_together": sum(seconds["on"][FIRST:]) / sum(seconds["off"][FIRST:]),
    }


def work(rank: int, ranks: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), ranks), rank=rank, world_size=ranks)
    steps = Steps(arguments, rank, ranks)
    parts = {"slow network": slow_network} if arguments.slow_network else {"wrong rates": wrong, "slow rank": slow_rank}
    result = {}
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(parts), desc=f"{ranks} ranks", file=sys.stderr)) if rank == 0 else None
        for name, part in parts.items():
            result[name] = part(steps, arguments)
            if bar is not None:
                bar.update()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def show(result: dict[str, Any]) -> None:
    table = Table(title="measured rates")
    for column in ("ranks", "part", "what", "figure"):
        table.add_column(column)
    for ranks, parts in result["ranks"].items():
        for name, row in parts.get("wrong rates", {}).items():
            said = f"estimate / measured {row['first']:.2f} at first; error {row['error_median']:.1%} after {FIRST} steps"
            table.add_row(ranks, "wrong rates", name, said)
        if "slow rank" in parts:
            for name, ratio in parts["slow rank"]["to_allowed"].items():
                table.add_row(ranks, "slow rank", name, f"{ratio:.3f} of what its speed allows")
        if "slow network" in parts:
            row = parts["slow network"]
            table.add_row(ranks, "slow network", "on / off, first step", f"{row['first_step']:.3f}")
            table.add_row(ranks, "slow network", f"on / off after {FIRST} steps", f"{row['later_together']:.3f}")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a rank (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads of 64; half as many key/value heads")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument(
        "--steps", type=int, default=36, help=f"steps of each mode, {FIRST} of them to learn (default: %(default)s)"
    )
    parser.add_argument("--kernel", choices=["timed", "real"], default="timed", help="see above (default: %(default)s)")
    parser.add_argument("--slow-network", action="store_true", help="exchanges that do not pay, and nothing else")
    parser.add_argument("--megabytes-per-second", type=float, default=2.0, help="of the slow network (default: %(default)s)")
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.steps <= FIRST + 1:
        parser.error(f"--steps {arguments.steps} must be more than {FIRST + 1}: rates are learned in the first {FIRST}")
    setting = {"threads": 1, "dtype": "float32", **{k: v for k, v in vars(arguments).items() if k != "json"}}
    result: dict[str, Any] = {"machine": describe(), "setting": setting, "ranks": {}}
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (ranks, arguments, folder), nprocs=ranks)
            result["ranks"][str(ranks)] = json.loads(Path(folder, "result.json").read_text())
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
