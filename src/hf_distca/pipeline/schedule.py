"""`Schedule`: pipeline stages that share the attention of every tick, also with stages that have no micro-batch in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.dealt import Dealt
from hf_distca.agreement.documents import Documents, PackedDocuments, read_documents
from hf_distca.errors import ConfigError, DistCADesyncError, LayoutError
from hf_distca.integration.session import Session, current_session
from hf_distca.pipeline.borrowed import OneStageSchedule
from hf_distca.pipeline.common import Facts, StepRow, check_steps, checksum, facts_of, fingerprint
from hf_distca.pipeline.crew import Crew, check_settings, meet
from hf_distca.pipeline.gradients import tied_gradients
from hf_distca.pipeline.pace import Estimate, Pace, learns, row
from hf_distca.pipeline.plans import StepPlans, documents_of_shares, documents_of_stated
from hf_distca.pipeline.split import Stage, stage_model
from hf_distca.pipeline.step import Step, TickFigures
from hf_distca.pipeline.ticks import Tick, ticks
from hf_distca.runtime.meeting import Meeting
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray

__all__ = ["Schedule"]

# How a batch was loaded. They are no numbers that another announcement begins with.
_STATED, _SHARES = -1, -2


class Schedule(OneStageSchedule):
    """Runs the micro-batches of a step through the stages, in as many ticks as 1F1B, and shares the attention of each tick.

    A drop-in for `torch.distributed.pipelining.Schedule1F1B`. All stages are in a forward tick or all in a backward tick; in
    each, a layer's attention is spread over the ranks of all stages and of all data-parallel copies. The price: stage s of p
    holds the activations of up to 2 (p - s) - 1 micro-batches, not p - s.

    Args:
        stage: of this rank, from `split`.
        n_microbatches: micro-batches of a step.
        loss_fn: ``loss_fn(logits, target)``, run on the last stage.
        kwargs: as for torch's schedules; ``scale_grads=False`` for a loss that is divided by the targets of the whole step.

    Attributes:
        figures: what this rank did in each tick of the last step.

    Raises:
        ConfigError: if the stage is not from `split`.
        UnsupportedError: if the settings ask for what stages cannot do.
    """

    def __init__(
        self, stage: Stage, n_microbatches: int, loss_fn: Callable[..., torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(stage, Stage):
            raise ConfigError(f"Schedule got a {type(stage).__name__}: give it the stage that hf_distca.pipeline.split made.")
        super().__init__(stage, n_microbatches, loss_fn, **kwargs)
        self.figures: list[TickFigures] = []
        self._pipeline_stage, self._session = stage, current_session()
        self._crew: Crew | None = None
        self._given: Sequence[PackedDocuments] | None = None
        self._steps = 0
        config = self._session.config
        # What a user's own model says is meant as it is.
        self._pace = Pace(corrects=config.measured_rates and not isinstance(config.cost_model, CostModel))
        self._estimates: list[Estimate] = []
        self._comparing: Meeting | None = None  # of the last step with shares

    def step(self, *args: Any, distca_documents: Sequence[PackedDocuments] | None = None, **kwargs: Any) -> Any:
        """Run a step, as torch's schedules do.

        Args:
            args: ``input_ids``, (n_microbatches * batch, tokens); only the first stage needs them.
            distca_documents: documents of each micro-batch; by default they are read from ``position_ids``.
            kwargs: ``position_ids`` of the same shape and whatever else the model takes, the same on all stages of a copy; and
                ``target``, ``losses``, ``return_outputs``, ``loss_kwargs`` as for torch.

        Raises:
            ConfigError, LayoutError: if the micro-batches are not as said here.
            DistCADesyncError: if ranks do not do the same, or not all come; names the tick, its stages and micro-batches.
        """
        self._given = distca_documents
        return super().step(*args, **kwargs)

    def run(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]], targets: Sequence[Any] | None, **more: Any
    ) -> None:
        """Run the micro-batches of a step; torch calls it."""
        if self._crew is None:
            _check_session(self._session)
            self._crew = meet(self._pipeline_stage, self._session, self._facts())
        crew, self._steps = self._crew, self._steps + 1
        order = ticks(self.stage.num_stages, self.micro_batches, backward=self.trains)
        name = f"step {self._steps}"
        with crew.group.reporting(f"reading the documents of {name}"):
            _check_session(self._session)
            check_settings(self._session.config, crew.group)
            documents, shape = self._documents(args, kwargs), _one_shape(args, kwargs)
        if learns(self._steps - 1):
            self._learn_pace(crew)
        plans = self._plan(crew, documents, shape, order, name)
        with crew.group.reporting(f"connecting the stages of {name}"):
            self._connect(crew, args[0], shape)

        def forward(at: int) -> None:
            output = self.stage.forward_one_chunk(at, args[at], kwargs[at], save_forward_output=more["return_outputs"])
            self.add_loss(output, targets, at, more["loss_kwargs"])

        def backward(at: int) -> None:
            self.stage.backward_one_chunk(at, loss=self.loss(at), last_backward=at == self.micro_batches - 1)

        self._session.conductor = crew.conductor
        try:
            with tied_gradients(self._pipeline_stage, crew.group, name) if self.trains else nullcontext():
                self.figures = Step(self, crew, plans, order, documents, forward, backward).run()
                if self.trains:
                    self.stage.perform_reduce_grad(1)  # losses are scaled, not gradients
        finally:
            self._session.conductor = None
        if learns(self._steps):
            self._estimates = plans.estimates(order)

    def _documents(self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> list[Documents]:
        """The documents of each micro-batch, as this rank has them."""
        given = self._given
        if given is not None and len(given) != self.micro_batches:
            raise ConfigError(f"distca_documents are of {len(given)} micro-batches, and the schedule has {self.micro_batches}.")
        if given is not None:
            for one, packed in zip(kwargs, given, strict=True):
                one["distca_documents"] = packed
        return [_read(own, more) for own, more in zip(args, kwargs, strict=True)]

    def _connect(self, crew: Crew, first: tuple[Any, ...], shape: tuple[int, int]) -> None:
        """Tell torch what travels between stages; again where it was told of other micro-batches last."""
        stage = self._pipeline_stage
        wanted = (shape, self.micro_batches, self.trains, crew.arriving, crew.leaving, crew.seat.device)
        if stage.connected == wanted:
            return
        config = stage_model(stage).model.config.get_text_config(decoder=True)
        width = (*shape, config.hidden_size)
        tokens = torch.empty(shape, dtype=torch.long, device="meta")
        inputs = torch.empty(width, dtype=crew.arriving, device="meta", requires_grad=True)
        outputs = torch.empty((*shape, config.vocab_size) if stage.is_last else width, dtype=crew.leaving, device="meta")
        stage.expect(tokens if stage.is_first else inputs, outputs.requires_grad_())
        stage.has_backward = self.trains
        self.connect(first)
        stage.connected = wanted

    def _plan(
        self, crew: Crew, documents: Sequence[Documents], shape: tuple[int, int], order: Sequence[Tick], name: str
    ) -> StepPlans:
        """Plan all ticks: from one announcement, or from what shares of dealt batches know, for which no rank waits."""
        planner, group, keys = self._session.planner, crew.group, crew.keys
        shares = [one.dealt for one in documents if one.dealt is not None]
        place = f"{name}, {self.micro_batches} micro-batches in {self.stage.num_stages} stages"
        dealt = len(shares) == len(documents)
        with group.reporting(f"planning {place}"):
            if dealt:
                _check_shares(shares, crew)
                of_all = documents_of_shares(shares, crew.pipeline.lanes)
            else:
                requests = [(one, keys[0]) for one in documents]
                of_all = documents_of_stated(planner.announce(requests, group, place))
                _check_lanes(of_all, crew)
            costs = {key: planner.costs.of(key) for key in keys}
            plans = StepPlans(crew.pipeline, of_all, costs, self._session.config, name, self._pace)
            digest = plans.make(order)
            way, batch = (_SHARES, (*shares[0].batch, shares[0].documents)) if dealt else (_STATED, (0, 0, 0))
            facts, tied = self._facts(), checksum(stage_model(self._pipeline_stage).tied_weight)
            self._compare(crew, StepRow(way, fingerprint(facts), digest, *batch, *shape, tied), facts, place)
        return plans

    def _facts(self) -> Facts:
        """What all ranks must have in common."""
        return facts_of(stage_model(self._pipeline_stage), self._session.config, self.micro_batches, backward=self.trains)

    def _compare(self, crew: Crew, row: StepRow, facts: Facts, place: str) -> None:
        """Compare what ranks are about to do: now, or while they do it if they have shares of dealt batches."""

        def check(rows: Sequence[IntArray]) -> None:
            check_steps(crew.group, rows, facts, crew.pipeline.lanes, place)

        numbers = np.array(row, dtype=np.int64)
        if row.way == _STATED:
            check(crew.group.gather(numbers, doing=f"comparing plans of {place}"))
            return
        if self._comparing is not None:
            self._comparing.wait()
        self._comparing = crew.group.gather_async(numbers, doing=f"comparing shares of {place}", agree=check)

    def _learn_pace(self, crew: Crew) -> None:
        """Tell the other ranks what this one did beside attention in the last step, and hear it from them."""
        turns, stopwatch = len(crew.pipeline.turns), crew.seat.stopwatch
        own = row(stopwatch.kernels([one.call for one in self._estimates]), stopwatch.found(turns))
        rows = crew.group.gather(own, doing="comparing what stages did beside attention")
        self._pace.learn(rows, crew.pipeline.stages, turns, self._estimates)
        self._estimates = []


def _check_session(session: Session) -> None:
    if current_session() is not session:
        raise ConfigError("hf_distca.configure was called after this Schedule was made: make the Schedule again.")


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(batch, tokens) of a micro-batch."""
    for tensor in (*args, kwargs.get("position_ids")):
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[0]), int(tensor.shape[1])
    raise ConfigError("Schedule.step needs position_ids on every stage, (micro-batches, tokens): documents are read from them.")


