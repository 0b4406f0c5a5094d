"""Run recurrent rules along documents whose segments lie on several ranks. One differentiable
exchange brings each segment the rows (states or tokens) that it needs from earlier segments.

Forward sends rows to every rank that needs them. Backward sends the gradients of received rows back
to the ranks that sent the rows. Gradients are always added in rank order, so that sums are the same
in every run.

Every rank must run the exchange, forward and backward, even if it sends and receives no rows. For
autograd to run the backward on every rank, the exchange needs an input that requires a gradient and
an output on which the loss depends. So `exchange_states` takes the inputs of the layer, which
require a gradient either on every rank or on no rank, and returns an anchor: a scalar whose value
has no meaning. `with_gradient_anchor` makes the layer's output depend on the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from hf_distca.hybrids.segments import RowNeeds, Segments, StateKey
from hf_distca.runtime.messages import MessagePart, add_rows, concat_rows, launch
from hf_distca.runtime.outputs import LayerOutputs


class Summaries(NamedTuple):
    """Effect of segments on a state: S_out = transition(S_in) + bias.

    The last segment of a document has no row, because no segment needs its effect.

    Attributes:
        biases: one row for each key of `Segments.summaries`.
        transitions: one row for each key of `Segments.transitions`.
    """

    biases: torch.Tensor
    transitions: torch.Tensor


class RuleOutputs(NamedTuple):
    """Result of a recurrent layer's kernel.

    Attributes:
        output: outputs of all tokens, (1, tokens, heads, width).
        states: states after each document, (documents, heads, ...); None if they were not
            requested.
    """

    output: torch.Tensor
    states: torch.Tensor | None

    def get_states(self, none: torch.Tensor) -> torch.Tensor:
        """Return the states in the dtype of `none`. If `states` is None, return `none`, an empty
        batch of states.
        """
        return none if self.states is None else self.states.to(none.dtype)


def append_token(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Append a token of zeros.

    A rank without tokens runs its kernels on this one token and drops the outputs, so that its
    weights get gradients, like the weights on other ranks.
    """
    shape = [1 if number == dim else size for number, size in enumerate(tensor.shape)]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


class RecurrentKernel(Protocol):
    """A kernel that runs a recurrent rule on several documents, whose tokens are concatenated."""

    def __call__(
        self,
        inputs: Any,
        lengths: Sequence[int],
        states: torch.Tensor | None,
        *,
        final_states: bool,
    ) -> RuleOutputs:
        """Run the rule on documents of these lengths.

        Args:
            inputs: inputs of all documents.
            lengths: number of tokens of each document, at least 1.
            states: initial states, (documents, ...), with the dtype and other dimensions of
                `inputs.make_no_states()`; None for zeros.
            final_states: whether `RuleOutputs.states` are needed.
        """


