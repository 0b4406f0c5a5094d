"""State space layers with a decay for each head and token (Mamba 2) over segments of documents.

Each head has a state S of shape (P, N). A token with step dt, input x of length P, and B and C of
length N changes the state and reads it::

    S <- exp(A dt) S + dt x B^T;   output = S C

The rule is that of Mamba 2 (Dao and Gu, Transformers are SSMs, arXiv 2405.21060). A segment of any
length computes S_out = d S_in + Z. The transition d is one number for each head, exp(sum of A dt),
and Z is the state at the end of a scan from zeros. The state S_in before a segment adds exp(sum of
A dt so far) S_in C to the outputs of the segment. So no segment is scanned twice.

Shape suffixes: T tokens, H heads, P head dim, G groups, N state size, D documents.
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


class ScanInputs(NamedTuple):
    """The inputs of the scan in a layer.

    Attributes:
        x: (1, T, H, P).
        dt: (1, T, H), the steps after bias, softplus and limits.
        A: (H,), negative.
        B, C: (1, T, G, N); G divides H.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor

    def make_no_states(self) -> torch.Tensor:
        """Make an empty batch of states (0, H, P, N): float64 if x is float64, else float32."""
        return self.x.new_zeros(
            (0, *self.x.shape[2:], self.B.shape[3]),
            dtype=torch.promote_types(self.x.dtype, torch.float32),
        )


def scan_by_document(kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> RecurrentKernel:
    """Make a `RecurrentKernel` from a kernel that scans one document from zeros.

    Args:
        kernel: called as ``kernel(x, dt, A, B, C, return_final_states=True)``, like mamba-ssm's
            `mamba_chunk_scan_combined` and the functions of transformers, with the chunk size and D
            already bound. It returns the output and the final state.
    """

    def run(
        inputs: ScanInputs,
        lengths: Sequence[int],
        states: torch.Tensor | None,
        *,
        final_states: bool,
    ) -> RuleOutputs:
        by_document = (
            torch.split(tensor, list(lengths), 1)
            for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C)
        )
        outputs, finals = list[torch.Tensor](), list[torch.Tensor]()
        for number, (x, dt, *projections) in enumerate(zip(*by_document, strict=True)):
            output, final = kernel(x, dt, inputs.A, *projections, return_final_states=True)
            if states is not None:
                document = ScanInputs(x, dt, inputs.A, *projections)
                output = (output + _read_state(document, states[number])).to(output.dtype)
                final = final + _sum_decays(document)[-1, :, None, None] * states[number]
            outputs.append(output)
            finals.append(final)
        return RuleOutputs(torch.cat(outputs, 1), torch.cat(finals) if final_states else None)

    return run


def compute_mamba2(
    inputs: ScanInputs,
    segments: Segments,
    scan: RecurrentKernel,
    stored: LayerOutputs | None = None,
) -> torch.Tensor:
    """Compute the scan for this rank's tokens. Each document starts with a state of zeros. Its
    segments may lie on several ranks.

    Every rank of the group must call this function at the same point, forward and backward.

    Args:
        inputs: inputs for the tokens of `segments`, in their order; T may be 0.
        segments: segments of this rank.
        scan: the model's kernel.
        stored: keeps received states for activation checkpointing, so that the recompute exchanges
            nothing.

    Returns:
        Outputs (1, T, H, P) in the dtype in which the scan returns them.

    Raises:
        LayoutError: if the inputs and the segments differ in their number of tokens.
        DistCADesyncError: if other ranks do not take part in time.
    """
    with segments.group.report_errors(f"computing a state space of {segments.name}"):
        segments.check(inputs.x, 1)
        layer = SegmentKernel(inputs, segments, scan)
        return run_along_documents(layer, _run_between, _decay_state, stored)


def _run_between(layer: SegmentKernel, which: Sequence[int]) -> Between:
    """Scan inner segments from zeros, and compute their transitions from the decays."""
    run = layer.run(which, final_states=True)
    none = layer.inputs.make_no_states()
    inputs = {index: layer.select_inputs([index]) for index in which}
    decays = [_sum_decays(segment)[-1] for segment in inputs.values()]
    transitions = torch.stack(decays) if decays else none.new_zeros((0, none.shape[1]))
    return Between(
        run.output,
        Summaries(run.get_states(none), transitions),
        lambda index, state: _read_state(inputs[index], state),
    )


def _decay_state(transition_H: torch.Tensor, state_HPN: torch.Tensor) -> torch.Tensor:
    return transition_H[:, None, None] * state_HPN


def _sum_decays(inputs: ScanInputs) -> torch.Tensor:
    """Return the decay from the start of a segment to each of its tokens, (T, H), in the dtype of
    states.
    """
    dtype = inputs.make_no_states().dtype
    return (inputs.A.to(dtype) * inputs.dt[0].to(dtype)).cumsum(0).exp()


def _read_state(inputs: ScanInputs, state_HPN: torch.Tensor) -> torch.Tensor:
    """Return what the state before a segment adds to the segment's outputs, (1, T, H, P), in the
    dtype of states.
    """
    C_TGN = inputs.C[0].to(state_HPN.dtype)
    by_group = state_HPN.reshape(C_TGN.shape[1], -1, *state_HPN.shape[1:])
    with torch.autocast(state_HPN.device.type, enabled=False):
        read = torch.einsum("tgn,ghpn->tghp", C_TGN, by_group).flatten(1, 2)
    return (_sum_decays(inputs)[..., None] * read)[None]
