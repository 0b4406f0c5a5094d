"""Short causal convolutions over segments of documents: each segment sees the last rows before it, wherever they lie.

Shape suffixes: T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_distca.recurrent.segments import Segments
from hf_distca.runtime.outputs import LayerOutputs

__all__ = ["causal_convolution"]


def causal_convolution(
    x_1CT: torch.Tensor,
    convolve: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    segments: Segments,
    stored: LayerOutputs | None = None,
) -> torch.Tensor:
    """A causal convolution of the tokens of this rank that starts with zeros at the first token of each document.

    Every rank of the group must call it at the same point, forward and backward.

    Args:
        x_1CT: rows of the tokens of `segments`, in their order; T may be 0.
        convolve: the model's own function, with activation: (1, C, T) to (1, C, T), zeros in front of the first token.
        width: of the kernel, so that a token sees `width - 1` before it.
        segments: of this rank.
        stored: where received rows are kept for activation checkpointing: the recompute then exchanges nothing.
    """
    raise NotImplementedError
