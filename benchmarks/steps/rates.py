"""Measured rates: estimates that began wrong by a factor of three, a rank that is slower, and
exchanges that do not pay.

Gloo processes with one thread each train a small, narrow Llama on new documents in every step.

- Wrong rates: kernels compute, and are timed by processor time, which other programs do not change.
- A slow rank: one rank's kernels take longer than those of the others.
- Never slower: steps with balancing on and off in turns, under DDP, where ranks wait for each other
  in attention alone, and under FSDP2, which lines them up before each layer; over this machine's
  network, and over slow ones.

In the last two, kernels sleep for as long as a cost model says (``--kernel timed``), so that a rank
has a processor to itself whatever else runs; what is tested is what the ranks make of it. With
``--kernel real`` they compute, and need as many idle cores as there are ranks.

    python benchmarks/steps/rates.py --json results.json
    python benchmarks/steps/rates.py --never-slower --layers 2 --steps 36 --json results.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import LlamaForCausalLM

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import batch_of
from hf_distca.integration import current_session
from hf_distca.integration.session import Session
from hf_distca.runtime import meter
from hf_distca.schedule.cost import CostModel
from models import plain_model_of
from processes import add_model_options, in_turns, median_ratio, medians, on_ranks
from script import add_option, end, make_parser, print_table, put_out
from slow_network import late_messages
from timed_kernels import make_slower, timed_kernels

SLOWNESS = 1.5
HIDDEN = 64  # little but attention is left to compute
# Times the built-in figures of a CPU that timed kernels take, so that they outweigh all else.
STRETCH = 4.0
WRONG = 3.0
FIRST = 12  # steps in which rates are learned
AT_MOST = 1.02  # times a step with balancing off, after them


def truth(arguments: argparse.Namespace) -> CostModel:
    """What timed kernels take."""
    return make_slower(arguments.heads, task=STRETCH, flop=STRETCH)


def beginning_with(cost: CostModel) -> AbstractContextManager[Any]:
    """Have ranks begin with these rates; those of a `cost_model` setting are never corrected."""
    figures = (
        cost.forward,
        cost.backward,
        cost.exchange_bytes_per_second,
        cost.exchange_seconds,
        cost.node_bytes_per_second,
    )
    return patch.dict("hf_distca.schedule.cost._BUILT_IN", cpu=figures)


def kernels(arguments: argparse.Namespace, slowness: float) -> AbstractContextManager[None]:
    """Kernels of this rank, so many times slower than those of others."""
    return timed_kernels(truth(arguments) if arguments.kernel == "timed" else None, slowness)


@contextmanager
def processor_clock() -> Iterator[None]:
    """Time kernels and exchanges by the processor time of the thread: a clock also has what other
    programs take away.
    """
    with patch.object(meter, "time", SimpleNamespace(perf_counter=time.thread_time)):
        yield


def network(megabytes_per_second: float | None) -> AbstractContextManager[None]:
    """Messages take as long as their bytes need at this rate; None to leave them alone."""
    if megabytes_per_second is None:
        return nullcontext()
    return late_messages(lambda size: size / megabytes_per_second / 1e6)


def lengths_of(step: int, rank: int, ranks: int, tokens: int) -> list[int]:
    """Documents of a rank: one rank has one long one, another in each step, and the others have
    many.
    """
    generator = np.random.default_rng([step, rank])
    if (step + rank) % ranks == 0:
        long = int(tokens * generator.uniform(0.8, 1.0)) // 128 * 128
        return [long, *([tokens - long] if long < tokens else [])]
    count = int(generator.integers(4, 12))
    cuts = np.sort(generator.choice(np.arange(1, 32), count - 1, replace=False)) * tokens // 32
    return np.diff([0, *cuts.tolist(), tokens]).tolist()


def fsdp2(model: LlamaForCausalLM) -> torch.nn.Module:
    """A model whose ranks are lined up by an all-gather before each layer, as DDP's are not."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


