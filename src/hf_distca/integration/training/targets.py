"""Estimate of the number of targets in documents, from a sample: training without targets learns
nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.pieces import DocumentPiece
from hf_distca.data.reading import DocumentReader
from hf_distca.errors import ConfigError

__all__ = ["Targets", "sample_targets"]

_log = logging.getLogger("hf_distca")
_SAMPLE = 256  # documents: they are read as training reads them, which takes a moment


@dataclass(frozen=True)
class Targets:
    """Counts in a sample of documents.

    Attributes:
        documents, seen: number of documents, and of those in the sample.
        tokens, targets: numbers of tokens and targets in the sample.
        without: number of documents in the sample without a target.
    """

    documents: int
    seen: int
    tokens: int
    targets: int
    without: int

    def __str__(self) -> str:
        if self.seen == self.documents:
            without = f"; {self.without:,} of the documents have none" if self.without else ""
            return f"Targets: {self.targets:,}{without}"
        without = f"; {self.without:,} of them have none" if self.without else ""
        return (
            f"Targets: {self.targets / max(1, self.tokens):.0%} of the tokens of {self.seen:,}"
            f" documents{without}"
        )


def sample_targets(documents: Any, count: int) -> Targets:
    """Count targets in some of `count` documents, spread over all of them; a document's first token
    is never a target.

    Raises:
        ConfigError: if no document has any.
    """
    numbers = (
        np.unique(np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64))
        if count
        else np.zeros(0, np.int64)
    )
    rows = DocumentReader(documents, "input_ids").read_rows(numbers)
    labels = [
        DocumentPiece(row, 0, len(row["input_ids"])).read_labels(0, len(row["input_ids"]))
        for row in rows
    ]
    counts = [int((of_row[1:] != IGNORED_LABEL).sum()) for of_row in labels]
    targets = Targets(count, len(numbers), sum(map(len, labels)), sum(counts), counts.count(0))
    if labels and not targets.targets:
        what = f"none of the {targets.tokens:,} tokens of {targets.seen:,} documents is a target"
        why = (
            "labels are -100 throughout, or completion_mask or assistant_masks 0, as where a"
            " template marks no answers"
        )
        if targets.seen == count:
            raise ConfigError(
                f"{what}: {why}. Training would learn nothing; look at the rows of train_dataset."
            )
        _log.warning("%s, which were looked at among %d: %s.", what, count, why)
    return targets
