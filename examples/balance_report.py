"""Time and draw the same global batches in order and dealt, to show what dealing changed."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from accelerate.utils import send_to_device
from matplotlib.figure import Figure

from comparison import Timing, imbalance, step_of, time_batch

if TYPE_CHECKING:
    from datasets import Dataset
    from matplotlib.axes import Axes
    from transformers import Trainer

IN_ORDER, BALANCED, DEALT = "in order, balancing off", "in order, balancing on", "dealt"


def compare_placements(
    trainer: Trainer, in_order: Dataset, dealt: Dataset, batches: int
) -> dict[str, list[Timing]]:
    """Time the first global batches in three ways: in order with balancing off, in order with
    balancing on, and dealt.

    Every rank must call this function. The model's weights do not change. The three ways take turns
    at going first, so that warm caches favour none of them.

    Args:
        trainer: Trainer whose model runs.
        in_order, dealt: the same documents in two placements, from `document_shares`.
        batches: number of global batches.
    """
    sides = {IN_ORDER: (in_order, False), BALANCED: (in_order, True), DEALT: (dealt, True)}
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    trainer.model_wrapped.train()
    step = step_of(trainer)

    def run(share: Any, balanced: bool) -> Timing:
        batch = send_to_device(trainer.data_collator([share]), trainer.accelerator.device)
        return time_batch(step, batch, balanced=balanced)

    # The first run after training is not counted, because rank 0 may still be writing files.
    run(in_order[trainer.args.process_index], balanced=False)
    for number in range(min(batches, len(dealt) // trainer.args.world_size)):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            shares, balanced = sides[name]
            share = shares[number * trainer.args.world_size + trainer.args.process_index]
            timings[name].append(run(share, balanced))
    return timings


def draw_comparison(timings: dict[str, list[Timing]], path: Path) -> Path:
    """Draw the attention seconds of every rank and batch to the image `path`, and return `path`."""
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
        # Matplotlib leaves labels that begin with an underscore out of legends.
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
    """Draw which tokens of a global batch lie on which rank, in order and dealt. Return `path`.

    A long document has the same colour in both panels.

    Args:
        in_order, dealt: as for `compare_placements`.
        path: image to write.
        ranks: number of ranks.
        number: index of the global batch.
    """
    mpl.use("Agg")
    sides = {"in order": in_order, "dealt": dealt}
    # Item k * ranks is rank 0's share of global batch k, and carries the layout of the whole batch.
    layouts = {
        name: shares[number * ranks]["distca_documents"].dealt_share.whole_layout
        for name, shares in sides.items()
    }
    figure = Figure(figsize=(12, 1.2 + 0.5 * layouts["dealt"].world_size), layout="constrained")
    for axes, (name, layout) in zip(
        figure.subplots(1, 2, sharey=True), layouts.items(), strict=True
    ):
        _draw_layout(axes, name, layout)
    figure.axes[0].invert_yaxis()  # both panels share this axis
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
