"""Documents of a batch, read from the arguments that a model gives to attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_distca.agreement.document_starts import RowTokens, as_mask, is_whole, read_tokens
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import IntArray, lengths_from_cu_seqlens, require_integers

if TYPE_CHECKING:
    from hf_distca.agreement.dealt import Dealt

__all__ = ["Documents", "PackedDocuments", "TokenBatch", "unknown_documents"]


class _Explained(type):
    """Metaclass whose repr says where objects of its classes cannot
    go: libraries put it into their errors.
    """

    def __repr__(cls) -> str:
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}'>, which stays on the rank that packed it. If rank 0 reads the batches "
            "of all ranks, as accelerate lets it do for iterable datasets, set "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}), or dispatch_batches=False in accelerate\'s '
            "DataLoaderConfiguration"
        )


class PackedDocuments(metaclass=_Explained):
    """Documents of one rank's micro-batch as a host-side object, so
    that no rank has to read a device tensor.

    A collator puts it into the batch under the key ``distca_documents``; Trainer, accelerate and
    the model pass it on. This is no dataclass: FSDP with mixed precision rebuilds dataclasses for
    every layer, and engines that move batches to a device copy them with all their contents.

    Args:
        lengths: number of tokens of each document (or part of a document) in token order.
        starts: first document position of each, if documents span ranks; else None.
        documents: a number of each document that is the same on all ranks, if documents span ranks;
            else None.
        dealt: the whole global batch of which this is a rank's share.

    Attributes:
        ahead: plans that `plan_ahead` made, by their keys; each is removed when it is used.

    Raises:
        LayoutError: if a number is negative or no whole number, or if there are not as many of
            each.
    """

    __slots__ = ("ahead", "dealt", "documents", "lengths", "starts")

    def __init__(
        self,
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
        documents: Sequence[int] | None = None,
        dealt: Dealt | None = None,
    ) -> None:
        self.lengths = _counts(lengths, "lengths")
        self.starts = None if starts is None else _counts(starts, "starts")
        self.documents = None if documents is None else _counts(documents, "documents")
        self.ahead: dict[Any, Any] = {}
        self.dealt = dealt
        spans = (self.starts, self.documents)
        if (self.starts is None) != (self.documents is None) or any(s is not None and len(s) != len(self.lengths) for s in spans):
            raise LayoutError(f"{self}: give starts and documents for each of the lengths, or neither.")

    @property
    def positions(self) -> IntArray:
        """Position of each token in its document, (tokens,) int64."""
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = np.zeros_like(lengths) if self.starts is None else np.array(self.starts, dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        positions: IntArray = np.arange(lengths.sum()) + np.repeat(starts - first, lengths)
        return positions

    def __repr__(self) -> str:
        return f"PackedDocuments(lengths={self.lengths}, starts={self.starts}, documents={self.documents})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedDocuments) and self._columns == other._columns

    def __hash__(self) -> int:
        return hash(self._columns)

    @property
    def _columns(self) -> tuple[tuple[int, ...] | None, ...]:
        return self.lengths, self.starts, self.documents


# Positions stay small enough to be added and multiplied.
_LARGEST = {"lengths": 2**48, "starts": 2**48, "documents": 2**63 - 1}


def _counts(values: Sequence[int], name: str) -> tuple[int, ...]:
    counts: list[int] = require_integers(values, f"{name} of PackedDocuments").tolist()
    for index, count in enumerate(counts):
        if not 0 <= count <= _LARGEST[name]:
            raise LayoutError(f"{name}[{index}] of PackedDocuments is {count}: it must be in 0..{_LARGEST[name]}.")
    return tuple(counts)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one rank in a micro-batch, or in one nano-batch of it.

    Attributes:
        rows: int64, one row per run of tokens, (document, start, length); document is -1 where only
            positions are known.
        spans: whether documents may span ranks, so that start and document of a run say what it
            continues.
        keep: int64 indices of the tokens that are not padding, among batch * sequence; None if
            there is no padding.
        context: number of tokens of the first document in the first nano-batch; they are the first
            row here, and not in `keep`.
        ahead: plans for these documents that were made before.
        dealt: the whole global batch of which these are a rank's share.
        holes: length of the longest document with padding inside, that padding included; 0 without
            such documents.
        numbered: whether the padding mask numbered the documents.
    """

    rows: IntArray
    spans: bool = False
    keep: IntArray | None = None
    context: int = 0
    ahead: dict[Any, Any] = field(default_factory=dict)
    dealt: Dealt | None = None
    holes: int = 0
    numbered: bool = False

    def check_holes(self, reach: int | None) -> None:
        """Raise if padding inside a document is longer than the reach of a layer's
        tokens; None for layers that see whole documents.

        Padding is left out before tokens are counted, and other attention counts it: each would see other tokens.
        """
        if reach is not None and self.holes > reach:
            raise UnsupportedError(
                f"attention_mask has zeros between the tokens of a document, over {self.holes} places, and a layer has a window "
                f"or chunks of {reach} tokens, which would reach over the zeros. Give the parts as documents of their own, or "
                "remove the tokens that are masked."
            )

    def in_chunks(self, size: int | None) -> Documents:
        """Cut documents into chunks of `size` positions, each a
        document of its own; None for no cuts.
        """
        if size is None:
            return self
        self.check_holes(size)
        if self.spans:
            raise UnsupportedError(
                f"a layer with attention chunks of {size} tokens met documents that span ranks: distca cuts documents in chunks "
                "only where each lies on one rank."
            )
        lengths = [min(size, length - start) for length in self.rows[:, 2].tolist() for start in range(0, length, size)]
        return replace(self, rows=unknown_documents(np.array(lengths, dtype=np.int64)))

    def cut(self, index: int) -> tuple[Documents, Documents]:
        """Split the documents at an index among batch * sequence; documents
        that span ranks only between two runs.
        """
        if self.spans:
            runs = int(np.searchsorted(np.cumsum(self.rows[:, 2]), index, side="right"))
            return replace(self, rows=self.rows[:runs]), replace(self, rows=self.rows[runs:])
        tokens = index if self.keep is None else int(np.searchsorted(self.keep, index))
        length = self.rows[:, 2]
        before = np.clip(tokens - (np.cumsum(length) - length), 0, length)  # tokens of each document
        rest = before < length
        context = before[rest & (before > 0)]  # of the document that the cut goes through, if there is one
        starts = np.concatenate([np.zeros_like(context), before[rest]])
        second = unknown_documents(np.concatenate([context, (length - before)[rest]]), starts)
        keeps = (None, None) if self.keep is None else (self.keep[:tokens], self.keep[tokens:] - index)
        return (
            replace(self, rows=unknown_documents(before[before > 0]), keep=keeps[0]),
            replace(self, rows=second, keep=keeps[1], context=int(context.sum())),
        )

    @property
    def are_whole(self) -> bool:
        """True if each document has all its tokens here, in one piece;
        documents that span ranks may be whole, too.
        """
        if self.context or not self.spans:
            return not self.context
        numbers, starts, _ = self.rows.T.tolist()
        return not any(starts) and (max(numbers, default=-1) < 0 or len(set(numbers)) == len(numbers))

    @property
    def first_tokens(self) -> IntArray:
        """Index of the first token of each document among batch * sequence, (rows,) int64."""
        first = self.rows[:, 2].cumsum() - self.rows[:, 2]
        return first if self.keep is None else self.keep[first]

    def packed(self, length: int) -> bool:
        """Return whether a row of `length` tokens holds more than one document,
        or a document continues in the next row.
        """
        last = self.rows[:, 2].cumsum() - 1
        first, last = self.first_tokens // max(length, 1), (last if self.keep is None else self.keep[last]) // max(length, 1)
        return bool((first != last).any() or (first[1:] == first[:-1]).any())

    @property
    def numbers(self) -> IntArray:
        """Numbers that other ranks need: the rows if documents span ranks, else (rows,) lengths."""
        return self.rows if self.spans else self.rows[:, 2]


