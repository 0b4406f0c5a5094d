"""Global batches, whose documents are chosen by seed and epoch.

A *global batch* has the tokens of all ranks for one micro-batch. The tokens depend only on seed,
epoch, batch number and size of the global batch, so any number of ranks trains on the same tokens.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import IntArray, enumerate_ranges, require_integers

_log = logging.getLogger("hf_distca")

FillRule = Literal["cut", "whole"]
LongerRule = Literal["cut", "refuse"]

# Padding is cut into documents of at most this many tokens, because attention within longer
# documents would waste time.
_MAX_PADDING_TOKENS = 128
# A warning suggests fill="cut" if padding increases the number of batches by more than this
# fraction.
_MUCH_PADDING = 0.05
# At most this many batches are filled at the same time. A larger number would waste a little less
# space, but take longer.
_MAX_OPEN_BATCHES = 64


@dataclass(frozen=True, slots=True, eq=False)
class BatchPieces:
    """Pieces of documents in a global batch. Each piece is trained on as a separate document.

    Piece i has the tokens [starts[i], ends[i]) of document ``documents[i]``.

    Attributes:
        documents: (pieces,) int64 index of each piece's document; -1 for padding.
        starts, ends: (pieces,) int64 bounds of each piece, in tokens of the document. For padding
            they are 0 and the number of padding tokens.
    """

    documents: IntArray
    starts: IntArray
    ends: IntArray

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each piece, (pieces,) int64."""
        return self.ends - self.starts


