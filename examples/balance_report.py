"""What balancing changed: the same micro-batches forward and backward with balancing off and on, as a table and a picture."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from accelerate.utils import gather_object
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import hf_distca

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import Trainer


@dataclass(frozen=True, slots=True)
class Timing:
    """One micro-batch, forward and backward, seen from all ranks.

    Attributes:
        loss: mean over the ranks.
        step_seconds: of the slowest rank.
        attention_seconds: in attention kernels, by rank.
    """

    loss: float
    step_seconds: float
    attention_seconds: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same micro-batches with balancing off and on.

    Attributes:
        off, on: one timing per micro-batch.
        estimated: imbalance before and after balancing that the scheduler estimated in training, as logged.
    """

    off: list[Timing]
    on: list[Timing]
    estimated: tuple[float, float] | None

    @property
    def ranks(self) -> int:
        """How many ranks took part."""
        return len(self.off[0].attention_seconds)


def imbalance(timings: list[Timing]) -> float:
    """Attention seconds of the slowest rank over the mean of all ranks, both summed over the micro-batches.

    Ranks wait for the slowest in every micro-batch, so the maximum is taken before the sum: which rank it is changes.
    """
    slowest = sum(max(timing.attention_seconds) for timing in timings)
    return slowest / sum(fmean(timing.attention_seconds) for timing in timings)


def compare_balancing(trainer: Trainer, batches: int) -> Comparison:
    """Run the first `batches` training micro-batches with balancing off and on. Every rank must call this.

    The model's weights stay as they are. Off and on take turns at going first, so that neither gains from warm caches.
    """
    timings: dict[bool, list[Timing]] = {False: [], True: []}
    trainer.model_wrapped.train()
    for index, inputs in enumerate(islice(trainer.get_train_dataloader(), batches)):
        for balanced in (True, False) if index % 2 else (False, True):
            timings[balanced].append(_time_micro_batch(trainer, inputs, balanced))
    return Comparison(timings[False], timings[True], _logged_estimate(trainer))


def _logged_estimate(trainer: Trainer) -> tuple[float, float] | None:
    """The mean over the training's log entries of what DistCACallback put there."""
    names = ("distca/imbalance_estimated_before", "distca/imbalance_estimated_after")
    entries = [entry for entry in trainer.state.log_history if names[0] in entry]
    if not entries:
        return None
    before, after = (fmean(entry[name] for entry in entries) for name in names)
    return before, after


def _time_micro_batch(trainer: Trainer, inputs: dict[str, Any], balanced: bool) -> Timing:
    trainer.accelerator.wait_for_everyone()
    attention_started, started = hf_distca.attention_seconds(), time.perf_counter()
    with hf_distca.balancing(balanced):
        loss = trainer.compute_loss(trainer.model_wrapped, inputs)
        trainer.accelerator.backward(loss)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    trainer.model_wrapped.zero_grad()
    mine = (loss.item(), seconds, hf_distca.attention_seconds() - attention_started)
    losses, steps, attention = zip(*gather_object([mine]), strict=True)
    return Timing(fmean(losses), max(steps), list(attention))


def print_comparison(comparison: Comparison) -> None:
    """Print the table."""
    off, on = comparison.off, comparison.on
    step_off, step_on = (median(timing.step_seconds for timing in side) for side in (off, on))
    difference = max(abs(a.loss - b.loss) for a, b in zip(off, on, strict=True))

    table = Table(title=f"The same {len(off)} micro-batches on {comparison.ranks} ranks, forward and backward")
    for heading in ("", "balancing off", "balancing on"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("loss, mean", *(f"{fmean(timing.loss for timing in side):.6f}" for side in (off, on)))
    table.add_row("largest loss difference", "", f"{difference:.1e}")
    if comparison.estimated is not None:
        table.add_row("attention imbalance, estimated in training", *(f"{value:.2f}" for value in comparison.estimated))
    table.add_row("attention imbalance, measured", f"{imbalance(off):.2f}", f"{imbalance(on):.2f}")
    for rank in range(comparison.ranks):
        seconds = (f"{sum(timing.attention_seconds[rank] for timing in side):.2f} s" for side in (off, on))
        table.add_row(f"attention seconds, rank {rank}", *seconds)
    table.add_row("step, median", f"{step_off:.2f} s", f"{step_on:.2f} s")
    table.add_row("step, off / on", "", f"{step_off / step_on:.2f} x", style="bold")
    # Not cut to 80 columns where the output is a file.
    Console(width=None if Console().is_terminal else 100).print(table)


def draw_comparison(comparison: Comparison, path: Path) -> Path:
    """Draw attention seconds of every rank and micro-batch, off beside on, to `path` and return it."""
    mpl.use("Agg")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_side(left, "balancing off", comparison.off)
    _draw_side(right, "balancing on", comparison.on)
    left.set_ylabel("seconds in attention kernels")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"Attention imbalance {imbalance(comparison.off):.2f} \N{RIGHTWARDS ARROW} {imbalance(comparison.on):.2f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_side(axes: Axes, title: str, timings: list[Timing]) -> None:
    ranks = len(timings[0].attention_seconds)
    width = 0.8 / ranks
    colours = mpl.colormaps["viridis"]
    for rank in range(ranks):
        places = [batch + (rank - (ranks - 1) / 2) * width for batch in range(len(timings))]
        heights = [timing.attention_seconds[rank] for timing in timings]
        axes.bar(places, heights, width * 0.92, label=f"rank {rank}", color=colours(0.2 + 0.6 * rank / max(ranks - 1, 1)))
    for batch, timing in enumerate(timings):
        mean = fmean(timing.attention_seconds)
        label = "mean of the ranks" if batch == 0 else "_again"  # matplotlib leaves labels with an underscore out of legends
        axes.hlines(mean, batch - 0.45, batch + 0.45, colors="black", linestyles="dashed", linewidth=1, label=label)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("micro-batch")
    axes.set_xticks(range(len(timings)), [str(batch + 1) for batch in range(len(timings))])
    axes.spines[["top", "right"]].set_visible(False)
