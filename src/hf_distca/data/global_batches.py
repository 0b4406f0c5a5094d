"""Global batches: their documents, chosen by seed and epoch.

A *global batch* holds the tokens of all ranks for one micro-batch. They depend only on the seed,
the epoch and their number: any number of ranks trains on the same tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import IntArray, require_integers

__all__ = ["Fill", "GlobalBatches", "Longer", "Pieces"]

_log = logging.getLogger("hf_distca")

Fill = Literal["cut", "whole"]
Longer = Literal["cut", "refuse"]

# Padding is documents of so many tokens at most: one long document of it would cost attention.
_PADDING = 128
# Batches that are not full yet, at most. More of them fill a little better and take longer.
_OPEN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Contents of a global batch: tokens [starts[i], ends[i]) of document
    ``documents[i]``, each piece a document of its own.

    Attributes:
        documents: int64 index of each document; -1 for padding.
        starts, ends: int64, in tokens of the document; of padding, 0 and its number of tokens.
    """

    documents: IntArray
    starts: IntArray
    ends: IntArray

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each piece."""
        return self.ends - self.starts


class GlobalBatches:
    """Cuts documents into global batches of equally many tokens, shuffled anew in each epoch.

    With ``fill="cut"``, documents follow each other in the epoch's order and batches are filled to
    the token; the rest of a document is a document of its own in the next batch. The rest at the
    end of an epoch, less than a batch, is dropped.

    With ``fill="whole"``, documents stay whole. They are packed once and tightly; epochs differ in
    the order of the batches. Free space is padding. No document is dropped: one batch may be
    mostly padding.

    Args:
        lengths: number of tokens of each document. Documents of 0 tokens are left out.
        tokens: number of tokens of a global batch.
        seed: epochs are shuffled by it; None for the order as given, the same in every epoch, as
            for evaluation.
        fill: how a batch is filled.
        longer: treatment of documents that are longer than a global batch: they are cut, or
            refused.
        quiet: say nothing and show no progress bar.

    Raises:
        LayoutError: if lengths are no whole numbers of at least 0, documents do not fill one batch,
            or one is too long.
        ConfigError: if another argument is out of its range.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        tokens: int,
        seed: int | None = 0,
        fill: Fill = "cut",
        longer: Longer = "cut",
        *,
        quiet: bool = False,
    ) -> None:
        _check_arguments(tokens, seed, fill, longer)
        counts = require_integers(lengths, "lengths of documents")
        if len(counts) and counts.min() < 0:
            raise LayoutError(f"document {int(counts.argmin())} has length {counts.min()}: lengths are at least 0.")
        self.tokens, self.seed, self._whole = tokens, seed, fill == "whole"
        self._document = np.flatnonzero(counts)
        self._start, self._length = np.zeros_like(self._document), counts[self._document]
        self._meet_longer(longer, quiet)
        total = int(self._length.sum())
        if not total or (not self._whole and total < tokens):
            raise LayoutError(
                f"{len(self._document)} documents with tokens have {total} tokens together, a global batch has {tokens} (ranks x "
                'tokens_per_rank): give more documents or fewer tokens a rank, or fill="whole" to train on padding.'
            )
        self._count = total // tokens
        if self._whole:
            self._packed, self._offsets = _packed_whole(self._length, self._shuffled(len(self._length), 0), tokens, quiet=quiet)
            self._count = len(self._offsets) - 1
            if not quiet:
                padding = 100 * (1 - total / (self._count * tokens))
                _log.info("%d global batches of whole documents, %.2f %% of them padding.", self._count, padding)
        self._epoch: tuple[int, IntArray, IntArray] | None = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_epoch": None}  # it is made faster than it travels

    def pieces(self, epoch: int, number: int) -> Pieces:
        """Return the pieces of a global batch; raise `IndexError` if there is no such batch."""
        if not 0 <= number < len(self):
            raise IndexError(f"global batch {number} of {len(self)}")
        if self._epoch is None or self._epoch[0] != epoch:
            # The order of batches, if documents are whole; else that of documents, and where they end in it.
            order = self._shuffled(self._count, 1 + epoch) if self._whole else self._shuffled(len(self._length), epoch)
            self._epoch = epoch, order, order[:0] if self._whole else np.cumsum(self._length[order])
        _, order, ends = self._epoch
        return self._whole_pieces(int(order[number])) if self._whole else self._cut_pieces(order, ends, number)

    def _shuffled(self, count: int, stream: int) -> IntArray:
        if self.seed is None:
            return np.arange(count)
        # Raw bits of a generator stay the same from one numpy to the next; `permutation` may not.
        bits = np.random.PCG64([self.seed, stream]).random_raw(count)
        return np.argsort(bits, kind="stable")

    def _cut_pieces(self, order: IntArray, ends: IntArray, number: int) -> Pieces:
        begin, end = number * self.tokens, (number + 1) * self.tokens
        first, last = int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left"))
        rows = order[first : last + 1]
        stops = self._length[rows]
        starts = np.zeros_like(stops)
        stops[-1] -= ends[last] - end  # before starts: there may be one piece only
        starts[0] = begin - (ends[first] - self._length[rows[0]])
        return Pieces(self._document[rows], starts, stops)

    def _whole_pieces(self, batch: int) -> Pieces:
        rows = self._packed[self._offsets[batch] : self._offsets[batch + 1]]
        length, start = self._length[rows], self._start[rows]
        free = self.tokens - int(length.sum())
        padding = np.diff(np.append(np.arange(0, free, _PADDING), free))
        documents = np.concatenate([self._document[rows], np.full_like(padding, -1)])
        starts = np.concatenate([start, np.zeros_like(padding)])
        return Pieces(documents, starts, np.concatenate([start + length, padding]))

    def _meet_longer(self, longer: Longer, quiet: bool) -> None:
        """Raise for documents that are longer than a global batch, or cut them."""
        long = np.flatnonzero(self._length > self.tokens)
        if not len(long):
            return
        row = long[np.argmax(self._length[long])]
        longer_ones = (
            f"{len(long)} of {len(self._length)} documents are longer than a global batch of {self.tokens} tokens (ranks x "
            f"tokens_per_rank); document {self._document[row]} has {self._length[row]}"
        )
        if longer == "refuse":
            raise LayoutError(f'{longer_ones}. More tokens a rank hold them; longer="cut" cuts them into documents of their own.')
        if not quiet:
            _log.warning("%s. They are cut: each piece is a document of its own.", longer_ones)
        if not self._whole:
            return
        parts = -(-self._length // self.tokens)
        self._document = np.repeat(self._document, parts)
        first = np.cumsum(parts) - parts
        self._start = (np.arange(len(self._document)) - np.repeat(first, parts)) * self.tokens
        self._length = np.minimum(np.repeat(self._length, parts) - self._start, self.tokens)


def _check_arguments(tokens: int, seed: int | None, fill: str, longer: str) -> None:
    # Not `isinstance`: True is no number.
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"tokens={tokens!r} of a global batch must be a whole number of at least 1.")
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"seed={seed!r} must be a whole number of at least 0, or None for no shuffling.")
    for name, value, choices in (("fill", fill, get_args(Fill)), ("longer", longer, get_args(Longer))):
        if value not in choices:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _packed_whole(length: IntArray, order: IntArray, tokens: int, *, quiet: bool) -> tuple[IntArray, IntArray]:
    """Pack documents into batches in an order, each into the
    fullest open batch that has room for it.

    Returns:
        ``packed, offsets``: batch b holds the documents ``packed[offsets[b] : offsets[b + 1]]``.
    """
    rooms: list[int] = []  # free tokens of open batches, ascending
    opened: list[int] = []  # their numbers
    batch_of: list[int] = []
    count = 0
    for n in tqdm(length[order].tolist(), "packing documents", delay=1.0, disable=quiet, unit=" documents"):
        place = bisect_left(rooms, n)
        if place < len(rooms):
            room, batch = rooms.pop(place) - n, opened.pop(place)
        else:
            room, batch = tokens - n, count
            count += 1
            if len(rooms) == _OPEN:
                del rooms[0], opened[0]  # the fullest one
        batch_of.append(batch)
        if room:
            place = bisect_left(rooms, room)
            rooms.insert(place, room)
            opened.insert(place, batch)
    batch_of_document = np.array(batch_of, dtype=np.int64)
    by_batch = np.argsort(batch_of_document, kind="stable")
    offsets = np.searchsorted(batch_of_document[by_batch], np.arange(count + 1))
    return order[by_batch], offsets
