"""Whole documents into global batches."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from tqdm.auto import tqdm

from hf_distca.schedule.layout import IntArray

__all__ = ["pack_whole"]

# Batches that are not full yet, at most. More of them fill a little better and take longer.
_OPEN = 64

_STEP = 2**16  # documents between two looks at the progress bar


def pack_whole(length: IntArray, order: IntArray, tokens: int, *, quiet: bool = False) -> tuple[IntArray, IntArray]:
    """Put documents into batches one after another, each into the fullest open batch that has room for it.

    Args:
        length: tokens of each document, in 1..tokens.
        order: of the documents.
        tokens: of a batch.
        quiet: show no progress bar.

    Returns:
        ``packed, offsets``: batch b holds the documents ``packed[offsets[b] : offsets[b + 1]]``.
    """
    rooms: list[int] = []  # free tokens of open batches, ascending
    opened: list[int] = []  # their numbers
    batch_of: list[int] = []
    count = 0
    bar = tqdm(total=len(order), desc="packing documents", delay=1.0, disable=quiet, unit=" documents")
    with bar:
        for begin in range(0, len(order), _STEP):
            step = length[order[begin : begin + _STEP]].tolist()
            for n in step:
                at = bisect_left(rooms, n)
                if at < len(rooms):
                    room, batch = rooms.pop(at) - n, opened.pop(at)
                else:
                    room, batch = tokens - n, count
                    count += 1
                    if len(rooms) == _OPEN:
                        del rooms[0], opened[0]  # the fullest one
                batch_of.append(batch)
                if room:
                    at = bisect_left(rooms, room)
                    rooms.insert(at, room)
                    opened.insert(at, batch)
            bar.update(len(step))
    batch_of_document = np.array(batch_of, dtype=np.int64)
    by_batch = np.argsort(batch_of_document, kind="stable")
    offsets = np.searchsorted(batch_of_document[by_batch], np.arange(count + 1))
    return order[by_batch], offsets