def _one_shape(args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(batch, tokens) of every micro-batch."""
    shapes = {_shape(own, more) for own, more in zip(args, kwargs, strict=True)}
    if len(shapes) > 1:
        raise LayoutError(f"micro-batches of shapes {sorted(shapes)}: all of a step must have one.")
    return shapes.pop()


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Documents:
    batch, tokens = _shape(args, kwargs)
    padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    return read_documents(
        batch,
        tokens,
        packed=kwargs.get("distca_documents"),
        position_ids=positions,
        padding=None if padding is None else padding.bool(),
        training=True,
    )


def _check_shares(shares: Sequence[Dealt], crew: Crew) -> None:
    """Raises `LayoutError` if shares are not those of this rank's copy of the model."""
    copies, own = 1 + max(crew.pipeline.lanes), crew.pipeline.lanes[crew.pipeline.rank]
    for dealt in shares:
        if (dealt.ranks, dealt.rank) != (copies, own):
            raise LayoutError(
                f"this rank has the share of rank {dealt.rank} of {dealt.ranks} of {dealt}, and is in copy {own} of {copies} of "
                "the model: deal to as many ranks as there are copies, and give all stages of a copy its share."
            )


def _check_lanes(documents: Sequence[Sequence[Documents]], crew: Crew) -> None:
    """Raises `DistCADesyncError` if the stages of a copy do not have the same micro-batches."""
    first = {lane: rank for rank, lane in reversed(list(enumerate(crew.pipeline.lanes)))}
    for at, of_ranks in enumerate(documents):
        for rank, lane in enumerate(crew.pipeline.lanes):
            if not np.array_equal(of_ranks[rank].rows, of_ranks[first[lane]].rows):
                one, other = first[lane], rank
                tokens = [of_ranks[each].rows[:, 2].tolist() for each in (one, other)]
                raise DistCADesyncError(
                    f"ranks {crew.group.ranks[one]} and {crew.group.ranks[other]} are stages of one copy of the model and have "
                    f"different documents in micro-batch {at}, of {tokens[0]} and {tokens[1]} tokens. Give all stages of a "
                    "copy the same position_ids."
                )
