"""A stage's part in calls of attention: with the rows of its own micro-batch, or as a server only.

A call has a plan for its forward and another one for its backward, since other micro-batches are in the same tick then. The rows
travel in backward anyway, so nothing is lost by it: when its backward begins, a call exchanges its route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_distca.errors import DistCADesyncError
from hf_distca.kernels.base import Grads, Operands, Outputs, Saved
from hf_distca.pipeline.kinds import Kind
from hf_distca.pipeline.pace import CallId
from hf_distca.runtime.call import AttentionServer, Call, in_groups
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import Route

__all__ = ["Leg", "Legs", "StageCall", "serve", "serve_backward"]


@dataclass(frozen=True, eq=False)
class Leg:
    """One rank's part in a call of attention that stages make together.

    Attributes:
        call: which one of the step it is.
        turn: which of the calls of a forward it is, from 0.
        place: which call it is, in words that are the same on all ranks.
        kind: of the layers.
        own: which of its own calls it is to this rank's stage, in the order of its forward; None if it only serves.
        route: this rank's.
        window: of the plan.
    """

    call: CallId
    turn: int
    place: str
    kind: Kind
    own: int | None
    route: Route
    window: int | None


class Legs:
    """The calls of a tick in their order, as this rank comes to them.

    Args:
        legs: those of forward in the order of layers, those of backward the other way round.
        serve: takes part in a call without rows of this rank's own.
        doing: what this rank runs, for errors.
    """

    def __init__(self, legs: Sequence[Leg], serve: Callable[[Leg], None], doing: str) -> None:
        self._legs, self._serve, self._doing, self._at = legs, serve, doing, 0

    def reach(self, own: int) -> Leg:
        """Serve until this rank's own call of that number is next.

        Raises:
            DistCADesyncError: if it is not: the stage runs other layers than it did before.
        """
        leg = self._until(own)
        if leg is None:
            raise DistCADesyncError(f"{self._doing} came to its attention call {own} where it has none: {self._expected()}.")
        return leg

    def finish(self) -> None:
        """Serve in the calls that are left.

        Raises:
            DistCADesyncError: if one of them is this rank's own.
        """
        leg = self._until(None)
        if leg is not None:
            raise DistCADesyncError(f"{self._doing} never came to its attention call {leg.own}: {self._expected()}.")

    def _until(self, own: int | None) -> Leg | None:
        while self._at < len(self._legs):
            leg = self._legs[self._at]
            if leg.own is not None and leg.own != own:
                return None if own is not None else leg
            self._at += 1
            if leg.own is not None:
                return leg
            if leg.route.exchanges:
                self._serve(leg)
        return None

    def _expected(self) -> str:
        return "every micro-batch must run the same layers, forward and backward, as the first step found them"


class StageCall(Call):
    """A call with rows of this rank's own.

    Args:
        route, group, server, stored: as for `Call`, of its forward.
        exchanges: whether any rank moves anything in its forward or backward.
        turn: gives route, group and server of its backward, once that begins.
    """

    def __init__(
        self,
        route: Route,
        group: AttentionGroup,
        server: AttentionServer,
        stored: LayerOutputs | None,
        *,
        exchanges: bool,
        turn: Callable[[], tuple[Route, AttentionGroup, AttentionServer]],
    ) -> None:
        super().__init__(route, group, server, stored)
        self._exchanges, self._turn = exchanges, turn

    @property
    def exchanges(self) -> bool:
        """Whether any rank moves anything, forward or backward."""
        return self._exchanges

    def begin_backward(self) -> None:
        """Go over to the plan of the tick in which the backward runs."""
        super().begin_backward()
        self.route, self.group, self.server = self._turn()
        self.server.tracer.backward = True


def serve(call: Call, nothing: Operands) -> None:
    """Take part in the forward of a call without rows of this rank's own.

    Args:
        call: with the route of this rank.
        nothing: operands without rows, of the layer's heads, widths and dtype.
    """
    nothing = in_groups(nothing, call.route.groups)  # rows of head groups travel, if documents are split by heads
    outputs = _no_outputs(nothing)
    for wave in call.route.waves:
        dispatch = call.send_queries_and_keys(wave, nothing)
        call.collect_outputs(wave, outputs, call.run_arrived(wave, nothing, outputs, dispatch))


def serve_backward(call: Call, nothing: Operands) -> None:
    """As `serve`, for the backward of a call."""
    nothing = in_groups(nothing, call.route.groups)
    outputs = _no_outputs(nothing)
    saved = Saved(torch.empty_like(outputs.o_THV), nothing.q_THD, *outputs, nothing.k_TKD, nothing.v_TKV)
    grads = Grads(*(torch.empty_like(tensor) for tensor in nothing))
    for wave in call.route.waves:
        dispatch = call.send_queries_and_keys(wave, saved)
        grads = call.collect_grads(wave, *call.run_arrived_backward(wave, saved, grads, dispatch))


def _no_outputs(nothing: Operands) -> Outputs:
    """Outputs without rows, in the dtypes of kernels: log-sum-exps are of float32 at least."""
    q_THD, _, v_TKV = nothing
    o_THV = q_THD.new_empty((0, q_THD.shape[1], v_TKV.shape[2]))
    lse_TH = q_THD.new_empty((0, q_THD.shape[1]), dtype=torch.promote_types(q_THD.dtype, torch.float32))
    return Outputs(o_THV, lse_TH)
