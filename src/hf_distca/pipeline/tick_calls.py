"""The attention calls of a tick, and a rank's part in each call. In a call, a rank has rows of its
own, or only serves other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

import torch

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.documents import Documents
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError, UnsupportedError
from hf_distca.integration.nano_batches import choose_cut
from hf_distca.kernels.base import Operands, ScoreOptions
from hf_distca.runtime.call import Inputs, make_empty_operands
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout

DTYPES = (torch.float64, torch.float32, torch.bfloat16)  # ranks send a dtype as its index here


class MicroBatchPart(NamedTuple):
    """Part of a micro-batch that one plan covers. It is identified by the number of the micro-batch
    and by the `chunk` and `nano` of a `PlanKey`.
    """

    micro_batch: int
    chunk: int | None
    nano: int


def make_requests(
    keys: Sequence[PlanKey],
    documents: Sequence[Documents],
    shape: tuple[int, int],
    config: DistCAConfig,
) -> dict[MicroBatchPart, Request]:
    """Make the requests to plan all parts of all micro-batches. `shape` is (batch, tokens) of a
    micro-batch.
    """
    requests: dict[MicroBatchPart, Request] = {}
    for key, nano in product(keys, (1, 2) if config.ping_pong else (0,)):
        for number, whole in enumerate(documents):
            part = whole.cut_into_chunks(key.chunk)
            if nano:
                part = choose_cut(*shape, part, config.tile)[2][nano - 1]
            requests[MicroBatchPart(number, key.chunk, nano)] = part, keys[0]._replace(nano=nano)
    return requests


class LayerKind(NamedTuple):
    """Everything that a server must know about a layer. Calls of one kind can be made together.

    Attributes:
        key: key of the plan of its tasks.
        dtype: dtype of q, k and v.
        scale, softcap: see `ScoreOptions`.
    """

    key: PlanKey
    dtype: torch.dtype
    scale: float
    softcap: float | None

    @classmethod
    def from_call(cls, key: PlanKey, inputs: Inputs, scores: ScoreOptions) -> LayerKind:
        """Return the kind of a call. Raise if stages cannot compute in its dtype."""
        dtype = inputs.q_THD.dtype
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"attention of a pipeline stage is computed in {dtype}. Pipeline stages run in"
                " float64, float32 or bfloat16. float16 needs a GradScaler, which would skip the"
                " optimizer's step only on stages whose own gradients overflow: use bfloat16."
            )
        return cls(key, dtype, scores.scale, scores.softcap)

    def __str__(self) -> str:
        shape, _, window, *_ = self.key
        seen = "all keys" if window is None else f"the last {window} keys"
        return (
            f"{shape.query_heads} heads of width {shape.head_dim} in {self.dtype} that see {seen}"
            f" (scale {self.scale:g})"
        )

    @property
    def numbers(self) -> list[int | float | None]:
        """Numbers that describe the kind, without the device."""
        return [
            *astuple(self.key.shape),
            self.key.window,
            self.key.chunk,
            DTYPES.index(self.dtype),
            self.scale,
            self.softcap,
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[Any], device: str) -> LayerKind:
        """Rebuild a kind from its `numbers`, for this type of device."""
        *shape, window, chunk, dtype, scale, softcap = numbers
        return cls(
            PlanKey(AttentionShape(*shape), device, window, chunk), DTYPES[dtype], scale, softcap
        )

    def make_empty_operands(self, device: torch.device) -> Operands:
        """Return operands without rows."""
        return make_empty_operands(self.key.shape, self.dtype, device)


class OwnCall(NamedTuple):
    """Identifier of an attention call of a micro-batch.

    Attributes:
        number: index of the call among the calls of the stage.
        nano: nano-batch of the call; 0 for the whole micro-batch.
    """

    number: int
    nano: int


@dataclass(frozen=True, eq=False)
class CallPart:
    """A rank's part in a call of attention that stages make together.

    Attributes:
        number: index of the call among the calls of a forward; equal for both nano-batches.
        name: description of the call, the same on all ranks.
        kind: kind of the layers. Its key includes the nano-batch of the call.
        own_call: the call of this rank's own micro-batch; None if the rank only serves.
        route: route of this rank.
        window: the most keys that a row sees in this call; None for no limit.
    """

    number: int
    name: str
    kind: LayerKind
    own_call: OwnCall | None
    route: Route
    window: int | None


def serve_others(
    parts: Iterable[CallPart], serve: Callable[[Sequence[CallPart]], None]
) -> Iterator[CallPart]:
    """Yield the calls of this rank's own micro-batch in a tick, and serve other ranks in the calls
    between them.

    Args:
        parts: this rank's part in each call of the tick. In backward, the order is reversed.
        serve: function that serves other ranks in one call, or in the interleaved calls of two
            nano-batches.
    """
    for _, nano_parts in groupby(parts, lambda part: part.number):
        together = list(nano_parts)
        if together[0].own_call is not None:
            yield from together
        elif exchanged := [part for part in together if part.route.exchanges]:
            serve(exchanged)


SAME_LAYERS = (
    "in forward and backward, every micro-batch must run the layers that the first step ran"
)


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way through this rank's stage.

    Attributes:
        number: number of the micro-batch in the step.
        name: name in errors.
        documents: documents of this rank.
        layouts: layout of each part of each micro-batch. In a layout, each copy of the model counts
            as one rank.
        forward: iterator from `serve_others` over the micro-batch's calls in forward.
        backward: the same for its calls in backward; None until the backward begins.
        parts: this rank's part in each forward call of the micro-batch.
        outputs: stored outputs by nano-batch (0 for the whole micro-batch), for activation
            checkpointing; empty if no backward follows.
    """

    number: int
    name: str
    documents: Documents
    layouts: Mapping[MicroBatchPart, Layout]
    forward: Iterator[CallPart]
    parts: Mapping[OwnCall | None, CallPart]
    outputs: Mapping[int, OutputStore]
    backward: Iterator[CallPart] | None = None

    def reach(self, which: OwnCall) -> CallPart:
        """Serve other stages until it is the turn of the call `which` of this micro-batch, and
        return this rank's part in the call.
        """
        part = next(self.forward if self.backward is None else self.backward, None)
        if part is None or part.own_call != which:
            raise DistCADesyncError(
                f"{self.name} reached its attention call {which.number} when another call was"
                f" next: {SAME_LAYERS}. Run micro-batches only with `Schedule.step`."
            )
        return part
