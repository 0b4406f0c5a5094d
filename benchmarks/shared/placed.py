"""Placements of documents on ranks, and the shape and rates of most plans."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hf_distca.errors import DistCAError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout

LLAMA_3_8B = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
# Built-in figures of a GPU: links of one rate first, then 300 GB/s inside nodes and 40 between.
CUDA = CostModel.make_analytic(LLAMA_3_8B, device_type="cuda")
TWO_LEVELS = replace(CUDA, exchange_bytes_per_second=4e10, node_bytes_per_second=3e11)


def list_lengths(layout: Layout) -> list[int]:
    """List the tokens of each document, in the order of document numbers."""
    documents, place = np.unique(layout.document, return_inverse=True)
    return [int(n) for n in np.bincount(place, weights=layout.length, minlength=len(documents))]


def spread_tokens(layout: Layout) -> list[int]:
    """List the tokens of each rank after an even split of all tokens."""
    count, total = layout.world_size, int(layout.length.sum())
    return [total // count + (rank < total % count) for rank in range(count)]


def add_placements(parser: argparse.ArgumentParser) -> None:
    """Add ``--placements FOLDER``."""
    text = "folder of placements in JSON, as hf-distca plan reads them"
    parser.add_argument("--placements", type=Path, required=True, metavar="FOLDER", help=text)


def measure_placements(
    parser: argparse.ArgumentParser, folder: Path, measure: Callable[[Path], Any]
) -> list[Any]:
    """Measure each placement of a folder. An invalid placement, or an empty folder, ends the script
    with an error in one line.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        parser.error(f"--placements {folder} has no .json files: there is nothing to measure.")
    results = []
    for path in tqdm(paths, desc="placements", unit="placement", file=sys.stderr):
        try:
            results.append(measure(path))
        except DistCAError as error:
            parser.error(f"{path}: {error}")
    return results


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Compute the median, the 90th percentile and the largest value."""
    return {
        "median": statistics.median(values),
        "nine_in_ten": float(np.percentile(values, 90, method="higher")),
        "worst": max(values),
    }
