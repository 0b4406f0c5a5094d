"""State spaces with a decay for each head and token (Mamba 2) over segments of documents.

Shape suffixes: T tokens, H heads, P head dim, G groups, N state size, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_distca.recurrent.segments import Segments
from hf_distca.runtime.outputs import LayerOutputs

__all__ = ["Scan", "ScanInputs", "ScanOutputs", "mamba2", "scan_by_document"]


class ScanInputs(NamedTuple):
    """What a layer gives.

    Attributes:
        x: (1, T, H, P).
        dt: (1, T, H), the steps that the kernel uses: with bias, softplus and limits applied.
        A: (H,), negative.
        B, C: (1, T, G, N); G divides H.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor


class ScanOutputs(NamedTuple):
    """What a scan returns: outputs (1, T, H, P), and the state after each document, (D, H, P, N)."""

    output: torch.Tensor
    states: torch.Tensor


class Scan(Protocol):
    """A kernel that runs several documents, one after another in the tokens of its inputs, each from a state of zeros."""

    def __call__(self, inputs: ScanInputs, lengths: Sequence[int]) -> ScanOutputs:
        """Run documents of these lengths."""


def scan_by_document(kernel: Any) -> Scan:
    """The scan of a kernel that runs one document.

    Args:
        kernel: called as `kernel(x, dt, A, B, C, return_final_states=True)`, as `mamba_chunk_scan_combined` is; other arguments
            (chunk_size, D) bound before, `dt_bias` None and `dt_softplus` False. It returns output and final state.
    """
    raise NotImplementedError


def mamba2(inputs: ScanInputs, segments: Segments, scan: Scan, stored: LayerOutputs | None = None) -> torch.Tensor:
    """The scan for the tokens of this rank, each document from no state at its first token to its last, wherever its parts lie.

    Every rank of the group must call it at the same point, forward and backward.

    Returns:
        Outputs (1, T, H, P) in the dtype in which the scan returns them.
    """
    raise NotImplementedError
