"""`Recorder`, which writes the record of a run into its folder, for `hf-distca report`.

It writes when the Trainer logs. It writes only facts that rank 0 already has, so it needs no
collective, and reads nothing from a device.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from errno import ELOOP, ENXIO
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments

from hf_distca.agreement.batch_plan import BalanceTotals, MicroBatchPlan, RunningMicroBatch
from hf_distca.agreement.record_rows import (
    RECORD_NAME,
    PerRank,
    PlanPart,
    PlanRow,
    Row,
    RunRow,
    StepsRow,
    WarningRow,
    write_row,
)
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.processes import LOG
from hf_distca.integration.session import Session
from hf_distca.package_versions import list_versions

_TRAINING_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "bf16",
    "fp16",
    "seed",
)
_COUNTS = {"tokens", "sent_bytes", "between_bytes"}  # the fields of `PerRank` that are not seconds
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "sliding_window",
)
# Plans of the worst micro-batches are written until they take this many bytes: a few hundred steps
# with 8 ranks, a few steps with 512.
_MAX_PLAN_BYTES = 1_000_000
_REASONS: dict[int | None, str] = {ELOOP: "it is a link", ENXIO: "it is a pipe or a socket"}


class Recorder(logging.Filter):
    """Writes the record of a training on rank 0.

    It records warnings as a logging filter that lets all messages pass. It is not a handler,
    because Python prints warnings by itself only if there is no handler. With a handler, warnings
    would be missing on the console in scripts that set up no logging.

    Args:
        folder: folder of the record.
        session: session whose micro-batches are recorded.
        every_plan: whether to write all plans. If False, only the plans of the first micro-batch
            and, for each log, of its worst micro-batch are written.
    """

    def __init__(self, folder: Path, session: Session, *, every_plan: bool) -> None:
        super().__init__()
        self._path = folder / RECORD_NAME
        self._session = session
        self._every_plan = every_plan
        self._first_number = session.planner.number
        # Sums since rows were last written.
        self._totals = BalanceTotals()
        self._figures = np.zeros(())
        # Imbalance (slowest rank / mean, in estimated seconds) and plan of the worst micro-batch.
        self._worst_plan: tuple[float, RunningMicroBatch] | None = None
        self._plan_bytes = 0
        self._has_failed = False

    def start(
        self,
        args: TrainingArguments,
        step: int,
        model: torch.nn.Module | None,
        replaced_imbalance: float | None = None,
    ) -> None:
        """Begin the record after `step` steps. A resumed training appends to the existing file."""
        session, cost = self._session, self._session.config.cost_model
        run = RunRow(
            step=step,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=session.rank_count,
            nodes=session.node_count,
            device=torch.cuda.get_device_name(args.device)
            if args.device.type == "cuda"
            else f"{args.device.type} ({machine()})",
            model=_describe_model(model),
            settings={**asdict(session.config), "cost_model": str(getattr(cost, "name", cost))},
            training={name: getattr(args, name, None) for name in _TRAINING_FIELDS},
            versions=list_versions(),
            replaced_imbalance=replaced_imbalance,
        )
        self._append_rows([run], mode="a" if step else "w")
        session.planner.history.observer = self._add_micro_batch
        LOG.addFilter(self)

    def write_steps(self, step: int, loss: object = None) -> None:
        """Write a row after `step` steps. The row has the sums since the last row of this kind, and
        the loss if it is a finite number.
        """
        if not self._totals.micro_batches:
            return
        worst = [] if self._worst_plan is None else [self._make_plan_row(self._worst_plan[1])]
        counts = StepsRow(
            step,
            asdict(self._totals),
            _make_per_rank(self._figures),
            loss if isinstance(loss, float) and math.isfinite(loss) else None,
            list(self._session.kernel_names),
            self._session.planner.costs.learned_corrections,
        )
        self._append_rows([*worst, counts])
        self._totals = BalanceTotals()
        self._figures = np.zeros(())
        self._worst_plan = None

    def stop(self) -> None:
        """Stop recording."""
        self._session.planner.history.observer = None
        LOG.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Record a warning, and let every message pass."""
        if record.levelno >= logging.WARNING:
            self._append_rows([WarningRow(self._session.planner.history.step, record.getMessage())])
        return True

    def _add_micro_batch(self, micro_batch: RunningMicroBatch, totals: BalanceTotals) -> None:
        # Skip micro-batches of an evaluation before the training.
        if micro_batch.number <= self._first_number or self._has_failed:
            return
        self._totals += totals
        self._figures = self._figures + _sum_figures(micro_batch.plans)
        imbalance = totals.estimated_before / max(totals.estimated_mean, 1e-30)
        if self._every_plan or not self._plan_bytes:
            self._append_rows([self._make_plan_row(micro_batch)])
        elif self._plan_bytes < _MAX_PLAN_BYTES and (
            self._worst_plan is None or imbalance > self._worst_plan[0]
        ):
            self._worst_plan = imbalance, micro_batch

    def _make_plan_row(self, micro_batch: RunningMicroBatch) -> PlanRow:
        return PlanRow(
            micro_batch.step,
            micro_batch.number - self._first_number,
            _make_per_rank(_sum_figures(micro_batch.plans)),
            [
                PlanPart(
                    json.loads(plan.plan.to_json()), plan.task_seconds.tolist(), plan.ranks.speeds
                )
                for plan in micro_batch.plans
            ],
        )

    def _append_rows(self, rows: Sequence[Row], mode: str = "a") -> None:
        """Append rows. If writing fails, the run goes on without a record."""
        if self._has_failed:
            return
        lines = [write_row(row) + "\n" for row in rows]
        self._plan_bytes += sum(
            len(line) for row, line in zip(rows, lines, strict=True) if isinstance(row, PlanRow)
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, mode, encoding="utf-8", opener=_open_own_file) as file:
                if file.tell() and not _ends_with_a_line(self._path):
                    file.write("\n")  # an earlier training was killed while it wrote its last line
                file.writelines(lines)
        except OSError as error:
            self._has_failed = True
            LOG.warning(
                "no record for `hf-distca report` is kept: %s cannot be written (%s).",
                self._path,
                _REASONS.get(error.errno, error.strerror),
            )


