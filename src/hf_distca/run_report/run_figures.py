"""`Figures`: all numbers and sentences of the page, which `hf-distca report --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hf_distca.agreement.history import Tally
from hf_distca.errors import LayoutError, PlanError, ReportError
from hf_distca.run_report.folder import PREFIX, RankTrace, RunFolder
from hf_distca.run_report.rows import RECORD_NAME, PerRank, PlanRow, RunRow, StepsRow, WarningRow

__all__ = ["Figures", "PlanPiece", "PlanFigures", "collect"]

_TALLY = [figure.name for figure in fields(Tally)]
_MOST_STEPS_NAMED = 12


@dataclass(frozen=True)
class PlanPiece:
    """CA-tasks of one document on one rank.

    Attributes:
        rank: rank that computes them; `home` has their queries.
        document, length: its number in the micro-batch, and its tokens on all ranks.
        tokens: number of queries.
        seconds: estimated, of one layer, forward and backward, on this rank.
    """

    rank: int
    home: int
    document: int
    length: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PlanFigures:
    """A drawn micro-batch: its work at home, and as planned.

    Attributes:
        step, micro_batch: numbers of the step and the micro-batch.
        before, after: its pieces, in order of rank and document.
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
        name: name of its folder.
        verdict: summary in a sentence or two.
        total: figures of the log for the whole run, and the seconds that the slowest ranks saved.
        steps: for each row of the log, the step, its figures and the loss.
        per_rank: sums over the run, None without a record.
        hidden: for each traced rank, the part of the messages' time that was hidden.
        plan: plan of the chosen step, None without a record.
        plan_steps: steps with plans.
        run: device, model, settings, training arguments and versions.
        warnings: warnings with their steps.
        missing: missing parts of the page, and how to get them.
    """

    name: str
    verdict: str
    total: dict[str, float]
    steps: list[dict[str, float]]
    per_rank: PerRank | None
    hidden: list[RankTrace]
    plan: PlanFigures | None
    plan_steps: list[int]
    run: dict[str, dict[str, Any]]
    warnings: list[str]
    missing: list[str]


def collect(folder: RunFolder, step: int | None = None) -> Figures:
    """Collect the figures of a folder.

    Args:
        folder: the folder of a run.
        step: step whose plan is drawn; that of the most uneven micro-batch if None.

    Raises:
        ReportError: if there is no plan of that step, or if it cannot be read.
    """
    recorded, plan_steps = folder.rows_of(StepsRow), sorted({plan.step for plan in folder.rows_of(PlanRow)})
    row = _chosen(folder, plan_steps, step)
    total, steps = _of_record(recorded) if recorded else _of_log(folder.log)
    return Figures(
        name=folder.path.resolve().name,
        verdict=_verdict(total),
        total=total,
        steps=steps,
        per_rank=_summed(recorded),
        hidden=folder.traces,
        plan=None if row is None else _drawn(row),
        plan_steps=plan_steps,
        run=_run(folder),
        warnings=[f"step {warning.step}: {warning.text}" for warning in folder.rows_of(WarningRow)],
        missing=_missing(folder),
    )


def _short(figures: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in figures.items()}


def _of_record(rows: Sequence[StepsRow]) -> tuple[dict[str, float], list[dict[str, float]]]:
    tallies = [Tally(**{name: row.tally[name] for name in _TALLY}) for row in rows]  # type: ignore[arg-type]
    whole = sum(tallies, Tally())
    total = _short(whole.figures()) | {"moved_micro_batches": whole.moved, "last_step": rows[-1].step}
    total["slowest_seconds_before"], total["slowest_seconds_after"] = whole.measured_before, whole.measured_after
    losses = [{} if row.loss is None else {"loss": row.loss} for row in rows]
    steps = zip(rows, tallies, losses, strict=True)
    return total, [{"step": row.step, **_short(tally.figures()), **loss} for row, tally, loss in steps]


def _of_log(log: Sequence[tuple[int, dict[str, float]]]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Average figures of rows for the whole run, weighted by
    micro-batches, because the log has no sums.
    """
    return _mean([figures for _, figures in log]) | {"last_step": log[-1][0]}, [{"step": step, **row} for step, row in log]


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average rows by their micro-batches, which are summed."""
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        pairs = [(row[name], row.get("micro_batches", 1.0)) for row in rows if name in row]
        means[name] = sum(value * weight for value, weight in pairs) / (sum(weight for _, weight in pairs) or 1.0)
    return means | {"micro_batches": sum(row.get("micro_batches", 0.0) for row in rows)}


def _summed(rows: Sequence[StepsRow]) -> PerRank | None:
    """Sum figures over the run; if the number of ranks changed, over
    the newest rows with the same number.
    """
    if not rows:
        return None
    ranks = len(rows[-1].per_rank.tokens)
    kept = [row.per_rank for row in rows if len(row.per_rank.tokens) == ranks]
    columns = [column.name for column in fields(PerRank)]
    return PerRank(**{name: np.sum([getattr(row, name) for row in kept], axis=0).tolist() for name in columns})


def _uneven(row: PlanRow) -> float:
    before = row.per_rank.estimated_before
    return max(before, default=0.0) * len(before) / (sum(before) or 1.0)


def _chosen(folder: RunFolder, steps: Sequence[int], step: int | None) -> PlanRow | None:
    """Choose the most uneven plan of a step, or of all steps; `steps` are those with plans."""
    if step is not None and step not in steps:
        kept = "No plan was recorded: train with hf_distca.DistCACallback() of this version, which keeps some."
        if steps:
            named = [*map(str, steps[:_MOST_STEPS_NAMED]), *(f"... {last}" for last in steps[_MOST_STEPS_NAMED:][-1:])]
            kept = f'Plans of these steps were kept: {", ".join(named)}. DistCACallback(record="all") keeps all.'
        raise ReportError(f"there is no plan of step {step} in {folder.path}. {kept}")
    return max((plan for plan in folder.rows_of(PlanRow) if step in (None, plan.step)), key=_uneven, default=None)


def _drawn(row: PlanRow) -> PlanFigures:
    before: dict[tuple[int, int, int], list[float]] = {}
    after: dict[tuple[int, int, int], list[float]] = {}
    lengths: dict[int, int] = {}
    for part in row.parts:
        try:
            plan = part.read()
        except (LayoutError, PlanError) as error:
            raise ReportError(f"the plan of step {row.step} cannot be read: {error}") from error
        layout = plan.layout
        for document, end in zip(layout.unsplit(layout.document).tolist(), layout.end.tolist(), strict=True):
            lengths[document] = max(lengths.get(document, 0), end)
        documents = layout.unsplit(plan.document).tolist()
        speeds = part.speeds or [1.0] * layout.world_size
        for task, document, heads, seconds in zip(plan.tasks, documents, plan.heads.tolist(), part.seconds, strict=True):
            for side, rank in ((before, task.home), (after, task.server)):
                piece = side.setdefault((rank, document, task.home), [0.0, 0.0])
                piece[0] += heads * (task.end - task.start)
                piece[1] += seconds / speeds[rank]
    sides = [
        [
            PlanPiece(rank, home, document, lengths[document], round(tokens), seconds)
            for (rank, document, home), (tokens, seconds) in sorted(side.items())
        ]
        for side in (before, after)
    ]
    return PlanFigures(row.step, row.micro_batch, sides[0], sides[1], row.per_rank)


def _verdict(total: dict[str, float]) -> str:
    ends = {kind: (f"imbalance_{kind}_before", f"imbalance_{kind}_after") for kind in ("measured", "estimated")}
    kind = next((kind for kind, names in ends.items() if total.keys() >= set(names)), None)
    if kind is None:
        return "No attention was balanced."
    before, after = (total[name] for name in ends[kind])
    text = f"The slowest rank had {before:.2f} times the mean attention seconds before balancing, and {after:.2f} after ({kind})."
    if total.get("moved_micro_batches", 1) == 0:
        even = total.get("imbalance_estimated_before", before)
        measured = f", measured {after:.2f}" if kind == "measured" else ""
        text = f"No work was moved: the slowest rank had {even:.2f} times the mean attention seconds by estimate{measured}."
        if total.get("exchanged_mb_per_layer"):
            text += " What ranks sent is of documents that lie on several of them."
    saved = total.get("slowest_seconds_before", 0.0) - total.get("slowest_seconds_after", 0.0)
    if saved > 0 and total.get("moved_micro_batches"):
        text += f" Attention of the slowest ranks took {saved:.3g} s less in {total['micro_batches']:.0f} micro-batches."
    return text


def _run(folder: RunFolder) -> dict[str, dict[str, Any]]:
    runs = folder.rows_of(RunRow)
    if not runs:
        return {}
    run = runs[-1]
    kernels = dict.fromkeys(kernel for row in folder.rows_of(StepsRow) for kernel in row.kernels)
    machine = {"ranks": run.ranks, "nodes": run.nodes or "not known", "device of rank 0": run.device}
    facts = {"started": run.started.replace("T", " ").replace("+00:00", " UTC"), **machine, "kernels": ", ".join(kernels)}
    if run.step:
        facts["resumed after step"] = run.step
    return {"run": facts, "model": run.model, "settings": run.settings, "training": run.training, "versions": run.versions}


def _missing(folder: RunFolder) -> list[str]:
    absent = []
    if not folder.rows_of(StepsRow):
        absent.append(
            "Figures by rank, plans, settings, versions and warnings: the folder has the Trainer's log alone. "
            f"hf_distca.DistCACallback() of this version keeps them, in {RECORD_NAME}, unless record=False."
        )
    if not folder.traces:
        absent.append(
            "The share of messages that was hidden: it is read from timelines, which DistCACallback(trace_path=...) writes for "
            "the third optimizer step. They have to lie in the folder of the run."
        )
    elif not any(trace.travelled_seconds for trace in folder.traces):
        absent.append("The share of messages that was hidden: in the traced step none travelled.")
    return absent
