"""What the stages of a pipeline must have in common, compared by name, and what those of one copy of the model must.

A rank says a few numbers; one of them is a fingerprint of all facts that must be equal. Only where fingerprints differ do ranks
tell each other the facts themselves.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hf_distca.agreement.announce import check_equal
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.pipeline.split import StageModel
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import IntArray

__all__ = ["Facts", "StepRow", "check_facts", "check_steps", "checksum", "facts_of", "fingerprint"]

Facts = Mapping[str, str]

TIED = "tied weights"  # the fact that names them

_LONGEST_VALUE = 80  # characters of a fact in an error
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class StepRow(NamedTuple):
    """What a rank says of a step before it begins.

    Attributes:
        way: how the batch was loaded; it is no number that begins another announcement.
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


def facts_of(model: StageModel, config: DistCAConfig, micro_batches: int, *, backward: bool) -> dict[str, str]:
    """What all ranks must have in common in a step, by name.

    Args:
        model: of this rank's stage.
        config: the settings.
        micro_batches: of the step.
        backward: whether the step has a backward.
    """
    return {
        "the run": "step" if backward else "eval",
        "the mode of the model": "train" if model.training and model.model.training else "eval",
        "n_microbatches": str(micro_batches),
        "the version of hf-distca": version("hf-distca"),
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


def check_steps(group: AttentionGroup, rows: Sequence[IntArray], facts: Facts, lanes: Sequence[int], place: str) -> None:
    """Compare what ranks say of a step.

    Args:
        group: the ranks.
        rows: a `StepRow` of each.
        facts: of this rank.
        lanes: of each rank, which copy of the model it is a stage of.
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
    check_equal(
        group, _column([step.documents for step in steps]), "documents in the same global batch (as checksums)", place, arguments
    )
    for rank, lane in enumerate(lanes):
        other = lanes.index(lane)
        ranks = f"ranks {group.ranks[other]} and {group.ranks[rank]} are stages of one copy of the model"
        shapes = [(steps[index].batch, steps[index].tokens) for index in (other, rank)]
        if shapes[0] != shapes[1]:
            raise DistCADesyncError(
                f"{ranks} and have micro-batches of shapes {shapes[0]} and {shapes[1]} in {place}. Give all stages of a copy the "
                "same position_ids."
            )
        holders = [index for index, its in enumerate(lanes) if its == lane and steps[index].tied]
        if len({steps[index].tied for index in holders}) > 1:
            ranks = " and ".join(str(group.ranks[index]) for index in holders)
            raise DistCADesyncError(
                f"{facts[TIED]} are one weight, of which ranks {ranks} have a copy each, and the copies differ in {place}. Make "
                "all stages from one model, give their optimizers the same settings, and clip with "
                "hf_distca.pipeline.clip_grad_norm_, which takes the norm over all stages."
            )
    versions = "use one version of hf_distca and numpy"
    check_equal(group, _column([step.plans for step in steps]), "plans (as digests)", place, versions)


def _column(numbers: Sequence[int]) -> IntArray:
    return np.array(numbers, dtype=np.int64)
