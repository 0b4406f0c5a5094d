"""Lengths of documents that eight GPUs train on, as files, and the rows of a step made of them.

    python benchmarks/eight_gpus/eight_lengths.py --out benchmarks/eight_gpus/lengths

writes the files again: the same ones on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from make import documents

FOLDER = Path(__file__).with_name("lengths")
COUNT, SEED, EQUAL = 600, 8, 4096


def make_sets() -> dict[str, dict[str, Any]]:
    """Make the content of each file: where lengths come from, and (documents,) tokens."""
    drawn = list(islice(documents(np.random.default_rng(SEED)), COUNT))
    about = f"drawn as benchmarks/placements/make.py draws, numpy's generator seeded with {SEED}"
    return {
        "long_tail": {"about": about, "lengths": drawn},
        "equal": {"about": "equal lengths, the control", "lengths": [EQUAL] * COUNT},
    }


def read_lengths(name: str, folder: Path = FOLDER, shrink: int = 1) -> list[int]:
    """Read the lengths of a set, `shrink` times as short, but of at least two tokens."""
    lengths = json.loads((folder / f"{name}.json").read_text())["lengths"]
    return [max(length // shrink, 2) for length in lengths]


def rows_of_step(lengths: list[int], ranks: int, tokens: int, step: int) -> list[list[int]]:
    """Lengths in each row of `tokens` tokens of a step, in the order of the file, from its
    beginning again where it ends.

    A document is cut where a row is full, and its rest is a document of its own.
    """
    ends = np.cumsum(np.tile(lengths, -(-ranks * tokens * (step + 1) // sum(lengths))))
    first = step * ranks * tokens
    bounds = np.union1d(ends, first + np.arange(ranks + 1) * tokens)
    bounds = bounds[(bounds >= first) & (bounds <= first + ranks * tokens)]
    rows = (bounds[:-1] - first) // tokens
    pieces = np.diff(bounds)
    return [pieces[rows == row].tolist() for row in range(ranks)]


def describe_lengths(lengths: list[int]) -> dict[str, Any]:
    """Count documents and share of the tokens by powers of two, and how uneven squares are."""
    found = np.array(lengths, dtype=np.float64)
    power = np.floor(np.log2(found)).astype(int)
    squares = found**2
    return {
        "documents": len(lengths),
        "mean": float(found.mean()),
        "longest": int(found.max()),
        "variation_of_squares": float(squares.std() / squares.mean()),
        "histogram": [
            [2 ** int(p), int((power == p).sum()), float(found[power == p].sum() / found.sum())]
            for p in range(power.min(), power.max() + 1)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files")
    folder = parser.parse_args().out
    for name, content in make_sets().items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path}: {len(content['lengths'])} documents")


if __name__ == "__main__":
    main()
