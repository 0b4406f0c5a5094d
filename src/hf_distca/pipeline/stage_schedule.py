"""`Schedule`: pipeline stages that share the attention of every tick, including stages that have no
micro-batch in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hf_distca.agreement.announce import SharedSettings, hash_settings
from hf_distca.agreement.document_starts import convert_mask
from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.errors import ConfigError, DistCAError, LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import PLANNER
from hf_distca.integration.hooks.nano_batch_layers import can_cut_layers
from hf_distca.integration.nano_batches import choose_cut
from hf_distca.pipeline.borrowed_pipelining import OneStageSchedule
from hf_distca.pipeline.stage_ranks import (
    StepRow,
    check_copies,
    check_settings,
    check_shares_of_copy,
    check_steps,
    checksum,
    find_ranks,
)
from hf_distca.pipeline.stages import Stage
from hf_distca.pipeline.tick_calls import (
    CallPart,
    MicroBatch,
    MicroBatchPart,
    StageAttention,
    TickCalls,
    select_own_calls,
)
from hf_distca.pipeline.ticks import (
    Pipeline,
    Tick,
    TickPlans,
    order_ticks,
    read_announced_documents,
    read_shared_documents,
)
from hf_distca.runtime.channel import wait_for_works
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import reserved_seconds
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.rendezvous import Rendezvous

__all__ = ["Messages", "Schedule", "TickFigures", "clip_grad_norm_"]

# How a batch was loaded. They are no numbers that another announcement begins with.
_STATED, _SHARES = -1, -2


class TickFigures(NamedTuple):
    """Figures of one rank in a tick.

    Attributes:
        tick: the tick, with the micro-batches of each stage.
        seconds: duration.
        attention_seconds: time in attention kernels, for its own micro-batch and for others. On
            CUDA, of those that have finished.
        sent_bytes: bytes of rows sent to other ranks for their attention.
    """

    tick: Tick
    seconds: float
    attention_seconds: float
    sent_bytes: int


class Schedule(OneStageSchedule):
    """Runs the micro-batches of a step through the stages, in as many ticks as 1F1B, and shares the
    attention of each tick.

    A drop-in for `torch.distributed.pipelining.Schedule1F1B`. All stages are in a forward tick or
    all in a backward tick; in each, a layer's attention is spread over the ranks of all stages and
    of all data-parallel copies. The price: stage s of p holds the activations of up to 2 (p - s) -
    1 micro-batches, not p - s.

    Args:
        stage: stage of this rank, from `split`.
        n_microbatches: micro-batches of a step.
        loss_fn: ``loss_fn(logits, target)``, run on the last stage.
        kwargs: arguments of torch's schedules; ``scale_grads=False`` for a loss that is divided by
            the targets of the whole step.

    Attributes:
        figures: figures of this rank in each tick of the last step.

    Raises:
        ConfigError: if the stage is not from `split`.
    """

    def __init__(
        self,
        stage: Stage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(stage, Stage):
            raise ConfigError(
                f"Schedule got a {type(stage).__name__}: give it the stage that"
                " hf_distca.pipeline.split made."
            )
        super().__init__(stage, n_microbatches, loss_fn, **kwargs)
        self.stage, self.figures = stage, list[TickFigures]()
        self._session = current_session()
        self._ranks: tuple[Pipeline, StageAttention] | None = None  # found in the first step
        self._packed: Sequence[PackedDocuments] | None = None
        self._steps = 0
        self._comparing: Rendezvous | None = None  # of the last step with shares

    def step(
        self, *args: Any, distca_documents: Sequence[PackedDocuments] | None = None, **kwargs: Any
    ) -> Any:
        """Run a step, as torch's schedules do.

        Args:
            args: ``input_ids``, (n_microbatches * batch, tokens); only the first stage needs them.
            distca_documents: documents of each micro-batch; by default they are read from
                ``position_ids``.
            kwargs: ``position_ids`` of the same shape and whatever else the model takes, the same
                on all stages of a copy; and ``target``, ``losses``, ``return_outputs``,
                ``loss_kwargs`` as for torch.

        Raises:
            ConfigError, LayoutError: if the micro-batches are not as said here.
            UnsupportedError: in the first step, if stages cannot share the attention of the model,
                or not under these settings.
            DistCADesyncError: if ranks do not do the same, or not all come; names the tick, its
                stages and micro-batches.
        """
        self._packed = distca_documents
        return super().step(*args, **kwargs)

    def run(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any] | None,
        **more: Any,
    ) -> None:
        """Run the micro-batches of a step; torch calls it."""
        if self._ranks is None:
            self._ranks = find_ranks(self.stage, self._session, self._facts())
        pipeline, attention = self._ranks
        self._steps += 1
        name = f"step {self._steps}"
        with attention.group.reporting(f"reading the documents of {name}"):
            self._check_session()
            check_settings(self._session.config, attention.group)
            documents, shape = self._read(args, kwargs)
        plans = self._plan(pipeline, attention.group, documents, shape, name)

        def compute(tick: Tick, number: int, arrived: torch.Tensor | None) -> torch.Tensor:
            if tick.backward:
                loss = self.loss(number) if self.stage.is_last else None
                return self.stage.run_backward(
                    number, arrived, loss, last=number == self.micro_batches - 1
                )
            arguments = {**kwargs[number], PLANNER: attention}
            output = self.stage.run_forward(
                number, args[number][0] if arrived is None else arrived, arguments
            )
            if self.stage.is_last:
                self.add_loss(
                    output, None if targets is None else targets[number], more["loss_kwargs"]
                )
                if more["return_outputs"]:
                    self.stage.output_chunks.append(output.detach())
            return output

        step = _Step(self.stage, attention, plans, documents, shape, compute)
        attention.nano_batches = plans.config.ping_pong
        with _sum_tied_gradients(self.stage, attention.group, name, backward=self.is_training):
            self.figures = step.run()
            if self.is_training:
                self.stage.perform_reduce_grad(1)  # losses are scaled, not gradients

    def _check_session(self) -> None:
        if current_session() is not self._session:
            raise ConfigError(
                "hf_distca.configure was called after this Schedule was made: make the Schedule"
                " again."
            )

    def _facts(self) -> SharedSettings:
        """Return all that must be equal on all ranks in a step, by name."""
        model, config = self.stage.unwrapped, self._session.config
        return {
            "the run": "step" if self.is_training else "eval",
            "the mode of the model": "train" if model.training and model.model.training else "eval",
            "n_microbatches": str(self.micro_batches),
            "the type of device": self.stage.device.type,
            **model.facts,
            **{setting.name: repr(getattr(config, setting.name)) for setting in fields(config)},
        }

    def _read(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[list[Documents], tuple[int, int]]:
        """Read this rank's documents of each micro-batch, and the (batch, tokens) of all
        micro-batches.
        """
        packed = [None] * self.micro_batches if self._packed is None else self._packed
        documents, shapes = list[Documents](), set[tuple[int, int]]()
        if len(packed) != self.micro_batches:
            raise ConfigError(
                f"distca_documents are of {len(packed)} micro-batches, and the schedule has"
                f" {self.micro_batches}."
            )
        for inputs, arguments, packed_documents in zip(args, kwargs, packed, strict=True):
            if packed_documents is not None:
                arguments["distca_documents"] = packed_documents
            positions, padding = (
                arguments.get("position_ids"),
                convert_mask(arguments.get("attention_mask")),
            )
            shape = _read_shape(*inputs, positions)
            batch = TokenBatch(
                *shape, packed=packed_documents, position_ids=positions, padding=padding
            )
            documents.append(batch.read_documents(training=True))
            shapes.add(shape)
        if len(shapes) > 1:
            raise LayoutError(
                f"micro-batches of shapes {sorted(shapes)}: all of a step must have one."
            )
        return documents, shapes.pop()

    def _plan(
        self,
        pipeline: Pipeline,
        group: AttentionGroup,
        documents: Sequence[Documents],
        shape: tuple[int, int],
        name: str,
    ) -> TickPlans:
        """Plan all ticks: from one announcement, or from dealt shares, which hold all documents, so
        that no rank waits.
        """
        progress = self._session.planner.resume_progress()
        shares = [read.dealt_share for read in documents if read.dealt_share is not None]
        place = f"{name}, {self.micro_batches} micro-batches in {self.stage.num_stages} stages"
        with group.reporting(f"planning {place}"):
            config = replace(self._session.config, ping_pong=self._uses_nano_batches(documents))
            nanos = (1, 2) if config.ping_pong else (0,)
            parts = list(
                dict.fromkeys(
                    MicroBatchPart(key.chunk, nano) for key in pipeline.keys for nano in nanos
                )
            )
            facts = {**self._facts(), "nano-batches of a micro-batch": str(len(nanos))}
            if len(shares) == len(documents):
                check_shares_of_copy(shares, pipeline)
                way, checked = _SHARES, shares[0].digest
                facts["the batch"] = str(shares[0])
                of_all = {
                    part: read_shared_documents(shares, pipeline.copies, part) for part in parts
                }
            else:
                way, checked, key = _STATED, 0, pipeline.keys[0]
                requests = [
                    (_cut_documents(part, read, shape, config.tile), key._replace(nano=part.nano))
                    for part in parts
                    for read in documents
                ]
                stated = iter(
                    progress.announce_requests(requests, group, place, self._session.config)
                )
                of_all = {
                    part: read_announced_documents([next(stated) for _ in documents])
                    for part in parts
                }
                for of_part in of_all.values():
                    check_copies(of_part, pipeline, group)
            costs = {key: progress.costs.get_cost(key) for key in pipeline.keys}
            order = order_ticks(pipeline.depth, self.micro_batches, backward=self.is_training)
            plans = TickPlans(order, pipeline, of_all, costs, config, name)
            tied = checksum(self.stage.unwrapped.tied_weight)
            row = np.array(
                StepRow(way, hash_settings(facts), checked, plans.make(), *shape, tied),
                dtype=np.int64,
            )
            check = partial(check_steps, group, facts=facts, copies=pipeline.copies, place=place)
            if way == _STATED:
                check(group.gather(row, doing=f"comparing plans of {place}"))
            else:
                if self._comparing is not None:
                    self._comparing.wait()
                self._comparing = group.gather_async(
                    row, doing=f"comparing shares of {place}", on_arrival=check
                )
        return plans

    def _uses_nano_batches(self, documents: Sequence[Documents]) -> bool:
        """Return whether layers run as two nano-batches: in all of a step, because the stages of a
        tick do the same.

        Documents that span copies are cut only where they were dealt for it.
        """
        if not self._session.config.ping_pong or not can_cut_layers(self.stage.unwrapped.model):
            return False
        return all(
            not read.span_ranks
            or (read.dealt_share is not None and read.dealt_share.first_nano_tokens is not None)
            for read in documents
        )


def _cut_documents(
    part: MicroBatchPart, documents: Documents, shape: tuple[int, int], tile: int
) -> Documents:
    """Return the documents of a part of a micro-batch of (batch, tokens)."""
    documents = documents.cut_into_chunks(part.chunk)
    return choose_cut(*shape, documents, tile)[2][part.nano - 1] if part.nano else documents


def _read_shape(*tensors: Any) -> tuple[int, int]:
    """Return (batch, tokens) of a micro-batch, from its inputs and positions."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[0]), int(tensor.shape[1])
    raise ConfigError(
        "Schedule.step needs position_ids on every stage, (micro-batches, tokens): documents are"
        " read from them."
    )


