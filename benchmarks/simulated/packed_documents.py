"""The documents of MagiAttention's published benchmarks, drawn from the histogram that they are
drawn from there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SOURCE", "packed_rows"]

SOURCE = (
    "SandAI-org/MagiAttention, commit 2c641357, exps/dist_attn: doc_length_distribution.csv;"
    " documents of a bin have its middle length, those over a quarter of a row are cut into"
    " quarters, and rows are filled in shuffled order"
)
# First and last length of a bin, and how many documents are in it.
_BINS = (
    *(
        (0, 10, 30254),
        (11, 50, 391188),
        (51, 100, 699596),
        (101, 200, 1377757),
        (201, 500, 3794735),
        (501, 1024, 3316785),
    ),
    *(
        (1025, 2048, 2106566),
        (2049, 4096, 988525),
        (4097, 8192, 410002),
        (8193, 16384, 173574),
        (16385, 32768, 115007),
    ),
    *((32769, 65536, 18428), (65537, 131072, 22513), (131073, 196608, 18284)),
)
_DRAWN = 65536  # documents at a time


def packed_rows(tokens: int, count: int, seed: int = 0) -> list[npt.NDArray[np.int64]]:
    """Document lengths of `count` rows of so many tokens; the end of a row cuts a document, whose
    rest begins the next one.
    """
    first, last, number = np.array(_BINS).T
    length, quarter = (first + last) // 2, tokens // 4
    choices = np.append(length % quarter, quarter)
    weights = np.append(np.where(choices[:-1] > 0, number, 0), (length // quarter * number).sum())
    generator = np.random.default_rng(seed)
    drawn, total = [], 0
    while total < tokens * count:
        drawn.append(generator.choice(choices, size=_DRAWN, p=weights / weights.sum()))
        total += int(drawn[-1].sum())
    ends = np.cumsum(np.concatenate(drawn))
    ends = np.unique(np.append(ends[ends < tokens * count], np.arange(1, count + 1) * tokens))
    pieces = np.diff(ends, prepend=0)
    return np.split(pieces, np.searchsorted(ends, np.arange(1, count) * tokens, side="right"))
