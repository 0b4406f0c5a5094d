"""Other ways to train on documents of different lengths, really run beside hf-distca on CPU
processes.

    python benchmarks/steps/peers.py --picture peers.png --json

The same documents, model and weights for all; one document is as long as what one of four ranks
holds. Each way takes turns with the others within a round, in fresh processes with one thread each,
and its figures are medians over rounds. Where there are more processes than cores, or other
programs, compare processor seconds of the busiest process: they leave out that it waits.

Losses of all steps are compared with one process that computes one document at a time under sdpa:
the first tells about outputs, later ones about gradients as well. What does not run is started all
the same, and its error is shown.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from machine import describe
from output import add_json_option, put_out
from processes import in_turns, on_ranks, setting_of

# Where a step is, and what is told of it. Modules are imported in the processes that need them:
# DeepSpeed patches others.
WAYS = {
    "packed, sdpa": ("peer_steps", "Packed"),
    "batch_rebalance, padded": ("peer_steps", "Rebalanced"),
    "batch_rebalance, packed": ("peer_steps", "RebalancedAndPacked"),
    "Ulysses, a document a micro-batch": ("peer_context", "Ulysses"),
    "Ulysses, packed": ("peer_context", "PackedUlysses"),
    "packed, kernel of hf-distca": ("peer_steps", "Unbalanced"),
    "hf-distca, as given": ("peer_steps", "AsGiven"),
    "hf-distca, dealt": ("peer_steps", "Dealt"),
}
ALONE = ("peer_steps", "Alone")
# As accelerate's guide to sequence parallelism takes the loss, on 2 processes and few tokens.
GUIDED = {
    "Ulysses by its guide, ZeRO-2": ("peer_context", "guided_under_zero_2"),
    "Ulysses by its guide, ZeRO-3": ("peer_context", "guided_under_zero_3"),
}
EQUAL = 1e-6  # of losses, relative
# Started on 2 processes: each has to fail here.
REFUSED = {
    "accelerate, ParallelismConfig(cp_size=2)": ("peer_context", "accelerate_context_parallel"),
    "torch, context_parallel, sdpa": ("peer_context", "torch_context_parallel"),
    "torch, context parallelism, flex_attention": ("peer_context", "flex_context_parallel"),
    "Ulysses, one head on 2 ranks": ("peer_context", "one_head"),
    "hf-distca, a Bloom": ("peer_steps", "unknown_family"),
}


def find(place: tuple[str, str]) -> Callable[..., Any]:
    return getattr(import_module(place[0]), place[1])  # type: ignore[no-any-return]


def be_launched(rank: int, ranks: int) -> None:
    """Tell accelerate and DeepSpeed what torchrun would tell them; the address is never used, for
    there is a group already.
    """
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1")


def train(
    rank: int, ranks: int, arguments: argparse.Namespace, place: tuple[str, str]
) -> dict[str, Any]:
    """Train a few steps in one way, the first of which is not timed; figures that differ by rank
    are lists.

    Memory is what steps add to that of the process before the first one, at its peak.
    """
    be_launched(rank, ranks)
    way = find(place)(arguments, rank, ranks)
    before = psutil.Process().memory_info().rss  # the model and what was imported
    seconds, busy, losses = [], [], []
    for _ in range(arguments.steps + 1):
        dist.barrier()
        started, ran = time.perf_counter(), time.process_time()
        losses.append(way.step())
        taken = torch.tensor(time.process_time() - ran, dtype=torch.float64)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        busy.append(float(taken))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    columns = torch.zeros(ranks, 3, dtype=torch.float64)
    columns[rank] = torch.tensor([way.tokens, way.pairs, peak / 1e6], dtype=torch.float64)
    dist.all_reduce(columns)
    tokens, pairs, megabytes = columns.T.tolist()
    by_rank = {"tokens": tokens, "pairs": pairs, "peak_mb": megabytes}
    return {"seconds": seconds[1:], "processor_seconds": busy[1:], "losses": losses, **by_rank}


def refusal(
    rank: int, ranks: int, arguments: argparse.Namespace, place: tuple[str, str]
) -> str | None:
    """The first line of the error that something ends with; None if it runs."""
    be_launched(rank, ranks)
    try:
        find(place)(arguments, rank, ranks)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    words = arguments.ways or [""]
    ways, refused, guided = (
        {name: place for name, place in group.items() if any(word in name for word in words)}
        for group in (WAYS, REFUSED, GUIDED)
    )
    turns: dict[tuple[int, str], list[dict[str, Any]]] = {
        (ranks, way): [] for ranks in arguments.ranks for way in ways
    }
    small = argparse.Namespace(**{**vars(arguments), "tokens": 1024, "steps": 1})
    bar = tqdm(
        total=1 + bool(guided) + len(guided) + len(refused) + len(turns) * arguments.rounds,
        file=sys.stderr,
    )

    def started(
        function: Callable[..., Any],
        ranks: int,
        place: tuple[str, str],
        setting: argparse.Namespace = arguments,
    ) -> Any:
        bar.set_description(f"{place[1]}, {ranks} processes")
        result = on_ranks(partial(function, place=place), ranks, setting, forked=True)
        bar.update()
        return result

    alone, right = started(train, 1, ALONE), started(train, 1, ALONE, small) if guided else {}
    errors = {name: started(refusal, 2, place) for name, place in refused.items()}
    by_guide = {
        name: differences([started(train, 2, place, small)], right)
        for name, place in guided.items()
    }
    for round_ in range(arguments.rounds):
        for ranks, way in in_turns(turns, round_):
            turns[ranks, way].append(started(train, ranks, ways[way]))
    bar.close()
    return {
        "machine": describe(),
        "setting": setting_of(arguments),
        "one process": alone,
        "rows": [row_of(ranks, way, runs, alone) for (ranks, way), runs in turns.items()],
        "refused": errors,
        "by_guide": by_guide,
    }


def differences(runs: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences of losses from one process: of the first step, and of later
    ones.
    """
    by_step = [
        max(abs(run["losses"][step] / right - 1) for run in runs)
        for step, right in enumerate(alone["losses"])
    ]
    return {"first_loss_difference": by_step[0], "later_loss_difference": max(by_step[1:])}


