"""Pieces: the parts of documents in global batches, and the samples of them that ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_distca.data.collator import make_labels
from hf_distca.data.columns import TARGET_MASKS, convert_integers
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["SAMPLE_COUNT", "DocumentPiece", "hash_pieces"]

# Of so many documents at most, and of so many tokens at their beginning, middle and end, ranks compare what they read.
SAMPLE_COUNT, _SAMPLE_TOKENS = 64, 64
_PACKED_MASK_REMEDY = (
    "it numbers the documents of a row that was packed already, which would be dealt as one. Give "
    "them one by one, as PackingCollator takes such a row."
)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPiece:
    """Tokens [start, end) of a document, which are a document of their own in their global batch.

    Attributes:
        row: the document, with values that can be sliced: ``input_ids``, and possibly ``labels``,
            ``attention_mask``, ``position_ids`` and the masks of targets; empty for padding.
        start, end: in tokens of the document.
    """

    row: Mapping[str, Any]
    start: int
    end: int

    def read_tokens(self, begin: int, end: int) -> IntArray:
        """Return the tokens [begin, end) of the piece.

        Raises:
            LayoutError: if they are padding that the document came with, or fewer than the document was said to have.
        """
        first = self.start + begin
        if (
            self._has_column("attention_mask")
            and (
                wrong := (mask := self._read_slice("attention_mask", begin, end, "iub")) != 1
            ).any()
        ):
            place, value = int(wrong.argmax()), int(mask[wrong.argmax()])
            raise LayoutError(
                f"attention_mask of a document is {value} at token {first + place}: "
                + (
                    "documents over ranks come without padding. Tokenize with padding=False."
                    if value == 0
                    else _PACKED_MASK_REMEDY
                )
            )
        expected = np.arange(first, self.start + end)
        if (
            self._has_column("position_ids")
            and (wrong := self._read_slice("position_ids", begin, end) != expected).any()
        ):
            place = first + int(wrong.argmax())
            raise LayoutError(
                f"position_ids of a document do not count on from 0 at token {place}: the row was "
                "packed already, and would be dealt as one document, or skips positions, which "
                "would be lost where it is cut. Give its documents one by one, without "
                "position_ids."
            )
        return self._read_slice("input_ids", begin, end)

    def read_sample(self) -> IntArray:
        """Return tokens at the beginning, in the middle and at the end of the piece, unchecked."""
        count = self.end - self.start
        middle, last = (
            max(0, begin) for begin in ((count - _SAMPLE_TOKENS) // 2, count - _SAMPLE_TOKENS)
        )
        slices = [
            self._read_slice("input_ids", begin, min(begin + _SAMPLE_TOKENS, count))
            for begin in (0, middle, last)
        ]
        return np.concatenate(slices)

    def read_labels(self, begin: int, end: int) -> IntArray:
        """Return the labels of the tokens [begin, end) of the piece; see
        `make_labels` for a document without labels.
        """
        if self._has_column("labels"):
            return self._read_slice("labels", begin, end)
        masks = [
            self._read_slice(name, begin, end, "iub")
            for name in TARGET_MASKS
            if self._has_column(name)
        ]
        return make_labels(self._read_slice("input_ids", begin, end), masks)

    def _has_column(self, name: str) -> bool:
        return self.row.get(name) is not None

    def _read_slice(self, name: str, begin: int, end: int, kinds: str = "iu") -> IntArray:
        values = convert_integers(
            self.row[name][self.start + begin : self.start + end], name, kinds
        )
        if len(values) != end - begin:
            raise LayoutError(
                f"the {name} of a document end before token {self.start + end}: they are fewer "
                "than its lengths or its other columns say."
            )
        return values


def hash_pieces(pieces: Sequence[DocumentPiece]) -> int:
    """Return a hash below 2**56 of some of the tokens of pieces, which may be any integers."""
    chosen = np.unique(np.linspace(0, max(len(pieces) - 1, 0), SAMPLE_COUNT).astype(np.int64))
    samples = [pieces[index].read_sample() for index in chosen if index < len(pieces)]
    parts = [part.tobytes() for sample in samples for part in (np.array([len(sample)]), sample)]
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:7], "big")
