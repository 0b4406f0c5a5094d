"""Documents whose attention is left to servers: where they lie is decided by their tokens alone.

Where a document is cut for its attention, every rank that has a piece needs the keys before it, which for the longest documents
travel longer than a rank should compute. Such a document is laid over ranks by its tokens, few enough on each for their rows to
be sent in time, and `balance` gives its attention to all ranks, split by heads: a server of a head group needs the keys of that
group alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.takers import divide

__all__ = ["Served"]

# Part of the mean seconds of a rank that sending all its rows of such a document may take: more where it hides behind compute.
_SENDING = 0.25
_SENDING_OVERLAPPED = 0.3


class Served(NamedTuple):
    """What is dealt by tokens alone.

    Attributes:
        rest: which documents are not.
        rows: (rank, document, start, length) of the pieces of the others.
        tokens: what each rank has left for the rest.
    """

    rest: npt.NDArray[np.bool_]
    rows: list[tuple[int, int, int, int]]
    tokens: list[int]

    @classmethod
    def of(
        cls, document: IntArray, length: IntArray, tokens: list[int], cost: CostModel, tile: int, *, overlapped: bool
    ) -> Served:
        """Choose them and lay them out.

        Args:
            document, length: numbers and tokens of the documents.
            tokens: of each rank.
            cost: cost model; nothing is served if its heads are one group, or if a window bounds the keys.
            tile: pieces are cut at multiples of it, as far as `tokens` allows.
            overlapped: whether exchanges are hidden behind compute.
        """
        rest, left, ranks = np.ones(len(length), dtype=np.bool_), list(tokens), len(tokens)
        rows: list[tuple[int, int, int, int]] = []
        if ranks < 3 or cost.shape.key_value_heads == 1 or cost.window is not None:
            return cls(rest, rows, left)
        mean = math.fsum(cost.seconds(length, length).tolist()) / ranks
        row_seconds = float(cost.transfer_seconds(1, 0))
        late = np.flatnonzero(cost.transfer_seconds(0, length) > mean)
        for number, place in enumerate(late[np.argsort(-length[late], kind="stable")].tolist()):
            count = int(length[place])
            wanted = count * row_seconds / ((_SENDING_OVERLAPPED if overlapped else _SENDING) * mean)
            # At least one more than its tokens fill: other documents have to be cut to fit as well.
            over = min(max(math.ceil(wanted), count // max(tokens) + 2), ranks)
            some = sorted({(number + step * ranks // over) % ranks for step in range(over)})
            rooms = [left[rank] for rank in some]
            if sum(rooms) < count:
                continue
            parts = divide(count, rooms, [float(room) for room in rooms], tile)
            rest[place] = False
            rows += [(rank, int(document[place]), start, size) for rank, start, size in _pieces(some, parts, count)]
            for rank, part in zip(some, parts, strict=True):
                left[rank] -= part
        return cls(rest, rows, left)


def _pieces(ranks: list[int], parts: list[int], length: int) -> list[tuple[int, int, int]]:
    """(rank, start, length) of a piece from the front and one from the back of a document for each rank."""
    found, head, tail = [], 0, length
    for rank, part in zip(ranks, parts, strict=True):
        front = part // 2
        pieces = [(rank, head, front), (rank, tail - (part - front), part - front)]
        head, tail = head + front, tail - (part - front)
        if head == tail:
            pieces = [(rank, head - front, part)]
        found += [piece for piece in pieces if piece[2]]
    return found
