"""Shares of documents that arrive in a stream."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hf_distca.agreement.dealt_share import Dealing
from hf_distca.data.borrowed_readers import count_split_ranks, hide_worker_info
from hf_distca.data.columns import InputNames
from hf_distca.data.pieces import DocumentPiece, hash_pieces
from hf_distca.data.reading import convert_document, count_tokens, is_datasets_class
from hf_distca.data.shares import EpochMixin, cut_share
from hf_distca.errors import ConfigError


class StreamedShares(EpochMixin, torch.utils.data.IterableDataset[Mapping[str, Any]]):
    """Shares of global batches that are filled as documents arrive.

    Each global batch is filled to the last token. The rest of a document is a separate document in
    the next batch. Tokens at the end of an epoch that do not fill a batch are dropped. Every
    rank reads all documents, and keeps one global batch at a time. The shares of all ranks come one
    after another: accelerate picks each process's own, and shares of others are never computed.

    With loader workers, worker w of W makes the global batches w, w + W, ..., so a loader yields
    all of them in order. A `datasets.IterableDataset` divides its files among workers: each worker
    then fills its own global batches, and a resumed run needs the same number of workers. Any
    other iterable is read in full by each worker: code in it that divides documents by torch's
    worker info, as torch's documentation teaches, finds that it is in no worker.

    Args:
        documents: token ids, or rows with a column of token ids and possibly ``labels``. They are
            iterated once an epoch; their ``set_epoch`` is called, if they have one.
        deal_settings: settings for dealing global batches.
        column: column of the tokens.
        inputs: names of the inputs of the model that trains on them.

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
                f"documents are a {type(documents).__name__}, which can be read once: give "
                "something that every epoch and every worker can iterate from its beginning, such "
                "as datasets.IterableDataset.from_generator(...)."
            )
        is_divided = is_datasets_class("IterableDataset", documents)
        if is_divided and count_split_ranks(documents) > 1:
            raise ConfigError(
                f"documents are one of {count_split_ranks(documents)} parts of a stream that is "
                "divided by rank "
                "(split_dataset_by_node): each rank reads the whole stream, and dealing leaves it "
                "its share. Give the stream as it was."
            )
        super().__init__()
        self.documents = documents
        self._is_divided = is_divided  # among workers
        self.deal_settings = deal_settings
        self.column = column
        self.inputs = inputs

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch here, and in workers that already run."""
        super().set_epoch(epoch)
        self._set_documents_epoch(epoch)

    def _set_documents_epoch(self, epoch: int) -> None:
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch = self.epoch
        if info is not None:  # a worker has a copy of the documents, without the new epoch
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
    """Yield all documents, even if the iterable would divide them among loader workers."""
    with hide_worker_info():
        if get_worker_info() is not None:
            raise ConfigError(
                "torch says in which loader worker documents are read, and they may be divided: "
                "set num_workers=0."
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
    """A share that is computed on first access: accelerate skips those of other ranks."""

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
        """The share."""
        lengths = np.array([piece.end - piece.start for piece in self._pieces])
        document_ids = np.array([hash_pieces(self._pieces)])
        packed = self._stream.deal_settings.make_share(
            lengths, self._batch_id, self._rank, document_ids
        )
        return cut_share(packed, dict(enumerate(self._pieces)))
