"""Bytes of one call of core attention on every rank, kept for backward and transient: balanced or
not, bounded or not.

Gloo processes with one thread each hold equally many tokens: one long document on the first rank
and many small ones on the others. Tensors are counted operation by operation, including those of
the kernel.

The time of a call follows, forward and backward, with kernels that sleep for as long as the
built-in figures of a CPU predict (`timed_kernels.py`). It shows what a bound costs in the first
micro-batches of a run; later ones use measured rates.

    python benchmarks/memory/call_memory.py --json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.kernels import ScoreOptions
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import compute_imbalance
from processes import add_rounds, compute_medians, gather, run_on_ranks, take_turns
from script import add_option, make_parser, output_result, print_table
from timed_kernels import timed_kernels

DIM = 64


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations in this mode made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((args, kwargs), new=False)
        result = func(*args, **(kwargs or {}))
        self.note(result, new=True)
        return result

    def note(self, values: Any, *, new: bool) -> None:
        for tensor in (value for value in tree_leaves(values) if isinstance(value, torch.Tensor)):
            reference = StorageWeakRef(tensor.untyped_storage())
            self.known.setdefault(
                reference.cdata, (reference, tensor.untyped_storage().nbytes() if new else 0)
            )
        self.peak = max(self.peak, self.alive())

    def alive(self) -> int:
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())


def choose_lengths(ranks: int, tokens: int) -> list[list[int]]:
    return [[tokens], *([[tokens // 16] * 16] * (ranks - 1))]


class Layer:
    """Core attention of a layer on one rank, with the plan of a mode."""

    def __init__(
        self,
        rank: int,
        group: AttentionGroup,
        arguments: argparse.Namespace,
        balanced: bool,
        bound: int | None,
    ) -> None:
        heads = (arguments.heads, max(arguments.heads // 2, 1))
        self.cost = CostModel.make_analytic(AttentionShape(*heads, DIM, DIM, 4), device_type="cpu")
        config = DistCAConfig(balance=balanced, max_transient_bytes=bound)
        plan = balance(
            Layout.from_lengths(choose_lengths(group.size, arguments.tokens)), self.cost, config
        )
        self.route, self.group = Route.build(plan, rank), group
        scores, self.meter = ScoreOptions(DIM**-0.5), Meter()
        self.server = AttentionServer(CpuKernel(), scores, self.meter)
        self.leaves = [
            torch.randn(arguments.tokens, n, DIM, requires_grad=True) for n in (*heads, heads[1])
        ]
        self.gradient = torch.randn(arguments.tokens, heads[0], DIM)

    def call(self) -> torch.Tensor:
        return compute_core_attention(
            Inputs(*self.leaves), LayerExchange(self.route, self.group, self.server)
        )

    def count_bytes(self) -> dict[str, float]:
        """Return the bytes of a call whose tensors are counted."""
        dist.barrier()
        live = LiveBytes()
        with live:
            out = self.call()
            time.sleep(0.05)  # gloo's thread holds the last message for a moment
            kept, peak = live.alive(), live.peak
            live.peak = 0
            grads = torch.autograd.grad(out, self.leaves, self.gradient, retain_graph=True)
            dist.barrier()
            transient = max(peak - kept, live.peak - kept - sum(grad.nbytes for grad in grads))
        inputs = sum(leaf.nbytes for leaf in self.leaves)
        return {"kept": kept + inputs, "transient": transient, "sent": self.meter.sent_bytes}

    def time_call(self) -> float:
        """Return the seconds of a call whose kernels sleep, until all ranks are done."""
        dist.barrier()
        started = time.perf_counter()
        with timed_kernels(self.cost):
            torch.autograd.grad(self.call(), self.leaves, self.gradient)
        dist.barrier()
        return time.perf_counter() - started


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    group = AttentionGroup.create()
    modes: dict[str, tuple[bool, int | None]] = {
        "unbalanced": (False, None),
        "balanced": (True, None),
    }
    modes |= {f"bound of {bound} MiB": (True, bound * 2**20) for bound in arguments.bounds}
    layers = {mode: Layer(rank, group, arguments, *wanted) for mode, wanted in modes.items()}
    result: dict[str, Any] = {}
    for mode, layer in layers.items():
        rows = gather(layer.count_bytes())
        found = {name: [row[name] for row in rows] for name in rows[0]}
        uneven = compute_imbalance(np.array(found["kept"], dtype=np.float64))
        result[mode] = found | {"kept_imbalance": uneven}
    seconds = take_turns(layers, lambda mode: layers[mode].time_call(), rank, arguments.rounds)
    middle = compute_medians(seconds)
    for mode, taken in seconds.items():
        result[mode] |= {"seconds": taken, "median_seconds": middle.get(mode)}
    return result


def show(result: dict[str, Any]) -> None:
    rows = []
    for ranks, modes in result["ranks"].items():
        for mode, row in modes.items():
            kept, transient = (
                ", ".join(f"{value / 2**20:.1f}" for value in row[name])
                for name in ("kept", "transient")
            )
            seconds = "" if row["median_seconds"] is None else f"{row['median_seconds']:.2f}"
            sent = f"{sum(row['sent']) / 2**20:.0f}"
            rows.append(
                (ranks, mode, kept, f"{row['kept_imbalance']:.3f}", transient, sent, seconds)
            )
    columns = "ranks", "mode", "kept", "max/mean", "transient", "MiB sent", "seconds"
    title = f"MiB a rank, {result['setting']['tokens']} tokens a rank"
    print_table(title, columns, rows, texts=7)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--tokens", 16384, "tokens a rank")
    add_option(parser, "--heads", 4, "query heads of 64; half as many key/value heads")
    add_option(parser, "--ranks", [2, 4], "numbers of ranks")
    add_option(parser, "--bounds", [4, 16, 64], "max_transient_bytes, in MiB")
    add_rounds(parser, 3)
    arguments = parser.parse_args()
    found = {str(ranks): run_on_ranks(measure, ranks, arguments) for ranks in arguments.ranks}
    output_result(arguments, {"ranks": found}, show, dtype="float32")


if __name__ == "__main__":
    main()
