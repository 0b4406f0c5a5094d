"""A step of a stage: in each tick, the stage runs a micro-batch or serves other stages, and
exchanges messages with its neighbours. This file also sums the gradients of tied weights over
stages, and clips gradients over stages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hf_distca.agreement.documents import Documents
from hf_distca.errors import DistCADesyncError, DistCAError
from hf_distca.pipeline.stage_attention import StageAttention
from hf_distca.pipeline.stages import Stage
from hf_distca.pipeline.tick_calls import SAME_LAYERS, MicroBatch, serve_others
from hf_distca.pipeline.ticks import Tick, TickPlans
from hf_distca.runtime.channel import wait_for_works
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import compute_reserved_seconds
from hf_distca.runtime.outputs import OutputStore


class TickFigures(NamedTuple):
    """Figures of one rank in a tick.

    Attributes:
        tick: the tick, with the micro-batches of each stage.
        seconds: duration of the tick on this rank.
        attention_seconds: time in attention kernels, for this rank's micro-batch and for those of
            other ranks. On CUDA, only finished kernels count.
        sent_bytes: bytes of rows that attention sent to other ranks.
    """

    tick: Tick
    seconds: float
    attention_seconds: float
    sent_bytes: int


@dataclass(eq=False)
class StageStep:
    """The ticks of a step on this rank's stage.

    Attributes:
        documents: documents of each micro-batch on this rank.
        shape: (batch, tokens) of a micro-batch.
        compute: function that runs a micro-batch in a tick. It takes the tick, the index of the
            micro-batch, and the tensor that arrived from another stage, or None. It returns the
            tensor to send to the next stage.
    """

    stage: Stage
    attention: StageAttention
    plans: TickPlans
    documents: Sequence[Documents]
    shape: tuple[int, int]
    compute: Callable[[Tick, int, torch.Tensor | None], torch.Tensor]
    _micro_batches: dict[int, MicroBatch] = field(default_factory=dict)
    _arriving: dict[tuple[bool, int], tuple[Messages, torch.Tensor]] = field(default_factory=dict)
    _last: Messages = field(default_factory=lambda: Messages([]))

    def run(self) -> list[TickFigures]:
        """Run all ticks."""
        figures, meter, group = [], self.attention.session.meter, self.attention.group
        for tick in self.plans.order:
            began = time.perf_counter()
            seconds = meter.seconds
            sent = meter.sent_bytes
            with group.report_errors(f"running {self._name_tick(tick)}"):
                self._send(tick, self._run_tick(tick))
            figures.append(
                TickFigures(
                    tick,
                    time.perf_counter() - began,
                    meter.seconds - seconds,
                    meter.sent_bytes - sent,
                )
            )
        self._last.wait(group, f"sending to other stages at the end of {self.plans.name}")
        return figures

    def _name_tick(self, tick: Tick) -> str:
        return f"{tick} of {self.plans.name}, as stage {self.stage.stage_index}"

    def _run_tick(self, tick: Tick) -> torch.Tensor | None:
        """Run this stage's micro-batch in a tick, if it has one, and serve other stages in their
        calls. Return the tensor for the next stage.
        """
        index = self.stage.stage_index
        number = tick.micro_batches[index]
        parts = self.plans.list_parts(tick)
        attention = self.attention
        calls = serve_others(parts, partial(attention.serve, backward=tick.backward))
        leaving = None
        if number is not None:
            arrived = self._receive(tick, number)
            if tick.backward:
                self._micro_batches.pop(number).backward = calls
            else:
                micro_batch = attention.micro_batch = MicroBatch(
                    number,
                    name=f"micro-batch {number} of {self.plans.name} on stage {index}",
                    documents=self.documents[number],
                    layouts=self.plans.layouts,
                    forward=calls,
                    parts={part.own_call: part for part in parts},
                    outputs=(
                        {nano: OutputStore() for nano in range(3)}
                        if self.stage.has_backward
                        else {}
                    ),
                )
                self._micro_batches[number] = micro_batch
            try:
                leaving = self.compute(tick, number, arrived)
            except RuntimeError as error:
                # If a stage raises an error, torch wraps this error in another. Raise the original
                # one.
                if isinstance(error.__cause__, DistCAError):
                    raise error.__cause__ from None
                raise
            finally:
                attention.micro_batch = None
        part = next(calls, None)
        if part is not None:
            raise DistCADesyncError(
                f"{self._name_tick(tick)} never reached {part.name}: {SAME_LAYERS}."
            )
        return leaving

    def _receive(self, tick: Tick, number: int) -> torch.Tensor | None:
        """Wait for the tensor that a micro-batch needs from another stage in this tick. Return None
        if the micro-batch needs no tensor.
        """
        if (tick.backward, number) not in self._arriving:
            return None
        messages, arrived = self._arriving.pop((tick.backward, number))
        messages.wait(self.attention.group, f"waiting for the input of {self._name_tick(tick)}")
        return arrived.requires_grad_(bool(self.stage.has_backward) and not tick.backward)

    def _send(self, tick: Tick, leaving: torch.Tensor | None) -> None:
        """Begin to send this stage's output of a tick to the next stage, and to receive the output
        of the previous stage. In backward, the directions are reversed.
        """
        way = -1 if tick.backward else 1
        source, target = self.stage.stage_index - way, self.stage.stage_index + way
        ops = list[dist.P2POp]()
        if leaving is not None and 0 <= target < self.stage.num_stages:
            ops.append(
                dist.P2POp(
                    dist.isend,
                    leaving.detach().contiguous(),
                    group=self.stage.group,
                    group_peer=target,
                )
            )
        coming = (*tick.micro_batches, None)[source]  # None if stage `source` does not exist
        if coming is not None:
            buffer = torch.empty(
                (*self.shape, self.stage.unwrapped.width),
                # Hidden states have the dtype of their source's output. Gradients have the dtype of
                # this stage's output.
                dtype=self.plans.pipeline.dtypes[min(source, self.stage.stage_index)],
                device=self.stage.device,
            )
            ops.append(dist.P2POp(dist.irecv, buffer, group=self.stage.group, group_peer=source))
        self._last.wait(
            self.attention.group, f"sending the output of the tick before {self._name_tick(tick)}"
        )
        self._last = Messages(ops)
        if coming is not None:
            self._arriving[tick.backward, coming] = self._last, buffer


class Messages:
    """Messages on their way between stages."""

    def __init__(self, ops: Sequence[dist.P2POp]) -> None:
        self._ops = ops  # keep tensors alive until they are sent
        self._works = list[dist.Work | None](dist.batch_isend_irecv(list(ops)) if ops else ())

    def wait(self, group: AttentionGroup, activity: str) -> None:
        """Wait until all messages have been sent and received. Over gloo, give up shortly before
        the timeout of the group.
        """
        deadline = (
            time.monotonic()
            + group.timeout_seconds
            - compute_reserved_seconds(group.timeout_seconds)
        )
        over_gloo = any(op.group.name() == "gloo" for op in self._ops)
        try:
            wait_for_works(self._works, deadline if over_gloo else None)
        except RuntimeError as error:
            raise (
                error if group.monitor is None else group.monitor.give_up(activity, error)
            ) from error


@torch.no_grad()
def clip_grad_norm_(stage: Stage, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that their total norm is at most `max_norm`.

    This is `torch.nn.utils.clip_grad_norm_` over all stages.

    All ranks must call it, after `Schedule.step` and before the step of the optimizer. A tied
    weight counts once, although two stages have a copy of it. Gradients may be sharded (FSDP2,
    tensor parallelism).

    Args:
        stage: stage of this rank.
        max_norm: the largest norm.

    Returns:
        The norm of all gradients of one copy of the model before scaling: a float32 or float64
            scalar, equal on all ranks.
    """
    weights = [weight for weight in stage.submod.parameters() if weight.grad is not None]
    repeated = None if stage.is_first else stage.unwrapped.tied_weight
    by_mesh: dict[object, list[Any]] = defaultdict(list)
    for weight in weights:
        if weight is not repeated:
            by_mesh[getattr(weight.grad, "device_mesh", None)].append(weight.grad)
    squares = torch.zeros((), dtype=torch.float64, device=stage.device)
    for grads in by_mesh.values():
        norm = get_total_norm(grads)
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
    dist.all_reduce(squares, group=stage.group)
    in_float64 = any(weight.dtype == torch.float64 for weight in weights)
    total = squares.sqrt().to(torch.float64 if in_float64 else torch.float32)
    clip_grads_with_norm_(weights, max_norm, total)
    return total


@contextmanager
def sum_tied_gradients(
    stage: Stage, group: AttentionGroup, name: str, *, backward: bool
) -> Iterator[None]:
    """Sum the gradients that the two copies of a tied weight get inside this context, and add the
    sum to the earlier gradient of each copy.
    """
    weight = stage.unwrapped.tied_weight if backward else None
    if weight is None or not weight.requires_grad:
        yield
        return
    before = weight.grad
    weight.grad = None
    yield
    gradient: Any = weight.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    arriving = torch.empty_like(local)
    peer = 0 if stage.is_last else stage.num_stages - 1
    with group.report_errors(activity := f"adding the gradients of the tied embedding in {name}"):
        tensors = ((dist.isend, local), (dist.irecv, arriving))
        Messages(
            [dist.P2POp(way, tensor, group=stage.group, group_peer=peer) for way, tensor in tensors]
        ).wait(group, activity)
    local.add_(arriving)
    if before is not None:
        gradient.add_(before)