@dataclass(eq=False)
class _Step:
    """The ticks of a step on this rank's stage.

    Attributes:
        documents: documents of each micro-batch on this rank.
        shape: (batch, tokens) of a micro-batch.
        compute: runs the micro-batch of this number in a tick, on the tensor from another stage;
            returns the tensor for the next one.
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
            began, seconds, sent = time.perf_counter(), meter.seconds, meter.sent_bytes
            with group.reporting(f"running {self._named(tick)}"):
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

    def _named(self, tick: Tick) -> str:
        return f"{tick} of {self.plans.name}, as stage {self.stage.stage_index}"

    def _run_tick(self, tick: Tick) -> torch.Tensor | None:
        """Run this stage's micro-batch, if it has one, and serve in the calls of others.

        Return the tensor for the next stage.
        """
        number, parts, attention = (
            tick.micro_batches[self.stage.stage_index],
            self.plans.parts(tick),
            self.attention,
        )
        calls = TickCalls(
            parts, partial(attention.serve, backward=tick.backward), self._named(tick)
        )
        leaving = None
        if number is not None:
            arrived = self._receive(tick, number)
            if tick.backward:
                self._micro_batches.pop(number).backward = calls
            else:
                self._micro_batches[number] = attention.micro_batch = self._begin(
                    number, parts, calls
                )
            try:
                leaving = self.compute(tick, number, arrived)
            except RuntimeError as error:
                # Which torch has put into an error of its own.
                if isinstance(error.__cause__, DistCAError):
                    raise error.__cause__ from None
                raise
            finally:
                attention.micro_batch = None
        calls.finish()
        return leaving

    def _begin(self, number: int, parts: Sequence[CallPart], calls: TickCalls) -> MicroBatch:
        """Make a micro-batch whose forward begins."""
        backward = self.plans.backward_parts(number)
        return MicroBatch(
            name=f"micro-batch {number} of {self.plans.name} on stage {self.stage.stage_index}",
            documents=self.documents[number],
            layouts=self.plans.layouts_of(number),
            forward=calls,
            parts=dict(select_own_calls(parts)),
            moved={
                which
                for which, part in select_own_calls([*parts, *backward])
                if part.route.exchanges
            },
            outputs={part.kind.key.nano: OutputStore() for part in backward},
        )

    def _receive(self, tick: Tick, number: int) -> torch.Tensor | None:
        """Wait for the tensor that a micro-batch begins with in a tick; None if it does not come
        from another stage.
        """
        if (tick.backward, number) not in self._arriving:
            return None
        messages, arrived = self._arriving.pop((tick.backward, number))
        messages.wait(self.attention.group, f"waiting for what {self._named(tick)} begins with")
        return arrived.requires_grad_(bool(self.stage.has_backward) and not tick.backward)

    def _send(self, tick: Tick, leaving: torch.Tensor | None) -> None:
        """Send this stage's output of a tick, and begin to receive its neighbour's."""
        way, group, running = -1 if tick.backward else 1, self.stage.group, tick.micro_batches
        source, target = self.stage.stage_index - way, self.stage.stage_index + way
        ops = []
        if leaving is not None and 0 <= target < len(running):
            ops.append(
                dist.P2POp(
                    dist.isend, leaving.detach().contiguous(), group=group, group_peer=target
                )
            )
        coming = running[source] if 0 <= source < len(running) else None
        if coming is not None:
            # Gradients have the dtype of what this stage handed on.
            dtype = self.plans.pipeline.dtypes[min(source, self.stage.stage_index)]
            buffer = torch.empty(
                (*self.shape, self.stage.unwrapped.width), dtype=dtype, device=self.stage.device
            )
            ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=source))
        self._last.wait(self.attention.group, f"sending what was made before {self._named(tick)}")
        self._last = Messages(ops)
        if coming is not None:
            self._arriving[tick.backward, coming] = self._last, buffer


class Messages:
    """Messages under way between stages."""

    def __init__(self, ops: Sequence[dist.P2POp]) -> None:
        self._ops = list(ops)  # what is sent must stay until it has left
        self._works: list[dist.Work | None] = [*dist.batch_isend_irecv(self._ops)] if ops else []

    def wait(self, group: AttentionGroup, doing: str) -> None:
        """Wait until all have arrived and left; over gloo no longer than the ranks of the group
        wait for each other.
        """
        deadline = (
            time.monotonic() + group.timeout_seconds - reserved_seconds(group.timeout_seconds)
        )
        over_gloo = bool(self._ops) and self._ops[0].group.name() == "gloo"
        try:
            wait_for_works(self._works, deadline if over_gloo else None)
        except RuntimeError as error:
            raise error if group.monitor is None else group.monitor.give_up(doing, error) from error
        self._ops.clear()


@torch.no_grad()
def clip_grad_norm_(stage: Stage, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that their norm together is at most `max_norm`.

    This is `torch.nn.utils.clip_grad_norm_` over all stages.

    All ranks must call it, after `Schedule.step` and before the optimizer's. A tied weight, of
    which two stages have a copy, counts once. Gradients may be sharded (FSDP2, tensor parallelism).

    Args:
        stage: stage of this rank.
        max_norm: the largest norm.

    Returns:
        The norm before scaling, of all gradients of one copy of the model: a float32 or float64
            scalar, equal on all ranks.
    """
    weights = [weight for weight in stage.submod.parameters() if weight.grad is not None]
    repeated = None if stage.is_first else stage.unwrapped.tied_weight
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for weight in weights:
        if weight is not repeated and weight.grad is not None:
            by_mesh.setdefault(
                weight.grad.device_mesh if isinstance(weight.grad, DTensor) else None, []
            ).append(weight.grad)
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
def _sum_tied_gradients(
    stage: Stage, group: AttentionGroup, name: str, *, backward: bool
) -> Iterator[None]:
    """Sum the gradients that both copies of a tied weight get inside, and add the sum to both."""
    weight = stage.unwrapped.tied_weight if backward else None
    if weight is None:
        yield
        return
    before = _take_gradient(weight)
    yield
    gradient = _take_gradient(weight)
    if gradient is None:
        weight.grad = before
        return
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    arriving, peer = torch.empty_like(local), 0 if stage.is_last else stage.num_stages - 1
    with group.reporting(doing := f"adding the gradients of the tied embedding in {name}"):
        tensors = ((dist.isend, local), (dist.irecv, arriving))
        Messages(
            [dist.P2POp(way, tensor, group=stage.group, group_peer=peer) for way, tensor in tensors]
        ).wait(group, doing)
    local.add_(arriving)
    weight.grad = gradient if before is None else gradient.add_(before)


def _take_gradient(weight: torch.nn.Parameter) -> torch.Tensor | None:
    gradient, weight.grad = weight.grad, None
    return gradient
