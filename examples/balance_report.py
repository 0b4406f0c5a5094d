"""What dealing and balancing changed: the same global batches in order and dealt, as a table and
two pictures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from accelerate.utils import gather_object, send_to_device
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import hf_distca

if TYPE_CHECKING:
    from datasets import Dataset
    from matplotlib.axes import Axes
    from transformers import Trainer

IN_ORDER, BALANCED, DEALT = "in order, balancing off", "in order, balancing on", "dealt"


@dataclass(frozen=True, slots=True)
class Timing:
    """One global batch, forward and backward, seen from all ranks.

    Attributes:
        loss: of all its targets.
        step_seconds: of the slowest rank.
        attention_seconds: in attention kernels, by rank.
    """

    loss: float
    step_seconds: float
    attention_seconds: list[float]


def imbalance(timings: Sequence[Timing]) -> float:
    """Attention seconds of the slowest rank over the mean of all ranks, both summed over the
    batches.

    Ranks wait for the slowest in every batch, so the maximum is taken before the sum: which rank it
    is changes.
    """
    slowest = sum(max(timing.attention_seconds) for timing in timings)
    return slowest / sum(fmean(timing.attention_seconds) for timing in timings)


def compare_placements(
    trainer: Trainer, in_order: Dataset, dealt: Dataset, batches: int
) -> dict[str, list[Timing]]:
    """Run the first global batches in order, with balancing off and on, and dealt. Every rank must
    call this.

    The model's weights stay as they are. All three take turns at going first, so that none gains
    from warm caches.

    Args:
        trainer: whose model runs.
        in_order, dealt: the same documents as `document_shares` gives them for both placements.
        batches: how many.
    """
    sides = {IN_ORDER: (in_order, False), BALANCED: (in_order, True), DEALT: (dealt, True)}
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    trainer.model_wrapped.train()
    # The first batch after training is not counted: rank 0 may still be writing.
    _time(trainer, trainer.data_collator([in_order[trainer.args.process_index]]), balanced=False)
    for number in range(min(batches, len(dealt) // trainer.args.world_size)):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            shares, balanced = sides[name]
            share = shares[number * trainer.args.world_size + trainer.args.process_index]
            timings[name].append(_time(trainer, trainer.data_collator([share]), balanced))
    return timings


def _time(trainer: Trainer, batch: dict[str, Any], balanced: bool) -> Timing:
    inputs = send_to_device(batch, trainer.accelerator.device)
    targets = sum(gather_object([int((batch["shift_labels"] != -100).sum())]))
    trainer.accelerator.wait_for_everyone()
    attention_started, started = hf_distca.metrics().attention_seconds, time.perf_counter()
    with hf_distca.balancing(balanced):
        loss = trainer.compute_loss(
            trainer.model_wrapped, inputs, num_items_in_batch=torch.tensor(targets)
        )
        trainer.accelerator.backward(loss)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    trainer.model_wrapped.zero_grad()
    mine = (loss.item(), seconds, hf_distca.metrics().attention_seconds - attention_started)
    losses, steps, attention = zip(*gather_object([mine]), strict=True)
    return Timing(fmean(losses), max(steps), list(attention))


def print_comparison(timings: dict[str, list[Timing]]) -> None:
    """Print the table."""
    sides, off = list(timings.values()), timings[IN_ORDER]
    ranks, steps = (
        len(off[0].attention_seconds),
        [sum(timing.step_seconds for timing in side) for side in sides],
    )
    differences = [
        max(abs(a.loss - b.loss) for a, b in zip(off, side, strict=True)) for side in sides
    ]

    table = Table(
        title=f"The same {len(off)} global batches on {ranks} ranks, forward and backward"
    )
    for heading in ("", *timings):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("loss, mean", *(f"{fmean(timing.loss for timing in side):.6f}" for side in sides))
    table.add_row(
        "largest loss difference", "", *(f"{difference:.1e}" for difference in differences[1:])
    )
    table.add_row("attention imbalance, measured", *(f"{imbalance(side):.2f}" for side in sides))
    for rank in range(ranks):
        seconds = (
            f"{sum(timing.attention_seconds[rank] for timing in side):.2f} s" for side in sides
        )
        table.add_row(f"attention seconds, rank {rank}", *seconds)
    table.add_row("all of them", *(f"{step:.2f} s" for step in steps))
    table.add_row(
        "times faster", "", *(f"{steps[0] / step:.2f} x" for step in steps[1:]), style="bold"
    )
    # Not cut to 80 columns where the output is a file.
    Console(width=None if Console().is_terminal else 120).print(table)


def draw_comparison(timings: dict[str, list[Timing]], path: Path) -> Path:
    """Draw attention seconds of every rank and batch, side by side, to `path` and return it."""
    mpl.use("Agg")
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(timings), sharey=True)
    for axes, (name, side) in zip(panels, timings.items(), strict=True):
        _draw_side(axes, f"{name}: imbalance {imbalance(side):.2f}", side)
    panels[0].set_ylabel("seconds in attention kernels")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_side(axes: Axes, title: str, timings: list[Timing]) -> None:
    ranks = len(timings[0].attention_seconds)
    width = 0.8 / ranks
    for rank in range(ranks):
        places = [batch + (rank - (ranks - 1) / 2) * width for batch in range(len(timings))]
        heights = [timing.attention_seconds[rank] for timing in timings]
        axes.bar(places, heights, width * 0.92, label=f"rank {rank}", color=_colour(rank, ranks))
    for batch, timing in enumerate(timings):
        mean = fmean(timing.attention_seconds)
        # Matplotlib leaves labels with an underscore out of legends.
        label = "mean of the ranks" if batch == 0 else "_again"
        axes.hlines(
            mean,
            batch - 0.45,
            batch + 0.45,
            colors="black",
            linestyles="dashed",
            linewidth=1,
            label=label,
        )
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("global batch")
    axes.set_xticks(range(len(timings)), [str(batch + 1) for batch in range(len(timings))])
    axes.spines[["top", "right"]].set_visible(False)


def _colour(number: int, count: int) -> Any:
    return mpl.colormaps["viridis"](0.2 + 0.6 * number / max(count - 1, 1))


def draw_global_batch(
    in_order: Dataset, dealt: Dataset, path: Path, ranks: int, number: int = 0
) -> Path:
    """Draw which tokens of a global batch lie on which rank, in order and dealt; a document has one
    colour in both.

    Args:
        in_order, dealt: as for `compare_placements`.
        path: image to write.
        ranks: that share it.
        number: of the global batch.
    """
    mpl.use("Agg")
    sides = {"in order": in_order, "dealt": dealt}
    # Item k * ranks is rank 0's share of global batch k, and carries the layout of all of it.
    layouts = {
        name: shares[number * ranks]["distca_documents"].dealt_share.whole_layout
        for name, shares in sides.items()
    }
    figure = Figure(figsize=(12, 1.2 + 0.5 * layouts["dealt"].world_size), layout="constrained")
    for axes, (name, layout) in zip(
        figure.subplots(1, 2, sharey=True), layouts.items(), strict=True
    ):
        _draw_layout(axes, name, layout)
    figure.axes[0].invert_yaxis()  # the other one shares it
    figure.savefig(path, dpi=150)
    return path


def _draw_layout(axes: Axes, title: str, layout: Any) -> None:
    long = [
        document
        for document in range(int(layout.document.max()) + 1)
        if _tokens(layout, document) * 20 > layout.length.sum()
    ]
    for rank in range(layout.world_size):
        left = 0
        for segment in layout.list_segments(rank):
            known = segment.document in long
            colour = (
                mpl.colormaps["tab10"](long.index(segment.document) % 10) if known else "lightgrey"
            )
            axes.barh(
                rank, segment.length, left=left, color=colour, edgecolor="white", linewidth=0.5
            )
            if known:
                axes.text(
                    left + segment.length / 2,
                    rank,
                    f"{segment.start}",
                    ha="center",
                    va="center",
                    fontsize="x-small",
                )
            left += segment.length
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("tokens; numbers: where in its document a piece starts")
    axes.set_yticks(range(layout.world_size), [f"rank {rank}" for rank in range(layout.world_size)])
    axes.spines[["top", "right"]].set_visible(False)


def _tokens(layout: Any, document: int) -> int:
    return int(layout.length[layout.document == document].sum())
