"""Pieces: the parts of documents in global batches, and the samples of them that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_distca.agreement.dealt_share import hash_numbers
from hf_distca.data.collator import make_labels
from hf_distca.data.columns import TARGET_MASKS, convert_integers
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

# Ranks compare tokens of some documents: of so many at most, and so many tokens at the beginning,
# in the middle and at the end of each.
SAMPLE_COUNT = 64
_SAMPLE_TOKENS = 64
_PADDING_REMEDY = "documents to deal must have no padding. Tokenize with padding=False."
_PACKED_MASK_REMEDY = (
    "it numbers the documents of a row that was packed already, which would be dealt as one. Give "
    "them one by one, as PackingCollator takes such a row."
)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPiece:
    """Tokens [start, end) of a document, trained on as a separate document.

    Attributes:
        row: the document, by columns that can be sliced: ``input_ids``, and possibly ``labels``,
            ``attention_mask``, ``position_ids`` and the masks of targets; empty for padding.
        start, end: bounds of the piece, in tokens of the document.
    """

    row: Mapping[str, Any]
    start: int
    end: int

    def read_tokens(self, begin: int, end: int) -> IntArray:
        """Read the tokens [begin, end) of the piece, (tokens,) int64.

        Raises:
            LayoutError: if they are padding, do not count on in their document, or are fewer than
                the document's length.
        """
        positions = np.arange(self.start + begin, self.start + end)
        for name, expected in (
            ("attention_mask", np.ones_like(positions)),
            ("position_ids", positions),
        ):
            values = self._read_slice(name, begin, end) if self._has_column(name) else expected
            wrong = np.flatnonzero(values != expected)
            if len(wrong):
                value = values[wrong[0]]
                place = f"at token {positions[wrong[0]]}"
                if name == "position_ids":
                    raise LayoutError(
                        f"position_ids of a document do not count on from 0 {place}: the row was "
                        "packed already, and would be dealt as one document, or skips positions, "
                        "which would be lost where it is cut. Give its documents one by one, "
                        "without position_ids."
                    )
                remedy = _PACKED_MASK_REMEDY if value else _PADDING_REMEDY
                raise LayoutError(f"{name} of a document is {int(value)} {place}: {remedy}")
        return self._read_slice("input_ids", begin, end)

    def read_sample(self) -> IntArray:
        """Read tokens at the beginning, in the middle and at the end of the piece, unchecked."""
        count = self.end - self.start
        last = max(0, count - _SAMPLE_TOKENS)
        return np.concatenate(
            [
                self._read_slice("input_ids", begin, min(begin + _SAMPLE_TOKENS, count))
                for begin in (0, last // 2, last)
            ]
        )

    def read_labels(self, begin: int, end: int) -> IntArray:
        """Read the labels of the tokens [begin, end) of the piece, (tokens,) int64.

        For a document without labels, see `make_labels`.
        """
        if self._has_column("labels"):
            return self._read_slice("labels", begin, end)
        masks = [
            self._read_slice(name, begin, end) for name in TARGET_MASKS if self._has_column(name)
        ]
        return make_labels(self._read_slice("input_ids", begin, end), masks)

    def _has_column(self, name: str) -> bool:
        return self.row.get(name) is not None

    def _read_slice(self, name: str, begin: int, end: int) -> IntArray:
        column = self.row[name]
        if hasattr(column, "__len__") and getattr(column, "shape", None) != ():
            column = column[self.start + begin : self.start + end]
        values = convert_integers(column, name)  # refuses a single number
        if len(values) != end - begin:
            raise LayoutError(
                f"the {name} of a document end before token {self.start + end}: they are fewer "
                "than its lengths or its other columns promise."
            )
        return values


def hash_pieces(pieces: Sequence[DocumentPiece]) -> int:
    """Return a hash below 2**56 of some tokens of some pieces; any integers may be tokens."""
    indices = np.unique(np.linspace(0, max(len(pieces) - 1, 0), SAMPLE_COUNT).astype(np.int64))
    samples = [pieces[index].read_sample() for index in indices if index < len(pieces)]
    return hash_numbers(part for sample in samples for part in ([len(sample)], sample))
