"""The ranks of all stages: what they find out about each other before the first step, and what they compare before every step.

A rank says a few numbers; one of them is a fingerprint of all facts that must be equal on all ranks. Only where fingerprints
differ do ranks tell each other the facts themselves.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_distca.agreement.announce import check_equal
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, UnsupportedError
from hf_distca.integration.processes import data_parallel_group
from hf_distca.integration.session import Session
from hf_distca.pipeline.borrowed_pipelining import whole_mesh
from hf_distca.pipeline.stages import TIED, Stage, stage_model
from hf_distca.pipeline.tick_calls import DTYPES, WHY_NOT_OTHERS, CallFactory, LayerKind, StageAttention
from hf_distca.pipeline.ticks import Pipeline, joint_calls
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.schedule.layout import IntArray

__all__ = [
    "Facts",
    "PipelineRanks",
    "StepRow",
    "check_settings",
    "check_steps",
    "checksum",
    "facts_of",
    "find_ranks",
    "fingerprint",
]

Facts = Mapping[str, str]

_NO_COPY = -1  # of a tied weight
_TOKENS = 16  # of the forward in which a stage's kinds of attention are found
_LONGEST_VALUE = 80  # characters of a fact in an error
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, eq=False)
class PipelineRanks:
    """What a rank knows of all stages.

    Attributes:
        pipeline: who has which stage, and the calls of attention that stages make together.
        attention: gives this rank's calls their parts in them.
        arriving, leaving: dtypes of hidden states that travel to this stage and from it.
    """

    pipeline: Pipeline
    attention: StageAttention
    arriving: torch.dtype
    leaving: torch.dtype

    @property
    def group(self) -> AttentionGroup:
        """The ranks of all stages and copies, which share attention."""
        return self.attention.factory.group


class StageRow(NamedTuple):
    """What a rank says of its stage when ranks meet, before the kinds of its calls of attention.

    Attributes:
        stage: which stage.
        copy: the first rank of this copy of the model.
        leaving: index of the dtype that the stage puts out.
        tied: whether its copy of a tied weight is trained; -1 if it has none.
        kinds: how many calls of attention it makes.
    """

    stage: int
    copy: int
    leaving: int
    tied: int
    kinds: int


class StepRow(NamedTuple):
    """What a rank says of a step before it begins.

    Attributes:
        way: how the batch was loaded; a number that begins no other announcement.
        facts: `fingerprint` of what all ranks must have in common.
        plans: digest of the plans.
        epoch, number: of the global batch whose share the first micro-batch is; 0 of other batches.
        documents: a number that tells its documents from others; 0 of other batches.
        batch, tokens: shape of a micro-batch.
        tied: `checksum` of this stage's copy of a tied weight, 0 if it has none.
    """

    way: int
    facts: int
    plans: int
    epoch: int
    number: int
    documents: int
    batch: int
    tokens: int
    tied: int

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, tokens) of a micro-batch."""
        return self.batch, self.tokens


def find_ranks(stage: Stage, session: Session, facts: Facts) -> PipelineRanks:
    """Find out about all stages, together with their ranks.

    Args:
        stage: of this rank.
        session: of this process.
        facts: what all ranks must have in common, as this rank has it.

    Raises:
        ConfigError, DistCADesyncError: if the ranks are not the stages of copies of one model.
        UnsupportedError: if attention is computed in a way that stages cannot share, or settings ask for what they cannot do.
    """
    group = AttentionGroup.of(_members(stage, session), timeout_seconds=session.config.timeout_seconds)
    fingerprints = group.gather(np.array([fingerprint(facts)]), doing="comparing the models of the pipeline stages")
    check_facts(group, [int(row[0]) for row in fingerprints], facts, "the first step")
    check_settings(session.config, group)
    attention = StageAttention(CallFactory(session, group, stage.device))
    with group.reporting(f"looking at the attention of stage {stage.stage_index}"):
        leaving = _learn(stage, attention)
    kinds, attention.learned = attention.learned or [], None
    copy = dist.get_process_group_ranks(stage.group or dist.GroupMember.WORLD)[0]
    weight = stage_model(stage).tied_weight
    tied = _NO_COPY if weight is None else int(weight.requires_grad)
    own = StageRow(stage.stage_index, copy, DTYPES.index(leaving), tied, len(kinds))
    numbers = [*own, *(number for kind in kinds for number in kind.row())]
    rows = group.gather(np.array(numbers, dtype=np.int64), doing="meeting the other pipeline stages")
    pipeline = _pipeline(rows, group, stage.device.type)
    with group.reporting("connecting the pipeline stages"):
        # NCCL asks that all ranks take part if messages between some are the first thing in a group. All are here now.
        dist.all_reduce(torch.zeros(1, device=stage.device), group=stage.group)
    before = max(pipeline.stage - 1, 0)
    arriving = next(DTYPES[_stage_row(row).leaving] for row in rows if _stage_row(row).stage == before)
    with group.reporting("measuring costs"):
        for kind in dict.fromkeys(call.kind for call in pipeline.calls):
            session.learn_cost(kind.key, kind.no_rows(stage.device).q_THD, group)
    return PipelineRanks(pipeline, attention, arriving, leaving)


