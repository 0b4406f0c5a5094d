"""Estimate of the number of targets in documents, from a sample: training without targets learns
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.pieces import DocumentPiece
from hf_distca.data.reading import DocumentReader
from hf_distca.errors import ConfigError
from hf_distca.integration.processes import LOG

__all__ = ["TargetCounts", "sample_targets"]

_SAMPLE_SIZE = 256  # documents: they are read as training reads them, which takes a moment


@dataclass(frozen=True)
class TargetCounts:
    """Counts in a sample of documents.

    Attributes:
        document_count, sample_count: number of documents, and of those in the sample.
        token_count, target_count: numbers of tokens and targets in the sample.
        empty_count: number of documents in the sample without a target.
    """

    document_count: int
    sample_count: int
    token_count: int
    target_count: int
    empty_count: int

    def __str__(self) -> str:
        is_sample = self.sample_count < self.document_count
        documents = "them" if is_sample else "the documents"
        empty = f"; {self.empty_count:,} of {documents} have none" if self.empty_count else ""
        if not is_sample:
            return f"Targets: {self.target_count:,}{empty}"
        part = f"{self.target_count / max(1, self.token_count):.0%} of the tokens"
        return f"Targets: {part}, in a sample of {self.sample_count:,} documents{empty}"


def sample_targets(documents: Any, count: int) -> TargetCounts:
    """Count targets in some of `count` documents, spread over all of them; a document's first token
    is never a target.

    Raises:
        ConfigError: if no document has any.
    """
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE_SIZE)).astype(np.int64))
    labels = [
        DocumentPiece(row, 0, len(row["input_ids"])).read_labels(0, len(row["input_ids"]))
        for row in DocumentReader(documents, "input_ids").read_rows(numbers)
    ]
    counts = [int((row_labels[1:] != IGNORED_LABEL).sum()) for row_labels in labels]
    targets = TargetCounts(count, len(numbers), sum(map(len, labels)), sum(counts), counts.count(0))
    if labels and not targets.target_count:
        finding = (
            f"none of the {targets.token_count:,} tokens of {targets.sample_count:,} documents is"
            " a target"
        )
        cause = (
            "labels are -100 throughout, or completion_mask or assistant_masks 0, as where a"
            " template marks no answers"
        )
        if targets.sample_count == count:
            raise ConfigError(
                f"{finding}: {cause}. Training would learn nothing; look at the rows of"
                " train_dataset."
            )
        LOG.warning("%s, which were looked at among %d: %s.", finding, count, cause)
    return targets
