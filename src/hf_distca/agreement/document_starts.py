"""Finds where documents begin in rows of tokens, from position ids or from numbers in a mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import BoolArray, IntArray, mark_changes


def is_integer_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def convert_mask(attention_mask: object) -> torch.Tensor | None:
    """Return a padding mask of whole numbers unchanged, and any other mask as bool.

    A mask of whole numbers may number the documents. Return None if the mask is not a tensor.
    """
    if not isinstance(attention_mask, torch.Tensor):
        return None
    return attention_mask if is_integer_tensor(attention_mask) else attention_mask.bool()


def read_positions(
    position_ids: torch.Tensor | None, padding: torch.Tensor | None, shape: tuple[int, int]
) -> tuple[IntArray, IntArray | None]:
    """Read the positions and the padding mask of a batch, with one copy from device to host.

    Args:
        position_ids: (1 or batch_size, length) integers; None to count from 0 in each row.
        padding: (batch_size, length) mask; None if there is no padding.
        shape: batch_size and length.

    Returns:
        Positions and mask, each (batch_size * length,) int64. The mask is None without padding.

    Raises:
        LayoutError: if positions are not integers.
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
            "use PackingCollator, which says where documents begin."
        )
    if not is_integer_tensor(positions):
        raise LayoutError(f"position_ids are {positions.dtype}: positions must be integers.")
    rows = positions.expand(shape).long()
    if padding is None:
        return rows.reshape(-1).cpu().numpy(), None
    columns = [rows.to(padding.device), padding.long()]
    position, mask = torch.stack(columns).reshape(2, -1).cpu().numpy()
    return position, mask


@dataclass(frozen=True, eq=False)
class RowTokens:
    """All tokens of some rows except padding, row after row.

    Attributes:
        index: (tokens,) int64 index among all tokens of the rows, padding included.
        position: (tokens,) int64 positions, counted from 0 even if the position ids of documents
            begin at another number.
        document_number: (tokens,) int64 number of each token's document, from the mask; None if the
            mask does not number documents.
        row_length: number of tokens of a row, padding included.
    """

    index: IntArray
    position: IntArray
    document_number: IntArray | None
    row_length: int

    @classmethod
    def from_rows(
        cls, position: IntArray, mask: IntArray | None, row_length: int, first_position: int = 0
    ) -> RowTokens:
        """Read the tokens of rows that are given as flat arrays.

        Args:
            position: (rows * row_length,) position ids of all tokens.
            mask: (rows * row_length,) 0 for padding. All other tokens have 1, or the number of
                their document in the row, from 1. None if there is no padding.
            row_length: number of tokens of a row.
            first_position: position id of a document's first token.

        Raises:
            LayoutError: if a position or a number of the mask is out of range, or if tokens with
                the same number are not adjacent.
        """
        index = np.arange(len(position)) if mask is None else np.flatnonzero(mask)
        number = None if mask is None else mask[index]
        if number is not None and (number == 1).all():
            number = None
        tokens = cls(index, position[index] - first_position, number, max(row_length, 1))
        tokens._check_values(first_position)
        return tokens

    @property
    def row(self) -> IntArray:
        """Index of each token's row, (tokens,) int64."""
        return self.index // self.row_length

    def find_document_starts(self, *, training: bool) -> IntArray:
        """Find the first tokens of documents, if each document lies on one rank.

        A document begins where a row begins, where the number in the mask changes, and where
        positions start again. Inside a document, positions may skip numbers (as in training for
        longer contexts) or repeat (as for images).

        Args:
            training: refuse a row that begins inside a document.

        Returns:
            (documents,) int64 indices of tokens, padding not counted.

        Raises:
            LayoutError: if a position is lower than the previous one, but does not start again.
            UnsupportedError: if a row begins inside a document, in training.
        """
        if not len(self.index):
            return np.zeros(0, dtype=np.int64)
        if training:
            self._check_row_starts()
        row = self.row
        position = self.position
        begin = self._mark_starts()
        step = np.diff(position, prepend=position[:1])
        begins_row = mark_changes(row)
        row_position = position[begins_row][np.cumsum(begins_row) - 1]
        restart = ((step <= 0) & (position == 0)) | ((step < 0) & (position == row_position))
        falls = np.flatnonzero((step < 0) & ~begin & ~restart)
        if len(falls):
            token = falls[0]
            raise LayoutError(
                f"position_ids[{row[token]}, {self.index[token] % self.row_length}] falls from "
                f"{position[token - 1]} to {position[token]}: positions may fall only to a "
                "document's first position. Say where documents begin, with PackingCollator or "
                "cu_seq_lens_q."
            )
        return np.flatnonzero(begin | restart)

    def find_run_starts(self) -> IntArray:
        """Find the first tokens of runs, if documents may span ranks.

        A run begins where a row begins, where the number in the mask changes, and where a position
        does not follow the previous one.

        Returns:
            (runs,) int64 indices of tokens, padding not counted.
        """
        step = np.diff(self.position)
        # The step is larger than 1 if positions count padding between two tokens.
        counts_on = (step == 1) | (step == np.diff(self.index))
        breaks = np.concatenate([[True], ~counts_on])[: len(self.index)]
        return np.flatnonzero(self._mark_starts() | breaks)

    def _mark_starts(self) -> BoolArray:
        """Mark the first tokens of rows, and of documents that the mask numbers: (tokens,) bool."""
        columns = [self.row] if self.document_number is None else [self.row, self.document_number]
        return mark_changes(*columns)

    def _check_values(self, first_position: int) -> None:
        row = self.row
        column = self.index % self.row_length
        if len(self.index) and self.position.min() < 0:
            token = self.position.argmin()
            remedy = (
                f"this model counts from {first_position}, as DataCollatorWithFlattening("
                f"position_ids_start={first_position}) does. Use that, or PackingCollator."
            )
            raise LayoutError(
                f"position_ids[{row[token]}, {column[token]}] is "
                f"{self.position[token] + first_position}: "
                f"{remedy if first_position else 'positions start at 0.'}"
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
        numbers, counts = np.unique(runs, axis=0, return_counts=True)
        if len(numbers) < len(runs):
            repeated = numbers[counts > 1][0]
            raise LayoutError(
                f"attention_mask numbers the documents of row {repeated[0]}, but {repeated[1]} "
                "comes again after another number: give each document a different number, and "
                "keep its tokens together."
            )

    def _check_row_starts(self) -> None:
        """Raise if a row begins inside a document, which another tool must have cut.

        A row with padding at its beginning may begin at any position, because default position ids
        count padding. A row may also begin at position 1, as in PaliGemma.
        """
        inside = np.flatnonzero((self.index % self.row_length == 0) & (self.position > 1))
        if len(inside):
            raise UnsupportedError(
                f"row {self.row[inside[0]]} of a training batch begins at position "
                f"{self.position[inside[0]]}, inside a document. Without distca_documents, distca "
                "would treat this part of the document as a separate document. If the batch is "
                "dealt, pass all its keys to the model: model(**inputs). If another tool has cut "
                "sequences over ranks (context parallelism, Ulysses), switch that tool off, or set "
                "DistCAConfig(documents_span_ranks=True) if ranks of the group hold the other "
                "parts."
            )
