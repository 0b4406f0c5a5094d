"""Documents, read so that a slice costs a slice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_distca.data.integers import flat
from hf_distca.data.lengths import is_arrow
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["Piece", "Reader", "as_row"]


class Piece:
    """Tokens [start, end) of a document, which are a document of their own in their global batch.

    Args:
        row: the document: something that can be cut in slices for each of ``input_ids``, ``labels`` and ``attention_mask``
            (the latter two may be missing); None for padding.
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
        if self.row is not None and self.row.get("attention_mask") is not None:
            mask = self._slice("attention_mask", begin, end, "iub")
            if mask is not None and not mask.all():
                raise LayoutError(
                    f"attention_mask of a document is 0 at token {self.start + begin + int(mask.argmin())}: documents over ranks "
                    "come without padding. Tokenize with padding=False."
                )
        return self._slice("input_ids", begin, end)

    def labels(self, begin: int, end: int) -> IntArray | None:
        """The labels of the tokens [begin, end) of the piece: the tokens themselves if the document has none."""
        has_labels = self.row is not None and self.row.get("labels") is not None
        return self._slice("labels" if has_labels else "input_ids", begin, end)

    def _slice(self, name: str, begin: int, end: int, kinds: str = "iu") -> IntArray | None:
        if self.row is None:
            return None
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
            wanted = [column, *(name for name in ("labels", "attention_mask") if name in documents.column_names)]
            documents = documents.with_format("arrow", columns=list(dict.fromkeys(wanted)))
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
    names = [name for name in ("labels", "attention_mask") if name in document]
    return {"input_ids": document[column], **{name: document[name] for name in names}}


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
