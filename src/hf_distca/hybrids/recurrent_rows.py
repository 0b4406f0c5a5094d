"""`RecurrentRows`, which tells recurrent layers the documents of a batch and the segments along
which to run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.documents import Documents
from hf_distca.hybrids.segments import Segments
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.outputs import OutputStore


class RecurrentRows:
    """The documents of a batch, and the segments along which its recurrent layers run.

    It is not a dataclass, because FSDP with mixed precision rebuilds dataclasses for every layer.

    Args:
        documents: documents of the batch.
        shape: (rows, tokens of a row) of the batch.
        segments: segments of all rows, in their order; None if layers run along rows as usual,
            because each row is one document.

    Attributes:
        used_functions: names of the functions that have run along segments.
        stores: by function name, the tensors that the function received from other ranks in this
            micro-batch.
    """

    def __init__(
        self, documents: Documents, shape: tuple[int, int], segments: Segments | None
    ) -> None:
        self.documents = documents
        self.shape = shape
        self.segments = segments
        self.used_functions: set[str] = set()
        self._tensors: dict[Any, torch.Tensor] = {}
        self.stores = defaultdict[str, OutputStore](OutputStore)

    def make_cu_seqlens(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the starts of documents with these lengths, followed by the end of the last
        document: (documents + 1,) int64.
        """
        return self._make_once(tuple(lengths), device, lambda: np.cumsum([0, *lengths]))

    def make_seq_idx(self, device: torch.device) -> torch.Tensor:
        """Return the index of each token's segment: (batch, length) int32."""
        lengths = () if self.segments is None else self.segments.lengths
        numbers = np.arange(len(lengths), dtype=np.int32)
        return self._make_once(
            "seq_idx", device, lambda: np.repeat(numbers, lengths).reshape(self.shape)
        )

    def _make_once(
        self, name: Any, device: torch.device, make: Callable[[], np.ndarray[Any, Any]]
    ) -> torch.Tensor:
        """Return the tensor of this name. Make it at the first call for each device."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = to_device(torch.from_numpy(make()), device)
        return self._tensors[name, device]
