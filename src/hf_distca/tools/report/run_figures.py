"""`Figures`: all numbers and sentences of the page, which `hf-distca report --json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import numpy as np

from hf_distca.agreement.batch_plan import BalanceTotals
from hf_distca.agreement.record_rows import (
    RECORD_NAME,
    PerRank,
    PlanRow,
    RunRow,
    StepsRow,
    WarningRow,
)
from hf_distca.errors import ReportError
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.plan import Plan
from hf_distca.tools.report.folder import RunFolder

_TALLY = [figure.name for figure in fields(BalanceTotals)]


@dataclass(frozen=True)
class PlanPiece:
    """CA-tasks of one document on one rank.

    Attributes:
        rank: rank that computes the tasks.
        home: home rank of the queries.
        document: index of the document in the micro-batch.
        length: number of the document's tokens on all ranks.
        tokens: number of queries.
        seconds: estimated seconds of one layer on this rank, forward and backward.
    """

    rank: int
    home: int
    document: int
    length: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PlanFigures:
    """The plan of a micro-batch, for a picture.

    Attributes:
        step, micro_batch: numbers of the step and the micro-batch.
        before, after: pieces of the micro-batch before and after work is moved, in order of rank
            and document.
        per_rank: see `PlanRow`.
    """

    step: int
    micro_batch: int
    before: list[PlanPiece]
    after: list[PlanPiece]
    per_rank: PerRank


@dataclass(frozen=True)
class Figures:
    """Figures of a run.

    Attributes:
        name: name of the run's folder.
        cards: the most important figures, with their meanings.
        total: figures of the whole run: the logged figures, the seconds of a step, and the
            attention seconds of the slowest ranks before and after work was moved.
        steps: for each row of the log, the step, its figures and the loss.
        per_rank: figures of each rank, summed over the run.
        plan: plan of the chosen step; None if no plan was kept.
        plan_steps: steps whose plans were kept.
        run: device, model, settings, training arguments and versions.
        warnings: warnings with their steps.
        missing: parts of the page that are missing, and how to get them.
    """

    name: str
    cards: list[tuple[str, str]]
    total: dict[str, float]
    steps: list[dict[str, float]]
    per_rank: PerRank
    plan: PlanFigures | None
    plan_steps: list[int]
    run: dict[str, dict[str, Any]]
    warnings: list[str]
    missing: list[str]


def collect(folder: RunFolder, step: int | None = None) -> Figures:
    """Collect the figures of a folder.

    Args:
        folder: the folder of a run.
        step: step whose plan is drawn; if None, the step of the most uneven micro-batch.

    Raises:
        ReportError: if there is no plan of this step, or if the record is inconsistent.
    """
    rows, plans = folder.select_rows(StepsRow), folder.select_rows(PlanRow)
    chosen = _choose_plan(folder, plans, step)
    try:
        with np.errstate(all="raise"):
            total, steps = _sum_up_run(folder, rows)
            figures = Figures(
                name=folder.path.resolve().name,
                cards=_make_cards(total),
                total=total,
                steps=steps,
                per_rank=_sum_rows(rows),
                plan=None if chosen is None else _describe_plan(chosen),
                plan_steps=sorted({plan.step for plan in plans}),
                run=_run(folder.select_rows(RunRow)[-1], rows),
                warnings=[
                    f"step {warning.step}: {warning.text}"
                    for warning in folder.select_rows(WarningRow)
                ],
                missing=[
                    f"Broken lines of {folder.path / RECORD_NAME}:"
                    f" {', '.join(map(str, folder.broken))}. A run that is killed while it"
                    " writes leaves such lines."
                ]
                * bool(folder.broken),
            )
            json.dumps(asdict(figures), allow_nan=False)  # fails if a sum is infinite
            return figures
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReportError(
            f"{folder.path / RECORD_NAME} is not a record of a run: its figures are inconsistent"
            f" ({error}). Move the file away."
        ) from error


def _sum_up_run(
    folder: RunFolder, rows: Sequence[StepsRow]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the figures of the whole run, and the figures of each row."""
    tallies = [
        BalanceTotals(**{name: float(row.tally[name]) for name in _TALLY if name in row.tally})  # type: ignore[arg-type]
        for row in rows
    ]
    whole = sum(tallies, BalanceTotals())
    runs = folder.select_rows(RunRow)
    replaced = runs[-1].replaced_imbalance
    total = {
        "step_seconds": whole.elapsed_seconds / max(rows[-1].step - runs[0].step, 1),
        **_read_logged(whole),
        "moved_micro_batches": whole.moved,
        "last_step": rows[-1].step,
        "slowest_seconds_before": whole.measured_before,
        "slowest_seconds_after": whole.measured_after,
        **({} if replaced is None else {"imbalance_estimated_replaced": replaced}),
    }
    return total, [
        {
            "step": row.step,
            **_read_logged(tally),
            **({} if row.loss is None else {"loss": row.loss}),
        }
        for row, tally in zip(rows, tallies, strict=True)
    ]


