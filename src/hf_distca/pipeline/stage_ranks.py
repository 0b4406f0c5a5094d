"""The ranks of all stages: checks that they agree, before the first step and before every step.

Each rank sends a few numbers; one of them is a fingerprint of all facts that must be equal on all
ranks. Only if fingerprints differ do ranks exchange the facts themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_distca.agreement.announce import (
    SharedSettings,
    check_equal,
    check_shared_settings,
    hash_settings,
)
from hf_distca.agreement.dealt_share import DealtShare
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, LayoutError, UnsupportedError
from hf_distca.integration.processes import find_data_parallel_ranks
from hf_distca.integration.session import Session
from hf_distca.pipeline.borrowed_pipelining import find_whole_mesh
from hf_distca.pipeline.stage_attention import LayerKindRecorder, StageAttention
from hf_distca.pipeline.stage_models import TIED
from hf_distca.pipeline.stages import Stage
from hf_distca.pipeline.tick_calls import DTYPES, LayerKind
from hf_distca.pipeline.ticks import Pipeline, merge_calls
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.schedule.layout import IntArray

__all__ = [
    "StepRow",
    "check_shares_of_copy",
    "check_steps",
    "checksum",
    "find_ranks",
]

_SAME = (
    ". Give all ranks the same model, settings and micro-batches, or shares of one data set in one"
    " order, and call the same of Schedule.step and Schedule.eval, train() and eval() on all of"
    " them."
)
_TOKENS = 16  # of the forward in which a stage's kinds of attention are found
_ODD = -0x61C8864680B583EB  # 2**64 by the golden ratio, as an int64
_CHUNK = 1 << 22  # elements that are multiplied at once
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class StageFacts(NamedTuple):
    """Facts about a rank's stage that it sends when ranks meet.

    Attributes:
        stage: number of the stage.
        copy: the first rank of this copy of the model.
        dtype: index in `DTYPES` of the dtype of the hidden states that the stage hands on.
        trained: whether its copy of a tied weight is trained; None if it has none.
        kinds: `LayerKind.numbers` of its calls of attention.
    """

    stage: int
    copy: int
    dtype: int
    trained: bool | None
    kinds: list[list[int | float | None]]

    def row(self) -> IntArray:
        """Return the facts as int64 numbers, which ranks gather: JSON in bytes."""
        text = json.dumps(self).encode()
        return np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype=np.int64)


class StepRow(NamedTuple):
    """Numbers that a rank sends about a step before it begins.

    Ranks that load batches in another way read them as an `Announcement`.

    Attributes:
        way: code of the way in which the batch was loaded; no announcement begins with it.
        facts: `hash_settings` of all that must be equal on all ranks.
        documents: checksum of the documents of a dealt global batch; 0 for other batches.
        plans: digest of the plans.
        batch, tokens: shape of a micro-batch, which the stages of a copy of the model must have in
            common.
        tied: `checksum` of this stage's copy of a tied weight, 0 if it has none.
        leaves: 0, for no stage leaves.
    """

    way: int
    facts: int
    documents: int
    plans: int
    batch: int
    tokens: int
    tied: int
    leaves: int = 0


def find_ranks(
    stage: Stage, session: Session, facts: SharedSettings
) -> tuple[Pipeline, StageAttention]:
    """Learn about all stages, together with their ranks; `facts` are this rank's values of all that
    must be equal.

    Returns:
        The stage of each rank, and the attention of this stage, computed together with the others.

    Raises:
        ConfigError, DistCADesyncError: if the ranks are not the stages of copies of one model.
        UnsupportedError: if attention is computed in a way that stages cannot share, or settings
            ask for what they cannot do.
    """
    group = AttentionGroup.of(
        _members(stage, session), timeout_seconds=session.config.timeout_seconds
    )
    fingerprints = group.gather(
        np.array([hash_settings(facts)]), doing="comparing the models of the pipeline stages"
    )
    check_shared_settings(
        group,
        np.concatenate(fingerprints),
        facts,
        "ranks do not run the same in the first step",
        _SAME,
    )
    _check_settings(session.config, group)
    with group.reporting(f"looking at the attention of stage {stage.stage_index}"):
        kinds, dtype = _find_kinds(stage, session)
    copy = dist.get_process_group_ranks(stage.group or dist.GroupMember.WORLD)[0]
    weight = stage.unwrapped.tied_weight
    trained = None if weight is None else weight.requires_grad
    facts_of_stage = StageFacts(
        stage.stage_index, copy, DTYPES.index(dtype), trained, [kind.numbers for kind in kinds]
    )
    rows = group.gather(facts_of_stage.row(), doing="meeting the other pipeline stages")
    pipeline = _pipeline(
        [StageFacts(*json.loads(row.tobytes())) for row in rows], group, stage.device.type
    )
    with group.reporting("connecting the pipeline stages"):
        # NCCL asks that all ranks take part if messages between some are the first thing in a
        # group. All are here now.
        dist.all_reduce(torch.zeros(1, device=stage.device), group=stage.group)
    with group.reporting("measuring costs"):
        for kind in dict.fromkeys(call.kind for call in pipeline.calls):
            session.learn_cost(kind.key, kind.make_empty_operands(stage.device).q_THD, group)
    return pipeline, StageAttention(session, group, stage.device)


def _check_settings(config: DistCAConfig, group: AttentionGroup) -> None:
    """Raise `UnsupportedError` if settings ask for something that stages cannot do."""
    if AttentionGroup.observer is not None:
        raise UnsupportedError(
            "stages of a pipeline serve each other while they are idle, and no other servers: leave"
            " these out."
        )
    if config.group_size not in (None, group.size):
        raise UnsupportedError(
            f"group_size={config.group_size}, but all stages of all copies of a model share"
            f" attention, {group.size} ranks here: leave it out of DistCAConfig, or give"
            " configure() the group of the ranks with all stages of some copies."
        )
    if config.documents_span_ranks:
        raise UnsupportedError(
            "documents_span_ranks=True: stages do not read from position_ids which document goes on"
            " where. Leave it out of DistCAConfig, and give Schedule.step distca_documents with"
            " numbers (shares of hf_distca.document_shares)."
        )


def _members(stage: Stage, session: Session) -> dist.ProcessGroup | Members | None:
    """Return the ranks that share attention: of all stages and all copies of the model, with equal
    heads.
    """
    if session.given_group is not None and not isinstance(session.given_group, DeviceMesh):
        return session.given_group
    whole = session.given_group or find_whole_mesh(stage.mesh)
    return find_data_parallel_ranks(
        whole, extra_dimension=(stage.mesh.mesh_dim_names or ("pp",))[0]
    )


def _find_kinds(stage: Stage, session: Session) -> tuple[list[LayerKind], torch.dtype]:
    """Find the kinds of a stage's calls of attention and the dtype of its output, from a forward of
    a few tokens.
    """
    model, device, finder = stage.unwrapped, stage.device, LayerKindRecorder(session)
    positions = torch.arange(_TOKENS, device=device)[None]
    inputs = torch.zeros_like(positions)
    if not stage.is_first:
        inputs = torch.zeros(
            (1, _TOKENS, model.width), device=device, dtype=next(model.parameters()).dtype
        )
    devices = [device] if device.type != "cpu" else []
    session.work_provider = finder
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
        ):
            dtype: torch.dtype = stage.submod(inputs, position_ids=positions).dtype
    finally:
        session.work_provider = None
        stage.clear_runtime_states()  # and shard weights again
    return finder.kinds, dtype


def _pipeline(stages: Sequence[StageFacts], group: AttentionGroup, device: str) -> Pipeline:
    """Combine the facts that all ranks sent about their stages."""
    depth, copies = (
        1 + max(facts.stage for facts in stages),
        sorted({facts.copy for facts in stages}),
    )
    expected = [(copy, stage) for copy in copies for stage in range(depth)]
    if sorted((facts.copy, facts.stage) for facts in stages) != expected:
        by_rank = ", ".join(
            f"rank {rank}: stage {facts.stage}"
            for rank, facts in zip(group.ranks, stages, strict=True)
        )
        raise ConfigError(
            f"ranks that share attention are not the stages of whole models: {by_rank}. Give"
            " configure() a group or a mesh with all stages of all data-parallel copies, or none."
        )
    if {True, False} <= {facts.trained for facts in stages}:
        by_rank = ", ".join(
            f"rank {rank} (stage {facts.stage}): {'trained' if facts.trained else 'frozen'}"
            for rank, facts in zip(group.ranks, stages, strict=True)
            if facts.trained is not None
        )
        raise ConfigError(
            "embedding and head are one weight, of which the first and the last stage have a copy,"
            f" and only one of them is trained: {by_rank}. Freeze it before split, or"
            " stage.submod.tied_weight on both stages."
        )
    by_stage = {facts.stage: facts for facts in stages}
    for rank, facts in zip(group.ranks, stages, strict=True):
        if facts.kinds != by_stage[facts.stage].kinds:
            raise DistCADesyncError(
                f"rank {rank} has other attention on stage {facts.stage} than other copies of it:"
                " give all one model."
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


def checksum(weight: torch.Tensor | None) -> int:
    """Return a 60-bit checksum of a weight's bits and their places; of a sharded weight, of this
    rank's shard.

    It is 0 only for None. Sums of bits times numbers without a pattern are equal by chance only:
    neither permutations nor drifts that cancel are lost.
    """
    if weight is None:
        return 0
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    bits = local.detach().contiguous().view(_BITS[local.element_size()]).flatten()
    factors = torch.arange(1, min(len(bits), _CHUNK) + 1, device=bits.device) * _ODD
    factors = (factors ^ (factors >> 29)) * _ODD
    sums = torch.stack([(part * factors[: len(part)]).sum() for part in torch.split(bits, _CHUNK)])
    digest = hashlib.sha256(sums.cpu().numpy().tobytes()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % ((1 << 60) - 1)


def check_shares_of_copy(shares: Sequence[DealtShare], pipeline: Pipeline) -> None:
    """Raise `LayoutError` unless shares are those of this rank's copy of the model."""
    copies, copy = 1 + max(pipeline.copies), pipeline.copies[pipeline.rank]
    for dealt in shares:
        if (dealt.ranks, dealt.rank) != (copies, copy):
            raise LayoutError(
                f"this rank has the share of rank {dealt.rank} of {dealt.ranks} of {dealt}, and is"
                f" in copy {copy} of {copies} of the model: deal to as many ranks as there are"
                " copies, and give all stages of a copy its share."
            )


