"""The collator, which packs documents into a row, or makes a batch from a share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_distca.agreement.document_starts import RowTokens
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.columns import (
    ROW_COLUMNS,
    TARGET_MASKS,
    InputNames,
    check_columns,
    convert_integers,
    read_input_names,
)
from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import IntArray

_log = logging.getLogger("hf_distca")

IGNORED_LABEL = -100
_READ_COLUMNS = ROW_COLUMNS | {"seq_lengths", "position_ids"}


class DocumentTokens(NamedTuple):
    """One document: its tokens, labels and positions, each (tokens,) int64."""

    tokens: IntArray
    labels: IntArray
    positions: IntArray

    def check_positions(self) -> None:
        """Raise `LayoutError` unless positions are consecutive, like those of dealt documents."""
        jumps = np.flatnonzero(np.diff(self.positions) != 1)
        if len(jumps):
            token = int(jumps[0])
            raise LayoutError(
                f"positions of a document go from {self.positions[token]} to "
                f"{self.positions[token + 1]}, but dealing makes positions consecutive. Train "
                "with PackingCollator, which keeps positions, and with documents that fit on a "
                "rank."
            )


def make_labels(tokens: IntArray, masks: Collection[IntArray]) -> IntArray:
    """Make labels for tokens without a column of labels, in the same way as TRL.

    Args:
        tokens: (tokens,) int64.
        masks: masks of targets, (tokens,) each. A token is a target if it is 1 in all masks.
    """
    if not masks:
        return tokens
    return np.where(np.all(np.stack(list(masks)), axis=0), tokens, IGNORED_LABEL)


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Collator that packs the documents of a batch into one row, without padding.

    A feature is a row of tokens, ``{"input_ids": [...]}``, or a list of documents, ``{"documents":
    [[...], [...]]}``. A row is one document, unless several documents are marked by ``seq_lengths``
    (the number of tokens of each document), by ``position_ids``, or by an ``attention_mask`` with
    numbers above 1. A row may have ``labels``. Without labels, the targets are the tokens for which
    every given mask (``completion_mask``, ``assistant_masks``) is 1, or all tokens if no mask is
    given. Tokens whose ``attention_mask`` is 0 are padding, and are removed. Each column is a flat
    list, numpy array or tensor of integers. Documents without tokens are dropped. Other columns of
    numbers raise an error if they are inputs of the model, or if no model is given.

    With a data set of shares (`hf_distca.document_shares`), a batch is exactly one share, which is
    already packed.

    With several processes, an iterable dataset needs
    ``TrainingArguments(accelerator_config={"dispatch_batches": False})``. See `check_loader`.

    A batch has these int64 tensors (1, tokens):

    - ``input_ids``.
    - ``labels``. The label of the first token of each document is -100, because no token of the
      document comes before it.
    - ``position_ids``. They count from 0 in each document, and skip the positions that the
      ``position_ids`` of the row skip.
    - ``shift_labels``, only for a share: for each token, the label of the next token, even if that
      token is on another rank.

    It also has ``distca_documents``, which describes the documents on the host.

    Args:
        model: the model that trains on the batches. Its signature gives the inputs. Without a
            model, any column of numbers may be an input.
    """

    model: InitVar[Any] = None
    _inputs: InputNames = field(init=False, repr=False, default=None)

    def __post_init__(self, model: Any) -> None:
        object.__setattr__(self, "_inputs", read_input_names(model))

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack one batch.

        Raises:
            LayoutError: if features are malformed, have no tokens, or have padding between tokens;
                if a column that may be an input of the model would be lost; or if there are several
                shares.
        """
        if any(map(_is_share, features)):
            return _make_share_batch(features)
        documents = [
            document
            for feature in features
            for document in read_feature_documents(feature, self._inputs)
            if len(document.tokens)
        ]
        if not documents:
            raise LayoutError(
                f"{len(features)} features hold no tokens: drop empty documents before batching."
            )
        ids, labels, positions = (np.concatenate(parts) for parts in zip(*documents, strict=True))
        packed = PackedDocuments([len(document.tokens) for document in documents])
        labels[packed.positions == 0] = IGNORED_LABEL
        if not (labels != IGNORED_LABEL).any():
            _warn_of_no_targets(len(ids))
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(positions)[None],
            "distca_documents": packed,
        }


@dataclass(frozen=True)
class ShareCollator:
    """Collator of shares. It passes rows that are not shares to another collator.

    Attributes:
        others: collator for rows that were not dealt, for example in evaluation.
    """

    others: Callable[[Sequence[Any]], dict[str, Any]]

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Make a batch from one share, or from other rows.

        Raises:
            LayoutError: if there are several shares.
        """
        return _make_share_batch(features) if _is_share(features[0]) else self.others(features)


_warnings_given: set[str] = set()


