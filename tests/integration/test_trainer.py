"""Trainer under DDP on two real ranks: same losses as sdpa, and the balance in every log."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainerCallback, TrainerState

import hf_distca
from checkpointed import ARGUMENT
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import dispatches, logged, make_trainer, rows, settings
from turns import in_turn

FIGURES = {
    "distca/imbalance_tokens",
    "distca/imbalance_estimated_before",
    "distca/imbalance_estimated_after",
    "distca/imbalance_measured_before",
    "distca/imbalance_measured_after",
    "distca/planning_ms",
    "distca/exchanged_mb_per_layer",
    "distca/server_time_share",
    "distca/micro_batches",
}


class Reporter(TrainerCallback):
    """Stands for W&B or TensorBoard: sees the logs that reach reporters."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.seen.append(dict(logs or {}))


@dataclass(frozen=True)
class Way:
    """How the model is trained."""

    accumulation: int = 1
    checkpointing: bool = False
    ping_pong: bool = False
    bf16: bool = True


def train(rank: int, implementation: str, way: Way) -> tuple[list[dict], list[dict], int]:
    """Train; return the log history, the logs of a reporter, and the number of dispatches."""
    steps, reporter = 6, Reporter()
    trainer = make_trainer(
        implementation,
        rows(2 * steps * way.accumulation),
        eval_dataset=rows(2),
        config=settings(ping_pong=way.ping_pong),
        callbacks=[reporter],
        gradient_accumulation_steps=way.accumulation,
        **{ARGUMENT: way.checkpointing},
        bf16=way.bf16,
        max_steps=steps,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    return trainer.state.log_history, reporter.seen, dispatches()


# In bfloat16, sums in another order differ after six steps: losses by up to 4e-4, and gradient
# norms by up to 9e-3.
CLOSE = {
    False: {"loss": 1e-4, "eval_loss": 1e-4, "grad_norm": 1e-4},
    True: {"loss": 1e-3, "eval_loss": 1e-3, "grad_norm": 2e-2},
}
ALWAYS = [Way(), Way(2, checkpointing=True, ping_pong=True, bf16=False)]


@pytest.mark.parametrize(
    "way",
    in_turn(
        [*ALWAYS, Way(bf16=False), *(Way(2, *on) for on in product((False, True), repeat=2))],
        99,
        ALWAYS,
    ),
    ids=str,
)
def test_trainer_has_the_losses_of_sdpa_and_logs_balance(rank_pool: RankPools, way: Way) -> None:
    pool = rank_pool(2)
    ours, theirs = (pool(train, name, way) for name in ("distca", "sdpa"))
    for (history, seen, sent), (reference, *_) in zip(ours, theirs, strict=True):
        # Of 6 steps, each micro-batch has 2 layers; each half of a layer has a dispatch forward and
        # backward.
        assert sent == 6 * way.accumulation * 4 * (2 if way.ping_pong else 1)
        assert len(history) == len(reference)
        for row, wanted in zip(history, reference, strict=True):
            for name in CLOSE[way.bf16].keys() & wanted.keys():
                assert row[name] == pytest.approx(wanted[name], rel=CLOSE[way.bf16][name]), name
        logs = [row for row in history if "loss" in row]
        assert all(row.keys() >= FIGURES for row in logs)
        assert all(row["distca/imbalance_estimated_before"] > 1.5 for row in logs)
        assert all(row["distca/imbalance_estimated_after"] < 1.2 for row in logs)
        assert all(row["distca/exchanged_mb_per_layer"] > 0 for row in logs)
        assert [row.keys() >= FIGURES for row in seen if "loss" in row] == [True] * len(logs)
    assert not any(row.keys() & FIGURES for row in theirs[0][0]), "sdpa has no figures to report"


def train_with_reporter(rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train with a reporter before distca's callback; return the log history and reported logs."""
    reporter = Reporter()
    trainer = make_trainer(
        "distca",
        rows(8),
        callbacks=[reporter],
        max_steps=4,
        logging_steps=2,
        train_sampling_strategy="sequential",
    )
    trainer.remove_callback(hf_distca.DistCACallback)
    hf_distca.configure(settings())
    trainer.add_callback(hf_distca.DistCACallback(settings(), record=False))
    trainer.train()
    return trainer.state.log_history, reporter.seen


def test_reporter_added_before_the_callback_sees_the_figures(rank_pool: RankPools) -> None:
    for history, seen in rank_pool(2)(train_with_reporter):
        logs = [row for row in history if "loss" in row]
        assert len(logs) == 2
        assert all(row.keys() >= FIGURES for row in logs)
        seen = [row for row in seen if "loss" in row]
        for row, reported in zip(logs, seen, strict=True):
            assert {name: row[name] for name in FIGURES} == {
                name: reported[name] for name in FIGURES
            }


def test_callback_without_a_handler_warns_that_reporters_miss_the_figures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf_distca.DistCACallback(record=False).on_step_begin(None, TrainerState(), None)
    assert "but not the reporters" in caplog.text
    assert "trainer.callback_handler.callbacks" in caplog.text


def evaluate_first(rank: int, when: str) -> tuple[int, int, int, str, bool]:
    """Evaluate, train and predict; return dispatches, the log, and whether the session stayed."""
    callback = hf_distca.DistCACallback(settings(balance_evaluation=True), record=False)
    hf_distca.configure()  # removes the settings of an earlier run
    trainer = make_trainer(
        "distca",
        rows(4),
        eval_dataset=rows(4),
        distca=None if when == "late" else callback,
        max_steps=2,
        train_sampling_strategy="sequential",
    )
    if when == "late":
        trainer.remove_callback(hf_distca.DistCACallback)
        hf_distca.configure()
        trainer.add_callback(callback)
    with logged() as said:
        trainer.evaluate()
    evaluated, session = dispatches(), current_session()
    trainer.train()
    trained = dispatches()
    trainer.predict(rows(2))
    return (
        evaluated,
        trained - evaluated,
        dispatches() - trained,
        "".join(said),
        current_session() is session,
    )


def test_settings_of_a_callback_apply_to_evaluation_before_training(rank_pool: RankPools) -> None:
    layers = 2
    for evaluated, trained, predicted, said, same in rank_pool(2)(evaluate_first, "in time"):
        assert (evaluated, trained, predicted) == (2 * layers, 2 * 2 * layers, layers)
        assert said == ""
        assert same, "the session keeps figures and costs while its settings stay"


def test_callback_added_late_logs_that_its_settings_begin_late(rank_pool: RankPools) -> None:
    layers = 2
    for evaluated, trained, predicted, said, _ in rank_pool(2)(evaluate_first, "late"):
        assert (evaluated, trained, predicted) == (layers, 2 * 2 * layers, layers), (
            "all batches except the first"
        )
        assert "its settings apply only from now on" in said


def collect_groups(rank: int) -> list[tuple[int, ...]]:
    """Give settings and groups in turn; return the ranks of each attention group."""
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp_shard"))["dp_shard"].get_group()
    found = []

    def begin(callback: hf_distca.DistCACallback) -> None:
        callback.on_init_end(None, None, None)
        callback.on_train_begin(None, TrainerState(), None)
        found.append(current_session().join_group().ranks)

    hf_distca.configure(group=own)
    begin(hf_distca.DistCACallback(settings()))
    assert current_session().config == settings()
    begin(hf_distca.DistCACallback(group=dist.group.WORLD))
    assert current_session().config == hf_distca.DistCAConfig(), (
        "settings come from configure, not from another callback"
    )
    hf_distca.configure()
    begin(hf_distca.DistCACallback(settings(), group=own))
    begin(hf_distca.DistCACallback(settings()))  # without the group of the previous callback
    return found


def test_group_of_a_callback_overrides_the_group_of_configure(rank_pool: RankPools) -> None:
    for rank, found in enumerate(rank_pool(2)(collect_groups)):
        assert found == [(rank,), (0, 1), (rank,), (0, 1)]


@pytest.mark.parametrize(
    ("implementation", "said"),
    [
        ("sdpa", "LlamaForCausalLM has attn_implementation='sdpa', which is right only for"),
        ("distca", "this process alone"),
    ],
)
def test_callback_with_nothing_to_do_logs_the_reason_once(
    implementation: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(implementation, rows(1), max_steps=1).train()
    assert said in caplog.text
    assert caplog.text.count("DistCACallback has nothing to") == 1
