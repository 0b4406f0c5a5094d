"""Writes the placements of this folder: made-up document lengths with a long tail, dealt to ranks
in the order in which they were drawn.

python benchmarks/placements/make.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
RANKS = (8, 64, 512)
TOKENS_PER_RANK = 65536
SEED = 0

# Mean and standard deviation of the logarithm of a length in tokens. README.md names the data that
# they fit.
SHORT, LONG = (7.747, 0.998), (10.128, 0.885)
BOUNDARY, LONGEST = 8192, 131072  # tokens
LONG_SHARE = 0.0237  # of the documents


def draw_documents(generator: np.random.Generator) -> Iterator[int]:
    """Draw document lengths without end: most short, a few long."""
    while True:
        long = generator.random() < LONG_SHARE
        low, high = (BOUNDARY, LONGEST) if long else (0, BOUNDARY)
        length = 0
        while not low < length <= high:
            length = round(generator.lognormal(*(LONG if long else SHORT)))
        yield length


def deal(ranks: int, lengths: Iterator[int]) -> list[list[int]]:
    """Assign documents to ranks in order, cut wherever a rank is full. The rest after a cut is a
    separate document.
    """
    dealt: list[list[int]] = []
    rest = 0
    for _ in range(ranks):
        row: list[int] = []
        room = TOKENS_PER_RANK
        while room:
            length = rest or next(lengths)
            row.append(min(length, room))
            rest, room = length - row[-1], room - row[-1]
        dealt.append(row)
    return dealt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=FOLDER,
        help="folder of the files (default: next to this script)",
    )
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for ranks in RANKS:
        path = folder / f"long_tail_{ranks}_ranks.json"
        lengths = deal(ranks, draw_documents(np.random.default_rng((SEED, ranks))))
        path.write_text(
            json.dumps({"lengths": lengths}, separators=(",", ":")) + "\n", encoding="utf-8"
        )
        print(f"{path}: {sum(map(len, lengths))} documents")


if __name__ == "__main__":
    main()
