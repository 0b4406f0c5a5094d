"""Rows of a run's record: `DistCACallback` writes them into the run folder, one
JSON object a line, and the page reads them.

Arrays have one number per rank of the attention group of rank 0. Seconds are of attention kernels,
forward and backward; bytes are those that a rank sent. "Before" means if every rank computed its
own attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, get_origin, get_type_hints

import numpy as np

from hf_distca.agreement.history import Tally
from hf_distca.errors import PlanError, ReportError
from hf_distca.schedule.plan import Plan

__all__ = [
    "RECORD_NAME",
    "PerRank",
    "PlanPart",
    "PlanRow",
    "Row",
    "RunRow",
    "StepsRow",
    "WarningRow",
    "is_number",
    "read_json",
    "read_row",
    "write_row",
]

RECORD_NAME = "_distca_run.jsonl"  # `Trainer.push_to_hub` leaves out what begins so
_LARGEST = 1e100  # no sum of such numbers is infinite
_DIGITS = 5  # significant ones of what is estimated or measured


@dataclass(frozen=True)
class PerRank:
    """Figures of each rank."""

    tokens: list[float]
    estimated_before: list[float]
    estimated_after: list[float]
    measured_before: list[float]
    measured_after: list[float]
    sent_bytes: list[float]
    between_bytes: list[float]  # of these, to other nodes

    def __post_init__(self) -> None:
        columns = [getattr(self, column.name) for column in fields(self)]
        numbers = [value for column in columns for value in column]
        if len({len(column) for column in columns}) != 1 or not numbers or not all(map(is_number, numbers)):
            raise ValueError("figures by rank are lists of numbers, of one length")


@dataclass(frozen=True)
class RunRow:
    """The beginning of a training.

    Attributes:
        step: optimizer steps that were done before.
        started: time, in UTC.
        ranks, nodes: numbers of ranks and nodes of the attention group; 0 nodes if unknown.
        device: device of rank 0.
        model: its type, shape and dtype.
        settings: the fields of `DistCAConfig`.
        training: the training arguments that define a micro-batch.
        versions: versions of packages.
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


@dataclass(frozen=True)
class StepsRow:
    """Micro-batches that were counted since the previous row.

    Attributes:
        step: optimizer steps that are done.
        tally: the fields of a `Tally`, from which the figures of the log are made.
        per_rank: sums over the micro-batches.
        loss: the logged loss; None if none was logged.
        kernels: kernels of attention.
        rates: rates of the plans: learned factors by kind of layer, and ranks' speeds.
    """

    step: int
    tally: dict[str, float]
    per_rank: PerRank
    loss: float | None = None
    kernels: list[str] = field(default_factory=list)
    rates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanPart:
    """A plan of a micro-batch, which has several with nano-batches or several kinds of layers.

    Attributes:
        plan: as `Plan.to_json` writes it.
        seconds: estimated, of each of its tasks, on a rank of speed 1.
        speeds: of the ranks, None if all are alike.
    """

    plan: dict[str, Any]
    seconds: list[float]
    speeds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not all(map(is_number, self.seconds)):
            raise TypeError("the seconds of a plan are a list of numbers")
        if self.speeds is not None and not all(is_number(speed) and speed > 0 for speed in self.speeds):
            raise TypeError("the speeds of ranks are a list of positive numbers")

    def read(self) -> Plan:
        """Read the plan.

        Raises:
            LayoutError, PlanError: if it is not a plan.
        """
        plan = Plan.from_json(json.dumps(self.plan))
        if len(self.seconds) != len(plan.document):
            raise PlanError(f"{len(self.seconds)} seconds for {len(plan.document)} tasks.")
        if self.speeds is not None and len(self.speeds) != plan.layout.world_size:
            raise PlanError(f"{len(self.speeds)} speeds for {plan.layout.world_size} ranks.")
        return plan


@dataclass(frozen=True)
class PlanRow:
    """A micro-batch with its plans.

    Attributes:
        step: step of the optimizer.
        micro_batch: its number since the training began, from 1.
        per_rank, parts: estimated and measured figures; its plans.
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
_KINDS: dict[str, type[Row]] = {"run": RunRow, "steps": StepsRow, "plan": PlanRow, "warning": WarningRow}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TALLY = {figure.name for figure in fields(Tally)}


def write_row(row: Row) -> str:
    """Format a row as a line without its end; floats are rounded to five digits."""
    return json.dumps({"row": _NAMES[type(row)], **_rounded(asdict(row))}, separators=(",", ":"), default=_plain)


def read_row(line: str, name: str) -> Row | None:
    """Read what `write_row` wrote; None for a kind of row that this version does not know.

    Args:
        line: the text.
        name: name of the file and the line, for errors.

    Raises:
        ReportError: if it is not a row.
    """
    data = read_json(line, name)
    if not isinstance(data, dict) or not isinstance(data.get("row"), str):
        raise ReportError(f"{name} is no row of a record: it must be an object with the key 'row'.")
    kind = _KINDS.get(data.pop("row"))
    try:
        return None if kind is None else _row_of(kind, data)
    except (TypeError, ValueError, AttributeError) as error:
        raise ReportError(f"{name} is no row of a record: {error}.") from error


def read_json(text: str | bytes, name: str) -> Any:
    """Parse JSON; `name` appears in errors."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ReportError(f"{name} is not JSON: {error}. Move the file away to get a page without it.") from error


def _row_of(kind: type[Row], data: dict[str, Any]) -> Row:
    types = get_type_hints(kind)
    values: dict[str, Any] = {key: value for key, value in data.items() if key in types}  # a newer version may write more
    if isinstance(values.get("per_rank"), Mapping):
        values["per_rank"] = PerRank(**values["per_rank"])
    if kind is PlanRow:
        values["parts"] = [PlanPart(**part) for part in values.get("parts", [])]
    for name, value in values.items():
        expected = types[name] if isinstance(types[name], UnionType) else get_origin(types[name]) or types[name]
        if isinstance(value, bool) or not isinstance(value, expected):
            raise TypeError(f"{name}={str(value)[:60]!r} is not what stands there")
    if not 0 <= values.get("step", 0) <= _LARGEST or not all(map(is_number, values.get("tally", {}).values())):
        raise ValueError("its step is below 0, or its tally is not of numbers")
    if absent := _TALLY - values.get("tally", dict.fromkeys(_TALLY)).keys():
        raise ValueError(f"its tally has no {', '.join(sorted(absent))}")
    if (tally := values.get("tally")) and not 0 <= tally["moved"] <= tally["micro_batches"]:
        raise ValueError(f"work was moved in {tally['moved']} of its {tally['micro_batches']} micro-batches")
    if not all(isinstance(kernel, str) for kernel in values.get("kernels", ())):
        raise TypeError("its kernels are not names")
    return kind(**values)


def is_number(value: object) -> bool:
    """Return whether a value can be drawn: it is no NaN, and neither infinite nor near it."""
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
