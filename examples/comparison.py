"""Time the same batches in several ways, for example with balancing off and on.

Losses must be equal. A table shows how many times faster each way is than the first, and how many
times faster a perfectly balanced step would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table

import hf_distca

if TYPE_CHECKING:
    from transformers import Trainer

# Runs a micro-batch forward and backward, clears the gradients, and returns the loss.
Step = Callable[[dict[str, Any]], torch.Tensor]
OFF, ON = "balancing off", "balancing on"
BATCHES = 2  # number of compared batches
# Largest relative differences of losses that rounding explains.
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-3}


@dataclass(frozen=True, slots=True)
class Timing:
    """Loss and times of a global batch, forward and backward, or of one tick of a pipeline.

    Attributes:
        loss: loss of the whole batch.
        step_seconds: seconds of the slowest rank.
        attention_seconds: seconds in attention kernels, for each rank.
    """

    loss: float
    step_seconds: float
    attention_seconds: list[float]


def imbalance(timings: Sequence[Timing]) -> float:
    """Compute the attention seconds of the slowest rank / the mean of all ranks.

    A batch takes as long as its slowest rank, so the seconds of the slowest rank of each batch are
    summed.
    """
    slowest = sum(max(timing.attention_seconds) for timing in timings)
    return slowest / sum(fmean(timing.attention_seconds) for timing in timings)


def times_faster_at_best(timings: Sequence[Timing]) -> float:
    """Compute how many times faster steps would be if attention were perfectly balanced."""
    seconds = sum(timing.step_seconds for timing in timings)
    waited = sum(
        max(timing.attention_seconds) - fmean(timing.attention_seconds) for timing in timings
    )
    return seconds / (seconds - waited)


def step_of(trainer: Trainer) -> Step:
    """Make a step that runs a micro-batch through the Trainer."""

    def step(batch: dict[str, Any]) -> torch.Tensor:
        accelerator = trainer.accelerator
        (batch,), targets = trainer.get_batch_samples(iter([batch]), 1, accelerator.device)
        loss = trainer.compute_loss(trainer.model_wrapped, batch, num_items_in_batch=targets)
        accelerator.backward(loss)
        trainer.model_wrapped.zero_grad()
        return loss.detach()

    return step


def time_batch(step: Step, batch: dict[str, Any], *, balanced: bool) -> Timing:
    """Run a micro-batch on every rank, and gather the losses and times of all ranks."""
    PartialState().wait_for_everyone()
    torch.manual_seed(0)  # the same dropout in every run
    attention_started, started = hf_distca.metrics().attention_seconds, time.perf_counter()
    with hf_distca.balancing(balanced):
        loss = step(batch)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    mine = (loss.item(), seconds, hf_distca.metrics().attention_seconds - attention_started)
    losses, steps, attention = zip(*gather_object([mine]), strict=True)
    return Timing(fmean(losses), max(steps), list(attention))


def compare_balancing(
    model: torch.nn.Module, step: Step, batches: Iterable[dict[str, Any]], dtype: torch.dtype
) -> None:
    """Run batches with balancing off and on, print a table, and check the losses.

    Every rank must call this function. On one process, or under another attention, it does nothing.

    Raises:
        AssertionError: if losses differ by more than rounding explains.
    """
    if not hf_distca.metrics().balance.micro_batches:  # no micro-batch was planned
        return
    model.train()
    timings: dict[str, list[Timing]] = {OFF: [], ON: []}
    for number, batch in enumerate(islice(batches, BATCHES + 1)):
        for name in (OFF, ON) if number % 2 else (ON, OFF):
            timing = time_batch(step, batch, balanced=name == ON)
            if number:  # batch 0 only fills caches
                timings[name].append(timing)
    if PartialState().is_main_process:
        print_comparison(timings)
    check_losses(timings, dtype)


def check_losses(timings: dict[str, list[Timing]], dtype: torch.dtype) -> None:
    """Raise AssertionError if losses differ by more than rounding in `dtype` explains."""
    first, *others = timings.values()
    for batch, *same in zip(first, *others, strict=True):
        for name, other in zip(list(timings)[1:], same, strict=True):
            if not abs(other.loss - batch.loss) <= BOUNDS[dtype] * abs(batch.loss):
                raise AssertionError(
                    f"the loss is {batch.loss} ({next(iter(timings))}) and {other.loss} ({name}):"
                    f" rounding in {dtype} explains a relative difference of at most"
                    f" {BOUNDS[dtype]:g}."
                )


def print_comparison(timings: dict[str, list[Timing]], parts: str = "batches") -> None:
    """Print a table of the timings, with a column for each way."""
    sides = list(timings.values())
    off = sides[0]
    ranks = len(off[0].attention_seconds)
    steps = [sum(timing.step_seconds for timing in side) for side in sides]
    differences = [
        max(abs(a.loss - b.loss) for a, b in zip(off, side, strict=True)) for side in sides
    ]

    table = Table(title=f"The same {len(off)} {parts} on {ranks} ranks, forward and backward")
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
    table.add_row("total time", *(f"{step:.2f} s" for step in steps))
    table.add_row(
        "times faster", "", *(f"{steps[0] / step:.2f} x" for step in steps[1:]), style="bold"
    )
    best = f"{times_faster_at_best(off):.2f} x"
    table.add_row("times faster, at best", "", *(best for _ in steps[1:]))
    # By default, rich cuts tables in files to 80 columns.
    Console(width=None if Console().is_terminal else 120).print(table)