class SegmentKernel(NamedTuple):
    """A recurrent kernel, with its inputs for all segments of this rank.

    Attributes:
        inputs: named tuple of tensors (1, tokens, ...). Tensors with one dimension, such as A of
            Mamba 2, are the same for all tokens.
        segments: segments of this rank.
        kernel: the kernel.
    """

    inputs: Any
    segments: Segments
    kernel: RecurrentKernel

    def convert_inputs(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the inputs, with `convert` applied to every tensor that has tokens."""
        return type(self.inputs)(
            *(tensor if tensor.dim() == 1 else convert(tensor) for tensor in self.inputs)
        )

    def select_inputs(self, which: Sequence[int]) -> Any:
        """Return the inputs of the segments `which`."""
        return self.convert_inputs(lambda tensor: self.segments.select(tensor, which))

    def run(
        self,
        which: Sequence[int],
        states: torch.Tensor | None = None,
        *,
        final_states: bool = False,
    ) -> RuleOutputs:
        """Run the kernel on the segments `which`."""
        if not which:
            return RuleOutputs(self.inputs[0][:, :0], None)
        lengths = self.segments.count_tokens(which)
        return self.kernel(self.select_inputs(which), lengths, states, final_states=final_states)

    def run_none(self) -> torch.Tensor:
        """Run the kernel on one token of zeros, for a rank without tokens, and return an empty
        output.
        """
        inputs = self.convert_inputs(append_token)
        return self.kernel(inputs, [1], None, final_states=False).output[:, :0]


class Between(NamedTuple):
    """Results of inner segments: segments that are neither the first nor the last of their
    document. Their initial states are not known yet.

    Attributes:
        output: outputs of the segments when each starts from zeros.
        summaries: effect of each segment on a state.
        read_state: takes the index of a segment and its initial state, and returns the contribution
            of this state to the outputs of the segment.
    """

    output: torch.Tensor
    summaries: Summaries
    read_state: Callable[[int, torch.Tensor], torch.Tensor]


def run_along_documents(
    layer: SegmentKernel,
    run_between: Callable[[SegmentKernel, Sequence[int]], Between],
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    stored: LayerOutputs | None,
) -> torch.Tensor:
    """Run a rule along each document, beginning with a state of zeros. Segments of a document may
    lie on several ranks.

    Args:
        layer: kernel, inputs and segments of this rank.
        run_between: runs the segments that are neither the first nor the last of their document.
        move: applies a transition to a state: (transition, state) -> state.
        stored: see `exchange_states`.
    """
    inputs, segments, _ = layer
    if segments.has_only_whole_documents:
        return layer.run(segments.whole_documents).output if segments.here else layer.run_none()
    # 1. The first segments of cut documents run from zeros. Their final states are their biases.
    first = layer.run(segments.first_segments, final_states=True)
    # 2. Inner segments run from zeros. Each has a bias and a transition.
    between = run_between(layer, segments.inner_segments)
    # 3. Biases and transitions travel to the ranks that hold later segments.
    biases = torch.cat([first.get_states(inputs.make_no_states()), between.summaries.biases])
    held = biases, between.summaries.transitions
    rows, anchor = exchange_states(
        segments, held, (segments.summaries, segments.transitions), inputs, stored
    )
    # 4. Biases and transitions are composed, in the order of the document, into the state before
    # each segment.
    with torch.autocast(biases.device.type, enabled=False):
        states = compute_starting_states(segments, Summaries(*rows), move)
        # 5. The contribution of this state is added to the outputs of inner segments. The last
        # segments of documents run from this state.
        outputs = segments.split(between.output, segments.inner_segments)
        for index, output in outputs.items():
            added = between.read_state(index, states[index])
            outputs[index] = (output + added).to(output.dtype)
    endings = [index for index in states if index not in outputs]
    starts = torch.stack([states[index] for index in endings]) if endings else None
    for which, run in (
        (segments.first_segments, first),
        (endings, layer.run(endings, starts)),
        (segments.whole_documents, layer.run(segments.whole_documents)),
    ):
        outputs |= segments.split(run.output, which)
    parts = [outputs[index] for index in range(len(outputs))]
    return with_gradient_anchor(torch.cat(parts, 1) if parts else layer.run_none(), anchor)


class _Exchange:
    """An exchange of rows, forward and backward."""

    def __init__(
        self, segments: Segments, needed: Sequence[RowNeeds], stored: LayerOutputs | None
    ) -> None:
        self.segments, self.needed, self.stored = segments, needed, stored
        self.label = f"exchange {next(segments.numbers)} of recurrent layers in {segments.name}"

    def send(self, parts: Sequence[MessagePart], direction: str) -> list[list[torch.Tensor]]:
        segments = self.segments
        purpose = f"states in {direction} of {self.label}"
        pending = launch(segments.group.data, parts, segments.layouts, purpose)
        segments.meter.count(state_exchanges=1, state_bytes=pending.layout.payload)
        return pending.receive_sections()

    def get_received(self, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return rows from other ranks. In a recompute, return the rows that the forward kept."""
        if self.stored is not None and (kept := self.stored.take_recorded()) is not None:
            return [rows.detach() for rows in kept]
        parts = [
            MessagePart(tensor.contiguous(), needed.rows)
            for tensor, needed in zip(held, self.needed, strict=True)
        ]
        came = [
            concat_rows(sections, tensor)
            for sections, tensor in zip(self.send(parts, "forward"), held, strict=True)
        ]
        if self.stored is not None:
            self.stored.store_outputs(*came)
        return came

    def return_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the gradients of received rows back to the ranks that sent the rows. Return the
        gradient of each held row, plus the gradients that came back for this row.
        """
        if self.stored is not None:
            self.stored.discard()
        parts = [
            MessagePart(gradient[len(needed.held) :].contiguous(), needed.rows.way_back)
            for gradient, needed in zip(gradients, self.needed, strict=True)
        ]
        return [
            add_rows(
                gradient[: len(needed.held)].clone(),
                needed.rows.returned,
                sections,
            )
            for gradient, needed, sections in zip(
                gradients, self.needed, self.send(parts, "backward"), strict=True
            )
        ]


class _ExchangeStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.inputs = len(tensors)
        held = tensors[: len(exchange.needed)]
        came = exchange.get_received(held)
        return held[0].new_zeros(()), *(torch.cat(pair) for pair in zip(held, came, strict=True))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _anchor: torch.Tensor, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        returned = ctx.exchange.return_gradients(gradients)
        return None, *returned, *[None] * (ctx.inputs - len(returned))


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_zeros(())


def exchange_states(
    segments: Segments,
    held: Sequence[torch.Tensor],
    needed: Sequence[RowNeeds],
    inputs: Sequence[torch.Tensor],
    stored: LayerOutputs | None,
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """Bring rows to the ranks that need them. Nothing is exchanged if no document of the
    micro-batch lies on several ranks.

    Every rank of the group must call this function at the same point, forward and backward.

    Args:
        segments: segments of this rank.
        held: tensors with one row for each key of `RowNeeds.held`. Dtypes and row shapes must be
            equal on all ranks.
        needed: the `RowNeeds` of each tensor of `held`.
        inputs: inputs of the layer. They must require a gradient on every rank, or on no rank.
        stored: keeps received rows for activation checkpointing, so that the recompute exchanges
            nothing.

    Returns:
        The held and received rows of each tensor, and the anchor.
    """
    if not segments.exchanges:
        return held, held[0].new_zeros(())
    anchor, *rows = _ExchangeStates.apply(_Exchange(segments, needed, stored), *held, *inputs)  # type: ignore[no-untyped-call]
    return rows, anchor


def with_gradient_anchor(output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Tie the output to the anchor, so that a backward from the output reaches the exchange."""
    result: torch.Tensor = _Tie.apply(output, anchor)  # type: ignore[no-untyped-call]
    return result


def compute_starting_states(
    segments: Segments,
    carried: Summaries,
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Compute the state before each segment of this rank, except the first segments of documents.
    Return the states by the segment's index in `Segments.here`.

    Args:
        segments: segments of this rank.
        carried: summaries of earlier segments: the rows that `exchange_states` returned.
        move: applies a transition to a state: (transition, state) -> state.
    """
    states: dict[int, torch.Tensor] = {}
    here = segments.group.rank
    for document, held in segments.cut.items():
        last = max(number for number, segment in enumerate(held) if segment.rank == here)
        state: torch.Tensor | None = None
        for segment, following in pairwise(held[: last + 1]):
            key = StateKey(document, segment.start)
            bias = carried.biases[segments.summaries.place[key]]
            if state is not None:
                bias = move(carried.transitions[segments.transitions.place[key]], state) + bias
            state = bias
            if following.rank == here:
                states[segments.index[StateKey(document, following.start)]] = state
    return states
