"""One row of the log, one set of micro-batches: checked against what each micro-batch really did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import datasets
import pytest
from transformers import Trainer, TrainerCallback

import hf_distca
from hf_distca.agreement.planned import Planned
from hf_distca.agreement.planner import Planner
from hf_distca.integration.session import current_session
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPool
from tiny_runs import documents, make_trainer, settings

STEPS = 6
ESTIMATED = "distca/imbalance_estimated_before"
MEGABYTES = "distca/exchanged_mb_per_layer"
MEASURED = "distca/imbalance_measured_after"


class PlanningTrainer(hf_distca.DistCATrainerMixin, Trainer):
    pass


@dataclass
class Did:
    """What one micro-batch did on this rank."""

    before: float
    mean: float
    meters: list[Meter]

    @property
    def sent_bytes(self) -> list[int]:
        """By each of its plans: one, or those of two nano-batches."""
        return [meter.sent_bytes for meter in self.meters]


@contextmanager
def recorded() -> Iterator[dict[int, Did]]:
    """What the micro-batches inside do, by number: their plans, and the meters of what is done by them."""
    done: dict[int, Did] = {}
    use = Planner.use

    def spy(self: Planner, planned: Planned, *args: Any) -> Meter:
        meter = use(self, planned, *args)
        seconds = self.costs.of(planned.key).seconds(planned.plan.end - planned.plan.start, planned.plan.end, planned.plan.heads)
        before = [float(seconds[planned.plan.home == rank].sum()) for rank in (0, 1)]
        did = done.setdefault(self.number, Did(0.0, 0.0, []))
        did.before += max(before)
        did.mean += sum(before) / 2
        did.meters.append(meter)
        return meter

    with patch.object(Planner, "use", spy):
        yield done


def data(accumulation: int) -> list[dict[str, Any]]:
    """Rows for steps that are even and uneven in turns: in an uneven one, rank 0 has one long document for many short ones."""
    even, uneven = ((48, 48), (48, 48)), ((96,), (24, 24, 24, 24))
    lengths = [(uneven if step % 2 else even)[rank] for step in range(STEPS) for _ in range(accumulation) for rank in (0, 1)]
    return [{"documents": documents(*some, seed=at)} for at, some in enumerate(lengths)]


def train(
    rank: int, accumulation: int, checkpointing: bool, ping_pong: bool, ahead: bool, every: int
) -> tuple[list[dict[str, Any]], dict[int, tuple[float, float, list[int]]], list[dict[str, Any]]]:
    """The log history, (slowest, mean, sent bytes) of each micro-batch, and what reporters saw."""
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = make_trainer(
        "distca",
        data(accumulation),
        kind=PlanningTrainer if ahead else Trainer,
        callbacks=[Reporter()],
        config=settings(ping_pong=ping_pong),
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
        max_steps=STEPS,
        logging_steps=every,
        train_sampling_strategy="sequential",
    )
    with recorded() as done:
        trainer.train()
    assert current_session().planner.number == STEPS * accumulation
    return trainer.state.log_history, {number: (did.before, did.mean, did.sent_bytes) for number, did in done.items()}, seen


@pytest.mark.parametrize(
    ("accumulation", "checkpointing", "ping_pong", "ahead", "every"),
    [
        (1, False, False, False, 1),
        (1, False, True, False, 1),
        (2, True, False, False, 1),
        (2, True, True, True, 1),
        (2, False, False, True, 2),
        (1, False, False, False, 4),  # the last log is two steps before the end
    ],
)
def test_a_row_is_about_the_same_micro_batches_in_all_its_figures(
    rank_pool: Callable[[int], RankPool], accumulation: int, checkpointing: bool, ping_pong: bool, ahead: bool, every: int
) -> None:
    (history, done, seen), (_, others, _) = rank_pool(2)(train, accumulation, checkpointing, ping_pong, ahead, every)
    rows = [row for row in history if ESTIMATED in row]
    layers, number = 2, 0
    for row in rows:
        count = int(row["distca/micro_batches"])
        numbers = range(number + 1, number + 1 + count)
        number += count
        slowest, mean = (sum(done[one][part] for one in numbers) for part in (0, 1))
        assert row[ESTIMATED] == pytest.approx(slowest / mean, abs=1e-4)
        sent = [max(pair) for one in numbers for pair in zip(done[one][2], others[one][2], strict=True)]
        assert row[MEGABYTES] == pytest.approx(sum(sent) / (count * layers) / 1e6, abs=1e-4)
        assert (row[MEGABYTES] > 0) == (row[ESTIMATED] > 1.001), "what was uneven was moved, in the same row"
        assert row.keys() >= {MEASURED, "distca/server_time_share", "distca/planning_ms"}
        assert 0 < row["distca/server_time_share"] < 1
    assert number == STEPS * accumulation, "each micro-batch is in one row, the last ones at the end of training"
    assert "train_loss" in history[-1], "the row that the Trainer ends with stays the last one"
    reported = [row for row in seen if ESTIMATED in row]
    assert [row[ESTIMATED] for row in reported] == [row[ESTIMATED] for row in rows]


def train_on_shares(rank: int) -> tuple[list[dict[str, Any]], dict[int, tuple[float, float, list[int]]]]:
    """The log history of training on shares of dealt documents, and what each micro-batch did."""
    lengths = (96, 24, 24, 24, 24, 48, 48, 96)  # four global batches; in each, documents are dealt to both ranks
    dataset = datasets.Dataset.from_dict({"input_ids": documents(*lengths)})
    shares = hf_distca.document_shares(dataset, 48, shapes=[(AttentionShape(4, 2, 16, 16, 4), None)], config=settings(), ranks=2)
    trainer = make_trainer("distca", shares, num_train_epochs=2, train_sampling_strategy="sequential", remove_unused_columns=True)
    with recorded() as done:
        trainer.train()
    return trainer.state.log_history, {number: (did.before, did.mean, did.sent_bytes) for number, did in done.items()}


def test_rows_of_shares_whose_measurements_come_when_they_come(rank_pool: Callable[[int], RankPool]) -> None:
    """No rank waits for a meeting on shares: how many micro-batches a row is about is open, not what it says of them."""
    for history, done in rank_pool(2)(train_on_shares):
        assert len(done) == 8
        number = 0
        for row in (row for row in history if ESTIMATED in row):
            numbers = range(number + 1, number + 1 + int(row["distca/micro_batches"]))
            number = numbers[-1]
            slowest, mean = (sum(done[one][part] for one in numbers) for part in (0, 1))
            assert row[ESTIMATED] == pytest.approx(slowest / mean, abs=1e-4)
            assert row.keys() >= {MEASURED, MEGABYTES}
        assert number == len(done)
