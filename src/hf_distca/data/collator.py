"""The collator: it packs documents and says where they start, or makes a batch of a share."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

__all__ = ["COLUMNS", "IGNORED_LABEL", "MASKS", "PackingCollator", "check_columns", "documents_of", "flat", "targets_of"]

_log = logging.getLogger("hf_distca")

IGNORED_LABEL = -100
MASKS = ("completion_mask", "assistant_masks")  # 1 for tokens that are targets, where a row has no labels
COLUMNS = frozenset({"input_ids", "labels", "attention_mask", *MASKS})  # what is read of a row
_READ = COLUMNS | {"seq_lengths", "position_ids"}

# Other inputs of models. Without them a row would be trained on as something else.
_REFUSED = frozenset({"shift_labels", "token_type_ids", "seq_idx", "inputs_embeds", "pixel_values", "distca_documents"})


def check_columns(row: Mapping[str, Any], tokens: int, read: Collection[str]) -> None:
    """Refuse columns of a row that would change what is trained, and warn of others that have a number for each of its tokens.

    Raises:
        LayoutError: names a column that is not among those that the caller reads.
    """
    for name in row.keys() - set(read):
        if name in _REFUSED:
            raise LayoutError(
                f"a row has a column {name!r}, an input of models that would be lost here: only {', '.join(sorted(read))} are "
                "read. Remove the column, or use another collator."
            )
        value = row[name]
        has_numbers = isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and len(value) == tokens > 1
        if has_numbers and isinstance(value[0], (int, float, np.number, torch.Tensor)):
            _warn_of_column(name, tuple(sorted(read)))


@cache
def _warn_of_column(name: str, read: tuple[str, ...]) -> None:
    _log.warning(
        "column %r has a number for each token, and is not read: only %s are. Remove it if it does not matter.",
        name,
        ", ".join(read),
    )


def targets_of(tokens: IntArray, masks: Collection[IntArray]) -> IntArray:
    """The labels of tokens without labels of their own: the tokens, where all masks are 1, as TRL has it."""
    return tokens if not masks else np.where(np.all(np.stack(list(masks)), axis=0), tokens, IGNORED_LABEL)


def flat(values: Any, name: str, kinds: str = "iu") -> IntArray:
    """Integers of a document, a list, array or tensor, as an int64 array; `kinds` are the numpy kinds of dtype that are taken.

    Raises:
        LayoutError: if they are no flat row of integers; `name` says of what.
    """
    try:
        row = values.numpy(force=True) if isinstance(values, torch.Tensor) else values
        if not isinstance(row, np.ndarray):
            numbers = list(row)
            if numbers and isinstance(numbers[0], bool) and "b" not in kinds:
                raise TypeError("they are bool")
            # An `array` refuses what is no integer, and reads a list in a third of numpy's time.
            row = np.frombuffer(array("q", numbers), dtype=np.int64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"the {name} of a document must be a flat list of integers ({error}).") from error
    if row.shape == (0,):
        return np.zeros(0, dtype=np.int64)  # empty arrays and tensors have any dtype
    if row.ndim != 1 or row.dtype.kind not in kinds or (row.dtype == np.uint64 and row.max(initial=0) >= 2**63):
        raise LayoutError(
            f"the {name} of a document must be a flat list of integers; here they are {row.dtype} of shape {row.shape}."
        )
    return row.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Packs the documents of a batch into one row, without padding, and attaches their lengths as a host-side object.

    A feature is a row of tokens, ``{"input_ids": [...]}``, or a list of documents, ``{"documents": [[...], [...]]}``. A row is
    one document, unless ``seq_lengths`` (tokens of each) or its own ``position_ids`` say which documents it has. ``labels`` are
    its labels; without them, tokens are targets where ``completion_mask`` and ``assistant_masks`` are 1, or everywhere.
    Padding, where ``attention_mask`` is 0, is cut off at both ends. Each column is a flat list, numpy array or tensor of
    integers. Documents without tokens are dropped.

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
            LayoutError: if features are of another form, hold no tokens, have padding between tokens, have other columns that
                would change what is trained, or are several shares.
        """
        if any(map(_is_share, features)):
            return _batch_of_share(features)
        documents = [document for feature in features for document in documents_of(feature) if len(document[0])]
        if not documents:
            raise LayoutError(f"{len(features)} features hold no tokens: drop empty documents before batching.")
        ids, labels = (np.concatenate(parts) for parts in zip(*documents, strict=True))
        packed = PackedDocuments([len(tokens) for tokens, _ in documents])
        labels[packed.positions == 0] = IGNORED_LABEL
        rows = {"input_ids": ids, "labels": labels, "position_ids": packed.positions}
        return {**{name: torch.from_numpy(row)[None] for name, row in rows.items()}, "distca_documents": packed}


