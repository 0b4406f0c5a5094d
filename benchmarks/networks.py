"""Seconds of a training step on two nodes of two ranks whose links are slow: plans for one level of links, for two, and relays.

Four processes hold equally many tokens: one long document on the first rank, eight short ones on each of the others. Exchanges
take as long as their bytes would at `--rates` between nodes and at ten times that inside (`slow_network.py`). All is in float64.

Gradients of all modes are compared in steps whose kernels compute. In the steps that are timed, kernels sleep for as long as the
cost model says (`timed_kernels.py`), so that every rank has a processor to itself for its attention; `--kernel real` needs a core
for each process instead. The model is so narrow that little but attention is left to compute. Modes take turns within each round;
the figures are medians over rounds.

    python benchmarks/networks.py --json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import hf_distca
from hf_distca.agreement import planner
from hf_distca.integration.session import current_session
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from machine import describe
from output import add_json_option, put_out
from processes import add_model_options, in_turns, on_ranks, rounds, setting_of
from slow_network import Links, SlowNetwork
from step_time import batch_of, model_of
from timed_kernels import timed_kernels

RANKS, RANKS_PER_NODE = 4, 2
INSIDE = 10  # times as fast as between nodes
HIDDEN = 64
SLOWER = 4  # times the built-in figures of a CPU that kernels take: attention and exchanges outweigh what else a step does


class Mode(NamedTuple):
    """What plans may do."""

    balanced: bool = True
    two_levels: bool = False
    relayed: bool = False


MODES = {
    "unbalanced": Mode(balanced=False),
    "one level": Mode(),
    "two levels": Mode(two_levels=True),
    "two levels and relays": Mode(two_levels=True, relayed=True),
}


def cost_of(heads: int, rate: float, *, two_levels: bool) -> CostModel:
    """The figures of a slow CPU, in float64, with bytes per second between nodes."""
    model = CostModel.analytic(AttentionShape(heads, max(heads // 2, 1), 64, 64, 8), device_type="cpu")
    forward, backward = (
        KernelCost(one.task_seconds, one.bytes_per_second, one.flops_per_second / SLOWER)
        for one in (model.forward, model.backward)
    )
    inside = INSIDE * rate if two_levels else None
    return replace(model, forward=forward, backward=backward, exchange_bytes_per_second=rate, node_bytes_per_second=inside)


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.network = SlowNetwork(rank, RANKS)
        self.heads, self.timed, self.ping_pong = arguments.heads, arguments.kernel == "timed", arguments.ping_pong
        self.model = model_of(arguments, "distca", HIDDEN)
        self.batch = batch_of([arguments.tokens] if rank == 0 else [arguments.tokens // 8] * 8, rank)

    def step(self, mode: Mode, rate: float, *, computing: bool) -> tuple[float, torch.Tensor, tuple[float, float]]:
        """Seconds until all ranks are done, the gradient, and megabytes sent by this rank and seconds of its links.

        Args:
            mode: what plans may do.
            rate: bytes per second between nodes.
            computing: let kernels compute, on a network that is not slow.
        """
        cost = cost_of(self.heads, rate, two_levels=mode.two_levels)
        session = current_session()
        session.config = hf_distca.DistCAConfig(balance=mode.balanced, cost_model=cost, ping_pong=self.ping_pong)
        session.planner.progress.costs.clear()
        before = session.meter.sent_bytes
        network: AbstractContextManager[Any] = nullcontext()
        kernels: AbstractContextManager[None] = nullcontext()
        if not computing:
            network = self.network.slow(Links(RANKS_PER_NODE, INSIDE * rate, rate))
            kernels = timed_kernels(cost) if self.timed else kernels
        dist.barrier()
        started = time.perf_counter()
        with network as injected, kernels, patch.object(planner, "balance", partial(balance, relayed=mode.relayed)):
            self.model(**dict(self.batch), use_cache=False).loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        self.model.zero_grad()
        megabytes = (session.meter.sent_bytes - before) / 1e6
        return seconds, gradient, (megabytes, 0.0 if injected is None else injected.seconds)


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    # As torchrun would on two nodes.
    os.environ.update(GROUP_RANK=str(rank // RANKS_PER_NODE), LOCAL_WORLD_SIZE=str(RANKS_PER_NODE))
    torch.set_default_dtype(torch.float64)
    steps = Steps(arguments, rank)
    keys = [(rate, name) for rate in arguments.rates for name in MODES]
    gradients = {key: steps.step(MODES[key[1]], key[0] * 1e6, computing=True)[1] for key in keys}
    sent: dict[tuple[float, str], list[Any]] = {}
    seconds: dict[tuple[float, str], list[float]] = {key: [] for key in keys}
    for round_ in rounds(rank, arguments.rounds):
        for rate, name in in_turns(keys, round_):
            taken, _, links = steps.step(MODES[name], rate * 1e6, computing=False)
            seconds[rate, name].append(taken)
            dist.all_gather_object(sent.setdefault((rate, name), [None] * ranks), links)
    return figures(arguments, seconds, sent, gradients)


def figures(
    arguments: argparse.Namespace,
    seconds: dict[tuple[float, str], list[float]],
    sent: dict[tuple[float, str], list[Any]],
    gradients: dict[tuple[float, str], torch.Tensor],
) -> dict[str, Any]:
    """By rate and mode: seconds, what each rank sent, and how far gradients are from those of the unbalanced step."""
    rows: dict[str, dict[str, Any]] = {}
    for (rate, name), taken in seconds.items():
        plain = gradients[rate, "unbalanced"]
        rows.setdefault(f"{rate:g}", {})[name] = {
            "seconds": taken,
            "median_seconds": statistics.median(taken),
            "to_unbalanced": statistics.median(a / b for a, b in zip(taken, seconds[rate, "unbalanced"], strict=True)),
            "megabytes_sent": [megabytes for megabytes, _ in sent[rate, name]],
            "link_seconds": [links for _, links in sent[rate, name]],
            "gradient_difference": float((gradients[rate, name] - plain).abs().max() / plain.abs().max()),
        }
    setting = setting_of(arguments, ranks=RANKS, ranks_per_node=RANKS_PER_NODE, inside=INSIDE, hidden=HIDDEN, slower=SLOWER)
    return {"machine": describe(), "setting": setting, "rates": rows}


def show(result: dict[str, Any]) -> None:
    table = Table(title="a step on two nodes of two ranks")
    names = (
        "MB/s between",
        "mode",
        "seconds",
        "to unbalanced",
        "MB sent by each rank",
        "busiest links, s",
        "gradients differ by",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for rate, modes in result["rates"].items():
        for name, row in modes.items():
            sent = ", ".join(f"{megabytes:.0f}" for megabytes in row["megabytes_sent"])
            measured = f"{row['median_seconds']:.2f}", f"{row['to_unbalanced']:.3f}", sent, f"{max(row['link_seconds']):.2f}"
            table.add_row(rate, name, *measured, f"{row['gradient_difference']:.1g}")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, tokens=2048, layers=2, heads=8)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[50, 100, 200],
        metavar="MB/s",
        help="of a rank between nodes (default: 50 100 200)",
    )
    parser.add_argument("--kernel", choices=["timed", "real"], default="timed", help="see above (default: %(default)s)")
    parser.add_argument("--ping-pong", action="store_true", help="layers in two nano-batches, which hide exchanges")
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(on_ranks(measure, RANKS, arguments), arguments.json, show)


if __name__ == "__main__":
    main()