def check_settings(config: DistCAConfig, group: AttentionGroup) -> None:
    """Raises `UnsupportedError` if settings ask for what stages cannot do."""
    if config.ping_pong:
        raise UnsupportedError("pipeline stages run their layers whole: set ping_pong=False in DistCAConfig.")
    if config.group_size not in (None, group.size):
        raise UnsupportedError(
            f"group_size={config.group_size}, but all stages of all copies of a model share attention, {group.size} ranks here: "
            "leave it out of DistCAConfig, or give configure() the group of the ranks with all stages of some copies."
        )
    if config.documents_span_ranks:
        raise UnsupportedError(
            "documents_span_ranks=True: stages do not read from position_ids which document goes on where. Leave it out of "
            "DistCAConfig, and give Schedule.step distca_documents with numbers (shares of hf_distca.document_shares)."
        )


def _members(stage: Stage, session: Session) -> dist.ProcessGroup | Members | None:
    """The ranks that share attention: of all stages and all copies of the model, with equal heads."""
    if session.given is not None and not isinstance(session.given, DeviceMesh):
        return session.given
    whole = session.given or whole_mesh(stage.mesh)
    return data_parallel_group(whole, also=(stage.mesh.mesh_dim_names or ("pp",))[0])


def _learn(stage: Stage, attention: StageAttention) -> torch.dtype:
    """Let a stage show which attention it has, in a forward of a few tokens. Returns the dtype of its output."""
    model, device, session = stage_model(stage), stage.device, attention.session
    positions = torch.arange(_TOKENS, device=device)[None]
    inputs = torch.zeros_like(positions)
    if not stage.is_first:
        width = model.model.config.get_text_config(decoder=True).hidden_size
        inputs = torch.zeros((1, _TOKENS, width), device=device, dtype=next(model.parameters()).dtype)
    devices = [device] if device.type != "cpu" else []
    session.conductor = attention
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            dtype: torch.dtype = stage.submod(inputs, position_ids=positions).dtype
    finally:
        session.conductor = None
        stage.reshard()
    if dtype not in DTYPES:
        raise UnsupportedError(f"stage {stage.stage_index} puts out {dtype}. {WHY_NOT_OTHERS}")
    return dtype


def _stage_row(row: IntArray) -> StageRow:
    return StageRow(*row[: len(StageRow._fields)].tolist())


def _pipeline(rows: Sequence[IntArray], group: AttentionGroup, device: str) -> Pipeline:
    """What the rows of all ranks say together."""
    stages = [_stage_row(row) for row in rows]
    depth, copies = 1 + max(row.stage for row in stages), sorted({row.copy for row in stages})
    expected = [(copy, stage) for copy in copies for stage in range(depth)]
    if sorted((row.copy, row.stage) for row in stages) != expected:
        by_rank = ", ".join(f"rank {rank}: stage {row.stage}" for rank, row in zip(group.ranks, stages, strict=True))
        raise ConfigError(
            f"ranks that share attention are not the stages of whole models: {by_rank}. Give configure() a group or a mesh with "
            "all stages of all data-parallel copies, or none."
        )
    if len({row.tied for row in stages} - {_NO_COPY}) > 1:
        by_rank = ", ".join(
            f"rank {rank} (stage {row.stage}): {'trained' if row.tied else 'frozen'}"
            for rank, row in zip(group.ranks, stages, strict=True)
            if row.tied != _NO_COPY
        )
        raise ConfigError(
            "embedding and head are one weight, of which the first and the last stage have a copy, and only one of them is "
            f"trained: {by_rank}. Freeze it before split, or stage.submod.tied_weight on both stages."
        )
    kinds: dict[int, list[LayerKind]] = {}
    for rank, stage, row in zip(group.ranks, stages, rows, strict=True):
        numbers = row[len(stage) :].reshape(stage.kinds, -1).tolist() if stage.kinds else []
        own = [LayerKind.from_row(kind, device) for kind in numbers]
        if kinds.setdefault(stage.stage, own) != own:
            raise DistCADesyncError(
                f"rank {rank} has other attention on stage {stage.stage} than other copies of it: give all one model."
            )
    calls = joint_calls([kinds[stage] for stage in range(depth)])
    numbers_of_copies = tuple(copies.index(row.copy) for row in stages)
    return Pipeline(tuple(row.stage for row in stages), numbers_of_copies, group.rank, tuple(calls))


def facts_of(stage: Stage, config: DistCAConfig, micro_batches: int, *, backward: bool) -> dict[str, str]:
    """What all ranks must have in common in a step, by name.

    Args:
        stage: of this rank.
        config: the settings.
        micro_batches: of the step.
        backward: whether the step has a backward.
    """
    model = stage_model(stage)
    return {
        "the run": "step" if backward else "eval",
        "the mode of the model": "train" if model.training and model.model.training else "eval",
        "n_microbatches": str(micro_batches),
        "the type of device": stage.device.type,
        **model.facts,
        **{field.name: repr(getattr(config, field.name)) for field in fields(config)},
    }