class GlobalBatches:
    """Global batches with the same number of tokens. Epochs differ in order unless `seed` is None.

    With ``fill="whole"``, documents that fit into a batch are not cut. Documents are packed once,
    and epochs differ in the order of batches. Free space is filled with padding. No document is
    dropped, so one batch may be mostly padding.

    With ``fill="cut"``, documents follow each other in the epoch's order, and each batch is filled
    to the last token. If a document does not fit, its rest is a separate document in the next
    batch. Tokens at the end of an epoch that do not fill a batch are dropped.

    Args:
        lengths: (documents,) number of tokens of each document. Documents of 0 tokens are skipped.
        tokens: number of tokens of a global batch.
        seed: seed of the order in each epoch. With None, every epoch has the given order, for
            example for evaluation.
        fill: "whole" or "cut".
        longer: "cut" to cut documents that are longer than a global batch, "refuse" to raise.
        quiet: log nothing, and show no progress bar.

    Raises:
        LayoutError: if a length is not a whole number of at least 0, if documents do not fill one
            batch, or if a document is too long.
        ConfigError: if another argument is out of range.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        tokens: int,
        seed: int | None = 0,
        fill: FillRule = "cut",
        longer: LongerRule = "cut",
        *,
        quiet: bool = False,
    ) -> None:
        _check_arguments(tokens, seed, fill, longer)
        counts = require_integers(lengths, "lengths of documents")
        if len(counts) and counts.min() < 0:
            raise LayoutError(
                f"document {counts.argmin()} has length {counts.min()}: it must be at least 0."
            )
        self.tokens = tokens
        self.seed = seed
        self.fills_whole = fill == "whole"
        self._document = np.flatnonzero(counts)
        self._start = np.zeros_like(self._document)
        self._length = counts[self._document]
        self._apply_longer_rule(longer, quiet)
        total = int(self._length.sum())
        if not total or (not self.fills_whole and total < tokens):
            raise LayoutError(
                f"{len(self._document)} documents with tokens have {total} tokens together, but a "
                f"global batch has {tokens} (ranks x tokens_per_rank). Give more documents, lower "
                'tokens_per_rank, or set fill="whole" to train on padding.'
            )
        if self.fills_whole:
            self._pack_whole_documents(quiet)
            total = int(self._length.sum())
        self._count = total // tokens
        # The current epoch, the order of its batches, the order of its documents, and the end of
        # each document in that order.
        self._epoch: tuple[int, IntArray, IntArray, IntArray] | None = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_epoch": None}  # faster to compute again than to send

    def get_pieces(self, epoch: int, number: int) -> BatchPieces:
        """Return the pieces of a global batch.

        Args:
            epoch: number of the epoch, from 0.
            number: number of the batch in the epoch, from 0.

        Raises:
            IndexError: if there is no such batch.
        """
        if not 0 <= number < len(self):
            raise IndexError(
                f"there is no global batch {number}: an epoch has {len(self)}, numbered from 0."
            )
        if self._epoch is None or self._epoch[0] != epoch:
            count = len(self._length)
            whole = self.fills_whole
            batches = self._shuffle(self._count, 1 + epoch) if whole else np.arange(self._count)
            documents = np.arange(count) if whole else self._shuffle(count, epoch)
            self._epoch = epoch, batches, documents, np.cumsum(self._length[documents])
        _, batches, documents, ends = self._epoch
        batch_start = int(batches[number]) * self.tokens
        batch_end = batch_start + self.tokens
        first = int(np.searchsorted(ends, batch_start, side="right"))
        last = int(np.searchsorted(ends, batch_end, side="left"))
        indices = documents[first : last + 1]
        piece_starts = self._start[indices]
        piece_ends = piece_starts + self._length[indices]
        piece_starts[0] += batch_start - (ends[first] - self._length[indices[0]])
        piece_ends[-1] -= ends[last] - batch_end
        return BatchPieces(self._document[indices], piece_starts, piece_ends)

    def count_cut_tokens(self) -> int:
        """Count the tokens of the first epoch that come after a cut in their document.

        These tokens do not see the beginning of the document.
        """
        if self.fills_whole:
            return int(self._length[self._start > 0].sum())
        ends = np.cumsum(self._length[self._shuffle(len(self._length), 0)])
        # The first cut after the start of each document.
        cuts = (np.append(0, ends[:-1]) // self.tokens + 1) * self.tokens
        return int(np.maximum(np.minimum(ends, self._count * self.tokens) - cuts, 0).sum())

    def count_padding_tokens(self) -> int:
        """Count the padding tokens of an epoch."""
        return int(self._length[self._document < 0].sum())

    def _shuffle(self, count: int, stream: int) -> IntArray:
        if self.seed is None:
            return np.arange(count)
        # Raw bits of a generator are the same in every version of numpy. Results of `permutation`
        # may differ.
        return np.argsort(np.random.PCG64([self.seed, stream]).random_raw(count), kind="stable")

    def _pack_whole_documents(self, quiet: bool) -> None:
        """Pack whole documents into batches, and fill each batch with padding."""
        order = self._shuffle(len(self._length), 0)
        batch = _pack_documents(self._length[order], self.tokens, quiet=quiet)
        used = np.bincount(batch, self._length[order]).astype(np.int64)
        padding = [
            (number, min(_MAX_PADDING_TOKENS, free - begin))
            for number, free in enumerate((self.tokens - used).tolist())
            for begin in range(0, free, _MAX_PADDING_TOKENS)
        ]
        numbers, lengths = np.array(padding, dtype=np.int64).reshape(-1, 2).T
        by_batch = np.argsort(np.append(batch, numbers), kind="stable")
        self._document = np.append(self._document[order], np.full_like(lengths, -1))[by_batch]
        self._start = np.append(self._start[order], np.zeros_like(lengths))[by_batch]
        self._length = np.append(self._length[order], lengths)[by_batch]
        least = -(-int(used.sum()) // self.tokens)  # the smallest possible number of batches
        if not quiet and len(used) > (1 + _MUCH_PADDING) * least:
            _log.warning(
                "%.1f %% of the tokens of %d global batches are padding, because documents are too"
                " long to fill batches of %d tokens well. Raise tokens_per_rank, or set"
                ' fill="cut", which needs no padding but cuts the last document of each batch.',
                *(100 * lengths.sum() / (len(used) * self.tokens), len(used), self.tokens),
            )

    def _apply_longer_rule(self, longer: LongerRule, quiet: bool) -> None:
        """Cut documents that are longer than a global batch, or raise if `longer` is "refuse"."""
        indices = np.flatnonzero(self._length > self.tokens)
        if not len(indices):
            return
        longest = indices[np.argmax(self._length[indices])]
        description = (
            f"{len(indices)} of {len(self._length)} documents are longer than a global batch of "
            f"{self.tokens} tokens (ranks x tokens_per_rank); document {self._document[longest]} "
            f"has {self._length[longest]}"
        )
        if longer == "refuse":
            raise LayoutError(
                f"{description}. Raise tokens_per_rank until they fit, or cut them into separate "
                'documents with longer="cut".'
            )
        if not quiet:
            _log.warning(
                "%s. They are cut: each piece is a separate document. With tokens_per_rank %.1f"
                " times as large, a global batch would have room for the longest document.",
                description,
                math.ceil(10 * self._length[longest] / self.tokens) / 10,
            )
        if not self.fills_whole:
            return
        counts = -(-self._length // self.tokens)  # number of pieces of each document
        whole, part = enumerate_ranges(np.zeros_like(counts), counts)
        self._document = self._document[whole]
        self._start = part * self.tokens
        self._length = np.minimum(self._length[whole] - self._start, self.tokens)


def _check_arguments(tokens: int, seed: int | None, fill: str, longer: str) -> None:
    # `isinstance` would accept True as a number.
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(
            f"tokens={tokens!r} of a global batch must be a whole number of at least 1."
        )
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(
            f"seed={seed!r} must be a whole number of at least 0, or None for no shuffling."
        )
    for name, value, choices in (
        ("fill", fill, get_args(FillRule)),
        ("longer", longer, get_args(LongerRule)),
    ):
        if value not in choices:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _pack_documents(lengths: IntArray, tokens: int, *, quiet: bool) -> IntArray:
    """Pack each document into the fullest open batch that has room for it.

    Args:
        lengths: (documents,) number of tokens of each document, in the order of packing.
        tokens: number of tokens of a batch.
        quiet: show no progress bar.

    Returns:
        The index of each document's batch, (documents,) int64.
    """
    # Open batches as (free tokens, -time of the last change, index), sorted. Among batches with the
    # same free tokens, the one that changed last comes first.
    open_batches: list[tuple[int, ...]] = []
    batches: list[int] = []  # batch of each document so far
    batch_count = 0
    for n in tqdm(
        lengths.tolist(), "packing documents", delay=1.0, disable=quiet, unit=" documents"
    ):
        index = bisect_left(open_batches, (n,))
        if index < len(open_batches):
            free, _, batch = open_batches.pop(index)
        else:
            free = tokens
            batch = batch_count
            batch_count += 1
            if len(open_batches) == _MAX_OPEN_BATCHES:
                del open_batches[0]  # close the fullest batch
        batches.append(batch)
        if free > n:
            insort(open_batches, (free - n, -len(batches), batch))
    return np.array(batches, dtype=np.int64)