def check_steps(
    group: AttentionGroup,
    rows: Sequence[IntArray],
    facts: SharedSettings,
    copies: Sequence[int],
    place: str,
) -> None:
    """Compare the `StepRow` of each rank. `copies` gives each rank's copy of the model.

    Raises:
        DistCADesyncError: if ranks do not run the same, if stages of one copy of the model have
            micro-batches of different shapes, or if their copies of a tied weight differ.
    """
    if any(len(row) != len(StepRow._fields) or row[0] != rows[0][0] for row in rows):
        raise DistCADesyncError(
            f"some ranks have shares of dealt batches in {place} and others have not: give"
            " Schedule.step distca_documents on all of them, or on none."
        )
    steps = [StepRow(*row.tolist()) for row in rows]
    check_shared_settings(
        group,
        np.array([step.facts for step in steps]),
        facts,
        f"ranks do not run the same in {place}",
        _SAME,
    )
    arguments = "give document_shares the same documents, seed and other arguments on every rank"
    documents, plans = (
        np.array(column)
        for column in zip(*((step.documents, step.plans) for step in steps), strict=True)
    )
    check_equal(
        group, documents, "documents in the same global batch (as checksums)", place, arguments
    )
    for copy in sorted(set(copies)):
        members = {
            rank: step
            for rank, step, its_copy in zip(group.ranks, steps, copies, strict=True)
            if its_copy == copy
        }
        _check_copy(members, facts, place)
    check_equal(group, plans, "plans (as digests)", place, "use one version of hf_distca and numpy")


def _check_copy(steps: Mapping[int, StepRow], facts: SharedSettings, place: str) -> None:
    """Compare the rows that the stages of one copy of the model sent, by rank."""
    shapes = {rank: (step.batch, step.tokens) for rank, step in steps.items()}
    first = min(shapes)
    for rank, shape in shapes.items():
        if shape != shapes[first]:
            raise DistCADesyncError(
                f"ranks {first} and {rank} are stages of one copy of the model and have"
                f" micro-batches of shapes {shapes[first]} and {shape} in {place}. Give all stages"
                " of a copy the same position_ids."
            )
    checksums = {rank: step.tied for rank, step in steps.items() if step.tied}
    if len(set(checksums.values())) > 1:
        holders = " and ".join(map(str, checksums))
        raise DistCADesyncError(
            f"{facts[TIED]} are one weight, of which ranks {holders} have a copy each, and the"
            f" copies differ in {place}. Make all stages from one model, give their optimizers the"
            " same settings, and clip with hf_distca.pipeline.clip_grad_norm_, which takes the"
            " norm over all stages."
        )
