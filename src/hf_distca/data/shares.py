"""Shares of global batches, from a data set or a stream. A share is one rank's part of a batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.borrowed_readers import count_split_ranks, hide_worker_info
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.columns import InputNames
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.reading import (
    DocumentPiece,
    DocumentReader,
    convert_document,
    count_tokens,
    hash_pieces,
    is_datasets_class,
)
from hf_distca.errors import ConfigError


class EpochMixin:
    """Epoch number in shared memory, so that running loader workers see changes."""

    def __init__(self) -> None:
        self.__setstate__({"_epoch": torch.zeros((), dtype=torch.int64, device="cpu")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Shallow copies and copies that are pickled for workers share the tensor. Other copies get
        # new shared memory.
        self._epoch: torch.Tensor = state["_epoch"].share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch from which the next items are read."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this object, of its shallow copies, and of its copies in workers."""
        self._epoch.fill_(epoch)


class Shares(EpochMixin):
    """Shares of all global batches. Item ``k * ranks + r`` is rank r's share of batch k.

    Accelerate reads items in this order, with batches of one item, so each process gets the shares
    of its rank. A share is a dictionary of int64 tensors (tokens_per_rank,):

    - ``input_ids``.
    - ``position_ids``, positions in the document.
    - ``shift_labels``, for each token the label of the document's next token, even if that token is
      on another rank; -100 at the end of the document.
    - ``labels``. With several ranks they are all -100, because a loss that itself shifts labels
      would lose the target at every cut. With -100, such a loss trains on nothing rather than on
      wrong targets. With one rank there are no cuts, and each token has its own label.

    A share also has ``distca_documents``, which carries the dealt layout.

    An object of this class is also a transform for `datasets`. When called with a batch of rows
    whose ``input_ids`` are item numbers, it returns the shares of these items.

    Shallow copies share the epoch. Only documents that overlap a share are read, and only the
    slices in the share are kept. Each rank also reads the same sample of documents once, and ranks
    compare the tokens of this sample.

    Args:
        documents: see `DocumentReader`.
        batches: the pieces of each global batch.
        deal_settings: settings for dealing, with as many tokens per global batch as `batches`.
        column: column of the tokens.
        pad_token_id: token id of padding.
        inputs: input names of the model that trains on the shares.

    Raises:
        LayoutError: if documents have a column that is not read and may be an input of the model.
    """

    def __init__(
        self,
        documents: Any,
        batches: GlobalBatches,
        deal_settings: Dealing,
        *,
        column: str = "input_ids",
        pad_token_id: int = 0,
        inputs: InputNames = None,
    ) -> None:
        super().__init__()
        self.batches = batches
        self.deal_settings = deal_settings
        self.pad_token_id = pad_token_id
        self._reader = DocumentReader(documents, column, inputs)
        self._digest = self._reader.compute_digest()

    def __len__(self) -> int:
        return len(self.batches) * self.deal_settings.ranks

    def __getitem__(self, item: int) -> dict[str, Any]:
        epoch = self.epoch
        number, rank = divmod(int(item), self.deal_settings.ranks)
        pieces = self.batches.get_pieces(epoch, number)
        document_ids = np.concatenate([pieces.documents, pieces.starts, [self._digest]])
        packed = self.deal_settings.make_share(pieces.lengths, (epoch, number), rank, document_ids)
        indices = np.unique(np.asarray(packed.documents, dtype=np.int64))
        numbers = np.unique(pieces.documents[indices])
        numbers = numbers[numbers >= 0]  # padding has the number -1
        rows = dict(zip(numbers.tolist(), self._reader.read_rows(numbers), strict=True))
        own_pieces = {
            index: DocumentPiece(
                rows.get(int(pieces.documents[index]), {}),
                int(pieces.starts[index]),
                int(pieces.ends[index]),
            )
            for index in indices.tolist()
        }
        return cut_share(packed, own_pieces, self.pad_token_id)

    def __call__(self, rows: Mapping[str, list[int]]) -> dict[str, list[Any]]:
        """Return the shares of items as columns, like a transform of `datasets`."""
        shares = [self[item] for item in rows["input_ids"]]
        return {name: [share[name] for share in shares] for name in shares[0]} if shares else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        # `datasets` copies transforms often, and copies must see when the epoch changes.
        return self


def cut_share(
    packed: PackedDocuments, pieces: Mapping[int, DocumentPiece], pad_token_id: int = 0
) -> dict[str, Any]:
    """Make the share of one rank. See `Shares`.

    Args:
        packed: the runs of tokens of this rank. Its ``documents`` are keys of `pieces`, and its
            ``starts`` are positions in these pieces.
        pieces: the pieces that have tokens on this rank, by index in the global batch. More pieces
            may be given.
        pad_token_id: token id of padding.

    Raises:
        LayoutError: see `DocumentPiece.read_tokens`.
    """
    total = sum(packed.lengths)
    is_cut = packed.dealt_share is None or packed.dealt_share.ranks > 1
    ids = np.full(total, pad_token_id, dtype=np.int64)
    labels = np.full(total, IGNORED_LABEL, dtype=np.int64)
    shifted = np.full(total, IGNORED_LABEL, dtype=np.int64)
    begin = 0
    runs = zip(packed.documents or (), packed.starts or (), packed.lengths, strict=True)
    for document, start, length in runs:
        piece = pieces[document]
        end = start + length
        if length and piece.row:
            ids[begin : begin + length] = piece.read_tokens(start, end)
            # Read one more label for the token after the run, if there is one.
            run_labels = piece.read_labels(start, min(end + 1, piece.end - piece.start))
            shifted[begin : begin + len(run_labels) - 1] = run_labels[1:]
            if not is_cut:
                labels[begin + 1 : begin + length] = run_labels[1:length]
        begin += length
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "shift_labels": torch.from_numpy(shifted),
        "position_ids": torch.from_numpy(packed.positions),
        "distca_documents": packed,
    }


