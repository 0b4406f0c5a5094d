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


def on_ranks(measure: Measure, ranks: int, arguments: argparse.Namespace) -> Any:
    """Run ``measure(rank, ranks, arguments)`` in so many processes.

    Returns:
        What rank 0 returns, as JSON keeps it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(be_rank, (measure, ranks, arguments, folder), nprocs=ranks)
        return read_result(folder)


def be_rank(
    rank: int, measure: Measure, ranks: int, arguments: argparse.Namespace, folder: Path
) -> None:
    """Be a rank, which writes to this folder what it finds if it is the first."""
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
    """What each rank has of something."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def rounds(rank: int, count: int) -> Iterable[int]:
    """The numbers of so many rounds, with progress on rank 0."""
    return tqdm(range(count), desc="rounds", file=sys.stderr, disable=rank > 0)


def in_turns(modes: Iterable[T], number: int) -> list[T]:
    """Modes in the order of a round: forwards and backwards in turns, so that a drifting machine
    slows all of them.
    """
    return list(modes)[:: 1 if number % 2 == 0 else -1]


def take_turns(
    modes: Iterable[T], step: Callable[[T], Value], rank: int, count: int
) -> dict[T, list[Value]]:
    """What a step of each mode returns in each of so many rounds."""
    found: dict[T, list[Value]] = {mode: [] for mode in modes}
    for number in rounds(rank, count):
        for mode in in_turns(found, number):
            found[mode].append(step(mode))
    return found


def medians(seconds: Mapping[T, Sequence[float]]) -> dict[T, float]:
    """The median of each mode that ran."""
    return {mode: statistics.median(taken) for mode, taken in seconds.items() if taken}


def median_ratio(taken: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
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
