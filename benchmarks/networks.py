"""Seconds of a training step on two nodes of two ranks, whose links are slow: keys sent directly, and passed on by relays.

Four processes with one thread each hold equally many tokens: one long document against short ones. Exchanges take as long as
their bytes would at `--rate` between nodes and at ten times that inside (`slow_network.py`). All is in float64, and the gradients
of all modes are compared. Modes take turns within each round; the figures are medians over rounds.

    python benchmarks/networks.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import hf_distca
from hf_distca.agreement import planner
from hf_distca.integration.session import current_session
from hf_distca.schedule import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from machine import describe
from output import add_json_option, put_out
from slow_network import Links, slow_network
from step_time import batch_of, model_of

RANKS, RANKS_PER_NODE = 4, 2
INSIDE = 10  # times as fast as between nodes
MODES = ("unbalanced", "planned without relays", "same tasks without relays", "relays")


@contextmanager
def plans_of(mode: str) -> Iterator[None]:
    """Make the plans of a mode. Without relays, less may be worth moving; with the same tasks, all is just sent directly."""
    if mode == "planned without relays":
        with patch.object(balance, "relieve", lambda load: load):
            yield
    elif mode == "same tasks without relays":
        with patch.object(planner, "balance", lambda *job: balance.balance(*job).with_relays(None)):
            yield
    else:
        yield


def cost_of(arguments: argparse.Namespace) -> CostModel:
    """The built-in figures of a CPU, in float64, with the rate between nodes."""
    shape = AttentionShape(arguments.heads, max(arguments.heads // 2, 1), 64, 64, 8)
    figures = json.loads(CostModel.analytic(shape, device_type="cpu").to_json())
    return CostModel.from_json(json.dumps({**figures, "exchange_bytes_per_second": arguments.rate * 1e6}))


def step(
    model: torch.nn.Module, batch: dict[str, Any], mode: str, arguments: argparse.Namespace
) -> tuple[float, torch.Tensor, int]:
    """Seconds until all ranks are done, the gradient, and the bytes that this rank sent."""
    session = current_session()
    session.config = hf_distca.DistCAConfig(balance=mode != "unbalanced", cost_model=cost_of(arguments))
    before = session.meter.sent_bytes
    links = Links(RANKS_PER_NODE, INSIDE * arguments.rate * 1e6, arguments.rate * 1e6)
    dist.barrier()
    started = time.perf_counter()
    with slow_network(links) as injected, plans_of(mode):
        model(**dict(batch), use_cache=False).loss.backward()
    dist.barrier()
    seconds = time.perf_counter() - started
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return seconds, gradient, (session.meter.sent_bytes - before, injected.seconds)


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = model_of(arguments, "distca")
    batch = batch_of([arguments.tokens] if rank == 0 else [arguments.tokens // 8] * 8, rank)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    gradients: dict[str, torch.Tensor] = {}
    sent: dict[str, list[tuple[int, float]]] = {}
    progress = tqdm(total=arguments.rounds, desc="rounds", file=sys.stderr) if rank == 0 else nullcontext()
    with progress as bar:
        for mode in MODES:  # the first steps pay for buffers and caches
            _, gradients[mode], count = step(model, batch, mode, arguments)
            sent[mode] = [(0, 0.0)] * RANKS
            dist.all_gather_object(sent[mode], count)
        for round_ in range(arguments.rounds):
            for mode in MODES[:: 1 if round_ % 2 == 0 else -1]:
                seconds[mode].append(step(model, batch, mode, arguments)[0])
            if bar is not None:
                bar.update()
    largest = float(gradients["unbalanced"].abs().max())
    differences = {mode: float((gradients[mode] - gradients["unbalanced"]).abs().max()) / largest for mode in MODES}
    same = gradients["relays"] - gradients["same tasks without relays"]
    differences["relays, from the same tasks without them"] = float(same.abs().max()) / largest
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(figures(arguments, seconds, sent, differences)))
    dist.barrier()
    dist.destroy_process_group()


def figures(
    arguments: argparse.Namespace,
    seconds: dict[str, list[float]],
    sent: dict[str, list[tuple[int, float]]],
    differences: dict[str, float],
) -> dict[str, Any]:
    """Medians over rounds, ratios within rounds, bytes and seconds of the links of each rank, and differences of gradients."""
    return {
        "machine": describe(),
        "setting": {"ranks": RANKS, "ranks_per_node": RANKS_PER_NODE, "inside": INSIDE, "threads": 1}
        | {k: v for k, v in vars(arguments).items() if k != "json"},
        "seconds": seconds,
        "median_seconds": {mode: statistics.median(row) for mode, row in seconds.items()},
        "relays_to": {
            mode: statistics.median(a / b for a, b in zip(seconds["relays"], seconds[mode], strict=True)) for mode in MODES[:-1]
        },
        "megabytes_sent": {mode: [count / 1e6 for count, _ in row] for mode, row in sent.items()},
        "link_seconds": {mode: [link for _, link in row] for mode, row in sent.items()},
        "gradient_difference": differences,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"step time on two nodes of two ranks, {result['setting']['rate']} MB/s between")
    for name in ("mode", "seconds", "MB sent by each rank", "seconds of the busiest links", "difference of gradients"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, seconds in result["median_seconds"].items():
        sent = ", ".join(f"{count:.0f}" for count in result["megabytes_sent"][mode])
        table.add_row(
            mode, f"{seconds:.2f}", sent, f"{max(result['link_seconds'][mode]):.2f}", f"{result['gradient_difference'][mode]:.1g}"
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="decoder layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="query heads of 64; half as many key/value heads")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each running every mode once (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of a rank between nodes (default: %(default)s)")
    add_json_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments, folder), nprocs=RANKS)
        result = json.loads(Path(folder, "result.json").read_text())
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
