"""Collators that pack documents and say where they start."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.schedule.layout import IntArray

__all__ = ["PackingCollator", "check_loader"]

IGNORED_LABEL = -100
_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Packs the documents of a batch into one row, without padding, and attaches their lengths as a host-side object.

    A feature is either one document, ``{"input_ids": [...]}`` with optional ``labels`` and ``attention_mask``, or a row that is
    packed already, ``{"documents": [[...], [...]]}``. Each is a flat list, numpy array or tensor of integers. Padding, where the
    mask is 0, is cut off at both ends. Documents without tokens are dropped.

    With several processes, an iterable dataset needs ``TrainingArguments(accelerator_config={"dispatch_batches": False})``: see
    `check_loader`.

    Returns a batch of int64 tensors (1, tokens): ``input_ids``, ``labels`` (the first token of each document is ignored, as
    nothing before it belongs to it) and ``position_ids`` (each document from 0), and ``distca_documents``.
    """

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack one batch.

        Raises:
            LayoutError: if features are of another form, hold no tokens, or have padding between tokens.
        """
        documents = [document for feature in features for document in _documents(feature) if len(document[0])]
        if not documents:
            raise LayoutError(f"{len(features)} features hold no tokens: drop empty documents before batching.")
        ids, labels = (np.concatenate(parts) for parts in zip(*documents, strict=True))
        lengths = np.array([len(tokens) for tokens, _ in documents])
        starts = np.cumsum(lengths) - lengths
        labels[starts] = IGNORED_LABEL
        positions = np.arange(len(ids)) - np.repeat(starts, lengths)
        rows = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {
            **{name: torch.from_numpy(row)[None] for name, row in rows.items()},
            "distca_documents": PackedDocuments(tuple(lengths.tolist())),
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


def _documents(feature: Mapping[str, Any]) -> list[tuple[IntArray, IntArray]]:
    """The (tokens, labels) of a feature's documents."""
    if not isinstance(feature, Mapping):
        raise LayoutError(f"a feature is of {type(feature)}; it must be a mapping with 'input_ids' or 'documents'.")
    if "documents" in feature:
        return [(tokens, tokens) for tokens in (_flat(one, "input_ids") for one in feature["documents"])]
    if "input_ids" not in feature:
        raise LayoutError(f"a feature has the keys {sorted(feature)}; it needs 'input_ids' or 'documents'.")
    tokens = _flat(feature["input_ids"], "input_ids")
    labels = _flat(feature["labels"], "labels") if "labels" in feature else tokens
    if len(tokens) != len(labels):
        raise LayoutError(f"a document has {len(tokens)} input_ids and {len(labels)} labels: they must match.")
    if feature.get("attention_mask") is None:
        return [(tokens, labels)]
    begin, end = _between_padding(feature["attention_mask"], len(tokens))
    return [(tokens[begin:end], labels[begin:end])]


def _between_padding(attention_mask: Any, length: int) -> tuple[int, int]:
    """Where the tokens of a padded document begin and end."""
    mask = _flat(attention_mask, "attention_mask", kinds="iub")
    if len(mask) != length:
        raise LayoutError(f"a document has {length} input_ids and {len(mask)} numbers in its attention_mask: they must match.")
    tokens = np.flatnonzero(mask)
    if not len(tokens):
        return 0, 0
    begin, end = int(tokens[0]), int(tokens[-1]) + 1
    if end - begin > len(tokens):
        hole = begin + int(np.flatnonzero(mask[begin:end] == 0)[0])
        raise LayoutError(
            f"attention_mask[{hole}] of a document is 0, between tokens {begin} and {end - 1}: only padding before and after the "
            "tokens can be cut off. Give the parts as documents of their own."
        )
    return begin, end


def _flat(values: Any, name: str, kinds: str = "iu") -> IntArray:
    """Integers of a document as an array; `kinds` are the numpy kinds of dtype that are taken."""
    try:
        row = values.numpy(force=True) if isinstance(values, torch.Tensor) else values
        if not isinstance(row, np.ndarray):
            row = _from_list(list(row), kinds)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"the {name} of a document must be a flat list of integers ({error}).") from error
    if row.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # empty arrays and tensors have any dtype
    if row.ndim != 1 or row.dtype.kind not in kinds or (row.dtype == np.uint64 and row.size and row.max() > _LARGEST):
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; here they are {row.dtype} of shape {row.shape}."
        )
    return row.astype(np.int64, copy=False)


def _from_list(values: list[Any], kinds: str) -> IntArray:
    """The same numbers; an `array` refuses what is no integer, and reads a list in a third of numpy's time."""
    if values and isinstance(values[0], bool) and "b" not in kinds:
        raise TypeError("they are bool")
    return np.frombuffer(array("q", values), dtype=np.int64)
