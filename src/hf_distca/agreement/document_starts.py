"""Beginnings of documents in rows of tokens, read from positions
and from a mask that numbers documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import BoolArray, IntArray

__all__ = ["RowTokens", "convert_mask", "is_integer_tensor", "read_positions"]


def is_integer_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def convert_mask(attention_mask: object) -> torch.Tensor | None:
    """Convert a 2-D mask to the form of `RowTokens`: whole numbers, which may number
    documents, or bool; None for anything else.
    """
    if not isinstance(attention_mask, torch.Tensor):
        return None
    return attention_mask if is_integer_tensor(attention_mask) else attention_mask.bool()


def read_positions(
    position_ids: torch.Tensor | None, padding: torch.Tensor | None, shape: tuple[int, int]
) -> tuple[IntArray, IntArray | None]:
    """Copy flat positions and the padding mask of every token of a (batch, length) batch from the device, in one go.

    Raises:
        LayoutError: if positions are no integers.
        UnsupportedError: if there are several position axes.
    """
    positions = torch.arange(shape[1], device="cpu")[None] if position_ids is None else position_ids
    if (
        positions.dim() != 2
        or positions.shape[-1] != shape[1]
        or positions.shape[0] not in (1, shape[0])
    ):
        raise UnsupportedError(
            f"position_ids of shape {tuple(positions.shape)} for a {shape} batch: distca reads "
            "documents from (1 or batch, length) positions. For models with several position axes "
            "use PackingCollator, which says where documents lie."
        )
    if not is_integer_tensor(positions):
        raise LayoutError(f"position_ids are {positions.dtype}: positions are integers.")
    rows = positions.expand(shape).long()
    if padding is None:
        return rows.reshape(-1).cpu().numpy(), None
    position, mask = (
        torch.stack([rows.to(padding.device), padding.long()]).reshape(2, -1).cpu().numpy()
    )
    return position, mask


@dataclass(frozen=True, eq=False)
class RowTokens:
    """Tokens of some rows that are not padding, row after row.

    Attributes:
        index: (tokens,) int64 place among all tokens of the rows, padding included.
        position: (tokens,) int64 position ids, less the position of a document's first token.
        number: (tokens,) int64 numbers in the mask; None if it numbers no documents.
        length: tokens of a row, padding included.
    """

    index: IntArray
    position: IntArray
    document_number: IntArray | None
    row_length: int

    @classmethod
    def of(
        cls, position: IntArray, mask: IntArray | None, length: int, first_position: int = 0
    ) -> RowTokens:
        """Read the tokens of flat rows.

        Args:
            position: position ids of all tokens.
            mask: 0 for padding; larger numbers than 1 number the documents of a row. None if there is no padding.
            length: tokens of a row.
            first_position: the position of a document's first token.
        """
        index = np.arange(len(position)) if mask is None else np.flatnonzero(mask)
        number = None if mask is None else mask[index]
        numbered = number is not None and len(number) and (number.max() > 1 or number.min() < 0)
        tokens = cls(
            index, position[index] - first_position, number if numbered else None, max(length, 1)
        )
        tokens._check_values(first_position)
        return tokens

    @property
    def row(self) -> IntArray:
        """Row of each token."""
        return self.index // self.row_length

    def find_document_starts(self, *, training: bool) -> IntArray:
        """Find the indices of tokens with which documents begin, if each document lies on one rank.

        A document begins with a row, where the mask has another number, and where positions begin
        again at the first. Inside a document positions may jump ahead, as where some are skipped to
        train for longer documents, or repeat, as for images.
        """
        if not len(self.index):
            return np.zeros(0, dtype=np.int64)
        row, position = self.row, self.position
        if training:
            self._check_row_starts()
        begin = self._mark_starts()
        ahead = np.diff(position, prepend=position[:1])
        first_of_row = np.concatenate([[True], np.diff(row) != 0])
        row_began_at = position[first_of_row][np.cumsum(first_of_row) - 1]
        restart = ((ahead <= 0) & (position == 0)) | ((ahead < 0) & (position == row_began_at))
        if (lost := np.flatnonzero((ahead < 0) & ~begin & ~restart)).size:
            token = lost[0]
            raise LayoutError(
                f"position_ids[{row[token]}, {self.index[token] % self.row_length}] falls from "
                f"{position[token - 1]} to {position[token]}: a document begins at its first "
                "position, and counts on. Say where documents begin, with PackingCollator or "
                "cu_seq_lens_q."
            )
        return np.flatnonzero(begin | restart)

    def find_run_starts(self) -> IntArray:
        """Find the indices of tokens with which runs begin, if documents may span
        ranks: wherever positions do not count on.
        """
        step, gap = np.diff(self.position), np.diff(self.index)
        counts_on = (step == 1) | (step == gap)  # over real tokens, or over all
        return np.flatnonzero(
            self._mark_starts() | np.concatenate([[True], ~counts_on])[: len(self.index)]
        )

    def _mark_starts(self) -> BoolArray:
        """Mark tokens with which a row begins, or a document that the mask numbers."""
        columns = [self.row] if self.document_number is None else [self.row, self.document_number]
        changes = np.any([np.diff(column) != 0 for column in columns], axis=0)
        begin: BoolArray = np.concatenate([[True], changes])[: len(self.index)]
        return begin

    def _check_values(self, first_position: int) -> None:
        row, column, first = self.row, self.index % self.row_length, first_position
        if len(self.index) and self.position.min() < 0:
            token = self.position.argmin()
            counted = f"this model counts from {first}, as DataCollatorWithFlattening(position_ids_start={first}) does"
            raise LayoutError(
                f"position_ids[{row[token]}, {column[token]}] is {self.position[token] + first}: "
                + (
                    f"{counted}. Use that, or PackingCollator."
                    if first
                    else "positions start at 0."
                )
            )
        if self.document_number is None:
            return
        if self.document_number.min() < 0:
            token = self.document_number.argmin()
            raise LayoutError(
                f"attention_mask[{row[token]}, {column[token]}] is {self.document_number[token]}: "
                "it must be 0 or more."
            )
        runs = np.stack([row, self.document_number], axis=1)[self._mark_starts()]
        if len(np.unique(runs, axis=0)) < len(runs):
            _, first_of, counts = np.unique(runs, axis=0, return_index=True, return_counts=True)
            twice = runs[first_of[counts > 1][0]]
            raise LayoutError(
                f"attention_mask numbers the documents of row {twice[0]}, and {twice[1]} comes "
                "again after another number: give each document a number of its own, and its "
                "tokens one after another."
            )

    def _check_row_starts(self) -> None:
        """Raise if the very first token of a row is inside a document:
        another tool must have cut the document.

        Behind padding a row may begin anywhere: without position ids of its own it counts padding too.
        """
        rest = np.flatnonzero((self.index % self.row_length == 0) & (self.position > 0))
        if len(rest):
            raise UnsupportedError(
                f"row {self.row[rest[0]]} of a training batch begins at position "
                f"{self.position[rest[0]]}, and there are no distca_documents. Dealt batches have "
                "more than input_ids: call model(**inputs). Else another tool may have cut "
                "sequences over ranks (context parallelism, Ulysses), and distca would take the "
                "rest for a document of its own. Switch that off; or set "
                "DistCAConfig(documents_span_ranks=True) if ranks of the group hold the parts."
            )
