"""The gated delta rule over segments of documents, and its form with a decay for each channel (Kimi delta attention).

Shape suffixes: B batch (1), T tokens, H value heads, G key heads, K key dim, V value dim, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_distca.recurrent.segments import Segments
from hf_distca.runtime.outputs import LayerOutputs

__all__ = ["DeltaInputs", "DeltaRule", "RuleOutputs", "document_by_document", "gated_delta_rule"]


class DeltaInputs(NamedTuple):
    """What a layer gives.

    Attributes:
        query, key: (1, T, G, K); G divides H.
        value: (1, T, H, V).
        decay: logarithms, (1, T, H), or (1, T, H, K) with a decay for each channel.
        beta: (1, T, H).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


class RuleOutputs(NamedTuple):
    """What a rule returns: outputs (1, T, H, V), and the state after each document, (N, H, K, V)."""

    output: torch.Tensor
    states: torch.Tensor


class DeltaRule(Protocol):
    """A kernel of the rule that runs several documents, one after another in the tokens of its inputs."""

    def __call__(self, inputs: DeltaInputs, lengths: Sequence[int], states: torch.Tensor | None) -> RuleOutputs:
        """Run documents of these lengths, which start with these states (N, H, K, V), or with zeros if None."""


def document_by_document(kernel: Any) -> DeltaRule:
    """The rule of a kernel that runs one document.

    Args:
        kernel: called as `kernel(query, key, value, g=decay, beta=beta, initial_state=(1, H, K, V) or None,
            output_final_state=True)`, as the functions in transformers and in fla are. It returns output and final state.
    """
    raise NotImplementedError


def gated_delta_rule(
    inputs: DeltaInputs, segments: Segments, rule: DeltaRule, stored: LayerOutputs | None = None
) -> torch.Tensor:
    """The rule for the tokens of this rank, each document from no state at its first token to its last, wherever its parts lie.

    Every rank of the group must call it at the same point, forward and backward.

    Args:
        inputs: of the tokens of `segments`, in their order; T may be 0.
        segments: of this rank.
        rule: the model's kernel.
        stored: where received states are kept for activation checkpointing: the recompute then exchanges nothing.

    Returns:
        Outputs (1, T, H, V) in the dtype in which the rule returns them.
    """
    raise NotImplementedError
