"""Records of runs, written without a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from hf_distca.agreement.batch_plan import BalanceTotals
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
from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

COST = CostModel.make_analytic(AttentionShape(8, 2, 64, 64, 2), device_type="cpu", tile=128)


def make_plan(lengths: list[list[int]]) -> Plan:
    return balance(Layout.from_lengths(lengths), COST, DistCAConfig(min_gain=0.0))


def documents(ranks: int, step: int) -> list[list[int]]:
    """Give the last rank one long document and the others many short ones. Later steps are more
    uneven.
    """
    short = 2 ** max(6, 11 - step)
    return [[short] * (8192 // short)] * (ranks - 1) + [[8192]]


def plan_row(step: int, ranks: int = 4) -> PlanRow:
    plan = make_plan(documents(ranks, step))
    seconds = COST.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
    before, after = (
        np.bincount(side, seconds, minlength=ranks) for side in (plan.home, plan.server)
    )
    tokens = plan.layout.query_tokens
    sent = tokens * 100
    per_rank = PerRank(
        *(
            column.tolist()
            for column in (tokens, before, after, before * 1.1, after * 1.1, sent, sent // 4)
        )
    )
    return PlanRow(step, step, per_rank, [PlanPart(json.loads(plan.to_json()), seconds.tolist())])


def steps_row(plan: PlanRow) -> StepsRow:
    ranks = plan.per_rank
    columns = {name: np.array(value) for name, value in asdict(ranks).items()}
    tally = BalanceTotals(
        micro_batches=1,
        moved=1,
        largest_tokens=columns["tokens"].max(),
        mean_tokens=columns["tokens"].mean(),
        planning_ms=2.0,
        estimated_before=columns["estimated_before"].max(),
        estimated_after=columns["estimated_after"].max(),
        estimated_mean=columns["estimated_before"].mean(),
        measured_before=columns["measured_before"].max(),
        measured_after=columns["measured_after"].max(),
        measured_mean=columns["measured_after"].mean(),
        busiest_bytes=columns["sent_bytes"].max(),
        layers=2,
        own_seconds=columns["measured_after"][0],
        elapsed_seconds=columns["measured_after"][0] * 3,
        between_bytes=columns["between_bytes"].max(),
        node_layers=2,
    )
    return StepsRow(plan.step, asdict(tally), ranks, 5.0 - plan.step / 10, ["cpu"])


RUN = RunRow(
    step=0,
    started="2026-11-22T06:00:00+00:00",
    ranks=4,
    nodes=2,
    device="cpu (x86_64)",
    model={"type": "llama", "num_hidden_layers": 2},
    settings={"tolerance": 0.01, "cost_model": "analytic"},
    training={"max_steps": 4},
    versions={"torch": "2.13.0"},
)


def some_rows(ranks: int = 4, steps: int = 4) -> list[Row]:
    rows: list[Row] = [replace(RUN, ranks=ranks)]
    for step in range(1, steps + 1):
        plan = plan_row(step, ranks)
        rows += [plan, steps_row(plan)]
    rows.insert(3, WarningRow(2, "something <b>to act on</b>"))
    return rows


def write_record(folder: Path, rows: Sequence[Row | str]) -> Path:
    """Write rows, or lines as they are, to the record of a run."""
    folder.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else write_row(row) for row in rows]
    (folder / RECORD_NAME).write_text("".join(f"{line}\n" for line in lines))
    return folder
