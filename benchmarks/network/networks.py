"""Seconds of a training step on two nodes with a slow cable: plans that know one level of links,
and plans that know nodes.

Four processes are two nodes of two ranks: network namespaces with a cable that Linux slows down
(`nodes.py`, needs root). Messages are real and travel by gloo over TCP. Batches are drawn from a
distribution, with lengths divided so that the longest document is as long as a rank. Documents lie
on the ranks in order, each on one rank, or are dealt. Plans know either one rate, that of the
cable, or nodes. All ways train on the same documents.

Kernels sleep for as long as the cost model predicts (`timed_kernels.py`), so that every rank seems
to have a processor to itself for attention. `--slower` makes them slower than a CPU, to outweigh
the rest of a step. With `--kernel real` they compute and need a core for each process: where four
processes share two cores, a rank that waits costs nothing. Ways take turns within each round. The
seconds of a round are the mean over its batches, and figures are medians over rounds.

    python benchmarks/network/networks.py --json
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import make_share
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.integration.current_session import current_session
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.cost import CostModel
from hf_distca.tools.cli.lengths import open_documents
from models import make_model
from nodes import CABLE, set_rate, two_nodes, wrap_command
from processes import (
    add_model_options,
    add_rounds,
    compute_median_ratio,
    iterate_rounds,
    order_modes,
    read_result,
    run_rank,
)
from script import add_option, make_parser, output_result, print_table
from timed_kernels import make_slower, timed_kernels

RANKS, PER_NODE = 4, 2
INSIDE = 1e9  # bytes per second inside a node, as plans assume
HIDDEN = 64
LONGEST = 2**16  # tokens of the distribution's longest document
SENT = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")  # of this node

Key = tuple[float, str]  # MB/s of the cable, and name of the way
Step = tuple[float, float, float, torch.Tensor]  # seconds, megabytes between nodes, loss, gradient


class Way(NamedTuple):
    """Where documents lie, and which links plans know."""

    placement: str
    nodes: bool = False
    balanced: bool = True


UNBALANCED = "in order, unbalanced"
WAYS = {
    UNBALANCED: Way("in order", balanced=False),
    "in order, one level": Way("in order"),
    "in order, nodes first": Way("in order", nodes=True),
    "dealt, one level": Way("dealt"),
    "dealt, nodes first": Way("dealt", nodes=True),
}


def make_cost(heads: int, slower: float, cable: float, *, nodes: bool) -> CostModel:
    """Make the cost model of a slow CPU in float32, with a cable of `cable` bytes per second."""
    model = replace(make_slower(heads, flop=slower), exchange_bytes_per_second=cable / PER_NODE)
    return replace(model, node_bytes_per_second=INSIDE, ranks_per_link=PER_NODE) if nodes else model


def draw_lengths(text: str, tokens: int, seed: int) -> np.ndarray:
    """Draw the document lengths of a batch, in order. A document that crosses the end of a rank is
    cut in two.
    """
    documents = replace(open_documents(text, "input_ids", LONGEST), seed=seed)
    drawn = next(documents.draw_batches(RANKS * LONGEST, 1))
    ends = np.concatenate([np.cumsum(drawn) * tokens // LONGEST, np.arange(1, RANKS) * tokens])
    return np.diff(np.unique(np.append(ends, 0)))


class Steps:
    """Times training steps of one rank."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.rank, self.arguments = rank, arguments
        self.model = make_model(arguments, "distca", HIDDEN)
        self.keys = list_layer_keys(self.model.module, None, "cpu")
        seeds = range(arguments.batches)
        self.batches = [draw_lengths(arguments.documents, arguments.tokens, seed) for seed in seeds]

    def dealing(self, way: Way, cable: float) -> Dealing:
        """Make the dealing of a way, and configure the session for it."""
        given, session = self.arguments, current_session()
        cost = make_cost(given.heads, given.slower, cable, nodes=way.nodes)
        config = hf_distca.DistCAConfig(way.balanced, cost_model=cost, ping_pong=given.ping_pong)
        session.config, costs = config, {key: make_initial_cost(key, config) for key in self.keys}
        for key, cost in costs.items():
            session.planner.costs[key.shape, key.device] = cost
        per_node = PER_NODE if way.nodes else None
        return Dealing(RANKS, given.tokens, costs, config, per_node, way.placement)

    def step(self, way: Way, cable: float, number: int, *, timed: bool) -> Step:
        """Time a step, from one barrier of all ranks to the next.

        Args:
            way: how documents are placed and planned.
            cable: bytes per second.
            number: index of the batch.
            timed: whether kernels sleep instead of computing.

        Returns:
            Seconds, megabytes that the busier node sent, loss and gradient of the global batch.
        """
        lengths, dealing = self.batches[number], self.dealing(way, cable)
        share = dealing.make_share(lengths, (0, number), self.rank)
        generator = torch.Generator().manual_seed(number)
        texts = [torch.randint(0, 512, (n,), generator=generator) for n in lengths.tolist()]
        batch, targets = make_share(texts, share), int((lengths - 1).sum())
        dist.barrier()
        before, started = int(SENT.read_text()), time.perf_counter()
        with timed_kernels(dealing.costs[self.keys[0]]) if timed else nullcontext():
            loss = self.model(**batch, use_cache=False, num_items_in_batch=targets).loss
            loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        sent = torch.tensor(int(SENT.read_text()) - before, dtype=torch.float64) / 1e6
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        total = loss.detach().double()
        dist.all_reduce(total)
        gradient = torch.cat([each.grad.flatten() for each in self.model.parameters()])
        self.model.zero_grad()
        return seconds, float(sent), float(total), gradient


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways at all rates."""
    timed = arguments.kernel == "timed"
    steps, keys = Steps(arguments, rank), list(itertools.product(arguments.rates, WAYS))

    def step(key: Key, number: int = 0, timed: bool = False) -> Step:
        return steps.step(WAYS[key[1]], key[0] * 1e6, number, timed=timed)

    exact = {key: step(key)[2:] for key in keys}
    taken: dict[Key, list[Any]] = {key: [] for key in keys}
    for round_ in iterate_rounds(rank, arguments.rounds):
        for rate in order_modes(arguments.rates, round_):
            if rank == 0:
                set_rate(arguments.nodes, rate * 1e6)
            for name in order_modes(WAYS, round_):
                done = [step((rate, name), n, timed)[:2] for n in range(arguments.batches)]
                taken[rate, name].append(np.mean(done, axis=0).tolist())
    documents = [batch.tolist() for batch in steps.batches]
    return {"documents_of_batches": documents, "rates": compute_figures(taken, exact)}


def compute_figures(
    taken: dict[Key, list[Any]], exact: dict[Key, Any]
) -> dict[str, dict[str, Any]]:
    """Compute seconds, megabytes between nodes, and differences of loss and gradients.

    Args:
        taken: mean seconds and megabytes of each round.
        exact: loss and gradient of a step whose kernels compute.
    """
    rows: dict[str, dict[str, Any]] = {}
    seconds = {key: [one for one, _ in done] for key, done in taken.items()}
    for (rate, name), done in taken.items():
        (loss, gradient), (plain_loss, plain) = exact[rate, name], exact[rate, UNBALANCED]
        one_level = name.replace("nodes first", "one level")
        rows.setdefault(f"{rate:g}", {})[name] = {
            "seconds": seconds[rate, name],
            "median_seconds": statistics.median(seconds[rate, name]),
            "megabytes_between": statistics.median(sent for _, sent in done),
            "to_unbalanced": compute_median_ratio(seconds[rate, name], seconds[rate, UNBALANCED]),
            "to_one_level": compute_median_ratio(seconds[rate, name], seconds[rate, one_level]),
            "loss_difference": abs(loss - plain_loss) / plain_loss,
            "gradient_difference": float((gradient - plain).abs().max() / plain.abs().max()),
        }
    return rows


def run_on_nodes(words: list[str]) -> dict[str, Any]:
    """Run this script with these words on both nodes, and return the result of the ranks."""
    with tempfile.TemporaryDirectory() as folder, two_nodes() as names:
        script = [sys.executable, __file__, *words, "--folder", folder, "--nodes", *names]
        common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE}
        running = []
        for rank in range(RANKS):
            node = rank // PER_NODE
            # The variables that torchrun sets.
            place = {"RANK": rank, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": PER_NODE}
            variables = os.environ | common | {name: str(value) for name, value in place.items()}
            running.append(subprocess.Popen(wrap_command(names[node], script), env=variables))
        ended = [process.wait() for process in running]
        if any(ended):
            raise SystemExit(f"ranks ended with {ended}: see above.")
        found: dict[str, Any] = read_result(Path(folder))
        return found


def show(result: dict[str, Any]) -> None:
    names = "seconds", "to unbalanced", "to one level", "MB between nodes", "gradients differ by"
    rows = []
    for rate, ways in result["rates"].items():
        for name, row in ways.items():
            to_one_level = f"{row['to_one_level']:.3f}" if WAYS[name].nodes else ""
            ratios = f"{row['to_unbalanced']:.3f}", to_one_level
            rest = f"{row['megabytes_between']:.1f}", f"{row['gradient_difference']:.1g}"
            rows.append((name, rate, f"{row['median_seconds']:.2f}", *ratios, *rest))
    print_table("a step on two nodes of two ranks", ("way", "MB/s between", *names), rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_model_options(parser, tokens=2048, layers=2, heads=8)
    add_rounds(parser)
    add_option(parser, "--rates", [20.0, 40.0, 80.0], "rates of the cable, in MB/s")
    add_option(parser, "--documents", "prolong", "distribution to draw batches from")
    add_option(parser, "--batches", 3, "batches of a round")
    parser.add_argument(
        "--kernel",
        choices=["timed", "real"],
        default="timed",
        help="timed kernels sleep, real ones compute",
    )
    add_option(parser, "--slower", 10.0, "slowdown of timed kernels relative to a CPU")
    parser.add_argument("--ping-pong", action="store_true", help="run layers in two nano-batches")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # only for rank processes
    parser.add_argument("--nodes", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        run_rank(int(os.environ["RANK"]), measure, RANKS, arguments, arguments.folder)
        return
    try:
        result = run_on_nodes(sys.argv[1:])
    except RuntimeError as error:
        parser.error(str(error))
    output_result(
        arguments, result, show, ranks=RANKS, per_node=PER_NODE, inside=INSIDE, hidden=HIDDEN
    )


if __name__ == "__main__":
    main()
