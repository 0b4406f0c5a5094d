"""Bytes of one call of core attention on every rank: kept for backward, and transient; balanced or not, bounded or not.

Gloo processes with one thread each hold equally many tokens, one long document on the first rank and many small ones on the
others. Tensors are counted operation by operation, the kernel's own ones included.

    python benchmarks/memory.py --json
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_distca.config import DistCAConfig
from hf_distca.kernels import Scores, select_kernel
from hf_distca.runtime.call import Call, Inputs
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.runtime.server import AttentionServer
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import imbalance
from hf_distca.schedule.waves import Waves
from machine import describe
from output import add_json_option, put_out
from processes import on_ranks, setting_of

DIM = 64


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside made and that still live, and the most of them at a time."""

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
            self.known.setdefault(reference.cdata, (reference, tensor.untyped_storage().nbytes() if new else 0))
        self.peak = max(self.peak, self.alive())

    def alive(self) -> int:
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())


def lengths_of(ranks: int, tokens: int) -> list[list[int]]:
    return [[tokens], *([[tokens // 16] * 16] * (ranks - 1))]


def measure(rank: int, ranks: int, group: AttentionGroup, arguments: argparse.Namespace, mode: str) -> dict[str, float]:
    shape = AttentionShape(arguments.heads, max(arguments.heads // 2, 1), DIM, DIM, 4)
    bound = arguments.bound if mode == "bounded" else None
    config = DistCAConfig(balance=mode != "unbalanced", max_transient_bytes=bound)
    layout = Layout.from_lengths(lengths_of(ranks, arguments.tokens))
    waves = Waves.of(balance(layout, CostModel.analytic(shape, device_type="cpu"), config), shape, config.tile, bound)
    scores, meter = Scores(DIM**-0.5), Meter()
    server = AttentionServer(select_kernel("auto", torch.device("cpu"), torch.float32, DIM, DIM, scores), scores, meter)
    route = Route.build(waves.plan, rank, waves)
    heads = (shape.query_heads, shape.key_value_heads, shape.key_value_heads)
    leaves = [torch.randn(arguments.tokens, n, DIM).requires_grad_() for n in heads]
    gradient = torch.randn(arguments.tokens, shape.query_heads, DIM)
    dist.barrier()
    started, live = time.perf_counter(), LiveBytes()
    with live:
        out = core_attention(Inputs(*leaves), Call(route, group, server))
        time.sleep(0.05)  # gloo's thread holds the last message for a moment
        kept, peak = live.alive(), live.peak
        live.peak = 0
        grads = torch.autograd.grad(out, leaves, gradient, retain_graph=True)
        dist.barrier()
        transient = max(peak - kept, live.peak - kept - sum(grad.nbytes for grad in grads))
    seconds = time.perf_counter() - started
    inputs = sum(leaf.nbytes for leaf in leaves)
    return {
        "kept": kept + inputs,
        "transient": transient,
        "waves": len(route.waves),
        "sent": meter.sent_bytes,
        "seconds": seconds,
    }


def work(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    group = AttentionGroup.create()
    result = {}
    for mode in ("unbalanced", "balanced", "bounded"):
        rows: list[Any] = [None] * ranks
        dist.all_gather_object(rows, measure(rank, ranks, group, arguments, mode))
        figures: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        figures["kept_imbalance"] = imbalance(torch.tensor(figures["kept"], dtype=torch.float64).numpy())
        result[mode] = figures
    return result


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"MiB a rank, {result['setting']['tokens']} tokens a rank")
    for column in ("ranks", "mode", "kept", "max/mean", "transient", "waves"):
        table.add_column(column)
    for ranks, modes in result["ranks"].items():
        for mode, row in modes.items():
            kept, transient = (", ".join(f"{value / 2**20:.1f}" for value in row[name]) for name in ("kept", "transient"))
            table.add_row(ranks, mode, kept, f"{row['kept_imbalance']:.4f}", transient, str(row["waves"][0]))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens a rank (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads of 64; half as many key/value heads")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--bound", type=int, default=2**24, help="bound of the bounded mode in bytes (default: %(default)s)")
    add_json_option(parser)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": describe(), "setting": setting_of(arguments, dtype="float32"), "ranks": {}}
    for ranks in arguments.ranks:
        result["ranks"][str(ranks)] = on_ranks(work, ranks, arguments)
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
