"""Rows of the record of a training run, which `DistCACallback` writes and the report page reads.

The record is a file in the run folder, with one JSON object per line. Lists have one number for
each rank of the attention group of rank 0. Seconds are the time of attention kernels in forward and
backward. Bytes are the bytes that a rank sent. In names, "before" means that every rank computes
its own attention, and "after" means that the plan is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

import numpy as np

RECORD_NAME = "_distca_run.jsonl"  # `Trainer.push_to_hub` skips names that begin with _


@dataclass(frozen=True)
class PerRank:
    """Figures by rank: each list has one number for each rank."""

    tokens: list[float]
    estimated_before: list[float]
    estimated_after: list[float]
    measured_before: list[float]
    measured_after: list[float]
    sent_bytes: list[float]
    between_bytes: list[float]  # the part of sent_bytes that goes to other nodes

    def __post_init__(self) -> None:
        # This raises if the lists differ in length, or hold anything but numbers.
        columns = np.array(astuple(self), dtype=np.float64)
        if not columns.size or not np.isfinite(columns).all():
            raise ValueError("figures by rank must be lists of finite numbers, all of one length")


@dataclass(frozen=True)
class RunRow:
    """Facts about a training run, written at its beginning.

    Attributes:
        step: number of optimizer steps before this run.
        started: time of the start, in UTC.
        ranks, nodes: numbers of ranks and nodes of the attention group; 0 nodes if unknown.
        device: device of rank 0.
        model: type, shape and dtype of the model.
        settings: the fields of `DistCAConfig`.
        training: the training arguments that define a micro-batch.
        versions: versions of packages.
        replaced_imbalance: estimated imbalance of attention in the Trainer's own batches, if
            batches of dealt documents replaced these batches; None without a replacement, or if the
            imbalance is unknown.
    """

    step: int
    started: str
    ranks: int
    nodes: int
    device: str
    model: dict[str, Any]
    settings: dict[str, Any]
    training: dict[str, Any]
    versions: dict[str, str]
    replaced_imbalance: float | None = None


@dataclass(frozen=True)
class StepsRow:
    """Sums over the micro-batches that were counted since the previous row of this kind.

    Attributes:
        step: number of optimizer steps so far.
        tally: the fields of a `BalanceTotals`, from which the logged figures are computed.
        per_rank: sums over the micro-batches.
        loss: the logged loss; None if none was logged.
        kernels: names of the attention kernels.
        rates: learned factors for each kind of layer, and learned speeds of the ranks.
    """

    step: int
    tally: dict[str, float]
    per_rank: PerRank
    loss: float | None = None
    kernels: list[str] = field(default_factory=list)
    rates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanPart:
    """A plan of a micro-batch. Each nano-batch and each kind of layer has its own plan.

    Attributes:
        plan: the plan, as `Plan.to_json` writes it.
        seconds: estimated seconds of each task on a rank of speed 1.
        speeds: speeds of the ranks; None if all are equally fast.
    """

    plan: dict[str, Any]
    seconds: list[float]
    speeds: Sequence[float] | None = None


@dataclass(frozen=True)
class PlanRow:
    """A micro-batch with its plans.

    Attributes:
        step: optimizer step of the micro-batch.
        micro_batch: number of the micro-batch since the training began, from 1.
        per_rank: estimated and measured figures.
        parts: the plans.
    """

    step: int
    micro_batch: int
    per_rank: PerRank
    parts: list[PlanPart]


@dataclass(frozen=True)
class WarningRow:
    """A warning of hf_distca on rank 0."""

    step: int
    text: str


Row = RunRow | StepsRow | PlanRow | WarningRow
_KINDS: dict[str, type[Row]] = {
    "run": RunRow,
    "steps": StepsRow,
    "plan": PlanRow,
    "warning": WarningRow,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def write_row(row: Row) -> str:
    """Format a row as a line without a line break. Floats are rounded to five digits."""
    exact = json.dumps({"row": _NAMES[type(row)], **asdict(row)}, default=_as_json)
    return json.dumps(json.loads(exact, parse_float=_round_digits), separators=(",", ":"))


def read_row(line: str) -> Row | None:
    """Read a row that `write_row` wrote. Return None for kinds of rows from a newer version.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: if `line` is not a row.
    """
    # For NaN and infinity, `json` calls `parse_constant`, and `int` raises.
    data = json.loads(line, parse_constant=int, parse_float=_read_finite)
    kind = _KINDS.get(data["row"])
    if kind is None:
        return None
    # Ignore fields that only a newer version knows.
    values = {part.name: data[part.name] for part in fields(kind) if part.name in data}
    values["step"] = int(values["step"])
    if "per_rank" in values:
        values["per_rank"] = PerRank(**values["per_rank"])
    if "parts" in values:
        values["parts"] = [PlanPart(**part) for part in values["parts"]]
    return kind(**values)


def _as_json(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _read_finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number:.20} is too large")
    return value


def _round_digits(number: str) -> float:
    return float(f"{float(number):.5g}")
