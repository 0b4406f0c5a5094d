"""The record that `DistCACallback` writes for `hf-distca report`, and its cost."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import chdir, nullcontext, redirect_stderr
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import BalanceTotals, History, MicroBatchPlan
from hf_distca.agreement.rates import LearnedCosts
from hf_distca.agreement.record_rows import (
    RECORD_NAME,
    PlanRow,
    Row,
    RunRow,
    StepsRow,
    WarningRow,
    read_row,
)
from hf_distca.integration.training import record
from hf_distca.integration.training.record import Recorder
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.report.folder import RunFolder
from hf_distca.tools.report.run_figures import collect
from ranks import RankPools
from recorded import Operations, recorded
from tiny_runs import PAIRS, documents, make_trainer, settings, tiny_llama
from turns import in_turn

STEPS = 6


class Warns(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            logging.getLogger("hf_distca").warning("something to act on")


def make_data() -> list[dict[str, Any]]:
    """Make rows: long documents on rank 0, short ones on rank 1; the worst step is the fourth."""
    lengths = [
        ((96,), (24, 24, 24, 24)) if step != 3 else ((192,), (24,) * 8) for step in range(STEPS)
    ]
    return [
        {"documents": documents(*lengths[step][rank], seed=step)}
        for step in range(STEPS)
        for rank in (0, 1)
    ]


def train(
    rank: int,
    folder: str,
    record: bool | Literal["all"],
    ping_pong: bool,
    changes: dict[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:
    callback = hf_distca.DistCACallback(settings(ping_pong=ping_pong), record=record)
    trainer = make_trainer(
        "distca",
        make_data(),
        folder=folder,
        callbacks=[Warns()],
        distca=callback,
        train_sampling_strategy="sequential",
        **{"max_steps": STEPS, **changes},
    )
    with recorded() as collectives, Operations() as operations:
        trainer.train(resume_from_checkpoint=resume)
    return {
        "collectives": collectives,
        "operations": operations.seen,
        "history": trainer.state.log_history,
    }


def read_rows(folder: Path) -> list[Row]:
    found = [read_row(line) for line in (folder / RECORD_NAME).read_text().splitlines()]
    return [row for row in found if row is not None]


@pytest.mark.parametrize("ping_pong", in_turn([True, False], 2))
def test_record_of_rank_0_has_the_figures_of_the_log_and_the_worst_plan(
    rank_pool: RankPools, tmp_path: Path, ping_pong: bool
) -> None:
    history = rank_pool(2)(train, str(tmp_path), True, ping_pong, {"logging_steps": 3})[0][
        "history"
    ]
    run, *others = read_rows(tmp_path)
    assert isinstance(run, RunRow)
    found = run.step, run.ranks, run.nodes, run.settings["ping_pong"], run.model["type"]
    assert found == (0, 2, 1, ping_pong, "llama"), "nodes are known without a launcher"
    assert run.versions["hf-distca"] == hf_distca.__version__
    assert (
        WarningRow(3, "something to act on") in others
        or WarningRow(4, "something to act on") in others
    )

    steps = [row for row in others if isinstance(row, StepsRow)]
    logged = [row for row in history if "distca/micro_batches" in row]
    tallies = [BalanceTotals(**row.tally) for row in steps]
    assert [tally.micro_batches for tally in tallies] == [
        row["distca/micro_batches"] for row in logged
    ]
    assert (
        sum(tally.micro_batches for tally in tallies)
        == STEPS
        == sum(tally.moved for tally in tallies)
    )
    for row, tally, log in zip(steps, tallies, logged, strict=True):
        figures = tally.compute_figures()
        assert figures == pytest.approx({name: log[name] for name in figures}, rel=1e-4, abs=6e-5)
        ranks = row.per_rank
        assert sum(ranks.estimated_before) == pytest.approx(sum(ranks.estimated_after), rel=1e-3)
        assert sum(ranks.measured_before) == pytest.approx(sum(ranks.measured_after), rel=1e-3)
        assert max(ranks.sent_bytes) > 0
    assert sum(sum(row.per_rank.tokens) for row in steps) == 2 * (5 * 96 + 192)

    plans = [row for row in others if isinstance(row, PlanRow)]
    assert (plans[0].step, plans[0].micro_batch) == (1, 1)
    assert 4 in [plan.step for plan in plans], "the plan of the worst step"
    for plan in plans:
        made = [Plan.from_json(json.dumps(part.plan)) for part in plan.parts]
        assert len(made) == (2 if ping_pong else 1)
        assert sum(one.layout.query_tokens.sum() for one in made) == sum(plan.per_rank.tokens)
        seconds = sum(
            np.bincount(one.server, part.seconds, minlength=2)
            for one, part in zip(made, plan.parts, strict=True)
        )
        np.testing.assert_allclose(seconds, plan.per_rank.estimated_after, rtol=2e-3)


@pytest.mark.parametrize("ping_pong", in_turn([False, True], 2))
def test_worst_plan_keeps_its_step_when_written_late(
    rank_pool: RankPools, tmp_path: Path, ping_pong: bool
) -> None:
    rank_pool(2)(train, str(tmp_path), True, ping_pong, {"logging_steps": 10, "max_steps": 10})
    plans = [(row.step, row.micro_batch) for row in read_rows(tmp_path) if isinstance(row, PlanRow)]
    assert plans[:2] == [(1, 1), (4, 4)]
    assert all(step == micro_batch for step, micro_batch in plans)


def test_a_record_costs_no_collective_and_no_operation(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    """A host sync would count as an operation of torch."""
    # The first run of new processes makes the group, which needs one more collective.
    _, without, kept = (
        rank_pool(2)(train, str(tmp_path), record, False, {}) for record in (False, False, "all")
    )
    for rank in (0, 1):
        assert kept[rank]["collectives"] == without[rank]["collectives"]
        assert kept[rank]["operations"] == without[rank]["operations"]
    assert [row.micro_batch for row in read_rows(tmp_path) if isinstance(row, PlanRow)] == list(
        range(1, STEPS + 1)
    )


@pytest.mark.parametrize(
    ("parts", "tokens"),
    [
        ([(0, None, [[192], [96, 96]]), (0, 64, [[192], [96, 96]])], [192, 192]),
        ([(1, None, [[96], [48]]), (2, None, [[64], [64, 48]])], [160, 160]),
        (
            [
                (1, None, [[96], [48]]),
                (1, 64, [[96], [48]]),
                (2, None, [[96], [8]]),
                (2, 64, [[96], [8]]),
            ],
            [192, 56],
        ),
    ],
    ids=["kinds of layers", "nano-batches", "both"],
)
def test_report_counts_tokens_once_and_pieces_fill_the_bars_of_ranks(
    tmp_path: Path, parts: list[tuple[int, int | None, list[list[int]]]], tokens: list[int]
) -> None:
    """Layers of different kinds plan the same tokens, and slow ranks have longer bars."""
    history, ranks = History(), Ranks(speeds=(0.5, 1.25))
    recorder = begin_record(tmp_path, 0, history)
    plans = []
    for nano, window, lengths in parts:
        cost = replace(PAIRS, window=window)
        plan = balance(Layout.from_lengths(lengths), cost, settings(), ranks)
        key = PlanKey(PAIRS.shape, "cpu", window, nano=nano)
        seconds = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
        plans.append(MicroBatchPlan(key, plan, 1, seconds, ranks, Meter()))
        history.record_plan(plans[-1])
    history.end_micro_batch()
    for used in plans:
        figures = np.zeros((2, 5), dtype=np.int64)
        figures[:, 0] = used.estimated_after * 1e9
        history.record_figures(used, figures)
    recorder.write_steps(1)
    recorder.stop()
    found = collect(RunFolder.read(tmp_path))
    assert found.plan is not None
    assert found.per_rank.tokens == found.plan.per_rank.tokens == tokens
    bars = found.plan.per_rank
    for pieces, seconds in (
        (found.plan.before, bars.estimated_before),
        (found.plan.after, bars.estimated_after),
    ):
        drawn = np.bincount(
            [piece.rank for piece in pieces], [piece.seconds for piece in pieces], minlength=2
        )
        np.testing.assert_allclose(drawn, seconds, rtol=1e-3)


def train_and_resume(rank: int, folder: str) -> None:
    train(rank, folder, True, False, {"save_strategy": "steps", "save_steps": 2, "max_steps": 3})
    train(rank, folder, True, False, {"max_steps": 4}, str(Path(folder, "checkpoint-2")))


def test_resumed_run_appends_to_its_record(rank_pool: RankPools, tmp_path: Path) -> None:
    rank_pool(2)(train_and_resume, str(tmp_path))
    assert [row.step for row in read_rows(tmp_path) if isinstance(row, RunRow)] == [0, 2]
    rank_pool(2)(train, str(tmp_path), True, False, {"max_steps": 1})
    assert [row.step for row in read_rows(tmp_path) if isinstance(row, RunRow)] == [0], (
        "a run from the start replaces the record"
    )


def train_with_a_folder_as_record(rank: int, folder: str) -> None:
    Path(folder, RECORD_NAME).mkdir(exist_ok=True)
    train(rank, folder, True, False, {"max_steps": 2})


def test_run_without_a_writable_record_continues(rank_pool: RankPools, tmp_path: Path) -> None:
    rank_pool(2)(train_with_a_folder_as_record, str(tmp_path))


def capture_console(rank: int, folder: str, full: bool) -> tuple[str, bool]:
    """Train without set-up logging; return the console, and whether the logger's filters are as
    before. A training that failed in another test may have left one.

    If `full`, the disk of rank 0 is full.
    """
    logger = logging.getLogger("hf_distca")
    logger.handlers.clear()
    filters = list(logger.filters)
    console = io.StringIO()
    full = full and rank == 0
    opened = partial(os.open, "/dev/full")
    with (
        redirect_stderr(console),
        patch.object(record, "_open_own_file", lambda _, flags: opened(flags))
        if full
        else nullcontext(),
    ):
        train(rank, folder, True, False, {"max_steps": 3})
    return console.getvalue(), logger.filters == filters


@pytest.mark.parametrize("full", [False, True])
def test_recorded_warnings_still_reach_the_console(
    rank_pool: RankPools, tmp_path: Path, full: bool
) -> None:
    (first, over), _ = rank_pool(2)(capture_console, str(tmp_path), full)
    assert "something to act on" in first
    assert ("no record for `hf-distca report` is kept" in first) == full
    assert ("No space left on device" in first) == full
    assert over, "a filter of the logger stayed"


def begin_record(folder: Path, step: int, history: History | None = None) -> Recorder:
    planner = SimpleNamespace(number=0, costs=LearnedCosts(), history=history or History())
    session: Any = SimpleNamespace(
        planner=planner, rank_count=2, node_count=1, config=settings(), kernel_names=["cpu"]
    )
    recorder = Recorder(folder, session, every_plan=True)
    recorder.start(TrainingArguments(str(folder), use_cpu=True, report_to="none"), step, None)
    if history is None:
        recorder.stop()
    return recorder


@pytest.mark.timeout(30)
@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (lambda path: os.mkfifo(path), "it is a pipe or a socket"),
        (lambda path: path.symlink_to(path.with_name("another's")), "it is a link"),
        (lambda path: path.symlink_to("nowhere"), "it is a link"),
        (lambda path: create_unix_server(path), "it is a pipe or a socket"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
    ids=["pipe", "link", "broken link", "socket", "folder"],
)
def test_record_is_not_written_to_a_pipe_link_socket_or_folder(
    place: Callable[[Path], object],
    reason: str,
    step: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Opening a pipe must not wait for a reader."""
    (tmp_path / "another's").write_text("precious")
    place(tmp_path / RECORD_NAME)
    begin_record(tmp_path, step)
    assert f"{RECORD_NAME} cannot be written ({reason})" in caplog.text
    assert (tmp_path / "another's").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("rest", [0.5, 0.01, 1.0])
