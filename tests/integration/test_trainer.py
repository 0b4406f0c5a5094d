"""Trainer under DDP on two real ranks: same losses as sdpa, and the balance in every log."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from ranks import RankPool
from tiny_runs import make_trainer, rows, settings

FIGURES = {
    "distca/imbalance_estimated_before",
    "distca/imbalance_estimated_after",
    "distca/imbalance_measured_before",
    "distca/imbalance_measured_after",
    "distca/planning_ms",
    "distca/exchanged_mb_per_layer",
    "distca/server_time_share",
}


class Reporter(TrainerCallback):
    """Stands for W&B or TensorBoard: sees the logs that reach reporters."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs or {}))


def train(
    rank: int, implementation: str, accumulation: int, checkpointing: bool, ping_pong: bool
) -> tuple[list[dict], list[dict], list[str]]:
    """The log history, what reporters saw, and the names of the spans that were traced."""
    steps, reporter = 6, Reporter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            implementation,
            rows(2 * steps * accumulation),
            eval_dataset=rows(2),
            config=settings(ping_pong=ping_pong),
            trace_path=folder,
            callbacks=[reporter],
            gradient_accumulation_steps=accumulation,
            activation_checkpointing=checkpointing,
            max_steps=steps,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        events = json.loads(Path(folder, f"rank_{rank}.json").read_text())["traceEvents"]
    return trainer.state.log_history, reporter.seen, [event["name"] for event in events]


@pytest.mark.parametrize(("accumulation", "checkpointing", "ping_pong"), [(1, False, False), (2, True, False), (2, True, True)])
def test_same_losses_as_sdpa_and_balance_in_the_logs(
    rank_pool: Callable[[int], RankPool], accumulation: int, checkpointing: bool, ping_pong: bool
) -> None:
    pool = rank_pool(2)
    ours, theirs = (pool(train, name, accumulation, checkpointing, ping_pong) for name in ("distca", "sdpa"))
    for (history, seen, traced), (reference, *_) in zip(ours, theirs, strict=True):
        # One step: each micro-batch, 2 layers, a dispatch forward and one backward, of each half.
        assert traced.count("dispatch") == accumulation * 2 * 2 * (2 if ping_pong else 1)
        assert len(history) == len(reference)
        for row, wanted in zip(history, reference, strict=True):
            for name in {"loss", "grad_norm", "eval_loss"} & wanted.keys():
                assert row[name] == pytest.approx(wanted[name], rel=1e-4), name
        logs = [row for row in history if "loss" in row]
        assert all(row.keys() >= FIGURES for row in logs)
        assert all(row["distca/imbalance_estimated_before"] > 1.5 for row in logs)
        assert all(row["distca/imbalance_estimated_after"] < 1.2 for row in logs)
        assert all(row["distca/exchanged_mb_per_layer"] > 0 for row in logs)
        assert [row.keys() >= FIGURES for row in seen if "loss" in row] == [True] * len(logs)
    assert not any(row.keys() & FIGURES for row in theirs[0][0]), "nothing to report where distca did not run"
