"""Shares: the part of each rank in each global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.columns import InputNames
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.pieces import DocumentPiece
from hf_distca.data.reading import DocumentReader


class EpochMixin:
    """Epoch number in shared memory: loader workers that already run see its changes."""

    def __init__(self) -> None:
        self.__setstate__({"_epoch": torch.zeros((), dtype=torch.int64, device="cpu")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # If it was not pickled for a worker, it has arrived as a copy, which has its own workers.
        self._epoch: torch.Tensor = state["_epoch"].share_memory_()

    @property
    def epoch(self) -> int:
        """Epoch of the items, or of the next iteration."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch here, in copies, and in workers that already run."""
        self._epoch.fill_(epoch)


class Shares(EpochMixin):
    """Shares of all global batches: item ``k * ranks + r`` is the share of rank r in batch k.

    `ranks` processes that read items in this order, one a batch, as accelerate does, each get their
    own share. A share is a dictionary of int64 tensors (tokens_per_rank,):

    - ``input_ids``.
    - ``position_ids``, in the document.
    - ``shift_labels``, the label of the document's next token, on whichever rank that lies; -100 at
      the document's end.
    - ``labels``, -100 throughout: shifting them would lose the target at every cut, and a loss that
      reads them trains on nothing rather than on something else. Only for one rank, where nothing
      is cut, they are each token's own label.

    ``distca_documents`` of a share carries the dealt layout.

    An object is also a transform of `datasets`: called with a batch of rows whose ``input_ids`` are
    numbers of items, it returns their shares.

    Copies share the epoch. Only documents that overlap a share are read, and only its slices of
    them are kept. In addition, some documents are read once, the same ones on all ranks, and ranks
    compare their tokens.

    Args:
        documents: see `DocumentReader`.
        batches: the pieces of each global batch.
        deal_settings: settings for dealing global batches, of the same number of tokens.
        column: column of the tokens.
        pad_token_id: token of padding.
        inputs: names of the inputs of the model that trains on them.

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
        numbers = numbers[numbers >= 0]  # without padding
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
        """Return the shares of items, by columns, as a transform of `datasets` does."""
        shares = [self[item] for item in rows["input_ids"]]
        return {name: [share[name] for share in shares] for name in shares[0]} if shares else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        # `datasets` copies its transforms often, and copies must see changes of the epoch.
        return self


def cut_share(
    packed: PackedDocuments, pieces: Mapping[int, DocumentPiece], pad_token_id: int = 0
) -> dict[str, Any]:
    """Cut out the share of one rank, as `Shares` describes it.

    Args:
        packed: the runs of tokens of this rank; ``documents`` are keys of `pieces`, ``starts``
            are positions in those.
        pieces: the pieces of the global batch of which this rank has tokens.
        pad_token_id: token of padding.

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
            # With the label of the next token, if there is one.
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
