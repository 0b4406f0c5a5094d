"""Ranks of a benchmark: gloo processes with one thread each, on this machine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from script import add_option

Measure = Callable[[int, int, argparse.Namespace], Any]
T = TypeVar("T")
Value = TypeVar("Value")


def run_on_ranks(measure: Measure, ranks: int, arguments: argparse.Namespace) -> Any:
    """Run ``measure(rank, ranks, arguments)`` in `ranks` processes.

    Returns:
        The result of rank 0, after a round trip through JSON.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(run_rank, (measure, ranks, arguments, folder), nprocs=ranks)
        return read_result(folder)


def run_rank(
    rank: int, measure: Measure, ranks: int, arguments: argparse.Namespace, folder: Path
) -> None:
    """Run `measure` as one rank; rank 0 writes the result to the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = measure(rank, ranks, arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def read_result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def gather(own: T) -> list[T]:
    """Gather a value of every rank on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def iterate_rounds(rank: int, count: int) -> Iterable[int]:
    """Iterate over `count` rounds, with a progress bar on rank 0."""
    return tqdm(range(count), desc="rounds", file=sys.stderr, disable=rank > 0)


def order_modes(modes: Iterable[T], number: int) -> list[T]:
    """List the modes in the order of a round. Every second round runs backwards, so that a machine
    that slows down slows all modes.
    """
    return list(modes)[:: 1 if number % 2 == 0 else -1]


def take_turns(
    modes: Iterable[T], step: Callable[[T], Value], rank: int, count: int
) -> dict[T, list[Value]]:
    """Run `step` once for each mode in each of `count` rounds, and return all results by mode."""
    found: dict[T, list[Value]] = {mode: [] for mode in modes}
    for number in iterate_rounds(rank, count):
        for mode in order_modes(found, number):
            found[mode].append(step(mode))
    return found


def compute_medians(seconds: Mapping[T, Sequence[float]]) -> dict[T, float]:
    """Compute the median of each mode that ran."""
    return {mode: statistics.median(taken) for mode, taken in seconds.items() if taken}


def compute_median_ratio(taken: Sequence[float], other: Sequence[float]) -> float:
    """Compute the ratio within each round, and return its median over rounds."""
    return statistics.median(a / b for a, b in zip(taken, other, strict=True))


def add_model_options(
    parser: argparse.ArgumentParser, *, tokens: int, layers: int, heads: int = 4
) -> None:
    """Add ``--tokens``, ``--layers`` and ``--heads`` with these defaults."""
    add_option(parser, "--tokens", tokens, "tokens a rank")
    add_option(parser, "--layers", layers, "decoder layers")
    add_option(parser, "--heads", heads, "query heads of 64; half as many key/value heads")


def add_rounds(parser: argparse.ArgumentParser, count: int = 5) -> None:
    add_option(parser, "--rounds", count, "rounds, each running every mode once")