def _read_logged(tally: BalanceTotals) -> dict[str, float]:
    return {name.removeprefix("distca/"): value for name, value in tally.compute_figures().items()}


def _sum_rows(rows: Sequence[StepsRow]) -> PerRank:
    """Sum the figures of each rank over the run. If the number of ranks has changed, sum only the
    rows with the last number of ranks.
    """
    tables = [np.array(astuple(row.per_rank), dtype=np.float64) for row in rows]
    return PerRank(
        *np.sum([table for table in tables if table.shape == tables[-1].shape], axis=0).tolist()
    )


def _choose_plan(folder: RunFolder, plans: Sequence[PlanRow], step: int | None) -> PlanRow | None:
    """Choose the plan of the most uneven micro-batch in a step, or in all steps."""
    steps = sorted({plan.step for plan in plans})
    if step not in (None, *steps):
        raise ReportError(
            f"there is no plan of step {step} in {folder.path}. Plans of these steps were kept: "
            f'{", ".join(map(str, steps)) or "none"}. DistCACallback(record="all") keeps all plans.'
        )

    def compute_unevenness(row: PlanRow) -> float:
        before = row.per_rank.estimated_before
        return max(before) * len(before) / (sum(before) or 1.0)

    some = (plan for plan in plans if step in (None, plan.step))
    return max(some, key=compute_unevenness, default=None)


def _describe_plan(row: PlanRow) -> PlanFigures:
    tasks = []
    lengths = dict[int, int]()
    for part in row.parts:
        plan = Plan.from_json(json.dumps(part.plan))
        layout = plan.layout
        rows = (plan.end - plan.start) * plan.heads
        for document, end in zip(
            layout.restore_numbers(layout.document).tolist(), layout.end.tolist(), strict=True
        ):
            lengths[document] = max(lengths.get(document, 0), end)
        speeds = np.array(part.speeds or [1.0] * layout.world_size, dtype=np.float64)
        placed = [
            layout.restore_numbers(plan.document),
            plan.home,
            plan.server,
            speeds[plan.home],
            speeds[plan.server],
        ]
        # This fails if the record does not have one number of seconds for each task.
        tasks.append(np.array([*placed, rows, part.seconds], dtype=np.float64))
    documents, homes, servers, home_speeds, server_speeds, rows, seconds = np.concatenate(
        tasks, axis=1
    )
    return PlanFigures(
        row.step,
        row.micro_batch,
        _sum_pieces(lengths, [homes, documents, homes], [rows, seconds / home_speeds]),
        _sum_pieces(lengths, [servers, documents, homes], [rows, seconds / server_speeds]),
        row.per_rank,
    )


def _sum_pieces(
    lengths: dict[int, int], keys: Sequence[FloatArray], figures: Sequence[FloatArray]
) -> list[PlanPiece]:
    """Sum queries and seconds of tasks with the same rank, document and home."""
    distinct, index = np.unique(np.array(keys, dtype=np.int64), axis=1, return_inverse=True)
    sums = (np.bincount(index.ravel(), weights).tolist() for weights in figures)
    return [
        PlanPiece(rank, home, document, lengths[document], round(tokens), seconds)
        for rank, document, home, tokens, seconds in zip(*distinct.tolist(), *sums, strict=True)
    ]


def _make_cards(total: dict[str, float]) -> list[tuple[str, str]]:
    """Return three figures with their meanings: imbalance, seconds per step, and megabytes sent."""
    kind = "measured" if "imbalance_measured_before" in total else "estimated"
    befores = {
        "imbalance_estimated_replaced": "in the batches that dealing replaced (estimated)",
        "imbalance_estimated_in_order": "with documents in their original order (estimated)",
        f"imbalance_{kind}_before": f"before work was moved ({kind})",
    }
    name = next(name for name in (*befores, *total) if name in total)
    before, after = total[name], total.get(f"imbalance_{kind}_after", 1.0)
    return [
        (
            f"{before:.2f} -> {after:.2f}",
            f"slowest rank / mean attention: {befores.get(name)} -> as trained ({kind})",
        ),
        (
            f"{total['step_seconds']:.3g} s",
            f"a step, of which rank 0 spent {total['server_time_share']:.0%} in attention",
        ),
        (
            f"{total.get('exchanged_mb_per_layer', 0.0):.3g} MB",
            "sent per layer and micro-batch by the busiest rank; work was moved in"
            f" {total['moved_micro_batches']:.0f} of {total['micro_batches']:.0f} micro-batches",
        ),
    ]


def _run(run: RunRow, rows: Sequence[StepsRow]) -> dict[str, dict[str, Any]]:
    return {
        "run": {
            "started": run.started.replace("T", " ").replace("+00:00", " UTC"),
            "ranks": run.ranks,
            "nodes": run.nodes or "not known",
            "device of rank 0": run.device,
            "kernels": ", ".join(dict.fromkeys(name for row in rows for name in row.kernels)),
            **({"resumed after step": run.step} if run.step else {}),
        },
        "model": dict(run.model),
        "settings": dict(run.settings),
        "training": dict(run.training),
        "versions": dict(run.versions),
    }
