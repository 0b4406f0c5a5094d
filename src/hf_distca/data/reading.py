"""Documents, read so that a slice costs a slice."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from hf_distca.data.integers import flat
from hf_distca.data.lengths import is_arrow, length_of
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["COLUMNS", "IGNORED_LABEL", "Piece", "Reader", "as_row", "check_columns", "targets_of"]

_log = logging.getLogger("hf_distca")

IGNORED_LABEL = -100
MASKS = ("completion_mask", "assistant_masks")  # 1 for tokens that are targets, where a row has no labels
COLUMNS = frozenset({"input_ids", "labels", "attention_mask", *MASKS})  # what is read of a row

# Other inputs of models. Without them a row would be trained on as something else.
_REFUSED = frozenset({"shift_labels", "token_type_ids", "seq_idx", "inputs_embeds", "pixel_values", "distca_documents"})


def check_columns(row: Mapping[str, Any], tokens: int, read: Collection[str]) -> None:
    """Refuse columns that would change what is trained, and warn of others that have a number for each token.

    Args:
        row: as it came.
        tokens: how many it has.
        read: the columns that the caller reads.

    Raises:
        LayoutError: names the column.
    """
    for name in row.keys() - set(read):
        if name in _REFUSED:
            raise LayoutError(
                f"a row has a column {name!r}, an input of models that would be lost here: only {', '.join(sorted(read))} are "
                "read. Remove the column, or use another collator."
            )
        value = row[name]
        has_numbers = isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and len(value) == tokens > 1
        if has_numbers and isinstance(value[0], (int, float, np.number, torch.Tensor)):
            _warn_of_column(name, tuple(sorted(read)))


@cache
def _warn_of_column(name: str, read: tuple[str, ...]) -> None:
    _log.warning(
        "column %r has a number for each token, and is not read: only %s are. Remove it if it does not matter.",
        name,
        ", ".join(read),
    )


def targets_of(tokens: IntArray, masks: Collection[IntArray]) -> IntArray:
    """The labels of tokens without labels of their own: the tokens, where all masks are 1, as TRL has it."""
    return tokens if not masks else np.where(np.all(np.stack(list(masks)), axis=0), tokens, IGNORED_LABEL)


class Piece:
    """Tokens [start, end) of a document, which are a document of their own in their global batch.

    Args:
        row: the document: something that can be cut in slices for ``input_ids``, and for what else it has of ``labels``,
            ``attention_mask``, ``position_ids`` and the masks of targets; None for padding.
        start, end: in tokens of the document.
    """

    __slots__ = ("end", "row", "start")

    def __init__(self, row: Mapping[str, Any] | None, start: int, end: int) -> None:
        self.row, self.start, self.end = row, start, end

    def tokens(self, begin: int, end: int) -> IntArray | None:
        """The tokens [begin, end) of the piece, None for padding.

        Raises:
            LayoutError: if they are padding that the document came with, or fewer than the document was said to have.
        """
        if self.row is None:
            return None
        first = self.start + begin
        if self._has("attention_mask") and not (mask := self._slice("attention_mask", begin, end, "iub")).all():
            raise LayoutError(
                f"attention_mask of a document is 0 at token {first + int(mask.argmin())}: documents over ranks come without "
                "padding. Tokenize with padding=False."
            )
        if (
            self._has("position_ids")
            and (wrong := self._slice("position_ids", begin, end) - np.arange(first, first + end - begin)).any()
        ):
            place = first + int(np.flatnonzero(wrong)[0])
            raise LayoutError(
                f"position_ids of a document do not count on from 0 at token {place}: the row was packed already, and would be "
                "dealt as one document. Give its documents one by one."
            )
        return self._slice("input_ids", begin, end)

    def labels(self, begin: int, end: int) -> IntArray | None:
        """The labels of the tokens [begin, end) of the piece, None for padding. See `targets_of` for a document without any."""
        if self.row is None:
            return None
        if self._has("labels"):
            return self._slice("labels", begin, end)
        masks = [self._slice(name, begin, end, "iub") for name in MASKS if self._has(name)]
        return targets_of(self._slice("input_ids", begin, end), masks)

    def _has(self, name: str) -> bool:
        return self.row is not None and self.row.get(name) is not None

    def _slice(self, name: str, begin: int, end: int, kinds: str = "iu") -> IntArray:
        assert self.row is not None
        found = flat(self.row[name][self.start + begin : self.start + end], name, kinds)
        if len(found) != end - begin:
            raise LayoutError(
                f"the {name} of a document end before token {self.start + end}: they are fewer than its lengths or its other "
                "columns say."
            )
        return found


class Reader:
    """Reads some of many documents.

    Args:
        documents: a `datasets.Dataset`, of which nothing is copied before it is sliced, or a sequence of rows or of tokens.
        column: where the tokens are.
    """

    def __init__(self, documents: Any, column: str) -> None:
        self.column = column
        # A transform of the user's own makes tokens only when rows are asked for.
        self._arrow = is_arrow(documents) and documents.format["type"] != "custom"
        if self._arrow:
            if len(documents):
                as_row(documents.with_format(None)[0], column)  # of the others, only the columns that are needed are read
            documents = documents.with_format("arrow", columns=[column, *_others(documents.column_names, column)])
        self._documents = documents

    def rows(self, numbers: IntArray) -> list[Mapping[str, Any]]:
        """The documents of these numbers, as `Piece` takes them."""
        if not len(numbers):
            return []
        if not self._arrow:
            return [as_row(self._documents[number], self.column) for number in numbers.tolist()]
        table = self._documents[numbers.tolist()]
        names = {name: "input_ids" if name == self.column else name for name in table.column_names}
        columns = [_row_views(table.column(name)) for name in names]
        return [dict(zip(names.values(), row, strict=True)) for row in zip(*columns, strict=True)]


def as_row(document: Any, column: str) -> Mapping[str, Any]:
    """A document that is its tokens, or a row with them in a column, as `Piece` takes it."""
    if not hasattr(document, "keys"):
        return {"input_ids": document}
    if column not in document:
        raise LayoutError(f"a document has no {column!r}, only {', '.join(map(repr, document))}.")
    row = {"input_ids": document[column], **{name: document[name] for name in document if name != column}}
    if row.get("seq_lengths") is not None:
        raise LayoutError(
            f"a row has a column 'seq_lengths': it was packed already, and would be dealt as one document of "
            f"{len(row['input_ids'])} tokens. Give its documents one by one."
        )
    if len(row) > 1:
        check_columns(row, length_of(document, column, 0), {*COLUMNS, "position_ids"})
    return {"input_ids": row["input_ids"], **{name: row[name] for name in _others(row, column)}}


def _others(names: Collection[str], column: str) -> list[str]:
    """What is read of a row beside the column of its tokens."""
    return [name for name in (*sorted(COLUMNS - {"input_ids"}), "position_ids") if name in names and name != column]


def _row_views(column: Any) -> list[np.ndarray | None]:
    """Each list of an Arrow column as an array: a view where no value is missing. None for a missing list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    views: list[np.ndarray | None] = []
    for chunk in column.chunks:
        if pa.types.is_null(chunk.type):
            views += [None] * len(chunk)
            continue
        array = chunk.flatten().to_numpy(zero_copy_only=False)
        if len(chunk) == 1:  # as nearly always: rows from here and there are chunks of their own
            views.append(None if chunk.null_count else array)
            continue
        missing = chunk.is_null().to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False))
        views += [None if gone else array[a:b] for gone, a, b in zip(missing, [0, *ends[:-1]], ends, strict=True)]
    return views
