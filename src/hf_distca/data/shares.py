"""Shares: the part of each rank in each global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.dealt_share import DealSettings
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.columns import UNKNOWN_INPUTS, ForwardInputs
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.pieces import DocumentPiece
from hf_distca.data.reading import DocumentReader

__all__ = ["EpochMixin", "Shares", "cut_share"]


class EpochMixin:
    """An epoch number in memory that loader workers share: they see changes after they started."""

    def __init__(self) -> None:
        self.__setstate__({"_epoch": torch.zeros((), dtype=torch.int64, device="cpu")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Pickled by other means than those of workers, it has arrived as a copy, which has workers of its own.
        self._epoch: torch.Tensor = state["_epoch"].share_memory_()

    @property
    def epoch(self) -> int:
        """Epoch of the items, or of the next iteration."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: here, in copies, and in workers that run already."""
        self._epoch.fill_(epoch)


class Shares(EpochMixin):
    """Shares of all global batches: item ``k * ranks + r`` is the
    share of rank r in global batch k.

    Read in this order by `ranks` processes with one item a batch, as accelerate does, each gets its
    own share. A share is a dictionary of int64 tensors (tokens_per_rank,): ``input_ids``,
    ``position_ids`` (in the document), ``shift_labels`` (the label of the next token of the
    document, wherever that lies; -100 at its end), ``labels``, and ``distca_documents``, which
    carries the dealt layout. ``labels`` are -100 throughout, as shifting them would lose the target
    at every cut: a loss that reads them trains on nothing rather than on something else. Only for
    one rank, where nothing is cut, they are each token's own label. It is also a transform of
    `datasets`: called with a batch of rows, it makes their ``input_ids``, numbers of items, into
    shares.

    Copies share the epoch. Only the documents that overlap a share are read, and only the slices of
    it are kept. In addition some documents are read once, the same ones on all ranks, and ranks
    compare their tokens.

    Args:
        documents: see `DocumentReader`.
        batches: the pieces of each global batch.
        dealing: settings for dealing global batches of as many tokens.
        column: column of the tokens.
        pad_token_id: token of padding.
        inputs: inputs of the model that trains on them.
    """

    def __init__(
        self,
        documents: Any,
        batches: GlobalBatches,
        dealing: DealSettings,
        *,
        column: str = "input_ids",
        pad_token_id: int = 0,
        inputs: ForwardInputs = UNKNOWN_INPUTS,
    ) -> None:
        super().__init__()
        self.batches, self.deal_settings, self.pad_token_id = batches, dealing, pad_token_id
        self._reader = DocumentReader(documents, column, inputs)
        self._digest = self._reader.compute_digest()

    def __len__(self) -> int:
        return len(self.batches) * self.deal_settings.ranks

    def __getitem__(self, item: int) -> dict[str, Any]:
        epoch = self.epoch
        number, rank = divmod(int(item), self.deal_settings.ranks)
        pieces = self.batches.get_pieces(epoch, number)
        names = np.concatenate([pieces.documents, pieces.starts, [self._digest]])
        packed = self.deal_settings.make_share(pieces.lengths, (epoch, number), rank, names)
        here = np.unique(np.asarray(packed.documents, dtype=np.int64))
        numbers = np.unique(pieces.documents[here])
        numbers = numbers[numbers >= 0]  # others are padding
        rows = dict(zip(numbers.tolist(), self._reader.read_rows(numbers), strict=True))
        overlapping = {
            index: DocumentPiece(
                rows.get(int(pieces.documents[index]), {}),
                int(pieces.starts[index]),
                int(pieces.ends[index]),
            )
            for index in here.tolist()
        }
        return cut_share(packed, overlapping, self.pad_token_id)

    def __call__(self, rows: Mapping[str, list[int]]) -> dict[str, list[Any]]:
        """Return the shares of items, as a batch of rows of a `datasets.Dataset`."""
        shares = [self[item] for item in rows["input_ids"]]
        return {name: [share[name] for share in shares] for name in shares[0]} if shares else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        # `datasets` copies what it holds at every turn; copies must hear of the epoch.
        return self


def cut_share(
    packed: PackedDocuments, pieces: Mapping[int, DocumentPiece], pad_token_id: int = 0
) -> dict[str, Any]:
    """Cut out the share of one rank, as `Shares` describes it.

    Args:
        packed: the runs of tokens of this rank; ``documents`` are keys of `pieces`, ``starts``
            positions in those.
        pieces: the documents of the global batch of which this rank has tokens.
        pad_token_id: token of padding.
    """
    total, cut = sum(packed.lengths), packed.dealt_share is None or packed.dealt_share.ranks > 1
    ids = np.full(total, pad_token_id, dtype=np.int64)
    labels, shifted = (np.full(total, IGNORED_LABEL, dtype=np.int64) for _ in range(2))
    begin = 0
    for document, start, length in zip(
        packed.documents or (), packed.starts or (), packed.lengths, strict=True
    ):
        piece, end = pieces[document], start + length
        if length and piece.row:
            ids[begin : begin + length] = piece.read_tokens(start, end)
            labels_here = piece.read_labels(
                start, min(end + 1, piece.end - piece.start)
            )  # and that of the next token, if any
            shifted[begin : begin + len(labels_here) - 1] = labels_here[1:]
            if not cut:
                labels[begin + 1 : begin + length] = labels_here[1:length]
        begin += length
    rows = {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": shifted,
        "position_ids": packed.positions,
    }
    return {
        **{name: torch.from_numpy(row) for name, row in rows.items()},
        "distca_documents": packed,
    }