ENGINES: dict[str, Callable[[LlamaForCausalLM], torch.nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": fsdp2,
}


class Steps:
    """Steps of one rank, which begin and end with those of all."""

    def __init__(
        self, arguments: argparse.Namespace, rank: int, ranks: int, engine: str = "DDP"
    ) -> None:
        self.arguments, self.rank, self.ranks = arguments, rank, ranks
        self.model = ENGINES[engine](plain_model_of(arguments, "distca", HIDDEN))

    def step(self, number: int) -> dict[str, float]:
        """Seconds of the step; and what was estimated and measured of the one before."""
        batch = batch_of(
            lengths_of(number, self.rank, self.ranks, self.arguments.tokens), self.rank
        )
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
            promised = done.estimated_after * done.layers / done.micro_batches
            found |= {
                "estimate": promised / done.measured_after,
                "slowest": done.measured_after,
                "mean": done.measured_mean,
            }
        return found


def wrong(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """Estimates that begin wrong: everything too fast, everything too slow, and tasks and flops in
    opposite directions.
    """
    found = {}
    for name, task, flop in (
        ("3x too slow", WRONG, WRONG),
        ("3x too fast", 1 / WRONG, 1 / WRONG),
        ("mixed", WRONG, 1 / WRONG),
    ):
        hf_distca.configure()
        with processor_clock(), beginning_with(make_slower(arguments.heads, task=task, flop=flop)):
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
    """One rank's kernels are slower: seconds of a step with measured rates, without, and what its
    speed allows.
    """
    slowness = SLOWNESS if steps.rank == 0 else 1.0
    modes = {
        "all alike": (1.0, hf_distca.DistCAConfig()),
        "unbalanced": (slowness, hf_distca.DistCAConfig(balance=False)),
        "speeds not measured": (slowness, hf_distca.DistCAConfig(measured_rates=False)),
        "speeds measured": (slowness, hf_distca.DistCAConfig()),
    }
    sessions = {name: Session(config) for name, (_, config) in modes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    slowest: dict[str, float] = dict.fromkeys(modes, 0.0)
    mean = 0.0
    kernel: list[float] = []
    for number in range(arguments.steps):
        for name in in_turns(modes, number):
            if number < FIRST - 1 and name != "speeds measured":  # nothing is learned
                continue
            with (
                kernels(arguments, modes[name][0]),
                patch.object(current_session, "_session", sessions[name]),
            ):
                row = steps.step(number)
            if number >= FIRST:
                seconds[name].append(row["seconds"])
                slowest[name] += row["slowest"]
                mean += row["mean"] if name == "all alike" else 0.0
                kernel += [row["kernel"]] if name == "all alike" else []
    means = torch.tensor(kernel, dtype=torch.float64)
    dist.all_reduce(means)
    # Where ranks are alike, a step is what it is without attention and the mean of attention; the
    # slow rank stretches the latter.
    stretch = steps.ranks / (steps.ranks - 1 + 1 / SLOWNESS) - 1
    allowed = [
        taken + float(one) * stretch
        for taken, one in zip(seconds["all alike"], means / steps.ranks, strict=True)
    ]
    speeds = sessions["speeds measured"].planner.costs.measured_ranks.speeds
    return {
        "median_seconds": medians(seconds),
        "allowed_seconds": statistics.median(allowed),
        "to_allowed": {
            name: median_ratio(row, allowed) for name, row in seconds.items() if name != "all alike"
        },
        "attention_to_allowed": {
            name: taken / (mean * (1 + stretch))
            for name, taken in slowest.items()
            if name != "all alike"
        },
        "speeds": speeds,
    }


def never_slower(arguments: argparse.Namespace, rank: int, ranks: int) -> dict[str, Any]:
    """Steps with balancing on and off, in turns, for each engine and network: what is learned must
    not make them slower.
    """
    found = {}
    for engine, rate in itertools.product(ENGINES, [None, *arguments.megabytes_per_second]):
        steps = Steps(arguments, rank, ranks, engine)
        # Each mode learns from its own steps alone.
        sessions = {
            mode: Session(hf_distca.DistCAConfig(balance=mode == "on")) for mode in ("on", "off")
        }
        seconds: dict[str, list[float]] = {mode: [] for mode in sessions}
        with kernels(arguments, 1.0), network(rate):
            for number in range(arguments.steps):
                for mode in in_turns(sessions, number):
                    with patch.object(current_session, "_session", sessions[mode]):
                        seconds[mode].append(steps.step(number)["seconds"])
        ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
        found[f"{engine}, {'this machine' if rate is None else f'{rate:g} MB/s'}"] = {
            "seconds": seconds,
            "on_to_off": ratios,
            "first_step": ratios[0],
            "first_steps_together": sum(seconds["on"][:FIRST]) / sum(seconds["off"][:FIRST]),
            "later_median": statistics.median(ratios[FIRST:]),
            "later_together": sum(seconds["on"][FIRST:]) / sum(seconds["off"][FIRST:]),
        }
    return found


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    with beginning_with(truth(arguments)):
        if arguments.never_slower:
            return {"never slower": never_slower(arguments, rank, ranks)}
        steps = Steps(arguments, rank, ranks)
        parts = {"wrong rates": wrong, "slow rank": slow_rank}
        shown = tqdm(parts.items(), desc=f"{ranks} ranks", file=sys.stderr, disable=rank > 0)
        return {name: part(steps, arguments) for name, part in shown}


def show(result: dict[str, Any]) -> None:
    rows: list[tuple[str, ...]] = []
    for ranks, parts in result["ranks"].items():
        for name, row in parts.get("wrong rates", {}).items():
            said = (
                f"estimate / measured {row['first']:.2f} at first; error {row['error_median']:.1%}"
                f" after {FIRST} steps"
            )
            rows.append((ranks, "wrong rates", name, said))
        for name, ratio in parts.get("slow rank", {}).get("to_allowed", {}).items():
            attention = parts["slow rank"]["attention_to_allowed"][name]
            said = f"step {ratio:.3f}, attention {attention:.3f} of what its speed allows"
            rows.append((ranks, "slow rank", name, said))
        for name, row in parts.get("never slower", {}).items():
            said = (
                f"on / off {row['first_step']:.3f} at first, {row['later_median']:.3f} after"
                f" {FIRST} steps (median)"
            )
            rows.append((ranks, "never slower", name, said))
    print_table("measured rates", ("ranks", "part", "what", "figure"), rows, texts=4)


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=2048, layers=1)
    add_option(parser, "--ranks", [2, 4], "numbers of ranks")
    add_option(parser, "--steps", 24, f"steps of each mode, {FIRST} of them to learn")
    parser.add_argument("--kernel", choices=["timed", "real"], default="timed", help="see above")
    text = f"balancing on and off instead; ends with 1 above {AT_MOST} after {FIRST} steps"
    parser.add_argument("--never-slower", action="store_true", help=text)
    add_option(parser, "--megabytes-per-second", [0.5, 5.0], "of slow networks")
    arguments = parser.parse_args()
    if arguments.steps <= FIRST + 1:
        parser.error(
            f"--steps {arguments.steps} must be more than {FIRST + 1}: rates are learned in the"
            f" first {FIRST}"
        )
    found = {str(ranks): on_ranks(measure, ranks, arguments) for ranks in arguments.ranks}
    put_out(arguments, {"ranks": found}, show, dtype="float32")
    end(
        [
            f"{ranks} ranks, {name}: {row['later_median']:.3f} is above {AT_MOST}"
            for ranks, parts in found.items()
            for name, row in parts.get("never slower", {}).items()
            if row["later_median"] > AT_MOST
        ]
    )


if __name__ == "__main__":
    main()