def fingerprint(facts: Facts) -> int:
    """A number of 60 bits that differs where facts do."""
    return int(hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:15], 16)


def checksum(weight: torch.Tensor | None) -> int:
    """A number of 60 bits that differs where any bit of a weight does; of a sharded weight, of this rank's shard. 0 for None."""
    if weight is None:
        return 0
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    bits = local.detach().contiguous().view(_BITS[local.element_size()])
    return int(bits.sum(dtype=torch.int64).item()) % (1 << 60)


def check_facts(group: AttentionGroup, fingerprints: Sequence[int], facts: Facts, place: str) -> None:
    """Compare what ranks must have in common.

    Args:
        group: the ranks.
        fingerprints: those of all ranks.
        facts: of this rank.
        place: what the ranks are about to do, for the error.

    Raises:
        DistCADesyncError: if they differ, with the names and values of those that do.
    """
    if len(set(fingerprints)) == 1:
        return
    told: list[dict[str, str]] = [json.loads(text or "{}") for text in group.gather_text(json.dumps(facts))]
    names = dict.fromkeys(name for rank_facts in told for name in rank_facts)
    different = [name for name in names if len({rank_facts.get(name) for rank_facts in told}) > 1]
    by_name = "; ".join(f"{name} is {_values(group, [rank_facts.get(name) for rank_facts in told])}" for name in different)
    raise DistCADesyncError(
        f"ranks do not run the same in {place}: {by_name}. Give all ranks the same model, settings and micro-batches, and call "
        "the same of Schedule.step and Schedule.eval, train() and eval() on all of them."
    )


def _values(group: AttentionGroup, values: Sequence[str | None]) -> str:
    """The values, each with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        ranks.setdefault(value or "unknown", []).append(str(rank))
    return ", ".join(
        f"{textwrap.shorten(value, _LONGEST_VALUE, placeholder=' ...')} on rank {', '.join(having)}"
        for value, having in ranks.items()
    )


def check_steps(group: AttentionGroup, rows: Sequence[IntArray], facts: Facts, copies: Sequence[int], place: str) -> None:
    """Compare what ranks say of a step.

    Args:
        group: the ranks.
        rows: a `StepRow` of each.
        facts: of this rank.
        copies: of each rank, which copy of the model it is a stage of.
        place: which step, for errors.

    Raises:
        DistCADesyncError: if ranks do not run the same, if stages of one copy of the model have micro-batches of different
            shapes, or if their copies of a tied weight differ.
    """
    if any(len(row) != len(StepRow._fields) or row[0] != rows[0][0] for row in rows):
        raise DistCADesyncError(
            f"some ranks have shares of dealt batches in {place} and others have not: give Schedule.step distca_documents on all "
            "of them, or on none."
        )
    steps = [StepRow(*row.tolist()) for row in rows]
    check_facts(group, [step.facts for step in steps], facts, place)
    order = "give all ranks the shares of one data set, in one order"
    check_equal(group, _column([step.epoch for step in steps]), "epochs of their global batches", place, order)
    check_equal(group, _column([step.number for step in steps]), "global batches", place, order)
    arguments = "give document_shares the same documents, seed and other arguments on every rank"
    what = "documents in the same global batch (as checksums)"
    check_equal(group, _column([step.documents for step in steps]), what, place, arguments)
    for copy in sorted(set(copies)):
        members = {rank: step for rank, step, its_copy in zip(group.ranks, steps, copies, strict=True) if its_copy == copy}
        _check_copy(members, facts, place)
    versions = "use one version of hf_distca and numpy"
    check_equal(group, _column([step.plans for step in steps]), "plans (as digests)", place, versions)


def _check_copy(steps: Mapping[int, StepRow], facts: Facts, place: str) -> None:
    """Compare what the stages of one copy of the model say, by rank."""
    first = min(steps)
    for rank, step in steps.items():
        if step.shape != steps[first].shape:
            raise DistCADesyncError(
                f"ranks {first} and {rank} are stages of one copy of the model and have micro-batches of shapes "
                f"{steps[first].shape} and {step.shape} in {place}. Give all stages of a copy the same position_ids."
            )
    checksums = {rank: step.tied for rank, step in steps.items() if step.tied}
    if len(set(checksums.values())) > 1:
        holders = " and ".join(map(str, checksums))
        raise DistCADesyncError(
            f"{facts[TIED]} are one weight, of which ranks {holders} have a copy each, and the copies differ in {place}. "
            "Make all stages from one model, give their optimizers the same settings, and clip with "
            "hf_distca.pipeline.clip_grad_norm_, which takes the norm over all stages."
        )


def _column(numbers: Sequence[int]) -> IntArray:
    return np.array(numbers, dtype=np.int64)
