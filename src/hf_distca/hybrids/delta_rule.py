"""The gated delta rule over segments of documents, and its form with a decay for each channel (Kimi
delta attention).

Each head has a state S of shape (K, V). A token with decay a = exp(decay), key k of length K and
value v of length V changes the state and reads it::

    S <- a S;   S <- S + beta k (v - S^T k)^T;   output = S^T q / sqrt(K)

The rule is that of Gated Delta Networks (Yang et al., arXiv 2412.06464). In Kimi Linear (arXiv
2510.26692) each channel, which is a row of S, has its own decay.

Each step is affine in S, and so is a segment of any length: S_out = T S_in + B, where T is (K, K).
A run of the rule from zeros ends with B. A run from the identity, with values of zero, ends with T.
The outputs of the segment are the outputs from zeros plus S_in^T times the outputs from the
identity. Columns of a state do not affect each other. So one run, with values and states K columns
wider, does the work of both.

Shape suffixes: T tokens, H value heads, G key heads, K key dim, V value dim, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_distca.hybrids.carryover import (
    Between,
    RecurrentKernel,
    RuleOutputs,
    SegmentKernel,
    Summaries,
    run_along_documents,
)
from hf_distca.hybrids.segments import Segments
from hf_distca.runtime.outputs import LayerOutputs


class DeltaInputs(NamedTuple):
    """The inputs of the rule in a layer.

    Attributes:
        query, key: (1, T, G, K); G divides H.
        value: (1, T, H, V).
        decay: logarithms of decays, (1, T, H), or (1, T, H, K) with a decay for each channel.
        beta: (1, T, H).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def make_no_states(self) -> torch.Tensor:
        """Make an empty batch of states (0, H, K, V): float64 if the values are float64, else
        float32.
        """
        shape = 0, self.value.shape[2], self.key.shape[3], self.value.shape[3]
        return self.value.new_zeros(
            shape, dtype=torch.promote_types(self.value.dtype, torch.float32)
        )


def run_by_document(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
) -> RecurrentKernel:
    """Make a `RecurrentKernel` from a kernel that runs one document.

    Args:
        kernel: called as ``kernel(query, key, value, g=decay, beta=beta, initial_state=...,
            output_final_state=...)``, with states of (1, H, K, V), like the functions of
            transformers and fla. It returns the output and the final state.
    """

    def run(
        inputs: DeltaInputs,
        lengths: Sequence[int],
        states: torch.Tensor | None,
        *,
        final_states: bool,
    ) -> RuleOutputs:
        starts = [None] * len(lengths) if states is None else torch.split(states, 1)
        documents = zip(
            starts, *(torch.split(tensor, list(lengths), 1) for tensor in inputs), strict=True
        )
        results = [
            kernel(
                query,
                key,
                value,
                g=decay,
                beta=beta,
                initial_state=state,
                output_final_state=final_states,
            )
            for state, query, key, value, decay, beta in documents
        ]
        outputs, finals = zip(*results, strict=True)
        return RuleOutputs(torch.cat(outputs, 1), torch.cat(finals) if final_states else None)

    return run


def compute_gated_delta_rule(
    inputs: DeltaInputs,
    segments: Segments,
    rule: RecurrentKernel,
    stored: LayerOutputs | None = None,
) -> torch.Tensor:
    """Compute the rule for this rank's tokens. Each document starts with a state of zeros. Its
    segments may lie on several ranks.

    Every rank of the group must call this function at the same point, forward and backward.

    Args:
        inputs: inputs for the tokens of `segments`, in their order; T may be 0.
        segments: segments of this rank.
        rule: the model's kernel, which must accept values and states wider than the model's.
        stored: keeps received states for activation checkpointing, so that the recompute exchanges
            nothing.

    Returns:
        Outputs (1, T, H, V) in the dtype in which the rule returns them.

    Raises:
        LayoutError: if the inputs and the segments differ in their number of tokens.
        DistCADesyncError: if other ranks do not take part in time.
    """
    with segments.group.report_errors(f"computing a delta rule of {segments.name}"):
        segments.check(inputs.value, 1)
        layer = SegmentKernel(inputs, segments, rule)
        return run_along_documents(layer, _run_between, torch.matmul, stored)


def _run_between(layer: SegmentKernel, which: Sequence[int]) -> Between:
    """Run inner segments from two starting states in one call: from zeros, and from the identity.
    In the run from the identity, all values are zero.
    """
    inputs: DeltaInputs = layer.select_inputs(which)
    none = inputs.make_no_states()
    heads, rows, columns = none.shape[1:]
    zeros = inputs.value.new_zeros((*inputs.value.shape[:3], rows))
    wide = inputs._replace(value=torch.cat([zeros, inputs.value], -1))
    start = torch.eye(rows, rows + columns, dtype=none.dtype, device=none.device)
    states = start.expand(len(which), heads, rows, rows + columns)
    if which:
        lengths = layer.segments.count_tokens(which)
        run = layer.kernel(wide, lengths, states, final_states=True)
    else:
        run = RuleOutputs(wide.value, states)
    reader, output = torch.split(run.output, [rows, columns], -1)
    transitions, biases = torch.split(run.get_states(none), [rows, columns], -1)
    readers = layer.segments.split(reader, which)

    def read_state(index: int, state: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bthk,hkv->bthv", readers[index].to(state.dtype), state)

    return Between(output, Summaries(biases, transitions), read_state)
