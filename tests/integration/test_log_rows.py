"""Each row of the log has the figures of the micro-batches since the previous row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from test_trainer import Reporter
from transformers import Trainer, TrainerCallback

import hf_distca
from hf_distca.agreement.batch_plan import History, MicroBatchPlan
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPools
from recorded import Operations, counted_planning
from tiny_runs import documents, make_trainer, settings, share_documents
from turns import in_turn

STEPS = 6
ESTIMATED = "distca/imbalance_estimated_before"
MEGABYTES = "distca/exchanged_mb_per_layer"
MEASURED = "distca/imbalance_measured_after"
GATHERING = "gather for gathering what ranks measured up to micro-batch"


@dataclass
class Did:
    """One micro-batch on this rank: its estimates, and the meter of each plan.

    Two nano-batches have two plans.
    """

    before: float
    mean: float
    meters: list[Meter]

    @property
    def figures(self) -> tuple[float, float, list[int], list[float]]:
        """Estimated seconds of the slowest rank and of the mean, then sent bytes and kernel seconds
        by plan.
        """
        return (
            self.before,
            self.mean,
            [meter.sent_bytes for meter in self.meters],
            [meter.seconds for meter in self.meters],
        )


@contextmanager
def record_micro_batches() -> Iterator[list[Did]]:
    """Record the micro-batches that run inside."""
    done: dict[int, Did] = {}
    seen: list[Did] = []
    record = History.record_plan

    def spy(self: History, used: MicroBatchPlan) -> None:
        record(self, used)
        before = [float(used.task_seconds[used.plan.home == rank].sum()) for rank in (0, 1)]
        if used.number not in done:
            done[used.number] = Did(0.0, 0.0, [])
            seen.append(done[used.number])
        did = done[used.number]
        did.before += max(before)
        did.mean += sum(before) / 2
        did.meters.append(used.meter)

    with patch.object(History, "record_plan", spy):
        yield seen


def make_data(accumulation: int, dealt: bool) -> Any:
    """Make rows for even and uneven steps in turn: in an uneven step, only rank 0 has a long
    document.

    If dealt, the long document lies on both ranks, and other documents are whole.
    """
    if dealt:
        lengths = [
            n
            for step in range(STEPS)
            for _ in range(accumulation)
            for n in ([(96,), (24,) * 4][step % 2])
        ]
        shapes = [(AttentionShape(4, 2, 16, 16, 4), None)]
        return share_documents(lengths, 96, 2, shapes=shapes, seed=None)
    even, uneven = ((48, 48), (48, 48)), ((96,), (24, 24, 24, 24))
    rows = [
        (uneven if step % 2 else even)[rank]
        for step in range(STEPS)
        for _ in range(accumulation)
        for rank in (0, 1)
    ]
    return [{"documents": documents(*some, seed=number)} for number, some in enumerate(rows)]


def build_trainer(accumulation: int = 1, dealt: bool = False, **changes: Any) -> Trainer:
    return make_trainer(
        "distca",
        make_data(accumulation, dealt),
        gradient_accumulation_steps=accumulation,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        remove_unused_columns=dealt,
        **changes,
    )


def train(
    rank: int, accumulation: int, every: int, case: dict[str, bool]
) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Train; return the log history, figures of each micro-batch, and the logs of a reporter."""
    reporter = Reporter()
    trainer = build_trainer(
        accumulation,
        case.get("dealt", False),
        callbacks=[reporter],
        config=settings(ping_pong=case.get("ping_pong", False)),
        activation_checkpointing=case.get("checkpointing", False),
        logging_steps=every,
    )
    with record_micro_batches() as done:
        trainer.train()
    assert current_session().planner.number == STEPS * accumulation
    return trainer.state.log_history, [did.figures for did in done], reporter.seen


