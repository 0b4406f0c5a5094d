"""`Schedule`: runs pipeline stages in ticks. In a tick, each stage runs the forward or the backward
of at most one micro-batch. All stages share the attention of the tick, including stages without a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.announce import SharedSettings, hash_settings
from hf_distca.agreement.document_starts import convert_mask
from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import PLANNER
from hf_distca.integration.hooks.nano_batch_layers import can_cut_layers
from hf_distca.pipeline.borrowed_pipelining import OneStageSchedule
from hf_distca.pipeline.stage_attention import StageAttention
from hf_distca.pipeline.stage_ranks import find_ranks
from hf_distca.pipeline.stage_step import StageStep, TickFigures, sum_tied_gradients
from hf_distca.pipeline.stages import Stage
from hf_distca.pipeline.step_checks import (
    StepRow,
    build_layout_of_copies,
    check_shares_of_copy,
    check_steps,
    compute_checksum,
)
from hf_distca.pipeline.tick_calls import make_requests
from hf_distca.pipeline.ticks import (
    Pipeline,
    Tick,
    TickPlans,
    order_ticks,
)
from hf_distca.runtime.group import AttentionGroup


class Schedule(OneStageSchedule):
    """Runs the micro-batches of a step through the stages, which share their attention.

    Use it instead of `torch.distributed.pipelining.Schedule1F1B`. A step has as many ticks as in
    1F1B. In a tick, all stages run the forward of a micro-batch, or all run a backward. So the
    attention of a layer is spread over the ranks of all stages and of all data-parallel copies. The
    price is memory: stage s of p keeps the activations of up to 2 (p - s) - 1 micro-batches,
    instead of p - s.

    Args:
        stage: stage of this rank, from `split`.
        n_microbatches: number of micro-batches of a step.
        loss_fn: ``loss_fn(logits, target)``, run on the last stage.
        kwargs: arguments of torch's schedules. Use ``scale_grads=False`` if the loss is divided by
            the number of targets in the whole step.

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
        self.stage = stage
        self.figures = list[TickFigures]()
        self._session = current_session()
        self._ranks: tuple[Pipeline, StageAttention] | None = None  # known from the first step on
        self._packed: Sequence[PackedDocuments] | None = None
        self._steps = 0

    def step(
        self, *args: Any, distca_documents: Sequence[PackedDocuments] | None = None, **kwargs: Any
    ) -> Any:
        """Run a step, like `step` of torch's schedules.

        Args:
            args: ``input_ids``, (n_microbatches * batch, tokens); only the first stage needs them.
            distca_documents: documents of each micro-batch; by default they are read from
                ``position_ids``.
            kwargs: ``position_ids`` of the same shape as ``input_ids``, other arguments of the
                model, and ``target``, ``losses``, ``return_outputs`` and ``loss_kwargs`` of torch's
                `step`. Arguments of the model must be equal on all stages of a copy.

        Raises:
            ConfigError, LayoutError: if the micro-batches are not as described here.
            UnsupportedError: in the first step, if stages cannot share the attention of the model
                under these settings.
            DistCADesyncError: if ranks run different steps, or if a rank does not take part in
                time. An error inside a tick names the micro-batch of each stage.
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
        """Run the micro-batches of a step. torch calls this method."""
        if self._ranks is None:
            self._ranks = find_ranks(self.stage, self._session, self._collect_facts())
        pipeline, attention = self._ranks
        self._steps += 1
        name = f"step {self._steps}"
        with attention.group.report_errors(f"reading the documents of {name}"):
            if current_session() is not self._session:
                raise ConfigError(
                    "hf_distca.configure was called after this Schedule was made: make the Schedule"
                    " again."
                )
            documents, shape = self._read(args, kwargs)
        plans = self._plan(pipeline, attention.group, documents, shape, name)

        def compute(tick: Tick, number: int, arrived: torch.Tensor | None) -> torch.Tensor:
            if tick.backward:
                loss = self.get_loss(number) if self.stage.is_last else None
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

        step = StageStep(self.stage, attention, plans, documents, shape, compute)
        attention.nano_batches = plans.config.ping_pong
        with sum_tied_gradients(self.stage, attention.group, name, backward=self.is_training):
            self.figures = step.run()
            if self.is_training:
                self.stage.perform_reduce_grad(1)  # 1, because losses are already scaled

    def _collect_facts(self) -> SharedSettings:
        """Return the values that must be equal on all ranks in a step, by name."""
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
        """Read this rank's documents of each micro-batch, and the common shape (batch, tokens) of
        its micro-batches.
        """
        packed = [None] * self.micro_batches if self._packed is None else self._packed
        if len(packed) != self.micro_batches:
            raise ConfigError(
                f"distca_documents describe {len(packed)} micro-batches, but the schedule has"
                f" {self.micro_batches}: give the documents of each micro-batch."
            )
        documents = list[Documents]()
        shapes = set[tuple[int, int]]()
        for inputs, arguments, packed_documents in zip(args, kwargs, packed, strict=True):
            if packed_documents is not None:
                arguments["distca_documents"] = packed_documents
            positions = arguments.get("position_ids")
            shape = _read_shape(*inputs, positions)
            batch = TokenBatch(
                *shape,
                packed=packed_documents,
                position_ids=positions,
                padding=convert_mask(arguments.get("attention_mask")),
            )
            documents.append(batch.read_documents(training=True))
            shapes.add(shape)
        if len(shapes) > 1:
            raise LayoutError(
                f"micro-batches of a step have different shapes, {sorted(shapes)}: give all of them"
                " the same shape."
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
        """Plan all ticks from the documents that ranks announce, and check that all ranks run the
        same step.
        """
        planner = self._session.planner
        shares = [read.dealt_share for read in documents if read.dealt_share is not None]
        label = f"{name}, {self.micro_batches} micro-batches in {self.stage.num_stages} stages"
        with group.report_errors(f"planning {label}"):
            check_shares_of_copy(shares, pipeline)
            config = replace(self._session.config, ping_pong=self._uses_nano_batches(documents))
            facts = {
                **self._collect_facts(),
                "nano-batches of a micro-batch": str(1 + config.ping_pong),
                "the dealt batches": ", ".join(map(str, shares)) or "none",
                "the dealt documents (checksums)": str([share.digest for share in shares]),
            }
            requests = make_requests(pipeline.keys, documents, shape, config)
            announced = planner.announce(list(requests.values()), group, label)
            layouts = {
                part: build_layout_of_copies(
                    announced_documents, pipeline.copies, group.ranks, part.micro_batch
                )
                for part, announced_documents in zip(requests, announced, strict=True)
            }
            costs = {key: planner.costs.get_cost(key) for key in pipeline.keys}
            order = order_ticks(
                self.stage.num_stages, self.micro_batches, backward=self.is_training
            )
            plans = TickPlans(order, pipeline, layouts, costs, config, name)
            tied = compute_checksum(self.stage.unwrapped.tied_weight)
            row = StepRow(hash_settings(facts), plans.make(), *shape, tied)
            rows = group.gather(np.array(row), activity=f"comparing plans of {label}")
            check_steps(group, rows, facts, pipeline.copies, label)
        return plans

    def _uses_nano_batches(self, documents: Sequence[Documents]) -> bool:
        """Return whether the layers of all micro-batches run as two nano-batches. All stages of a
        tick must do the same, so this cannot depend on the micro-batch.

        If documents span copies of the model, layers run as nano-batches only if the documents were
        dealt for nano-batches.
        """
        if not self._session.config.ping_pong or not can_cut_layers(self.stage.unwrapped.model):
            return False
        return all(
            not read.span_ranks
            or (read.dealt_share is not None and read.dealt_share.first_nano_tokens is not None)
            for read in documents
        )


def _read_shape(*tensors: Any) -> tuple[int, int]:
    """Return (batch, tokens) of a micro-batch, from its inputs and positions."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[0]), int(tensor.shape[1])
    raise ConfigError(
        "Schedule.step needs position_ids of shape (n_microbatches * batch, tokens) on every stage,"
        " to read documents from them."
    )
