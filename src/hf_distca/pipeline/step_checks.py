"""Checks, before every step, that the stages of all ranks agree.

Each rank sends a few numbers. One of them is a hash of all facts that must be equal on all ranks.
Ranks exchange the facts themselves only if the hashes differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hf_distca.agreement.announce import (
    AnnouncedDocuments,
    SharedSettings,
    check_equal,
    check_shared_settings,
)
from hf_distca.agreement.dealt_share import DealtShare
from hf_distca.errors import DistCADesyncError, LayoutError
from hf_distca.pipeline.stage_models import TIED
from hf_distca.pipeline.ticks import Pipeline
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import IntArray, Layout

_SAME = (
    ". Give all ranks the same model, the same settings, and the same micro-batches (or shares of"
    " one data set in one order). Make the same calls to Schedule.step, Schedule.eval, train() and"
    " eval() on all ranks."
)
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as an int64
_CHUNK = 1 << 22  # elements that are multiplied at once
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class StepRow(NamedTuple):
    """Numbers that a rank sends about a step before it begins.

    Attributes:
        facts: `hash_settings` of all facts that must be equal on all ranks.
        plans: digest of the plans.
        batch, tokens: shape of a micro-batch, which must be equal on all stages of a copy of the
            model.
        tied: checksum of this stage's copy of a tied weight; 0 without such a copy.
    """

    facts: int
    plans: int
    batch: int
    tokens: int
    tied: int


def compute_checksum(weight: torch.Tensor | None) -> int:
    """Return a 60-bit checksum of the elements of a weight and their order. If the weight is
    sharded, only this rank's shard counts. The checksum of None is 0.

    The bits of each element are multiplied by a pseudo-random number that depends on its place. So
    the checksum also changes if elements change places, or if changes of elements add up to 0.
    """
    if weight is None:
        return 0
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    bits = local.detach().contiguous().view(_BITS[local.element_size()]).flatten()
    factors = torch.arange(1, min(len(bits), _CHUNK) + 1, device=bits.device) * _ODD
    factors = (factors ^ (factors >> 29)) * _ODD
    sums = torch.stack([(part * factors[: len(part)]).sum() for part in torch.split(bits, _CHUNK)])
    digest = hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()
    return 1 + int(digest[:16], 16) % ((1 << 60) - 1)


def check_shares_of_copy(shares: Sequence[DealtShare], pipeline: Pipeline) -> None:
    """Raise `LayoutError` unless `shares` belong to this rank's copy of the model."""
    copies = 1 + max(pipeline.copies)
    copy = pipeline.copies[pipeline.rank]
    for dealt in shares:
        if (dealt.ranks, dealt.rank) != (copies, copy):
            raise LayoutError(
                f"this rank got share {dealt.rank} of {dealt.ranks} of {dealt}, but it belongs to"
                f" copy {copy} of {copies} of the model (both count from 0). Deal documents to as"
                " many ranks as there are copies, and give all stages of a copy its share."
            )


def check_facts(
    group: AttentionGroup, hashes: Sequence[int], facts: SharedSettings, label: str
) -> None:
    """Compare the `hash_settings` of all ranks' facts. `facts` are this rank's facts.
    If hashes differ, raise a `DistCADesyncError` that names the facts that differ.
    """
    description = f"ranks do not agree in {label}"
    check_shared_settings(group, np.array(hashes), facts, description, _SAME)


def check_steps(
    group: AttentionGroup,
    rows: Sequence[IntArray],
    facts: SharedSettings,
    copies: Sequence[int],
    label: str,
) -> None:
    """Compare the `StepRow` of each rank. `copies` gives each rank's copy of the model.

    Raises:
        DistCADesyncError: if ranks run different steps, if stages of one copy of the model have
            micro-batches of different shapes, if their copies of a tied weight differ, or if ranks
            have different plans.
    """
    steps = [StepRow(*row.tolist()) for row in rows]
    check_facts(group, [step.facts for step in steps], facts, label)
    for copy in sorted(set(copies)):
        members = {
            rank: step
            for rank, step, its_copy in zip(group.ranks, steps, copies, strict=True)
            if its_copy == copy
        }
        _check_copy(members, facts, label)
    plans = np.array([step.plans for step in steps])
    check_equal(group, plans, "plans (as digests)", label, "use one version of hf_distca and numpy")


def _check_copy(steps: Mapping[int, StepRow], facts: SharedSettings, label: str) -> None:
    """Check that the stages of one copy of the model agree. `steps` has the row of each rank."""
    shapes = {rank: (step.batch, step.tokens) for rank, step in steps.items()}
    first = min(shapes)
    for rank, shape in shapes.items():
        if shape != shapes[first]:
            raise DistCADesyncError(
                f"ranks {first} and {rank} are stages of one copy of the model and have"
                f" micro-batches of shapes {shapes[first]} and {shape} in {label}. Give all stages"
                " of a copy the same position_ids."
            )
    checksums = {rank: step.tied for rank, step in steps.items() if step.tied}
    if len(set(checksums.values())) > 1:
        holders = " and ".join(map(str, checksums))
        raise DistCADesyncError(
            f"{facts[TIED]} are one weight. Ranks {holders} have copies of it, which differ in"
            f" {label}. Make all stages from one model, give their optimizers the same"
            " settings, and clip gradients with hf_distca.pipeline.clip_grad_norm_, which takes the"
            " norm over all stages."
        )


def build_layout_of_copies(
    documents: AnnouncedDocuments, copies: Sequence[int], ranks: Sequence[int], micro_batch: int
) -> Layout:
    """Build a layout of the documents that ranks announced for a micro-batch or a nano-batch. In
    this layout, each copy of the model counts as one rank.

    Args:
        documents: documents of all ranks.
        copies: index of each rank's copy of the model.
        ranks: global rank of each member of the group, for errors.
        micro_batch: number of the micro-batch, for errors.

    Raises:
        DistCADesyncError: if the stages of a copy have different documents.
        LayoutError: if the documents of the copies do not fit together.
    """
    firsts = [copies.index(copy) for copy in range(1 + max(copies))]
    of_ranks = documents.split_by_rank()
    for rank, copy in enumerate(copies):
        first = firsts[copy]
        if not np.array_equal(of_ranks[first], of_ranks[rank]):
            lengths, other_lengths = (
                np.atleast_2d(of_ranks[index].T)[-1].tolist() for index in (first, rank)
            )
            raise DistCADesyncError(
                f"ranks {ranks[first]} and {ranks[rank]} are stages of one copy of the model and"
                f" have different documents in micro-batch {micro_batch}, of {lengths} and"
                f" {other_lengths} tokens. Give all stages of a copy the same position_ids."
            )
    numbers = np.concatenate([of_ranks[first] for first in firsts])
    try:
        return AnnouncedDocuments(documents.header[firsts], numbers).build_layout()
    except LayoutError as error:
        raise LayoutError(
            f"the documents that copies of the model have in micro-batch {micro_batch} do not fit"
            f" together: {error} Give all copies their shares of one data set, in one order."
        ) from error
