"""The figures that the page of a run shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from some_run import RUN, documents, plan_row, some_rows, steps_row, write_record

from hf_distca.agreement.batch_plan import BalanceTotals
from hf_distca.agreement.record_rows import RECORD_NAME, PlanRow, Row, StepsRow, read_row, write_row
from hf_distca.errors import ReportError
from hf_distca.tools.report.folder import RunFolder
from hf_distca.tools.report.page import draw_pictures
from hf_distca.tools.report.run_figures import Figures, collect


def figures(folder: Path, step: int | None = None) -> Figures:
    return collect(RunFolder.read(folder), step)


def test_rows_of_a_record_are_read_as_written() -> None:
    for row in some_rows():
        # Plan and steps rows are rounded.
        assert read_row(write_row(row)) == row or isinstance(row, PlanRow | StepsRow)
        assert write_row(read_row(write_row(row)) or RUN) == write_row(row)
    assert read_row('{"row": "of a newer version"}') is None


def test_totals_are_sums_over_the_steps_of_the_run(tmp_path: Path) -> None:
    rows = [row for row in some_rows() if isinstance(row, StepsRow)]
    found = figures(write_record(tmp_path / "run", some_rows()))
    tally = sum((BalanceTotals(**row.tally) for row in rows), BalanceTotals())  # type: ignore[arg-type]
    assert found.total["imbalance_measured_before"] == pytest.approx(
        tally.measured_before / tally.measured_mean, rel=1e-4
    )
    assert found.total["slowest_seconds_after"] == pytest.approx(tally.measured_after, rel=1e-4)
    assert found.total["moved_micro_batches"] == found.total["micro_batches"] == 4
    assert [row["step"] for row in found.steps] == [1, 2, 3, 4]
    np.testing.assert_allclose(
        found.per_rank.sent_bytes, np.sum([row.per_rank.sent_bytes for row in rows], axis=0)
    )
    assert found.cards[0] == (
        f"{tally.measured_before / tally.measured_mean:.2f} ->"
        f" {tally.measured_after / tally.measured_mean:.2f}",
        "slowest rank / mean attention: before work was moved (measured) -> as trained (measured)",
    )
    assert found.name == "run"
    assert found.warnings == ["step 2: something <b>to act on</b>"]
    assert found.run["run"]["kernels"] == "cpu"
    assert not found.missing


@pytest.mark.parametrize("step", [None, 2])
def test_pieces_of_a_plan_add_up_to_tokens_and_seconds(tmp_path: Path, step: int | None) -> None:
    """Without a step, the plan is that of the most uneven micro-batch."""
    plan = figures(write_record(tmp_path, some_rows()), step).plan
    assert plan is not None
    assert plan.step == (step or 4)
    row = plan_row(plan.step)
    for pieces, seconds in (
        (plan.before, row.per_rank.estimated_before),
        (plan.after, row.per_rank.estimated_after),
    ):
        found = np.bincount([piece.rank for piece in pieces], [piece.seconds for piece in pieces])
        np.testing.assert_allclose(found, seconds, rtol=1e-3)
        assert sum(piece.tokens for piece in pieces) == 4 * 8192
    assert all(piece.rank == piece.home for piece in plan.before)
    assert any(piece.rank != piece.home for piece in plan.after)
    lengths = [length for rank in documents(4, plan.step) for length in rank]
    assert {piece.document: piece.length for piece in plan.after} == dict(enumerate(lengths))


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0, 1.0, 1.0], ["fast"] * 4])
def test_invalid_speeds_of_a_plan_are_refused(tmp_path: Path, speeds: list[Any]) -> None:
    row = plan_row(1)
    text = write_row(replace(row, parts=[replace(row.parts[0], speeds=[1.0] * 4)]))
    text = text.replace('"speeds":[1.0,1.0,1.0,1.0]', f'"speeds":{json.dumps(speeds)}')
    write_record(tmp_path, [RUN, text, steps_row(row)])
    with pytest.raises(ReportError, match=r"is not a record of a run: .* Move the file away"):
        figures(tmp_path)


def test_a_resumed_run_counts_steps_once(tmp_path: Path) -> None:
    """Steps 3 and 4 ran, and ran again from the checkpoint of step 2."""
    again = [
        replace(RUN, step=2),
        *(row for step in (3, 4, 5) for row in (plan_row(step), steps_row(plan_row(step)))),
    ]
    found = figures(write_record(tmp_path, [*some_rows(), *again]))
    assert [row["step"] for row in found.steps] == [1, 2, 3, 4, 5]
    assert found.total["micro_batches"] == 5
    assert found.plan_steps == [1, 2, 3, 4, 5]
    assert found.run["run"]["resumed after step"] == 2


def test_steps_after_the_last_logged_loss_have_no_loss(tmp_path: Path) -> None:
    found = figures(
        write_record(tmp_path, [*some_rows(), replace(steps_row(plan_row(5)), loss=None)])
    )
    assert [row["micro_batches"] for row in found.steps] == [1] * 5
    assert ["loss" in row for row in found.steps] == [True] * 4 + [False]


def test_incomplete_last_line_of_a_record_is_ignored(tmp_path: Path) -> None:
    record = write_record(tmp_path, some_rows()) / RECORD_NAME
    record.write_text(record.read_text()[:-40])
    assert [row["step"] for row in figures(tmp_path).steps] == [1, 2, 3]


def test_broken_lines_of_a_record_are_ignored_and_listed(tmp_path: Path) -> None:
    """A training that was killed while it wrote a line, and then resumed, leaves such a line."""
    record = write_record(tmp_path, some_rows()) / RECORD_NAME
    lines = record.read_text().splitlines()
    again = [write_row(row) for row in (replace(RUN, step=3), *some_rows()[-2:])]
    wrong = [
        '{"row": Na',
        "[]",
        '{"row": "run"}',
        '{"row": "steps", "step": 1, "tally": {}, "per_rank": {"tokens": [1]}}',
        '{"row": "plan", "step": 1, "micro_batch": 1, "per_rank": {}, "parts": 3}',
        write_row(steps_row(plan_row(1))).replace(":8192.0", ":1e999", 1),
    ]
    record.write_text("\n".join([*lines[:-1], lines[-1][:40], *again, *wrong, ""]))
    found = figures(tmp_path)
    assert [row["step"] for row in found.steps] == [1, 2, 3, 4]
    assert found.missing[0] == (
        f"Broken lines of {record}: 10, 14, 15, 16, 17, 18, 19. A run that is killed while it"
        " writes leaves such lines."
    )


def test_dealt_run_shows_the_imbalance_of_the_replaced_batches(tmp_path: Path) -> None:
    row = steps_row(plan_row(1))
    dealt = {**row.tally, "estimated_in_order": 3.2, "dealt_mean": 2.0}
    run = replace(RUN, replaced_imbalance=1.9)
    shown = figures(write_record(tmp_path / "dealt", [run, replace(row, tally=dealt)]))
    value, meaning = shown.cards[0]
    assert value.startswith("1.90 -> ")
    assert "in the batches that dealing replaced (estimated) -> as trained" in meaning
    (rows,) = draw_pictures(shown)[0].sides.values()
    mean = np.mean(shown.per_rank.measured_before)
    (replaced,), (before,) = rows["replaced"][0], rows["rank 3"][0]
    assert replaced.length / before.length == pytest.approx(
        1.9 * mean / shown.per_rank.measured_before[3]
    )
    assert shown.total["imbalance_estimated_in_order"] == pytest.approx(1.6)


def test_older_records_without_newer_figures_are_read(tmp_path: Path) -> None:
    row = steps_row(plan_row(1))
    older = {name: n for name, n in row.tally.items() if name not in ("dealt_mean",)}
    shown = figures(write_record(tmp_path, [RUN, replace(row, tally=older)]))
    assert "imbalance_estimated_in_order" not in shown.total


def test_card_of_a_run_counts_micro_batches_that_moved_work(tmp_path: Path) -> None:
    row = steps_row(plan_row(1))
    found = figures(write_record(tmp_path, [RUN, replace(row, tally={**row.tally, "moved": 0})]))
    assert found.cards[2][1].endswith("work was moved in 0 of 1 micro-batches")


PLAN = plan_row(1)
# The lines of a record, the requested step, and the error.
NO_PAGE: dict[str, tuple[list[Row | str] | None, int | None, str]] = {
    "nothing": (None, None, "is not a folder with _distca_run.jsonl. Train with attn_implementat"),
    "empty": ([], None, "has no micro-batch yet"),
    "no beginning": (some_rows()[1:], None, "does not tell how the run began"),
    "broken steps": (
        [RUN, '{"step": 1}', '{"row": [1]}', '{"row": "steps", "step": 1}'],
        None,
        "has no micro-batch yet (broken lines: 2, 3, 4)",
    ),
    "other plans": (
        some_rows(),
        9,
        "Plans of these steps were kept: 1, 2, 3, 4. DistCACallback(record=",
    ),
    "no plans": (
        [RUN, steps_row(PLAN)],
        9,
        "Plans of these steps were kept: none. DistCACallback(record=",
    ),
    "bad plan": (
        [RUN, replace(PLAN, parts=[replace(PLAN.parts[0], seconds=[1.0])]), steps_row(PLAN)],
        None,
        "is not a record of a run: ",
    ),
}


@pytest.mark.parametrize("name", NO_PAGE)
def test_record_without_the_rows_of_a_page_is_refused(tmp_path: Path, name: str) -> None:
    rows, step, message = NO_PAGE[name]
    if rows is not None:
        write_record(tmp_path, rows)
    with pytest.raises(ReportError) as error:
        figures(tmp_path, step)
    assert message in str(error.value)


def test_paths_without_a_record_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("none", "file"):
        with pytest.raises(
            ReportError,
            match=f"{name} is not a folder with {RECORD_NAME}. .* give the output_dir of that run",
        ):
            figures(tmp_path / name)


def test_repeated_steps_count_once_in_the_mean_seconds_of_a_step(tmp_path: Path) -> None:
    """The second step runs before and after a resume."""
    rows = [steps_row(plan_row(step)) for step in (1, 2, 3)]
    elapsed = [row.tally["elapsed_seconds"] for row in rows]
    found = figures(write_record(tmp_path, [RUN, *rows[:2], replace(RUN, step=1), *rows[1:]]))
    assert found.total["step_seconds"] == pytest.approx(sum(elapsed) / 3, rel=1e-4)
    assert found.cards[1] == (
        f"{sum(elapsed) / 3:.3g} s",
        "a step, of which rank 0 spent 33% in attention",
    )
