"""Collators that pack documents and say where they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError, UnsupportedError

__all__ = ["PackingCollator", "check_loader"]

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Packs the documents of a batch into one row, without padding, and attaches their lengths as a host-side object.

    A feature is either one document, ``{"input_ids": [...]}`` with optional ``labels``, or a row that is packed already,
    ``{"documents": [[...], [...]]}``. Documents without tokens are dropped.

    With several processes, an iterable dataset needs ``TrainingArguments(accelerator_config={"dispatch_batches": False})``: see
    `check_loader`.

    Returns a batch of int64 tensors (1, tokens): ``input_ids``, ``labels`` (the first token of each document is ignored, as
    nothing before it belongs to it) and ``position_ids`` (each document from 0), and ``distca_documents``.
    """

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack one batch."""
        documents = [document for feature in features for document in _documents(feature) if document[0]]
        if not documents:
            raise LayoutError(f"{len(features)} features hold no tokens: drop empty documents before batching.")
        ids = [token for tokens, _ in documents for token in tokens]
        labels = [label for _, targets in documents for label in (IGNORED_LABEL, *targets[1:])]
        lengths = tuple(len(tokens) for tokens, _ in documents)
        positions = [position for length in lengths for position in range(length)]
        return {
            "input_ids": _row(ids, "input_ids"),
            "labels": _row(labels, "labels"),
            "position_ids": torch.tensor([positions]),
            "distca_documents": PackedDocuments(lengths),
        }


def check_loader(loader: object) -> None:
    """Refuse a loader of several processes in which rank 0 reads the batches of `PackingCollator` for all ranks.

    accelerate does so for iterable datasets unless told otherwise. It joins the rows of all ranks to one tensor, broadcasts and
    cuts it, which neither rows of different lengths nor `PackedDocuments` survive: rank 0 fails while the others wait for it.

    Raises:
        UnsupportedError: if `loader` is such a loader.
    """
    if not isinstance(loader, DataLoaderDispatcher) or loader.state.distributed_type == DistributedType.NO:
        return
    collator = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)  # the Trainer wraps it to drop columns
    if isinstance(collator, PackingCollator):
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them, as accelerate does by default for iterable datasets; "
            'packed documents cannot travel so. Set TrainingArguments(accelerator_config={"dispatch_batches": False}). Each rank '
            "then reads the dataset, in the same order, and accelerate leaves it its share: do not split the dataset by rank "
            "yourself, or each rank gets a share of its share."
        )


def _row(numbers: list[int], name: str) -> torch.Tensor:
    try:
        row = torch.tensor([numbers])
    except (RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"the {name} of a document must be a flat list of integers ({error}).") from error
    if row.dim() != 2 or row.dtype != torch.int64:
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; packed, they are {row.dtype} of {row.shape}."
        )
    return row


def _documents(feature: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The (tokens, labels) of a feature's documents."""
    if not isinstance(feature, Mapping):
        raise LayoutError(f"a feature is of {type(feature)}; it must be a mapping with 'input_ids' or 'documents'.")
    if "documents" in feature:
        return [(list(tokens), list(tokens)) for tokens in feature["documents"]]
    if "input_ids" not in feature:
        raise LayoutError(f"a feature has the keys {sorted(feature)}; it needs 'input_ids' or 'documents'.")
    tokens, labels = list(feature["input_ids"]), list(feature.get("labels", feature["input_ids"]))
    if len(tokens) != len(labels):
        raise LayoutError(f"a document has {len(tokens)} input_ids and {len(labels)} labels: they must match.")
    return [(tokens, labels)]