def _warn_of_no_targets(tokens: int) -> None:
    """Warn once per process that a batch has no targets."""
    if not _warnings_given:
        _warnings_given.add("no targets")
        _log.warning(
            "none of the %d tokens of a batch is a target: all labels are %d, or "
            "completion_mask and assistant_masks select no token. The loss of such a batch is nan, "
            "or trains nothing. This is logged once.",
            tokens,
            IGNORED_LABEL,
        )


def _is_share(feature: object) -> bool:
    packed = feature.get("distca_documents") if isinstance(feature, Mapping) else None
    return isinstance(packed, PackedDocuments) and packed.dealt_share is not None


def _make_share_batch(features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(features) != 1:
        raise LayoutError(
            f"a batch of {len(features)} shares cannot be made: a rank gets one share of each "
            "global batch, and tokens_per_rank sets the size of a share. Set "
            "per_device_train_batch_size=1 (and per_device_eval_batch_size=1)."
        )
    (share,) = features
    return {
        name: row[None] if isinstance(row, torch.Tensor) else row for name, row in share.items()
    }


def read_feature_documents(
    feature: Mapping[str, Any], inputs: InputNames = None
) -> list[DocumentTokens]:
    """Read the documents of a feature for a model with these inputs. See `PackingCollator`.

    Raises:
        LayoutError: see `PackingCollator`.
    """
    if not isinstance(feature, Mapping):
        raise LayoutError(
            f"a feature has type {type(feature)}; it must be a mapping with 'input_ids' or "
            "'documents'."
        )
    if "documents" in feature:
        unread = sorted(_READ_COLUMNS & feature.keys())
        if unread:
            raise LayoutError(
                f"a feature has 'documents' and {unread[0]!r}, which would not be read. Give rows "
                "of 'input_ids' instead."
            )
        check_columns(feature, 0, {"documents"}, inputs)
        documents = [convert_integers(tokens, "input_ids") for tokens in feature["documents"]]
        return [DocumentTokens(tokens, tokens, np.arange(len(tokens))) for tokens in documents]
    if "input_ids" not in feature:
        raise LayoutError(
            f"a feature has the keys {sorted(feature)}; it needs 'input_ids' or 'documents'."
        )
    row = {
        name: convert_integers(feature[name], name)
        for name in _READ_COLUMNS
        if feature.get(name) is not None
    }
    count = len(row["input_ids"])
    lengths = row.pop("seq_lengths", None)
    check_columns(feature, count, _READ_COLUMNS, inputs)
    for name, column in row.items():
        if len(column) != count:
            raise LayoutError(
                f"a row has {count} input_ids and {len(column)} numbers in its {name}: they must "
                "match."
            )
    positions = row.pop("position_ids", None)
    tokens = RowTokens.from_rows(
        np.arange(count) if positions is None else positions, row.get("attention_mask"), count
    )
    row = {name: column[tokens.index] for name, column in row.items()}
    ids = row["input_ids"]
    masks = [row[name] for name in TARGET_MASKS if name in row]
    labels = row["labels"] if "labels" in row else make_labels(ids, masks)
    starts = _find_starts(tokens, lengths, has_positions=positions is not None)
    columns = ids, labels, tokens.position
    parts = zip(*(np.split(column, starts[1:]) for column in columns), strict=True)
    return [
        DocumentTokens(ids, labels, positions - positions[:1]) for ids, labels, positions in parts
    ]


def _find_starts(tokens: RowTokens, lengths: IntArray | None, *, has_positions: bool) -> IntArray:
    """Find the index of the first token of each document in a row. Padding is not counted.

    `lengths` decides where documents begin, or the positions and mask if `lengths` is None. A row
    without any of these is one document.
    """
    if has_positions and tokens.position[:1].any():
        raise LayoutError(
            f"position_ids[0] of a row is {tokens.position[0]}, but positions of a document must"
            " count from 0. Rows whose documents begin on other ranks cannot be packed here."
        )
    starts = tokens.find_document_starts(training=True)
    holes = np.setdiff1d(np.flatnonzero(np.diff(tokens.index) > 1) + 1, starts)
    if len(holes):
        raise LayoutError(
            f"attention_mask[{tokens.index[holes[0] - 1] + 1}] of a document is 0, between tokens"
            f" {tokens.index[0]} and {tokens.index[-1]}. Padding is only allowed before and after"
            " the tokens. Split the document there into separate documents."
        )
    if lengths is None:
        return starts
    count = len(tokens.index)
    if lengths.min(initial=0) < 0 or lengths.sum() != count:
        raise LayoutError(
            f"seq_lengths of a row add up to {lengths.sum()} tokens, but the row has {count} "
            "without padding. They must be equal, and each length must be at least 0."
        )
    found_lengths = np.diff(starts, append=count)
    has_marks = has_positions or tokens.document_number is not None
    if has_marks and not np.array_equal(found_lengths, lengths[lengths > 0]):
        raise LayoutError(
            f"seq_lengths of a row are {lengths}, but by its position_ids or attention_mask, its "
            f"documents have the lengths {found_lengths}: give only one of these columns."
        )
    return np.cumsum(lengths) - lengths
