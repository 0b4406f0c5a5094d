"""The collator: it packs documents and says where they start, or makes a batch of a share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.integers import flat
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["IGNORED_LABEL", "PackingCollator"]

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Packs the documents of a batch into one row, without padding, and attaches their lengths as a host-side object.

    A feature is either one document, ``{"input_ids": [...]}`` with optional ``labels`` and ``attention_mask``, or a row that is
    packed already, ``{"documents": [[...], [...]]}``. Each is a flat list, numpy array or tensor of integers. Padding, where the
    mask is 0, is cut off at both ends. Documents without tokens are dropped.

    Of a data set of shares (`hf_distca.document_shares`) a batch is exactly one share, which is packed already.

    With several processes, an iterable dataset needs ``TrainingArguments(accelerator_config={"dispatch_batches": False})``: see
    `check_loader`.

    Returns a batch of int64 tensors (1, tokens): ``input_ids``, ``labels`` (the first token of each document is ignored, as
    nothing before it belongs to it) and ``position_ids`` (each document from 0), and ``distca_documents``. A share has
    ``shift_labels``, too: the next token's label for each token, also where that token lies on another rank.
    """

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack one batch.

        Raises:
            LayoutError: if features are of another form, hold no tokens, have padding between tokens, or are several shares.
        """
        if any(_is_share(feature) for feature in features):
            return _batch_of_share(features)
        documents = [document for feature in features for document in _documents(feature) if len(document[0])]
        if not documents:
            raise LayoutError(f"{len(features)} features hold no tokens: drop empty documents before batching.")
        ids, labels = (np.concatenate(parts) for parts in zip(*documents, strict=True))
        packed = PackedDocuments([len(tokens) for tokens, _ in documents])
        labels[packed.positions == 0] = IGNORED_LABEL
        rows = {"input_ids": ids, "labels": labels, "position_ids": packed.positions}
        return {**{name: torch.from_numpy(row)[None] for name, row in rows.items()}, "distca_documents": packed}


def _is_share(feature: object) -> bool:
    """Whether a feature is a part of a global batch that was dealt to ranks."""
    if not isinstance(feature, Mapping) or "distca_documents" not in feature:
        return False
    packed = feature["distca_documents"]
    return isinstance(packed, PackedDocuments) and packed.dealt is not None


def _batch_of_share(features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(features) != 1:
        raise LayoutError(
            f"a batch of {len(features)} shares: a share is all that a rank gets of a global batch, and tokens_per_rank sets its "
            "size. Set per_device_train_batch_size=1 (and per_device_eval_batch_size=1)."
        )
    (share,) = features
    return {name: row[None] if isinstance(row, torch.Tensor) else row for name, row in share.items()}


def _documents(feature: Mapping[str, Any]) -> list[tuple[IntArray, IntArray]]:
    """The (tokens, labels) of a feature's documents."""
    if not isinstance(feature, Mapping):
        raise LayoutError(f"a feature is of {type(feature)}; it must be a mapping with 'input_ids' or 'documents'.")
    if "documents" in feature:
        return [(tokens, tokens) for tokens in (flat(one, "input_ids") for one in feature["documents"])]
    if "input_ids" not in feature:
        raise LayoutError(f"a feature has the keys {sorted(feature)}; it needs 'input_ids' or 'documents'.")
    tokens = flat(feature["input_ids"], "input_ids")
    labels = flat(feature["labels"], "labels") if "labels" in feature else tokens
    if len(tokens) != len(labels):
        raise LayoutError(f"a document has {len(tokens)} input_ids and {len(labels)} labels: they must match.")
    if feature.get("attention_mask") is None:
        return [(tokens, labels)]
    begin, end = _between_padding(feature["attention_mask"], len(tokens))
    return [(tokens[begin:end], labels[begin:end])]


def _between_padding(attention_mask: Any, length: int) -> tuple[int, int]:
    """Where the tokens of a padded document begin and end."""
    mask = flat(attention_mask, "attention_mask", kinds="iub")
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