@pytest.mark.parametrize(
    ("accumulation", "every", "case"),
    in_turn(
        [
            (1, 1, {}),
            (1, 1, {"ping_pong": True}),
            (2, 1, {"checkpointing": True}),
            (2, 2, {"checkpointing": True, "ping_pong": True}),
            (1, 1, {"dealt": True}),
            (2, 1, {"dealt": True, "checkpointing": True}),
            (1, 4, {}),  # the last log is two steps before the end
            (1, 4, {"dealt": True}),
        ],
        5,
    ),
)
def test_log_row_covers_the_micro_batches_since_the_previous_row(
    rank_pool: RankPools, accumulation: int, every: int, case: dict[str, bool]
) -> None:
    (history, done, seen), (_, others, _) = rank_pool(2)(train, accumulation, every, case)
    rows = [row for row in history if ESTIMATED in row]
    logged = [*range(every, STEPS + 1, every)]
    assert [row["step"] for row in rows] == [*logged, *([STEPS] if STEPS % every else [])]
    assert ["loss" in row for row in rows] == [True] * len(logged) + [False] * (
        len(rows) - len(logged)
    )
    assert "train_loss" in history[-1], "the final row of the Trainer is the last one"
    assert (ESTIMATED in history[-1]) == (STEPS % every > 0), (
        "the final row has the steps after the last log"
    )
    layers, first = 2, 0
    for row in rows:
        numbers = range(first, row["step"] * accumulation)
        first = numbers.stop
        assert row["distca/micro_batches"] == len(numbers)
        slowest, mean = (sum(done[number][part] for number in numbers) for part in (0, 1))
        assert row[ESTIMATED] == pytest.approx(slowest / mean, abs=1e-4)
        sent, measured = (
            [
                pair
                for number in numbers
                for pair in zip(done[number][part], others[number][part], strict=True)
            ]
            for part in (2, 3)
        )
        most = sum(map(max, sent))
        assert row[MEGABYTES] == pytest.approx(most / (len(numbers) * layers) / 1e6, abs=1e-4)
        assert row[MEASURED] == pytest.approx(
            sum(map(max, measured)) / (sum(map(sum, measured)) / 2), abs=1e-3
        )
        if not case.get("dealt"):
            assert (row[MEGABYTES] > 0) == (row[ESTIMATED] > 1.001), (
                "work of uneven steps is moved in the same row"
            )
        assert 0 < row["distca/server_time_share"] < 1
        assert row["distca/planning_ms"] > 0
    assert first == STEPS * accumulation
    reported = [row for row in seen if ESTIMATED in row]
    assert [row[ESTIMATED] for row in reported] == [row[ESTIMATED] for row in rows]


def count_by_step(rank: int, dealt: bool) -> tuple[list[list[str]], list[int]]:
    """Train; return planning collectives by step, and torch operations in callbacks by step."""
    collectives: list[list[str]] = []
    operations: list[int] = []

    def watched(event: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            with Operations() as counting:
                event(*args, **kwargs)
            operations[-1] += counting.seen.total()

        return call

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            collectives.append(list(called))
            operations.append(0)
            called.clear()

    callback = hf_distca.DistCACallback(settings(), record=False)
    for name in ("on_step_end", "on_log"):
        setattr(callback, name, watched(getattr(callback, name)))
    trainer = build_trainer(2, dealt, callbacks=[Steps()], distca=callback, logging_steps=3)
    with counted_planning() as called:
        trainer.train()
    return [*collectives[1:], list(called)], operations


@pytest.mark.parametrize("dealt", [False, True])
def test_ranks_gather_measurements_only_in_logged_steps(rank_pool: RankPools, dealt: bool) -> None:
    for collectives, operations in rank_pool(2)(count_by_step, dealt):
        assert len(collectives) == len(operations) == STEPS
        for step, (called, count) in enumerate(zip(collectives, operations, strict=True), 1):
            planning = [activity for activity in called if not activity.startswith(GATHERING)]
            assert len(planning) == 2 * (1 if dealt else 2), (
                "each micro-batch compares shares, or gathers documents and compares plans"
            )
            gathered = [f"{GATHERING} {2 * step}"] if step % 3 == 0 else []
            assert called == planning + gathered
            assert (count > 0) == (step % 3 == 0)


class Alone(Trainer):
    """A Trainer that logs on rank 0 alone."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            super().log(*args, **kwargs)


def train_alone(rank: int) -> list[dict[str, Any]]:
    trainer = build_trainer(kind=Alone)
    trainer.train()
    return trainer.state.log_history


def test_trainer_that_logs_on_one_rank_gets_a_row_for_each_step(rank_pool: RankPools) -> None:
    first, other = rank_pool(2)(train_alone, timeout=60)
    assert [row["distca/micro_batches"] for row in first if "loss" in row] == [1] * STEPS
    assert other == []


class LogsLater(TrainerCallback):
    """Requests a log after all other callbacks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step in (2, 5)


def train_with_late_logs(rank: int) -> list[dict[str, Any]]:
    trainer = build_trainer(logging_steps=100)
    trainer.add_callback(LogsLater())
    trainer.train()
    return trainer.state.log_history


def test_log_requested_by_a_later_callback_covers_all_micro_batches(rank_pool: RankPools) -> None:
    for history in rank_pool(2)(train_with_late_logs):
        assert [
            row["distca/micro_batches"] for row in history if "distca/micro_batches" in row
        ] == [1, 3, 2]
