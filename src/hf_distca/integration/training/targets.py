"""Estimate of the number of targets in documents, from a sample: training without targets learns
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.pieces import DocumentPiece
from hf_distca.data.reading import DocumentReader
from hf_distca.errors import ConfigError
from hf_distca.integration.processes import LOG

__all__ = ["describe_targets"]

_SAMPLE_SIZE = 256  # documents: they are read as training reads them, which takes a moment


def describe_targets(documents: Any, count: int) -> str:
    """Count targets in some of `count` documents, spread over all of them, and describe them; a
    document's first token is never a target.

    Raises:
        ConfigError: if no document has any.
    """
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE_SIZE)).astype(np.int64))
    labels = [
        DocumentPiece(row, 0, len(row["input_ids"])).read_labels(0, len(row["input_ids"]))
        for row in DocumentReader(documents, "input_ids").read_rows(numbers)
    ]
    counts = [int((row_labels[1:] != IGNORED_LABEL).sum()) for row_labels in labels]
    tokens, targets, is_sample = sum(map(len, labels)), sum(counts), len(numbers) < count
    if labels and not targets:
        finding = f"none of the {tokens:,} tokens of {len(numbers):,} documents is a target"
        cause = (
            "labels are -100 throughout, or completion_mask or assistant_masks 0, as where a"
            " template marks no answers"
        )
        if not is_sample:
            raise ConfigError(
                f"{finding}: {cause}. Training would learn nothing; look at the rows of"
                " train_dataset."
            )
        LOG.warning("%s, which were looked at among %d: %s.", finding, count, cause)
    part = (
        f"{targets / max(1, tokens):.0%} of the tokens, in a sample of {len(numbers):,} documents"
    )
    empty = f"; {counts.count(0):,} of {'them' if is_sample else 'the documents'} have none"
    return f"Targets: {part}{empty if 0 in counts else ''}"
