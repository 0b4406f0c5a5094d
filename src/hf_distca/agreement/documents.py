"""Documents of a batch, read from the arguments that a model gives to attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_distca.agreement.document_starts import (
    RowTokens,
    convert_mask,
    is_integer_tensor,
    read_positions,
)
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.runtime.call import LayerExchange
from hf_distca.schedule.layout import (
    IntArray,
    compute_lengths,
    enumerate_ranges,
    require_integers,
)

if TYPE_CHECKING:
    from hf_distca.agreement.dealt_share import DealtShare

# Keys of a batch that say where documents begin, each with the attribute of `TokenBatch` that holds
# its value. They are also arguments of attention. The first key that is given decides.
DOCUMENT_KEYS = {
    "distca_documents": "packed",
    "cu_seq_lens_q": "cu_seq_lens",
    "position_ids": "position_ids",
}
# If documents span ranks, other keys are ignored, because they cannot say that a part continues a
# document.
SPANNING_KEYS = ("distca_documents", "position_ids")
# Keys that TRL's attention "tree_fa3" adds for documents that share prefixes.
TREE_KEYS = (
    *("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"),
    *("tree_max_seqlen_q", "tree_max_seqlen_k"),
)
# Keys that packing loaders add for flash attention and state space layers. Their values follow from
# the documents.
PACKING_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class _RemedyRepr(type):
    """Metaclass that adds advice to the class's repr, which other libraries print in errors."""

    def __repr__(cls) -> str:
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}'>, which stays on the rank that packed "
            "it. If rank 0 reads the batches of all ranks, as accelerate lets it do for iterable "
            'datasets, set TrainingArguments(accelerator_config={"dispatch_batches": False}), or '
            "dispatch_batches=False in accelerate's DataLoaderConfiguration"
        )


