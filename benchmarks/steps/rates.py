"""Measured rates: estimates that start wrong by a factor of three, a slower rank, and exchanges
that do not pay.

Gloo processes with one thread each train a small, narrow Llama on new documents in every step.

- Wrong rates: kernels compute, and are timed by processor time, which other programs do not change.
- A slow rank: the kernels of one rank take longer than those of the others.
- Never slower: steps alternate between balancing on and off, over this machine's network and over
  slow ones. Under DDP, ranks wait for each other in attention alone; FSDP2 synchronizes them before
  each layer.

In the last two, kernels sleep for as long as a cost model predicts (``--kernel timed``), so that
each rank seems to have a processor to itself; the test is how the ranks react. With ``--kernel
real`` kernels compute, which needs as many idle cores as ranks.

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
from batches import make_batch
from hf_distca.integration import current_session
from hf_distca.integration.session import Session
from hf_distca.runtime import meter
from hf_distca.schedule.cost import CostModel
from models import make_plain_model
from processes import (
    add_model_options,
    compute_median_ratio,
    compute_medians,
    order_modes,
    run_on_ranks,
)
from script import add_option, end, make_parser, output_result, print_table
from slow_network import late_messages
from timed_kernels import make_slower, timed_kernels

SLOWNESS = 1.5
HIDDEN = 64  # little but attention is left to compute
# Slowdown of timed kernels relative to a CPU, so that they outweigh all other work.
STRETCH = 4.0
WRONG = 3.0
FIRST = 12  # steps in which rates are learned
AT_MOST = 1.02  # largest ratio to a step with balancing off, after these steps


def make_true_cost(arguments: argparse.Namespace) -> CostModel:
    """Return the cost model of timed kernels."""
    return make_slower(arguments.heads, task=STRETCH, flop=STRETCH)


def start_with(cost: CostModel) -> AbstractContextManager[Any]:
    """Make ranks start with these rates; a `cost_model` setting would never be corrected."""
    figures = (
        cost.forward,
        cost.backward,
        cost.exchange_bytes_per_second,
        cost.exchange_seconds,
        cost.node_bytes_per_second,
    )
    return patch.dict("hf_distca.schedule.cost._BUILT_IN", cpu=figures)


def slow_kernels(arguments: argparse.Namespace, slowness: float) -> AbstractContextManager[None]:
    """Return this rank's kernels, slowed down by `slowness`."""
    return timed_kernels(
        make_true_cost(arguments) if arguments.kernel == "timed" else None, slowness
    )


@contextmanager
def processor_clock() -> Iterator[None]:
    """Time kernels and exchanges by processor time; the clock includes other programs."""
    with patch.object(meter, "time", SimpleNamespace(perf_counter=time.thread_time)):
        yield


def limit_network(megabytes_per_second: float | None) -> AbstractContextManager[None]:
    """Limit the network to this rate; None leaves messages alone."""
    if megabytes_per_second is None:
        return nullcontext()
    return late_messages(lambda size: size / megabytes_per_second / 1e6)


def draw_lengths(step: int, rank: int, ranks: int, tokens: int) -> list[int]:
    """Return a rank's documents: in each step one rank has a long one, the others many
    short ones.
    """
    generator = np.random.default_rng([step, rank])
    if (step + rank) % ranks == 0:
        long = int(tokens * generator.uniform(0.8, 1.0)) // 128 * 128
        return [long, *([tokens - long] if long < tokens else [])]
    count = int(generator.integers(4, 12))
    cuts = np.sort(generator.choice(np.arange(1, 32), count - 1, replace=False)) * tokens // 32
    return np.diff([0, *cuts.tolist(), tokens]).tolist()


