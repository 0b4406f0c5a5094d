"""The documents of a batch of one row, given by each key that can give them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from hf_distca.agreement.documents import DOCUMENT_KEYS, PackedDocuments


def say_documents(lengths: Sequence[int]) -> dict[str, Any]:
    """Return a value for each key of `DOCUMENT_KEYS`. Each one alone gives all documents."""
    said = {
        "distca_documents": PackedDocuments(lengths),
        "cu_seq_lens_q": torch.tensor([0, *accumulate(lengths)]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    assert said.keys() == DOCUMENT_KEYS.keys(), "give each key a value here"
    return said
