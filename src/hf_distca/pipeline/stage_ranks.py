"""`find_ranks`: the ranks of all stages exchange facts about their stages before the first step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.agreement.announce import SharedSettings, hash_settings
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, UnsupportedError
from hf_distca.integration.handle import PLANNER
from hf_distca.integration.processes import find_data_parallel_ranks
from hf_distca.integration.session import Session
from hf_distca.pipeline.borrowed_pipelining import find_whole_mesh
from hf_distca.pipeline.stage_attention import LayerKindRecorder, StageAttention
from hf_distca.pipeline.stages import Stage
from hf_distca.pipeline.step_checks import check_facts
from hf_distca.pipeline.tick_calls import DTYPES, LayerKind
from hf_distca.pipeline.ticks import Pipeline, merge_calls
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.members import Members
from hf_distca.schedule.layout import IntArray

_TOKENS = 16  # tokens of the forward that records a stage's kinds of attention


class StageFacts(NamedTuple):
    """Facts that a rank sends about its stage before the first step.

    Attributes:
        stage: index of the stage.
        copy: first rank of the stage's copy of the model, as the identifier of this copy.
        dtype: index in `DTYPES` of the dtype of the hidden states that the stage hands on.
        trained: whether the tied weight on this stage is trained; None if the stage has no tied
            weight.
        kinds: `LayerKind.numbers` of each attention call of the stage.
    """

    stage: int
    copy: int
    dtype: int
    trained: bool | None
    kinds: list[list[int | float | None]]

    def to_row(self) -> IntArray:
        """Encode the facts as JSON, stored in int64 numbers that ranks can gather."""
        text = json.dumps(self).encode()
        return np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype=np.int64)


def find_ranks(
    stage: Stage, session: Session, facts: SharedSettings
) -> tuple[Pipeline, StageAttention]:
    """Exchange facts about all stages. The ranks of all stages must call this function. `facts` are
    this rank's values of the settings that must be equal on all ranks.

    Returns:
        The stages of all ranks, and the object that computes the attention of this stage.

    Raises:
        ConfigError, DistCADesyncError: if the ranks are not the stages of copies of one model.
        UnsupportedError: if the stages cannot share their attention, or if settings ask for
            something that stages cannot do.
    """
    session.planner.join_world()
    group = AttentionGroup.find_or_create(
        _find_members(stage, session), timeout_seconds=session.config.timeout_seconds
    )
    hashes = group.gather(
        np.array([hash_settings(facts)]), activity="comparing the models of the pipeline stages"
    )
    check_facts(group, [int(row[0]) for row in hashes], facts, "the first step")
    _check_settings(session.config, group)
    with group.report_errors(f"looking at the attention of stage {stage.stage_index}"):
        kinds, dtype = _find_kinds(stage, session)
    weight = stage.unwrapped.tied_weight
    facts_of_stage = StageFacts(
        stage.stage_index,
        dist.get_process_group_ranks(stage.group or dist.GroupMember.WORLD)[0],
        DTYPES.index(dtype),
        None if weight is None else weight.requires_grad,
        [kind.numbers for kind in kinds.values()],
    )
    rows = group.gather(facts_of_stage.to_row(), activity="meeting the other pipeline stages")
    pipeline = _make_pipeline(
        [StageFacts(*json.loads(row.tobytes())) for row in rows], group, stage.device.type
    )
    with group.report_errors("connecting the pipeline stages"):
        # If the first communication in a group is a message between two ranks, NCCL needs all ranks
        # of the group to take part. So begin with a collective, while all ranks are here.
        dist.all_reduce(torch.zeros(1, device=stage.device), group=stage.group)
    attention = StageAttention(session, group, stage.device, list(kinds))
    with group.report_errors("measuring costs"):
        for kind in dict.fromkeys(call.kind for call in pipeline.calls):
            attention.make_cost(kind.key, kind.make_empty_operands(stage.device).q_THD, group)
    return pipeline, attention


def _check_settings(config: DistCAConfig, group: AttentionGroup) -> None:
    """Raise `UnsupportedError` if settings ask for something that stages cannot do."""
    if AttentionGroup.observer is not None:
        raise UnsupportedError(
            "pipeline stages serve each other, and separate servers cannot take part: train without"
            " servers."
        )
    if config.group_size not in (None, group.size):
        raise UnsupportedError(
            f"group_size={config.group_size}, but the {group.size} ranks of all stages of all"
            " copies of the model share attention. Leave group_size out of DistCAConfig. For"
            " smaller groups, give configure() a group with all stages of some of the copies."
        )
    if config.documents_span_ranks:
        raise UnsupportedError(
            "documents_span_ranks=True is not supported with pipeline stages, because position_ids"
            " do not tell on which rank a document continues. Leave it out of DistCAConfig, and"
            " give Schedule.step the distca_documents of shares from hf_distca.document_shares."
        )


def _find_members(stage: Stage, session: Session) -> dist.ProcessGroup | Members | None:
    """Return the ranks that share attention. They have all stages of all copies of the model and,
    under tensor parallelism, the same heads.
    """
    given = session.given_group
    if given is not None and not isinstance(given, DeviceMesh):
        return given
    return find_data_parallel_ranks(
        given or find_whole_mesh(stage.mesh),
        extra_dimension=(stage.mesh.mesh_dim_names or ("pp",))[0],
    )


def _find_kinds(stage: Stage, session: Session) -> tuple[dict[int, LayerKind], torch.dtype]:
    """Run a forward of a few tokens. Return the kind of each attention call by the id of its
    module, and the dtype of the output.
    """
    model = stage.unwrapped
    device = stage.device
    finder = LayerKindRecorder(session)
    positions = torch.arange(_TOKENS, device=device)[None]
    inputs = positions  # the first stage reads these numbers as token ids
    if not stage.is_first:
        inputs = torch.zeros(
            (1, _TOKENS, model.width), device=device, dtype=next(model.parameters()).dtype
        )
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(
                devices=[] if device.type == "cpu" else [device], device_type=device.type
            ),
        ):
            output = stage.submod(inputs, position_ids=positions, **{PLANNER: finder})
    finally:
        stage.clear_runtime_states()  # shards the weights of FSDP again
    return finder.kinds, output.dtype


def _make_pipeline(stages: Sequence[StageFacts], group: AttentionGroup, device: str) -> Pipeline:
    """Combine the facts that all ranks sent about their stages."""
    depth = 1 + max(facts.stage for facts in stages)
    copies = sorted({facts.copy for facts in stages})
    expected = [(copy, stage) for copy in copies for stage in range(depth)]
    if sorted((facts.copy, facts.stage) for facts in stages) != expected:
        by_rank = ", ".join(
            f"rank {rank}: stage {facts.stage}"
            for rank, facts in zip(group.ranks, stages, strict=True)
        )
        raise ConfigError(
            f"the ranks that share attention do not have all stages of every model copy: {by_rank}."
            " Give configure() a group or mesh with all stages of all data-parallel copies, or give"
            " it no group."
        )
    if {True, False} <= {facts.trained for facts in stages}:
        by_rank = ", ".join(
            f"rank {rank} (stage {facts.stage}): {'trained' if facts.trained else 'frozen'}"
            for rank, facts in zip(group.ranks, stages, strict=True)
            if facts.trained is not None
        )
        raise ConfigError(
            "embedding and head are one weight. The first and the last stage have a copy of it, but"
            f" only one of them is trained: {by_rank}. Freeze the weight before split, or freeze"
            " stage.submod.tied_weight on both stages."
        )
    by_stage = {facts.stage: facts for facts in stages}
    for rank, facts in zip(group.ranks, stages, strict=True):
        if facts.kinds != by_stage[facts.stage].kinds:
            raise DistCADesyncError(
                f"stage {facts.stage} has different attention on rank {rank} and in other copies of"
                " the model: give all ranks the same model."
            )
    kinds = [
        [LayerKind.from_numbers(numbers, device) for numbers in by_stage[stage].kinds]
        for stage in range(depth)
    ]
    return Pipeline(
        stages=tuple(facts.stage for facts in stages),
        copies=tuple(copies.index(facts.copy) for facts in stages),
        rank=group.rank,
        calls=tuple(merge_calls(kinds)),
        dtypes=tuple(DTYPES[by_stage[stage].dtype] for stage in range(depth)),
    )
