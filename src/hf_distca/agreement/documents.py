"""Which documents a batch holds, read from what a model hands to attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import IntArray, as_integers, lengths_from_cu_seqlens

if TYPE_CHECKING:
    from hf_distca.agreement.dealt import Dealt

__all__ = ["Documents", "PackedDocuments", "PlansAhead", "read_documents"]


class PlansAhead:
    """Plans for a batch that were made before its forward, each to be taken once.

    No dictionary and no dataclass: engines that move batches to a device copy those, with all that they hold.
    """

    def __init__(self, plans: Mapping[Any, Any] | None = None) -> None:
        self._plans = dict(plans or {})

    def take(self, kind: Any) -> Any:
        """The plan of a kind, None if there is none."""
        return self._plans.pop(kind, None)


class _Explained(type):
    """The type of a class whose name says where its objects cannot go: libraries put it into their errors."""

    def __repr__(cls) -> str:
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}'>, which stays on the rank that packed it. If rank 0 reads the batches "
            "of all ranks, as accelerate lets it do for iterable datasets, set "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}), or dispatch_batches=False in accelerate\'s '
            "DataLoaderConfiguration"
        )


class PackedDocuments(metaclass=_Explained):
    """The documents of one rank's micro-batch as a host-side object, so that no rank has to read a device tensor.

    A collator puts it into the batch under the key ``distca_documents``; Trainer, accelerate and the model pass it on. It is no
    dataclass: FSDP with mixed precision rebuilds those for every layer.

    Args:
        lengths: tokens of each document (or of each part of one) in token order.
        starts: first document position of each, if documents span ranks; else None.
        documents: a number of each document that is the same on all ranks, if documents span ranks; else None.
        ahead: plans that `plan_ahead` made.
        dealt: the whole global batch of which this is a rank's share.

    Raises:
        LayoutError: if a number is no whole number or negative, or if there are not as many of each.
    """

    __slots__ = ("ahead", "dealt", "documents", "lengths", "starts")

    def __init__(
        self,
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
        documents: Sequence[int] | None = None,
        ahead: PlansAhead | None = None,
        dealt: Dealt | None = None,
    ) -> None:
        self.lengths = _counts(lengths, "lengths")
        self.starts = None if starts is None else _counts(starts, "starts")
        self.documents = None if documents is None else _counts(documents, "documents")
        self.ahead, self.dealt = ahead or PlansAhead(), dealt
        spans = (self.starts, self.documents)
        if (self.starts is None) != (self.documents is None) or any(s is not None and len(s) != len(self.lengths) for s in spans):
            raise LayoutError(f"{self}: give starts and documents for each of the lengths, or neither.")

    def planned(self, ahead: PlansAhead) -> PackedDocuments:
        """The same documents with these plans."""
        return PackedDocuments(self.lengths, self.starts, self.documents, ahead, self.dealt)

    @property
    def positions(self) -> IntArray:
        """(tokens,) int64: the place of each token in its document."""
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
    counts: list[int] = as_integers(values, f"{name} of PackedDocuments").tolist()
    for index, count in enumerate(counts):
        if not 0 <= count <= _LARGEST[name]:
            raise LayoutError(f"{name}[{index}] of PackedDocuments is {count}: it must be in 0..{_LARGEST[name]}.")
    return tuple(counts)


@dataclass(frozen=True, eq=False)
class Documents:
    """One rank's documents in a micro-batch, or in one nano-batch of it.

    Attributes:
        rows: int64, one row per run of tokens, (document, start, length); document is -1 where only positions are known.
        spans: whether start and document say how runs continue each other across ranks.
        keep: int64 indices of the tokens that are not padding, among batch * sequence; None if there is no padding.
        context: tokens that the first document has in the first nano-batch; they are the first row here, and not in `keep`.
        ahead: plans for these documents that are there already.
        dealt: the whole global batch of which these are a rank's share.
    """

    rows: IntArray
    spans: bool = False
    keep: IntArray | None = None
    context: int = 0
    ahead: PlansAhead = field(default_factory=PlansAhead)
    dealt: Dealt | None = None

    def in_chunks(self, size: int | None) -> Documents:
        """The same tokens, where each chunk of `size` positions of a document is a document of its own; None for no cuts."""
        if size is None:
            return self
        if self.spans:
            raise UnsupportedError(
                f"a layer with attention chunks of {size} tokens met documents that span ranks: distca cuts documents in chunks "
                "only where each lies on one rank."
            )
        lengths = [min(size, length - start) for length in self.rows[:, 2].tolist() for start in range(0, length, size)]
        rows = np.array([(-1, 0, length) for length in lengths], dtype=np.int64).reshape(-1, 3)
        return replace(self, rows=rows)

    def cut(self, index: int) -> tuple[Documents, Documents]:
        """The documents before and from this index among batch * sequence; those that span ranks only between two runs."""
        if self.spans:
            runs = int(np.searchsorted(np.cumsum(self.rows[:, 2]), index, side="right"))
            return replace(self, rows=self.rows[:runs]), replace(self, rows=self.rows[runs:])
        tokens = index if self.keep is None else int(np.searchsorted(self.keep, index))
        first: list[tuple[int, int, int]] = []
        second: list[tuple[int, int, int]] = []
        context = begin = 0
        for length in self.rows[:, 2].tolist():
            here = min(max(tokens - begin, 0), length)  # tokens of the document before the cut
            if here:
                first.append((-1, 0, here))
            if here < length:
                if here:
                    second.append((-1, 0, here))
                    context = here
                second.append((-1, here, length - here))
            begin += length
        keeps = (None, None) if self.keep is None else (self.keep[:tokens], self.keep[tokens:] - index)
        rows = (np.array(part, dtype=np.int64).reshape(-1, 3) for part in (first, second))
        before, after = (replace(self, rows=part, keep=keep) for part, keep in zip(rows, keeps, strict=True))
        return before, replace(after, context=context)


def read_documents(
    batch_size: int,
    length: int,
    *,
    packed: PackedDocuments | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    span_ranks: bool = False,
    training: bool = False,
) -> Documents:
    """The documents of a (batch_size, length) batch.

    The first of `packed`, `cu_seq_lens` and `position_ids` that is given decides; without any, each row is one document.
    `padding` is a (batch_size, length) bool mask, true for tokens; the lengths given may count padding or leave it out. Copies
    from the device at most once. A row that begins in the middle of a document is refused in `training` unless documents may span
    ranks.

    Raises:
        LayoutError: if what is given describes no documents, or not those of such a batch.
        UnsupportedError: if there are several position axes, or a row that another tool has cut.
    """
    if packed is not None and not isinstance(packed, PackedDocuments):
        raise LayoutError(f"distca_documents is of {type(packed)}: put a PackedDocuments into the batch.")
    if padding is not None and (padding.shape != (batch_size, length) or padding.dtype != torch.bool):
        raise LayoutError(
            f"a padding mask of shape {tuple(padding.shape)} and {padding.dtype} for a ({batch_size}, {length}) batch: "
            "attention_mask must be 1 for tokens and 0 for padding, one number for each token."
        )
    if packed is not None or (cu_seq_lens is not None and not span_ranks):
        return _without_padding(_from_lengths(packed, cu_seq_lens), batch_size, length, padding)
    return _from_positions(batch_size, length, position_ids, padding, span_ranks, training)


def _from_lengths(packed: PackedDocuments | None, cu_seq_lens: torch.Tensor | None) -> Documents:
    if packed is None:
        lengths = [] if cu_seq_lens is None else _from_bounds(cu_seq_lens)
        packed = PackedDocuments(tuple(lengths))
    count = len(packed.lengths)
    documents, starts = packed.documents or (-1,) * count, packed.starts or (0,) * count
    rows = np.array([documents, starts, packed.lengths], dtype=np.int64).reshape(3, count).T
    return Documents(rows[rows[:, 2] > 0], packed.documents is not None, ahead=packed.ahead, dealt=packed.dealt)


def _without_padding(local: Documents, batch_size: int, length: int, padding: torch.Tensor | None) -> Documents:
    """The tokens of `local` that are not padding. Its lengths cover all tokens of the batch, or just these."""
    tokens, total = int(local.rows[:, 2].sum()), batch_size * length
    if padding is None and tokens == total:
        return local
    valid = np.ones(total, dtype=np.bool_) if padding is None else padding.reshape(-1).cpu().numpy()
    real = int(valid.sum())
    if tokens not in (total, real):
        raise LayoutError(
            f"the documents have {tokens} tokens and the batch has {batch_size} x {length}, {real} of them not padding: "
            "distca_documents or cu_seq_lens_q must cover the batch, row after row, with all its padding or without."
        )
    if real == total:
        return local
    if local.spans:  # other ranks count on the tokens that are given
        raise LayoutError(
            f"{total - real} of the {batch_size} x {length} tokens are padding by attention_mask, and the documents may go on on "
            "other ranks (PackedDocuments with starts): leave attention_mask out, and give padding as a document of its own."
        )
    rows = local.rows.copy()
    if tokens == total:
        before = np.concatenate([[0], np.cumsum(valid)])  # tokens in front of each
        rows[:, 2] = np.diff(before[np.cumsum(rows[:, 2])], prepend=0)
    return replace(local, rows=rows[rows[:, 2] > 0], keep=np.flatnonzero(valid))


def _from_bounds(cu_seq_lens: torch.Tensor) -> list[int]:
    if cu_seq_lens.dim() != 1 or not _whole(cu_seq_lens):
        raise LayoutError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and {cu_seq_lens.dtype}: it must be a flat tensor of integers."
        )
    return lengths_from_cu_seqlens(cu_seq_lens.tolist())


def _whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _from_positions(
    batch_size: int,
    length: int,
    position_ids: torch.Tensor | None,
    padding: torch.Tensor | None,
    span_ranks: bool,
    training: bool,
) -> Documents:
    position, valid = _on_host(batch_size, length, position_ids, padding)
    keep = None if valid is None or valid.all() else np.flatnonzero(valid)
    token = np.arange(batch_size * length) if keep is None else keep
    position = position[token]
    if position.size and position.min() < 0:
        index = int(token[position.argmin()])
        raise LayoutError(f"position_ids[{index // length}, {index % length}] is {position.min()}: positions start at 0.")
    if training and not span_ranks:
        _refuse_continuations(position, token, length)
    step, gap = np.diff(position), np.diff(token)
    # Two neighbours belong together if they are in one row and the position counts on: over all tokens, or over real ones.
    joined = ((step == 1) | (step == gap)) & (np.diff(token // max(length, 1)) == 0)
    first = np.flatnonzero(np.concatenate([[True], ~joined])) if len(token) else np.zeros(0, np.int64)
    lengths = np.diff(np.append(first, len(token)))
    starts = position[first] if span_ranks else np.zeros_like(lengths)
    rows = np.stack([np.full_like(lengths, -1), starts, lengths], axis=1)
    return Documents(rows, span_ranks, keep)


def _refuse_continuations(position: IntArray, token: IntArray, length: int) -> None:
    """A row whose very first token is no first token of a document is the rest of what another tool cut over ranks.

    Behind padding a row may begin anywhere: without position ids of its own it counts padding too.
    """
    wrong = np.flatnonzero((token % max(length, 1) == 0) & (position > 0))
    if len(wrong):
        row, first = int(token[wrong[0]]) // length, int(position[wrong[0]])
        raise UnsupportedError(
            f"row {row} of a training batch begins at position {first}: another tool seems to have cut sequences over ranks "
            "(context parallelism, Ulysses, sequence parallelism), and distca would take the rest for a document of its own. "
            "Switch that off; or set DistCAConfig(documents_span_ranks=True) if the ranks of the attention group hold the parts."
        )


def _on_host(
    batch_size: int, length: int, position_ids: torch.Tensor | None, padding: torch.Tensor | None
) -> tuple[IntArray, IntArray | None]:
    """Flat positions and validity of every token, copied from the device in one go."""
    if position_ids is None:
        position_ids = torch.arange(length, device="cpu")[None]
    if position_ids.dim() != 2 or position_ids.shape[-1] != length or position_ids.shape[0] not in (1, batch_size):
        raise UnsupportedError(
            f"position_ids of shape {tuple(position_ids.shape)} for a ({batch_size}, {length}) batch: distca reads documents "
            "from (1 or batch, length) positions. For models with several position axes put PackedDocuments in the batch."
        )
    if not _whole(position_ids):
        raise LayoutError(f"position_ids are {position_ids.dtype}: positions are integers.")
    rows = position_ids.expand(batch_size, length)
    if padding is None:
        return rows.reshape(-1).cpu().numpy().astype(np.int64), None
    both = torch.stack([rows.to(padding.device), padding.to(rows.dtype)]).reshape(2, -1).cpu().numpy().astype(np.int64)
    return both[0], both[1]