def unknown_documents(lengths: IntArray, starts: IntArray | None = None) -> IntArray:
    """Make rows as in `Documents`, for runs of tokens whose documents are not known."""
    return np.stack([np.full_like(lengths, -1), np.zeros_like(lengths) if starts is None else starts, lengths], axis=1)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Arguments of attention that describe the tokens of a (batch_size, length) batch.

    Attributes:
        packed, cu_seq_lens, position_ids: boundaries of documents; the first that is given decides.
            Without any, each row is one document.
        padding: (batch_size, length) mask, bool or whole numbers: 0 for padding, and larger numbers
            than 1 number the documents of a row. Lengths that are given may count padding or leave
            it out.
        first_position: position id of a document's first token.
    """

    batch_size: int
    length: int
    packed: PackedDocuments | None = None
    cu_seq_lens: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    first_position: int = 0

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> TokenBatch:
        """Read the arguments from a batch as it goes to a model."""
        batch_size, length = batch["input_ids"].shape
        packed, cu_seq_lens = batch.get("distca_documents"), batch.get("cu_seq_lens_q")
        return cls(batch_size, length, packed, cu_seq_lens, batch.get("position_ids"), as_mask(batch.get("attention_mask")))

    def documents(self, *, span_ranks: bool = False, training: bool = False) -> Documents:
        """Read the documents of the batch, with at most one copy from the device.

        A row that begins in the middle of a document is refused in `training` unless documents may
        span ranks.

        Raises:
            LayoutError: if the arguments describe no documents, or documents of another batch.
            UnsupportedError: if there are several position axes, or a row that another tool has
                cut.
        """
        packed, padding, shape = self.packed, self.padding, (self.batch_size, self.length)
        if packed is not None and not isinstance(packed, PackedDocuments):
            raise LayoutError(f"distca_documents is of {type(packed)}: put a PackedDocuments into the batch.")
        if padding is not None and (padding.shape != shape or not (is_whole(padding) or padding.dtype == torch.bool)):
            raise LayoutError(
                f"a padding mask of shape {tuple(padding.shape)} and {padding.dtype} for a {shape} batch: attention_mask must be "
                "0 for padding and 1 for tokens, or the number of their document, one number for each token."
            )
        if packed is None and self.cu_seq_lens is not None and not span_ranks:
            packed = PackedDocuments(_from_bounds(self.cu_seq_lens))
        return self._by_positions(span_ranks, training) if packed is None else self._without_padding(_by_lengths(packed))

    def _without_padding(self, local: Documents) -> Documents:
        """Remove padding from `local`.

        Its lengths cover all tokens of the batch, or just those that are not padding.
        """
        tokens, total = int(local.rows[:, 2].sum()), self.batch_size * self.length
        if self.padding is None and tokens == total:
            return local
        valid = np.ones(total, dtype=np.bool_) if self.padding is None else self.padding.reshape(-1).cpu().numpy() != 0
        real = int(valid.sum())
        batch = f"{self.batch_size} x {self.length}"
        if tokens not in (total, real):
            raise LayoutError(
                f"the documents have {tokens} tokens and the batch has {batch}, {real} of them not padding: distca_documents or "
                "cu_seq_lens_q must cover the batch, row after row, with all its padding or without."
            )
        if real == total:
            return local
        if local.spans:  # other ranks count on the tokens that are given
            raise LayoutError(
                f"{total - real} of the {batch} tokens are padding by attention_mask, and the documents may go on on other ranks "
                "(PackedDocuments with starts): leave attention_mask out, and give padding as a document of its own."
            )
        rows = local.rows.copy()
        if tokens == total:
            before = np.concatenate([[0], np.cumsum(valid)])  # tokens in front of each
            rows[:, 2] = np.diff(before[np.cumsum(rows[:, 2])], prepend=0)
        rows, keep = rows[rows[:, 2] > 0], np.flatnonzero(valid)
        return replace(local, rows=rows, keep=keep, holes=_holes(rows[:, 2], keep))

    def _by_positions(self, span_ranks: bool, training: bool) -> Documents:
        first = 0 if self.position_ids is None else self.first_position
        tokens = RowTokens.of(*read_tokens(self.position_ids, self.padding, (self.batch_size, self.length)), self.length, first)
        begin = tokens.run_starts() if span_ranks else tokens.document_starts(training=training)
        lengths = np.diff(np.append(begin, len(tokens.index)))
        keep = None if len(tokens.index) == self.batch_size * self.length else tokens.index
        rows = unknown_documents(lengths, tokens.position[begin] if span_ranks else None)
        holes = 0 if keep is None else _holes(lengths, keep)
        return Documents(rows, span_ranks, keep, holes=holes, numbered=tokens.number is not None)


def _holes(lengths: IntArray, keep: IntArray) -> int:
    """Compute `Documents.holes`."""
    ends = np.cumsum(lengths)
    places = keep[ends - 1] - keep[ends - lengths] + 1
    return int(places[places > lengths].max(initial=0))


def _by_lengths(packed: PackedDocuments) -> Documents:
    count = len(packed.lengths)
    documents, starts = packed.documents or (-1,) * count, packed.starts or (0,) * count
    rows = np.array([documents, starts, packed.lengths], dtype=np.int64).reshape(3, count).T
    return Documents(rows[rows[:, 2] > 0], packed.documents is not None, ahead=packed.ahead, dealt=packed.dealt)


def _from_bounds(cu_seq_lens: torch.Tensor) -> list[int]:
    if cu_seq_lens.dim() != 1 or not is_whole(cu_seq_lens):
        raise LayoutError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and {cu_seq_lens.dtype}: it must be a flat tensor of integers."
        )
    return lengths_from_cu_seqlens(cu_seq_lens.tolist())