def _open_own_file(path: str, flags: int) -> int:
    """Open a file. Raise for a link. Also raise for a pipe, because opening a pipe would wait for a
    reader.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _sum_figures(plans: Sequence[MicroBatchPlan]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the sums of figures over plans, (figures, ranks), in the order of the fields of
    `PerRank`.
    """
    rows = []
    for index, plan in enumerate(plans):
        # Plans for several kinds of layers have the same tokens, so tokens are counted only once
        # for each nano-batch.
        is_counted = plan.key.nano in {other.key.nano for other in plans[:index]}
        figures = (
            plan.plan.layout.query_tokens * (not is_counted),
            *(plan.estimated_before, plan.estimated_after),
            *(plan.measured_before, plan.measured_after),
            *(plan.sent_bytes, plan.between_bytes),
        )
        rows.append(np.stack(figures).astype(np.float64))
    return np.asarray(np.sum(rows, axis=0), dtype=np.float64)


def _make_per_rank(figures: np.ndarray[Any, np.dtype[np.float64]]) -> PerRank:
    return PerRank(
        **{
            field.name: row.astype(np.int64 if field.name in _COUNTS else np.float64).tolist()
            for field, row in zip(fields(PerRank), figures, strict=True)
        }
    )


def _describe_model(model: torch.nn.Module | None) -> dict[str, Any]:
    """Find the first submodel that asks for distca, and return its type, sizes and dtype."""
    for config in find_distca_configs(model)[:1]:
        sizes = {name: getattr(config, name, None) for name in _SIZES}
        known = {name: size for name, size in sizes.items() if size is not None}
        return {"type": config.model_type, **known, "dtype": str(getattr(model, "dtype", ""))}
    return {}