def test_resumed_record_after_a_cut_line_begins_a_new_line(rest: float, tmp_path: Path) -> None:
    """A run is killed within a line, after its first letter or before its end, and resumes."""
    begin_record(tmp_path, 0)
    path = tmp_path / RECORD_NAME
    line = path.read_text().rstrip("\n")
    with path.open("a") as file:
        file.write(line[: max(int(len(line) * rest), 1)])
    begin_record(tmp_path, 4)
    *_, last = path.read_text().splitlines()
    assert json.loads(last)["step"] == 4


def create_unix_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, chdir(path.parent):
        listening.bind(path.name)


def test_the_record_names_no_folder(tmp_path: Path) -> None:
    begin_record(tmp_path / "run", 0)
    assert len(read_rows(tmp_path / "run")) == 1
    assert read_rows(tmp_path / "run")[0].settings["cost_model"] == PAIRS.name
    assert str(tmp_path) not in (tmp_path / "run" / RECORD_NAME).read_text()


def test_push_to_hub_leaves_the_record_out() -> None:
    pushed = inspect.getsource(Trainer.push_to_hub) + inspect.getsource(
        Trainer._push_from_checkpoint
    )
    patterns = re.findall(r"ignore_patterns=(\[.*?\])", pushed)
    assert len(patterns) == 2
    assert all(fnmatch(RECORD_NAME, "_*") and '"_*"' in pattern for pattern in patterns)


def train_under_sdpa(rank: int, folder: str) -> None:
    trainer = make_trainer(
        "distca",
        make_data(),
        folder=folder,
        model=tiny_llama("sdpa"),
        max_steps=1,
        distca=hf_distca.DistCACallback(),
    )
    trainer.train()


def test_run_under_sdpa_leaves_no_record(rank_pool: RankPools, tmp_path: Path) -> None:
    rank_pool(2)(train_under_sdpa, str(tmp_path))
    assert not (tmp_path / RECORD_NAME).exists()
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
