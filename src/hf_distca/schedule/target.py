"""The seconds that every rank of a dealt global batch should end at.

Only *wide* documents are cut for their attention: those that alone take longer than a rank should. The ranks that get a part of
one need its keys, and are filled up with the shortest documents, which take the fewest seconds a token. The other ranks get the
longest of the whole documents. The target is the least number of seconds for which there are ranks enough for both.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray

__all__ = ["Target", "exchanged"]

_HALVINGS = 24
_ROUNDS = 8
# A document needs a target that leaves at least this part of it to compute.
_COMPUTED = 0.1


Ranks = TypeVar("Ranks", float, FloatArray)


def exchanged(ranks: Ranks) -> Ranks:
    """Part of a document's keys that each of so many ranks exchanges, with head and tail, on average."""
    return 0.875 - 0.75 / ranks


class _Need(NamedTuple):
    ranks: float
    filler: float
    wide: int
    filled: int


class Target:
    """What ranks should end at, for documents in order of falling length.

    Attributes:
        seconds: compute and exchange of a rank, or the longer of both if they overlap.
        filler: seconds a token of the documents that fill up the ranks with a part of a wide one.
    """

    def __init__(
        self, length: IntArray, seconds: FloatArray, ranks: int, tokens: float, exchange: FloatArray, *, overlapped: bool
    ) -> None:
        """Find the target.

        Args:
            length, seconds: of each document, longest first.
            ranks, tokens: number of ranks, and tokens of each.
            exchange: seconds of exchanging all keys of each document.
            overlapped: whether only the longer of compute and exchange counts.
        """
        self.ranks, self.tokens, self.overlapped = ranks, tokens, overlapped
        # Sums run in order: what they round to must not depend on the processor.
        self.tokens_before = np.concatenate([[0], np.cumsum(length)])
        self.seconds_before = np.concatenate([[0.0], np.cumsum(seconds)])
        low = float(self.seconds_before[-1]) / ranks
        high = low + float(seconds.max(initial=0.0))
        candidates = int(np.count_nonzero(seconds > low / 2))
        self.length, self.work = length[:candidates].astype(np.float64), seconds[:candidates]
        self.exchange = exchange[:candidates]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._suffices(middle) else (middle, high)
        self.seconds, self.filler = high, self._need(high).filler

    def _suffices(self, seconds: float) -> bool:
        need = self._need(seconds)
        rest = float(self.seconds_before[need.filled] - self.seconds_before[need.wide])
        return need.ranks <= self.ranks and rest <= (self.ranks - need.ranks) * seconds

    def _need(self, seconds: float) -> _Need:
        """Ranks that wide documents need to end after so many seconds, which depends on what fills up those ranks."""
        ranks = filler = 0.0
        wide = filled = 0
        for _ in range(_ROUNDS):
            free = seconds - filler * self.tokens
            excess = self.work - filler * self.length
            wide = int(np.count_nonzero(excess > free))
            if not wide:
                # Some document is longer than a rank should take as soon as ranks are filled up, and not if they are not.
                return _Need(0.0, filler, 0, 0)
            each = self._ranks_each(excess[:wide], free, seconds)
            if each is None or (total := float(np.cumsum(each)[-1])) > self.ranks:
                return _Need(math.inf, filler, wide, filled)
            settled, ranks = abs(total - ranks) < 0.01, max(total, float(wide))
            filled, filler = self._filler(ranks * self.tokens - float(self.tokens_before[wide]), wide)
            if settled:
                break
        return _Need(ranks, filler, wide, filled)

    def _ranks_each(self, excess: FloatArray, free: float, seconds: float) -> FloatArray | None:
        """Ranks that each wide document needs; None if no number of them suffices."""
        exchange = self.exchange[: len(excess)]
        if free <= 0 or exchange.max() > seconds:
            return None
        if self.overlapped:
            return np.asarray(excess / free)
        each = np.maximum(excess / free, 2.0)
        for _ in range(2):
            left = free - exchange * exchanged(each)
            if left.min() <= _COMPUTED * seconds:
                return None
            each = np.maximum(excess / left, 1.01)
        return each

    def _filler(self, tokens: float, wide: int) -> tuple[int, float]:
        """The first of the shortest documents with so many tokens, and the seconds a token of all of them."""
        total = int(self.tokens_before[-1])
        at = int(np.searchsorted(self.tokens_before, max(total - max(tokens, self.tokens), 0), side="right")) - 1
        at = max(at, wide)
        count = total - int(self.tokens_before[at])
        seconds = float(self.seconds_before[-1] - self.seconds_before[at])
        return at, seconds / count if count else 0.0