class PackedDocuments(metaclass=_RemedyRepr):
    """Documents of one rank's micro-batch, kept on the host so that no device tensor must be read.

    A collator puts this object into the batch under the key ``distca_documents``. Trainer,
    accelerate and the model pass it on. It is not a dataclass, because FSDP with mixed precision
    rebuilds dataclasses for every layer, and engines that move batches to a device copy dataclasses
    with all their contents.

    Args:
        lengths: number of tokens of each document, or of each part of a document, in token order.
        starts: document position of the first token of each part, if documents span ranks; else
            None.
        documents: number of each part's document, if documents span ranks; else None. A document
            has the same number on all ranks.
        parents: for documents that share prefixes, the index of the earlier part that each part
            continues, or -1. A part sees itself, its parent, and everything that the parent sees.
            Its positions continue those of the parent. None for other documents.
        dealt_share: the share of a global batch that has these documents; None for other batches.

    Raises:
        LayoutError: if a number is negative or not a whole number, if lengths, starts and documents
            differ in count, or if `parents` are not earlier parts.
    """

    __slots__ = ("copied_tokens", "dealt_share", "documents", "lengths", "starts")

    def __init__(
        self,
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
        documents: Sequence[int] | None = None,
        dealt_share: DealtShare | None = None,
        parents: Sequence[int] | None = None,
    ) -> None:
        self.lengths = _check_counts(lengths, "lengths")
        self.copied_tokens: tuple[int, ...] | None = None
        if parents is not None:
            above = require_integers(parents, "parents of PackedDocuments").tolist()
            is_tree = all(-1 <= parent < part for part, parent in enumerate(above))
            is_given = starts is not None or documents is not None or 0 in self.lengths
            if is_given or len(above) != len(self.lengths) or not is_tree:
                raise LayoutError(
                    f"parents={above} of PackedDocuments with lengths={self.lengths}: each part"
                    " must have tokens, and its parent must be an earlier part or -1. With parents,"
                    " give neither starts nor documents."
                )
            prefixes = _list_prefixes(self.lengths, above)
            starts, documents = list(map(len, prefixes)), range(len(prefixes))
            self.copied_tokens = tuple(chain.from_iterable(prefixes))
        self.starts = None if starts is None else _check_counts(starts, "starts")
        self.documents = None if documents is None else _check_counts(documents, "documents")
        self.dealt_share = dealt_share
        columns = [column for column in (self.starts, self.documents) if column is not None]
        if len(columns) == 1 or any(len(column) != len(self.lengths) for column in columns):
            raise LayoutError(
                f"{self}: give starts and documents for each of the lengths, or give neither."
            )

    @property
    def positions(self) -> IntArray:
        """Position of each token in its document, (tokens,) int64."""
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = np.array(self.starts or np.zeros_like(lengths), dtype=np.int64)
        return enumerate_ranges(starts, starts + lengths)[1]

    def __repr__(self) -> str:
        return (
            f"PackedDocuments(lengths={self.lengths}, starts={self.starts}, "
            f"documents={self.documents})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedDocuments) and self._columns == other._columns

    def __hash__(self) -> int:
        return hash(self._columns)

    @property
    def _columns(self) -> tuple[tuple[int, ...] | None, ...]:
        return self.lengths, self.starts, self.documents, self.copied_tokens


# These limits keep sums and products of positions within 64 bits.
_MAX_COUNTS = {"lengths": 2**48, "starts": 2**48, "documents": 2**63 - 1}


def _check_counts(values: Sequence[int], name: str) -> tuple[int, ...]:
    counts: list[int] = require_integers(values, f"{name} of PackedDocuments").tolist()
    for index, count in enumerate(counts):
        if not 0 <= count <= _MAX_COUNTS[name]:
            raise LayoutError(
                f"{name}[{index}] of PackedDocuments is {count}: it must be in "
                f"0..{_MAX_COUNTS[name]}."
            )
    return tuple(counts)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one rank in a micro-batch, or in one of its nano-batches, without padding.

    `TokenBatch` makes this object from `PackedDocuments`, `cu_seq_lens` or position ids.

    A *run* is a contiguous piece of a document on one rank.

    Attributes:
        runs: (runs, 3) int64 with columns document, start and length; document is -1 if only
            positions are known.
        span_ranks: True if documents may span ranks. The document and start of a run then tell
            which run on another rank it continues.
        token_indices: (tokens,) int64 indices, in the flattened batch, of the tokens that are not
            padding; None if there is no padding.
        copied_tokens: int64 indices of the tokens of shared prefixes, whose keys are copied to the
            front; None if no documents share prefixes.
        context_runs: number of runs of copied tokens. These runs are the first ones in `runs`.
        context_tokens: if the second nano-batch begins inside a document, the number of this
            document's tokens in the first nano-batch. In the second nano-batch, these tokens are
            the first run, but are not in `token_indices`.
        first_token: index in the flattened batch at which a nano-batch begins.
        home_pairs: number of query-key pairs that this rank computes outside of the plan, because
            tokens see each other in both directions.
        make_exchange: function that makes the `LayerExchange` of a call of attention. It takes the
            arguments of `LayerExchange`.
        dealt_share: the share of a global batch that has these documents; None for other batches.
        longest_holed: length of the longest document with padding inside, this padding included; 0
            if no document has padding inside.
        has_mask_numbers: True if the padding mask numbers the documents.
    """

    runs: IntArray
    span_ranks: bool = False
    token_indices: IntArray | None = None
    copied_tokens: IntArray | None = None
    context_runs: int = 0
    context_tokens: int = 0
    first_token: int = 0
    home_pairs: int = 0
    make_exchange: Callable[..., LayerExchange] = LayerExchange
    dealt_share: DealtShare | None = None
    longest_holed: int = 0
    has_mask_numbers: bool = False

    def check_holes(self, reach: int | None) -> None:
        """Raise if a layer's window or chunks would reach across padding inside a document.

        Other attention implementations count padding as tokens of a window or chunk, but distca
        does not. With distca, a token would therefore see other keys.

        Args:
            reach: tokens of a window or chunk; None for layers that see whole documents.

        Raises:
            UnsupportedError: if a document with padding inside is longer than the reach.
        """
        if reach is not None and self.longest_holed > reach:
            raise UnsupportedError(
                f"attention_mask has zeros inside a document of {self.longest_holed} tokens (zeros "
                f"included), and a layer has a window or chunks of {reach} tokens, which would "
                "reach across the zeros. Give the parts between zeros as separate documents, or "
                "remove the masked tokens."
            )

    def cut_into_chunks(self, size: int | None) -> Documents:
        """Cut documents into chunks, each a separate document.

        Args:
            size: number of positions of a chunk; None to cut nothing.

        Raises:
            UnsupportedError: if documents span ranks, or have padding inside.
        """
        if size is None:
            return self
        self.check_holes(size)
        if self.span_ranks:
            raise UnsupportedError(
                f"a layer has attention chunks of {size} tokens, and documents span ranks: "
                "distca cannot cut such documents into chunks. Keep each document on one rank."
            )
        lengths = [
            min(size, length - start)
            for length in self.runs[:, 2].tolist()
            for start in range(0, length, size)
        ]
        return replace(self, runs=make_unknown_runs(np.array(lengths, dtype=np.int64)))

    def split_at(self, index: int) -> tuple[Documents, Documents]:
        """Split the documents between two nano-batches.

        Args:
            index: index in the flattened batch at which the second nano-batch begins. If documents
                span ranks, one of `runs` must begin at this index.
        """
        length = self.runs[:, 2]
        if self.span_ranks:
            count = int(np.searchsorted(np.cumsum(length), index, side="right"))
            second = replace(self, runs=self.runs[count:], first_token=index)
            return replace(self, runs=self.runs[:count]), second
        indices = self.token_indices
        tokens = index if indices is None else int(np.searchsorted(indices, index))
        # Each document's number of tokens in the first nano-batch.
        before = np.clip(tokens - (np.cumsum(length) - length), 0, length)
        in_second = before < length
        context = before[in_second & (before > 0)]  # empty unless a document is cut
        starts = np.concatenate([np.zeros_like(context), before[in_second]])
        lengths = np.concatenate([context, (length - before)[in_second]])
        return (
            replace(
                self,
                runs=make_unknown_runs(before[before > 0]),
                token_indices=None if indices is None else indices[:tokens],
            ),
            replace(
                self,
                runs=make_unknown_runs(lengths, starts),
                token_indices=None if indices is None else indices[tokens:] - index,
                context_tokens=int(context.sum()),
                first_token=index,
            ),
        )

    @property
    def has_whole_documents(self) -> bool:
        """True if each document has all its tokens on this rank, in one run."""
        if self.context_tokens or not self.span_ranks:
            return not self.context_tokens
        numbers, starts, _ = self.runs.T.tolist()
        return not any(starts) and (
            max(numbers, default=-1) < 0 or len(set(numbers)) == len(numbers)
        )

    @property
    def first_token_indices(self) -> IntArray:
        """Index in the flattened batch of the first token of each run, (runs,) int64."""
        return self.find_indices(self.runs[:, 2].cumsum() - self.runs[:, 2])

    def is_packed(self, row_length: int) -> bool:
        """Return whether a row holds several documents, or a document continues in the next row.

        Args:
            row_length: number of tokens of a row, padding included.
        """
        ends = self.runs[:, 2].cumsum()
        first_row, last_row = self.find_indices(
            np.array([ends - self.runs[:, 2], ends - 1])
        ) // max(row_length, 1)
        return bool((first_row != last_row).any() or (first_row[1:] == first_row[:-1]).any())

    def find_indices(self, tokens: IntArray) -> IntArray:
        """Convert token indices that do not count padding to indices in the flattened batch."""
        return tokens if self.token_indices is None else self.token_indices[tokens]


def make_unknown_runs(lengths: IntArray, starts: IntArray | None = None) -> IntArray:
    """Make `Documents.runs` for documents whose numbers are unknown.

    Args:
        lengths: (runs,) int64 tokens of each run.
        starts: (runs,) int64 document position of the first token of each run; None for 0.
    """
    starts = np.zeros_like(lengths) if starts is None else starts
    return np.stack([np.full_like(lengths, -1), starts, lengths], axis=1)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Arguments of attention that describe the tokens of a (batch_size, length) batch.

    Documents are read from `packed` if it is given, else from `cu_seq_lens`, else from
    `position_ids`. Without these, each row is one document.

    Attributes:
        batch_size: number of rows.
        length: number of tokens of a row, padding included.
        packed: documents from the collator, with lengths that either include padding or leave it
            out.
        cu_seq_lens: (documents + 1,) integers, bounds of documents that either include padding or
            leave it out.
        position_ids: (1 or batch_size, length) integers.
        padding: (batch_size, length) mask of bools or whole numbers, with 0 for padding. If some
            numbers are above 1, the mask gives the number of each token's document in its row. None
            if there is no padding.
        first_position: position id of a document's first token.
    """

    batch_size: int
    length: int
    packed: PackedDocuments | None = None
    cu_seq_lens: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    first_position: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and number of tokens of a row."""
        return self.batch_size, self.length

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> TokenBatch:
        """Read the arguments of a model's forward."""
        batch_size, length = batch["input_ids"].shape
        return cls(
            batch_size, length, padding=convert_mask(batch.get("attention_mask"))
        ).with_documents(batch)

    def with_documents(self, arguments: Mapping[str, Any]) -> TokenBatch:
        """Replace attributes with values from a batch, or from arguments of attention.

        The values are found by the keys in `DOCUMENT_KEYS` and `TREE_KEYS`.
        """
        given: dict[str, Any] = {
            attribute: arguments[key]
            for key, attribute in DOCUMENT_KEYS.items()
            if arguments.get(key) is not None
        }
        if (tree := read_tree(arguments)) is not None:
            given["packed"] = tree
        return replace(self, **given)

    def read_documents(self, *, span_ranks: bool = False, training: bool = False) -> Documents:
        """Read the documents of the batch, with at most one copy from the device.

        Args:
            span_ranks: documents may span ranks.
            training: refuse a row that begins inside a document, unless documents may span ranks.

        Raises:
            LayoutError: if the arguments are malformed, or do not fit the batch.
            UnsupportedError: if there are several position axes, or if another tool has cut a row.
        """
        packed = self.packed
        padding = self.padding
        shape = (self.batch_size, self.length)
        if packed is not None and not isinstance(packed, PackedDocuments):
            raise LayoutError(
                f"distca_documents has type {type(packed)}: put a PackedDocuments into the batch."
            )
        if padding is not None and (
            padding.shape != shape
            or not (is_integer_tensor(padding) or padding.dtype == torch.bool)
        ):
            raise LayoutError(
                f"a padding mask of shape {tuple(padding.shape)} and {padding.dtype} for a {shape} "
                "batch: attention_mask must have one number for each token (0 for padding, else 1 "
                "or the number of the token's document)."
            )
        deciding = self._choose_attribute(span_ranks)
        if deciding == "cu_seq_lens" and self.cu_seq_lens is not None:
            packed = PackedDocuments(_read_bounds(self.cu_seq_lens))
        if packed is None or deciding == "position_ids":
            return self._read_from_positions(span_ranks, training)
        return self._remove_padding(_read_lengths(packed))

    def _choose_attribute(self, span_ranks: bool) -> str:
        """Choose the first given attribute that can say where documents begin."""
        for key, name in DOCUMENT_KEYS.items():
            if getattr(self, name) is not None and (key in SPANNING_KEYS or not span_ranks):
                return name
        return "position_ids"

    def _remove_padding(self, documents: Documents) -> Documents:
        """Remove padding from the documents, whose given lengths may or may not include padding."""
        tokens = int(documents.runs[documents.context_runs :, 2].sum())
        total = self.batch_size * self.length
        if self.padding is None and tokens == total:
            return documents
        padding = np.ones(total) if self.padding is None else self.padding.reshape(-1).cpu().numpy()
        is_real = padding != 0
        real = int(is_real.sum())
        batch = f"{self.batch_size} x {self.length}"
        if tokens not in (total, real):
            raise LayoutError(
                f"the documents have {tokens} tokens and the batch has {batch}, of which {real} "
                "are not padding: distca_documents or cu_seq_lens_q must cover the batch, row after"
                " row, either with all its padding or without any."
            )
        if real == total:
            return documents
        if documents.span_ranks:  # other ranks rely on this rank's positions
            raise LayoutError(
                f"{total - real} of the {batch} tokens are padding in attention_mask, but the "
                "documents may continue on other ranks (PackedDocuments with starts): leave "
                "attention_mask out, and give padding as a separate document."
            )
        lengths = documents.runs[:, 2]
        if tokens == total:
            document = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(document[is_real], minlength=len(lengths))
        lengths = lengths[lengths > 0]
        indices = np.flatnonzero(is_real)
        return replace(
            documents,
            runs=make_unknown_runs(lengths),
            token_indices=indices,
            longest_holed=_find_longest_holed(lengths, indices),
        )

    def _read_from_positions(self, span_ranks: bool, training: bool) -> Documents:
        first_position = 0 if self.position_ids is None else self.first_position
        shape = (self.batch_size, self.length)
        tokens = RowTokens.from_rows(
            *read_positions(self.position_ids, self.padding, shape), self.length, first_position
        )
        begin = (
            tokens.find_run_starts()
            if span_ranks
            else tokens.find_document_starts(training=training)
        )
        lengths = np.diff(begin, append=len(tokens.index))
        indices = None if len(tokens.index) == self.batch_size * self.length else tokens.index
        return Documents(
            make_unknown_runs(lengths, tokens.position[begin] if span_ranks else None),
            span_ranks,
            indices,
            longest_holed=0 if indices is None else _find_longest_holed(lengths, indices),
            has_mask_numbers=tokens.document_number is not None,
        )


def _find_longest_holed(lengths: IntArray, token_indices: IntArray) -> int:
    """Compute `Documents.longest_holed`."""
    ends = np.cumsum(lengths)
    extents = token_indices[ends - 1] - token_indices[ends - lengths] + 1
    return int(extents[extents > lengths].max(initial=0))


def _read_lengths(packed: PackedDocuments) -> Documents:
    count = len(packed.lengths)
    columns = packed.documents or (-1,) * count, packed.starts or (0,) * count, packed.lengths
    runs = np.array(columns, dtype=np.int64).reshape(3, count).T
    if packed.copied_tokens is not None:
        prefixes = np.stack([runs[:, 0], np.zeros_like(runs[:, 1]), runs[:, 1]], 1)[runs[:, 1] > 0]
        copied = np.array(packed.copied_tokens, dtype=np.int64)
        return Documents(
            np.concatenate([prefixes, runs]),
            span_ranks=True,
            copied_tokens=copied,
            context_runs=len(prefixes),
        )
    return Documents(
        runs[runs[:, 2] > 0],
        packed.documents is not None,
        dealt_share=packed.dealt_share,
    )


def _list_prefixes(lengths: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Return, for each part of a tree of documents, the tokens of all parts above it."""
    ends = list(accumulate(lengths, initial=0))
    prefixes: list[list[int]] = []
    for parent in parents:
        prefixes.append(
            [] if parent < 0 else [*prefixes[parent], *range(ends[parent], ends[parent + 1])]
        )
    return prefixes


def read_tree(arguments: Mapping[str, Any]) -> PackedDocuments | None:
    """Read the arguments that TRL's attention takes for documents that share prefixes.

    The arguments are copied from the device in one copy. Return None if they are missing.

    Raises:
        LayoutError: if the arguments do not describe a tree.
    """
    if arguments.get(TREE_KEYS[0]) is None:
        return None
    given = [arguments[name].long() for name in TREE_KEYS[:3]]
    bounds = np.cumsum([len(given[0]), len(given[1])])
    keys, rows, ends = np.split(torch.cat(given).cpu().numpy(), bounds)
    lengths = np.diff(rows)
    _, own = enumerate_ranges(ends[1:] - lengths, ends[1:])  # indices of each part's own tokens
    if not np.array_equal(keys[own], np.arange(rows[-1])) or not np.isin(keys, keys[own]).all():
        raise LayoutError(
            f"tree_kv_index of {len(lengths)} parts describes no tree: the keys of a part must be"
            " earlier tokens, followed by the part's own tokens."
        )
    tree = PackedDocuments(
        lengths.tolist(), (np.diff(ends) - lengths).tolist(), range(len(lengths))
    )
    tree.copied_tokens = tuple(np.delete(keys, own).tolist())
    return tree


def _read_bounds(cu_seq_lens: torch.Tensor) -> list[int]:
    if cu_seq_lens.dim() != 1 or not is_integer_tensor(cu_seq_lens):
        raise LayoutError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and {cu_seq_lens.dtype}: it must "
            "be a flat tensor of integers."
        )
    return compute_lengths(cu_seq_lens.tolist())
