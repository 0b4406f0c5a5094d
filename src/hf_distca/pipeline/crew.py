"""The ranks of all stages meet before their first step: who has which stage, and which attention it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.agreement.announce import PlanKey
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, UnsupportedError
from hf_distca.integration.processes import data_parallel_group
from hf_distca.integration.session import Session
from hf_distca.pipeline.borrowed import whole_mesh
from hf_distca.pipeline.common import Facts, check_facts, fingerprint
from hf_distca.pipeline.conductor import Conductor, Seat
from hf_distca.pipeline.kinds import DTYPES, WHY_NOT_OTHERS, Kind
from hf_distca.pipeline.plans import Pipeline
from hf_distca.pipeline.split import Stage, stage_model
from hf_distca.pipeline.ticks import merged
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.schedule.layout import IntArray

__all__ = ["Crew", "check_settings", "meet"]

_NO_COPY = -1  # of a tied weight
_TOKENS = 16  # of the forward in which a stage's kinds of attention are found
_HEADER = 6


@dataclass(frozen=True, eq=False)
class Crew:
    """What a rank knows of all stages.

    Attributes:
        pipeline: who has which stage, and the calls of attention that stages make together.
        conductor: gives this rank's calls their places among them.
        seat: what they need besides.
        arriving, leaving: dtypes of what travels to this stage and from it.
    """

    pipeline: Pipeline
    conductor: Conductor
    seat: Seat
    arriving: torch.dtype
    leaving: torch.dtype

    @property
    def group(self) -> AttentionGroup:
        """The ranks of all stages and copies, which share attention."""
        return self.seat.group

    @property
    def keys(self) -> list[PlanKey]:
        """The plans that a tick may need."""
        return list(dict.fromkeys(turn.kind.key for turn in self.pipeline.turns))


def meet(stage: Stage, session: Session, facts: Facts) -> Crew:
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
    conductor = Conductor(session)
    stage.follow()
    with group.reporting(f"looking at the attention of stage {stage.stage_index}"):
        leaving = _learn(stage, session, conductor)
    kinds = conductor.learned or []
    conductor.learned = None
    lane = dist.get_process_group_ranks(stage.group or dist.GroupMember.WORLD)[0]
    numbers = [number for kind in kinds for number in kind.row()]
    header = [
        stage.stage_index,
        stage.num_stages,
        lane,
        DTYPES.index(leaving),
        _tied(stage),
        len(kinds),
    ]
    rows = group.gather(np.array([*header, *numbers], dtype=np.int64), doing="meeting the other pipeline stages")
    pipeline = _pipeline(rows, group, stage.device.type)
    with group.reporting("connecting the pipeline stages"):
        # NCCL asks that all ranks take part if messages between some are the first thing in a group. All are here now.
        dist.all_reduce(torch.zeros(1, device=stage.device), group=stage.group)
    conductor.seat = Seat(session, group, stage.device)
    before = max(pipeline.stage - 1, 0)
    arriving = next(DTYPES[int(row[3])] for row in rows if row[0] == before)
    crew = Crew(pipeline, conductor, conductor.seat, arriving, leaving)
    with group.reporting("measuring costs"):
        for kind in dict.fromkeys(turn.kind for turn in pipeline.turns):
            session.learn_cost(kind.key, kind.nothing(stage.device).q_THD, group)
    return crew


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


def _learn(stage: Stage, session: Session, conductor: Conductor) -> torch.dtype:
    """Let a stage show which attention it has, in a forward of a few tokens. Returns the dtype of its output."""
    model, device = stage_model(stage), stage.device
    positions = torch.arange(_TOKENS, device=device)[None]
    inputs = torch.zeros_like(positions)
    if not stage.is_first:
        width = model.model.config.get_text_config(decoder=True).hidden_size
        inputs = torch.zeros((1, _TOKENS, width), device=device, dtype=next(model.parameters()).dtype)
    devices = [device] if device.type != "cpu" else []
    session.conductor = conductor
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            output: Any = stage.submod(inputs, position_ids=positions)
    finally:
        session.conductor = None
    if output.dtype not in DTYPES:
        raise UnsupportedError(f"stage {stage.stage_index} puts out {output.dtype}. {WHY_NOT_OTHERS}")
    dtype: torch.dtype = output.dtype
    return dtype


def _tied(stage: Stage) -> int:
    """Whether this stage's copy of a tied weight is trained."""
    weight = stage_model(stage).tied_weight
    return _NO_COPY if weight is None else int(weight.requires_grad)


def _pipeline(rows: Sequence[IntArray], group: AttentionGroup, device: str) -> Pipeline:
    """What the rows of all ranks say together."""
    stages, lanes = (tuple(int(row[column]) for row in rows) for column in (0, 2))
    depth = int(rows[0][1])
    expected = sorted((lane, stage) for lane in set(lanes) for stage in range(depth))
    if sorted(zip(lanes, stages, strict=True)) != expected:
        held = ", ".join(f"rank {rank}: stage {row[0]} of {row[1]}" for rank, row in zip(group.ranks, rows, strict=True))
        raise ConfigError(
            f"ranks that share attention are not the stages of whole models: {held}. Give configure() a group or a mesh with all "
            "stages of all data-parallel copies, or none."
        )
    if len({int(row[4]) for row in rows} - {_NO_COPY}) > 1:
        held = ", ".join(
            f"rank {rank} (stage {row[0]}): {'trained' if row[4] else 'frozen'}"
            for rank, row in zip(group.ranks, rows, strict=True)
            if row[4] != _NO_COPY
        )
        raise ConfigError(
            "embedding and head are one weight, of which the first and the last stage have a copy, and only one of them is "
            f"trained: {held}. Freeze it before split, or stage.submod.tied_weight on both stages."
        )
    kinds: dict[int, list[Kind]] = {}
    for rank, stage, row in zip(group.ranks, stages, rows, strict=True):
        own = [Kind.from_row(one.tolist(), device) for one in row[_HEADER:].reshape(int(row[5]), -1)] if row[5] else []
        if kinds.setdefault(stage, own) != own:
            raise DistCADesyncError(
                f"rank {rank} has other attention on stage {stage} than other copies of it: give all one model."
            )
    order = {lane: at for at, lane in enumerate(sorted(set(lanes)))}
    turns = merged([kinds[stage] for stage in range(depth)])
    return Pipeline(stages, tuple(order[lane] for lane in lanes), group.rank, tuple(turns))