def _is_share(feature: object) -> bool:
    packed = feature.get("distca_documents") if isinstance(feature, Mapping) else None
    return isinstance(packed, PackedDocuments) and packed.dealt is not None


def _batch_of_share(features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(features) != 1:
        raise LayoutError(
            f"a batch of {len(features)} shares: a share is all that a rank gets of a global batch, and tokens_per_rank sets its "
            "size. Set per_device_train_batch_size=1 (and per_device_eval_batch_size=1)."
        )
    (share,) = features
    return {name: row[None] if isinstance(row, torch.Tensor) else row for name, row in share.items()}


def documents_of(feature: Mapping[str, Any]) -> list[tuple[IntArray, IntArray]]:
    """The (tokens, labels) of a feature's documents, int64, as `PackingCollator` reads it."""
    if not isinstance(feature, Mapping):
        raise LayoutError(f"a feature is of {type(feature)}; it must be a mapping with 'input_ids' or 'documents'.")
    if "documents" in feature:
        beside = sorted(_READ & feature.keys())
        if beside:
            raise LayoutError(f"a feature has 'documents' and {beside[0]!r}, which would not be read: give rows of 'input_ids'.")
        return [(tokens, tokens) for tokens in (flat(tokens, "input_ids") for tokens in feature["documents"])]
    if "input_ids" not in feature:
        raise LayoutError(f"a feature has the keys {sorted(feature)}; it needs 'input_ids' or 'documents'.")
    row = {name: flat(feature[name], name, "iub" if "mask" in name else "iu") for name in _READ if feature.get(name) is not None}
    tokens, lengths = row["input_ids"], row.pop("seq_lengths", None)
    check_columns(feature, len(tokens), _READ)
    for name, column in row.items():
        if len(column) != len(tokens):
            raise LayoutError(f"a row has {len(tokens)} input_ids and {len(column)} numbers in its {name}: they must match.")
    if "attention_mask" in row:
        begin, end = _between_padding(row["attention_mask"])
        row = {name: column[begin:end] for name, column in row.items()}
        tokens = row["input_ids"]
    labels = row["labels"] if "labels" in row else targets_of(tokens, [row[name] for name in MASKS if name in row])
    bounds = np.cumsum(_lengths(len(tokens), lengths, row.get("position_ids")))[:-1]
    return list(zip(np.split(tokens, bounds), np.split(labels, bounds), strict=True))


def _lengths(tokens: int, lengths: IntArray | None, positions: IntArray | None) -> IntArray:
    """Tokens of each document of a row: by its lengths, by its positions, or all of it."""
    if lengths is not None and (lengths.min(initial=0) < 0 or lengths.sum() != tokens):
        raise LayoutError(
            f"seq_lengths of a row are of {lengths.sum()} tokens, and it has {tokens} without padding: they must match, and each "
            "be at least 0."
        )
    if positions is None or not tokens:
        return np.array([tokens]) if lengths is None else lengths
    first = np.flatnonzero(np.diff(positions, prepend=positions[0]) != 1)  # where counting begins anew
    if (wrong := first[positions[first] != 0]).size:
        raise LayoutError(
            f"position_ids[{wrong[0]}] of a row is {positions[wrong[0]]}, where a document begins: each counts from 0. Rows of "
            "which other ranks hold the rest are not packed here."
        )
    counted = np.diff(first, append=tokens)
    if lengths is not None and not np.array_equal(counted, lengths[lengths > 0]):
        raise LayoutError(
            f"seq_lengths of a row, {lengths}, and position_ids, {counted}, tell of other documents: give one of them."
        )
    return counted


def _between_padding(mask: IntArray) -> tuple[int, int]:
    """Where the tokens of a padded row begin and end."""
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
