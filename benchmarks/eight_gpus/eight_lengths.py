"""Document lengths for eight GPUs, as files, and the rows of a step that are filled with them.

    python benchmarks/eight_gpus/eight_lengths.py --out benchmarks/eight_gpus/lengths

writes the files again, with the same contents on every machine.
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

from make import draw_documents

FOLDER = Path(__file__).with_name("lengths")
COUNT, SEED, EQUAL = 600, 8, 4096


def make_sets() -> dict[str, dict[str, Any]]:
    """Make the content of each file: the source of the lengths, and (documents,) tokens."""
    drawn = list(islice(draw_documents(np.random.default_rng(SEED)), COUNT))
    about = f"drawn as benchmarks/placements/make.py draws, numpy's generator seeded with {SEED}"
    return {
        "long_tail": {"about": about, "lengths": drawn},
        "equal": {"about": "equal lengths, the control", "lengths": [EQUAL] * COUNT},
    }


def read_lengths(name: str, folder: Path = FOLDER, shrink: int = 1) -> list[int]:
    """Read the lengths of a set, divided by `shrink`, but at least two tokens each."""
    lengths = json.loads((folder / f"{name}.json").read_text())["lengths"]
    return [max(length // shrink, 2) for length in lengths]


def rows_of_step(lengths: list[int], ranks: int, tokens: int, step: int) -> list[list[int]]:
    """Fill the rows of a step with `tokens` tokens each. Documents follow the order of the file,
    which repeats from its beginning.

    A document is cut where a row is full, and its rest is a separate document.
    """
    ends = np.cumsum(np.tile(lengths, -(-ranks * tokens * (step + 1) // sum(lengths))))
    first = step * ranks * tokens
    bounds = np.union1d(ends, first + np.arange(ranks + 1) * tokens)
    bounds = bounds[(bounds >= first) & (bounds <= first + ranks * tokens)]
    rows = (bounds[:-1] - first) // tokens
    pieces = np.diff(bounds)
    return [pieces[rows == row].tolist() for row in range(ranks)]


def describe_lengths(lengths: list[int]) -> dict[str, Any]:
    """Count documents and tokens by powers of two, and compute the variation of squared lengths."""
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