def wrap_fsdp2(model: LlamaForCausalLM) -> torch.nn.Module:
    """Wrap a model in FSDP2, whose all-gathers synchronize the ranks before each layer."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


ENGINES: dict[str, Callable[[LlamaForCausalLM], torch.nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": wrap_fsdp2,
}


class Steps:
    """Steps of one rank; all ranks begin and end a step together."""

    def __init__(
        self, arguments: argparse.Namespace, rank: int, ranks: int, engine: str = "DDP"
    ) -> None:
        self.arguments, self.rank, self.ranks = arguments, rank, ranks
        self.model = ENGINES[engine](make_plain_model(arguments, "distca", HIDDEN))

    def step(self, number: int) -> dict[str, float]:
        """Return the seconds of this step, and the estimate and measurement of the previous one."""
        batch = make_batch(
            draw_lengths(number, self.rank, self.ranks, self.arguments.tokens), self.rank
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


def measure_wrong(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure estimates that start wrong: everything too fast, everything too slow, tasks and flops
    in opposite directions.
    """
    found = {}
    for name, task, flop in (
        ("3x too slow", WRONG, WRONG),
        ("3x too fast", 1 / WRONG, 1 / WRONG),
        ("mixed", WRONG, 1 / WRONG),
    ):
        hf_distca.configure()
        with processor_clock(), start_with(make_slower(arguments.heads, task=task, flop=flop)):
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


def measure_slow_rank(steps: Steps, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a step with one slow rank, with measured rates and without, and compute what its
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
        for name in order_modes(modes, number):
            if number < FIRST - 1 and name != "speeds measured":  # the other modes do not learn
                continue
            with (
                slow_kernels(arguments, modes[name][0]),
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
    # If all ranks have equal speed, a step is the time without attention plus the mean of
    # attention; the slow rank stretches the mean.
    stretch = steps.ranks / (steps.ranks - 1 + 1 / SLOWNESS) - 1
    allowed = [
        taken + float(one) * stretch
        for taken, one in zip(seconds["all alike"], means / steps.ranks, strict=True)
    ]
    speeds = sessions["speeds measured"].planner.costs.measured_ranks.speeds
    return {
        "median_seconds": compute_medians(seconds),
        "allowed_seconds": statistics.median(allowed),
        "to_allowed": {
            name: compute_median_ratio(row, allowed)
            for name, row in seconds.items()
            if name != "all alike"
        },
        "attention_to_allowed": {
            name: taken / (mean * (1 + stretch))
            for name, taken in slowest.items()
            if name != "all alike"
        },
        "speeds": speeds,
    }


def measure_never_slower(arguments: argparse.Namespace, rank: int, ranks: int) -> dict[str, Any]:
    """Time steps with balancing on and off in turns, for each engine and network; measured rates
    must not make steps slower.
    """
    found = {}
    for engine, rate in itertools.product(ENGINES, [None, *arguments.megabytes_per_second]):
        steps = Steps(arguments, rank, ranks, engine)
        # Each mode learns only from its own steps.
        sessions = {
            mode: Session(hf_distca.DistCAConfig(balance=mode == "on")) for mode in ("on", "off")
        }
        seconds: dict[str, list[float]] = {mode: [] for mode in sessions}
        with slow_kernels(arguments, 1.0), limit_network(rate):
            for number in range(arguments.steps):
                for mode in order_modes(sessions, number):
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
    with start_with(make_true_cost(arguments)):
        if arguments.never_slower:
            return {"never slower": measure_never_slower(arguments, rank, ranks)}
        steps = Steps(arguments, rank, ranks)
        parts = {"wrong rates": measure_wrong, "slow rank": measure_slow_rank}
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
    add_option(parser, "--steps", 24, f"steps of each mode, including {FIRST} that learn rates")
    parser.add_argument(
        "--kernel",
        choices=["timed", "real"],
        default="timed",
        help="timed kernels sleep, real ones compute",
    )
    text = f"compare balancing on and off; exit with status 1 above {AT_MOST} after {FIRST} steps"
    parser.add_argument("--never-slower", action="store_true", help=text)
    add_option(parser, "--megabytes-per-second", [0.5, 5.0], "rates of slow networks")
    arguments = parser.parse_args()
    if arguments.steps <= FIRST + 1:
        parser.error(
            f"--steps {arguments.steps} must be more than {FIRST + 1}: rates are learned in the"
            f" first {FIRST}"
        )
    found = {str(ranks): run_on_ranks(measure, ranks, arguments) for ranks in arguments.ranks}
    output_result(arguments, {"ranks": found}, show, dtype="float32")
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