def row_of(
    ranks: int, way: str, runs: list[dict[str, Any]], alone: dict[str, Any]
) -> dict[str, Any]:
    """Figures of a way: medians over rounds, and the largest differences of losses."""
    (pairs,) = alone["pairs"]
    return {
        "way": way,
        "ranks": ranks,
        **{
            name: statistics.median(statistics.median(run[name]) for run in runs)
            for name in ("seconds", "processor_seconds")
        },
        "all_seconds": [run["seconds"] for run in runs],
        **differences(runs, alone),
        "tokens": runs[0]["tokens"],
        "attention": [ranks * of_rank / pairs for of_rank in runs[0]["pairs"]],
        "peak_mb": statistics.median(max(run["peak_mb"]) for run in runs),
    }


def cells(row: dict[str, Any]) -> dict[str, str]:
    """What a table says of a way, by column."""
    tokens, attention = row["tokens"], row["attention"]
    return {
        "": row["way"],
        "s a step": f"{row['seconds']:.2f}",
        "processor s": f"{row['processor_seconds']:.2f}",
        "tokens of ranks": f"{min(tokens):,.0f} to {max(tokens):,.0f}",
        "attention / fair share": f"{min(attention):.2f} to {max(attention):.2f}",
        "peak MB": f"{row['peak_mb']:.0f}",
        "loss differs by": f"{row['first_loss_difference']:.0e}",
        "later losses": f"{row['later_loss_difference']:.0e}",
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=140)
    for ranks in result["setting"]["ranks"]:
        rows = [cells(row) for row in result["rows"] if row["ranks"] == ranks]
        table = Table(
            title=(
                f"{result['setting']['tokens']} tokens on {ranks} processes,"
                f" {result['machine']['cores']} cores"
            )
        )
        for column in rows[0] if rows else ():
            table.add_column(column, justify="right" if column else "left")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    for name, error in result["refused"].items():
        console.print(f"{name}: {error or 'runs'}", soft_wrap=True)
    for name, found in result["by_guide"].items():
        console.print(
            f"{name}: loss differs by {found['first_loss_difference']:.0e}, after a step"
            f" {found['later_loss_difference']:.0e}"
        )


def draw(result: dict[str, Any], path: str) -> None:
    """Processor seconds of each way and the attention of its busiest rank, on each number of
    processes.
    """
    import matplotlib.pyplot as plt  # takes a second, which the processes that train are spared

    counts = result["setting"]["ranks"]
    figure, axes = plt.subplots(
        len(counts), 2, figsize=(11, 3.4 * len(counts)), squeeze=False, sharey=True
    )
    for (left, right), ranks in zip(axes, counts, strict=True):
        rows = [row for row in result["rows"] if row["ranks"] == ranks][::-1]
        names, colors = [row["way"] for row in rows], [color_of(row) for row in rows]
        left.barh(names, [row["processor_seconds"] for row in rows], color=colors)
        left.set_title(f"processor seconds a step, busiest of {ranks} processes")
        right.barh(names, [max(row["attention"]) for row in rows], color=colors)
        right.axvline(1, color="#3c4650", linewidth=0.8)
        right.set_title("attention of the busiest rank / fair share")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def color_of(row: dict[str, Any]) -> str:
    """Blue for hf-distca, red for a loss that is not that of one process, grey for others."""
    if max(row["first_loss_difference"], row["later_loss_difference"]) > EQUAL:
        return "#d1495b"
    return "#2f6fb0" if row["way"].startswith("hf-distca") else "#9aa5b1"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=12288,
        help="tokens of the global batch (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="decoder layers (default: %(default)s)"
    )
    parser.add_argument(
        "--heads", type=int, default=8, help="query heads of 64; half as many key/value heads"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds, each running every way once (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 4],
        choices=(1, 2, 4),
        help="numbers of processes",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        help="timed steps of a way in a round (default: %(default)s)",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        metavar="WORD",
        help="only ways that have one of these words in their names",
    )
    parser.add_argument("--picture", help="where to draw processor seconds and attention")
    add_json_option(parser)
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.picture:
        draw(result, arguments.picture)
    put_out(result, arguments.json, show)


if __name__ == "__main__":
    main()
