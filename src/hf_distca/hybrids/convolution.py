"""Short causal convolutions over segments of documents. Each segment sees the last tokens before it
in its document, even if they lie on other ranks.

All segments of a rank are convolved in one call. In the input of this call, each segment follows
its halo: the last tokens before it, or zeros if the document has no earlier tokens. The outputs of
halos are dropped.

Shape suffixes: B rows of the batch (1), C channels, T tokens, W width of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import pad

from hf_distca.hybrids.carryover import append_token, exchange_states, with_gradient_anchor
from hf_distca.hybrids.segments import RowNeeds, Segments, StateKey
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.schedule.layout import Segment


def compute_causal_convolution(
    x_BCT: torch.Tensor,
    convolve: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    segments: Segments,
    stored: LayerOutputs | None = None,
) -> torch.Tensor:
    """Compute a causal convolution of this rank's tokens. The first tokens of a document see zeros
    before them.

    Every rank of the group must call this function at the same point, forward and backward.

    Args:
        x_BCT: input for the tokens of `segments`, in their order; B is 1, and T may be 0.
        convolve: the model's own function, activation included. It maps (1, C, any T) to the same
            shape, and puts zeros in front of the first token.
        width: W; a token sees the `width - 1` tokens before it.
        segments: segments of this rank.
        stored: keeps received rows for activation checkpointing, so that the recompute exchanges
            nothing.

    Returns:
        Outputs (1, C, T).

    Raises:
        LayoutError: if the input and the segments differ in their number of tokens.
        DistCADesyncError: if other ranks do not take part in time.
    """
    with segments.group.report_errors(f"computing a convolution of {segments.name}"):
        segments.check(x_BCT, 2)
        if segments.has_only_whole_documents:
            return _convolve_segments(x_BCT, convolve, segments, width - 1)
        needed = segments.find_halo(width - 1)
        tokens = map(segments.find_token, needed.held)
        held = torch.cat(
            [x_BCT[0, :, :0], *(x_BCT[0, :, token : token + 1] for token in tokens)], 1
        ).t()
        (rows,), anchor = exchange_states(segments, (held,), (needed,), (x_BCT,), stored)
        halos = {
            index: _gather_halo(rows, needed, segment, width - 1)
            for index, segment in enumerate(segments.here)
            if segment.start > 0
        }
        return with_gradient_anchor(
            _convolve_segments(x_BCT, convolve, segments, width - 1, halos), anchor
        )


def _gather_halo(rows: torch.Tensor, needed: RowNeeds, segment: Segment, size: int) -> torch.Tensor:
    """Return the halo of a segment, up to `size` tokens: (1, C, size or less)."""
    places = [
        needed.place[StateKey(segment.document, position)]
        for position in range(max(segment.start - size, 0), segment.start)
    ]
    return torch.cat([rows[:0], *(rows[place : place + 1] for place in places)]).t()[None]


def _convolve_segments(
    x_BCT: torch.Tensor,
    convolve: Callable[[torch.Tensor], torch.Tensor],
    segments: Segments,
    size: int,
    halos: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Convolve all segments in one call. Each segment follows its halo, which is padded with zeros
    in front to `size` tokens.
    """
    if not segments.here:
        return convolve(append_token(x_BCT, 2))[..., :0]
    if len(segments.here) == 1 and not halos:
        return convolve(x_BCT)
    row = list[torch.Tensor]()
    none = x_BCT[..., :0]
    for index, tokens in enumerate(torch.split(x_BCT, list(segments.lengths), 2)):
        halo = halos.get(index, none)
        row += [pad(halo, (size - halo.shape[2], 0)), tokens]
    output = convolve(torch.cat(row, 2))
    return torch.cat(torch.split(output, [part.shape[2] for part in row], 2)[1::2], 2)
