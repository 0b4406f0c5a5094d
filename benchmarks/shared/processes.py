"""Ranks of a benchmark: gloo processes with one thread each, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from options import add_option

Measure = Callable[[int, int, argparse.Namespace], Any]
T = TypeVar("T")

PRELOADED = [
    "torch",
    "hf_distca.integration.training.deal_trainer",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
]


def on_ranks(
    measure: Measure, ranks: int, arguments: argparse.Namespace, *, forked: bool = False
) -> Any:
    """What ``measure(rank, ranks, arguments)`` returns on rank 0 of so many processes, as JSON
    keeps it.

    Where processes start many times, let them be `forked` from one that has imported most of what
    they need.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (measure, ranks, arguments, folder)
        if forked:
            get_context("forkserver").set_forkserver_preload(PRELOADED)
            mp.start_processes(_be_rank, work, nprocs=ranks, start_method="forkserver")
        else:
            mp.spawn(_be_rank, work, nprocs=ranks)
        return json.loads(Path(folder, "result.json").read_text())


def _be_rank(
    rank: int, measure: Measure, ranks: int, arguments: argparse.Namespace, folder: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = measure(rank, ranks, arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def rounds(rank: int, count: int) -> Iterable[int]:
    """The numbers of so many rounds, with progress on rank 0."""
    return tqdm(range(count), desc="rounds", file=sys.stderr, disable=rank > 0)


def in_turns(modes: Iterable[T], number: int) -> list[T]:
    """Modes in the order of a round: forwards and backwards in turns, so that a drifting machine
    slows all of them.
    """
    return list(modes)[:: 1 if number % 2 == 0 else -1]


def add_model_options(
    parser: argparse.ArgumentParser, *, tokens: int, layers: int, heads: int = 4, rounds: int = 5
) -> None:
    """Add ``--tokens``, ``--layers``, ``--heads`` and ``--rounds`` with these defaults."""
    add_option(parser, "--tokens", tokens, "tokens a rank")
    add_option(parser, "--layers", layers, "decoder layers")
    add_option(parser, "--heads", heads, "query heads of 64; half as many key/value heads")
    add_option(parser, "--rounds", rounds, "rounds, each running every mode once")


def setting_of(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What was measured, for the result."""
    return {
        "threads": 1,
        **more,
        **{name: value for name, value in vars(arguments).items() if name != "json"},
    }