class StreamedShares(EpochMixin, torch.utils.data.IterableDataset[Mapping[str, Any]]):
    """Shares of global batches that are filled as documents arrive.

    Each global batch is filled to the last token. If a document does not fit, its rest is a
    separate document in the next batch. Tokens at the end of an epoch that do not fill a batch are
    dropped. Every rank reads all documents, and keeps one global batch at a time. The shares of all
    ranks come one after another. Accelerate keeps only the shares of the process's own rank, and
    the other shares are never computed.

    With loader workers, worker w of W makes the global batches w, w + W, ..., so a loader yields
    all of them in order. A `datasets.IterableDataset` divides its files among workers. Each worker
    then fills separate global batches, and a resumed run needs the same number of workers. Each
    worker reads any other iterable in full. Such an iterable may divide documents by torch's worker
    info, as torch's documentation suggests. This class hides that info, so that the iterable yields
    all documents.

    Args:
        documents: documents, which are token ids, or rows with a column of token ids and possibly
            ``labels``. They are iterated once an epoch. Their ``set_epoch`` is called if it exists.
        deal_settings: settings for dealing global batches.
        column: column of the tokens.
        inputs: input names of the model that trains on the shares.

    Raises:
        ConfigError: if documents are an iterator, which ends with the first epoch, or a stream that
            is divided by rank.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        deal_settings: Dealing,
        *,
        column: str = "input_ids",
        inputs: InputNames = None,
    ) -> None:
        if isinstance(documents, Iterator):
            raise ConfigError(
                f"documents are a {type(documents).__name__}, which can be read only once. Give an "
                "iterable that every epoch and every worker can read from the beginning, such as "
                "datasets.IterableDataset.from_generator(...)."
            )
        is_divided = is_datasets_class("IterableDataset", documents)
        if is_divided and count_split_ranks(documents) > 1:
            raise ConfigError(
                f"documents are one of {count_split_ranks(documents)} parts of a stream that is "
                "divided by rank (split_dataset_by_node). Each rank must read the whole stream, "
                "because dealing selects its share. Give the undivided stream."
            )
        super().__init__()
        self.documents = documents
        self._is_divided = is_divided  # whether workers read different documents
        self.deal_settings = deal_settings
        self.column = column
        self.inputs = inputs

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch here, and in running workers."""
        super().set_epoch(epoch)
        self._set_documents_epoch(epoch)

    def _set_documents_epoch(self, epoch: int) -> None:
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = self.epoch
        if info is not None:  # the worker's copy of the documents may have an old epoch
            self._set_documents_epoch(epoch)
        for number, pieces in enumerate(self._fill_global_batches()):
            if not self._is_divided and number % workers != worker:
                continue
            batch_id = epoch, number * workers + worker if self._is_divided else number
            for rank in range(self.deal_settings.ranks):
                yield _LazyShare(self, batch_id, rank, pieces)

    def _fill_global_batches(self) -> Iterator[list[DocumentPiece]]:
        tokens = self.deal_settings.tokens
        pieces: list[DocumentPiece] = []
        free = tokens
        documents = self.documents if self._is_divided else _iterate_undivided(self.documents)
        for number, document in enumerate(documents):
            begin = 0
            count = count_tokens(document, self.column, number)
            while begin < count:
                end = min(count, begin + free)
                row = convert_document(document, self.column, number, self.inputs)
                pieces.append(DocumentPiece(row, begin, end))
                free -= end - begin
                begin = end
                if not free:
                    yield pieces
                    pieces = []
                    free = tokens


def _iterate_undivided(documents: Iterable[Any]) -> Iterator[Any]:
    """Yield all documents, even if the iterable divides them among loader workers."""
    with hide_worker_info():
        if get_worker_info() is not None:
            raise ConfigError(
                "torch's worker info could not be hidden from the documents, so they may be "
                "divided among loader workers. Set num_workers=0."
            )
        iterator = iter(documents)
    end = object()
    while True:
        with hide_worker_info():
            document = next(iterator, end)
        if document is end:
            return
        yield document


class _LazyShare(UserDict[str, Any]):
    """A share that is computed at first access, because accelerate skips shares of other ranks."""

    def __init__(
        self,
        stream: StreamedShares,
        batch_id: tuple[int, int],
        rank: int,
        pieces: list[DocumentPiece],
    ) -> None:
        self._stream = stream
        self._batch_id = batch_id
        self._rank = rank
        self._pieces = pieces

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        """The share, computed at the first access."""
        lengths = np.array([piece.end - piece.start for piece in self._pieces])
        document_ids = np.array([hash_pieces(self._pieces)])
        packed = self._stream.deal_settings.make_share(
            lengths, self._batch_id, self._rank, document_ids
        )
        return cut_share(packed, dict(enumerate(self._pieces)))
