"""Evaluation, prediction and generation around the steps of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import hf_distca
from ranks import RankPool
from tiny_runs import dispatches, losses, make_trainer, rows, settings, tiny_llama
from turns import in_turn


class GenerateOnRankZero(TrainerCallback):
    """Shows what the model writes in the middle of training, as people do for a look at it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.written = rank, []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.rank or state.global_step % 2:
            return
        training = model.training
        model.eval()
        prompt = torch.tensor([[1, 5, 9, 3], [0, 0, 7, 4]])
        out = model.generate(prompt, attention_mask=(prompt > 0).long(), max_new_tokens=5, do_sample=False)
        model.train(training)
        self.written.append(out.tolist())


def train(rank: int, implementation: str, ping_pong: bool, balance_evaluation: bool) -> dict[str, Any]:
    writer = GenerateOnRankZero(rank)
    uneven = [*rows(4), {"documents": [[5, 6, 7], [8] * 30]}]  # 5 rows on 2 ranks, of several lengths
    trainer = make_trainer(
        implementation,
        rows(8),
        eval_dataset=uneven,
        callbacks=[writer],
        config=settings(ping_pong=ping_pong, balance_evaluation=balance_evaluation),
        bf16=False,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    trained = dispatches()
    predicted = trainer.predict(uneven)
    return {
        "losses": losses(trainer),
        "written": writer.written,
        "predictions": predicted.predictions,
        "test_loss": predicted.metrics["test_loss"],
        "training": trainer.model.training,
        "trained": trained,
        "dispatched by predict": dispatches() - trained,
    }


@pytest.mark.parametrize(("ping_pong", "balance_evaluation"), in_turn([(False, False), (True, False), (True, True)], 3))
def test_evaluation_and_generation_between_steps(
    rank_pool: Callable[[int], RankPool], ping_pong: bool, balance_evaluation: bool
) -> None:
    pool = rank_pool(2)
    ours, theirs = (pool(train, name, ping_pong, balance_evaluation) for name in ("distca", "sdpa"))
    for run, plain in zip(ours, theirs, strict=True):
        assert len(run["losses"]) == 4 * 2 + 2
        assert run["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert run["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-4)
        assert run["predictions"].shape == plain["predictions"].shape
        np.testing.assert_allclose(run["predictions"], plain["predictions"], rtol=1e-3, atol=1e-4)
        assert run["training"] == plain["training"]
        assert run["trained"] > 0
        assert bool(run["dispatched by predict"]) == balance_evaluation
    assert ours[0]["written"] == theirs[0]["written"]
    assert len(ours[0]["written"]) == 2


def generate_in_training_mode(rank: int, ping_pong: bool) -> tuple[int, list[int]]:
    hf_distca.configure(settings(ping_pong=ping_pong, timeout_seconds=15.0))
    model, plain = tiny_llama("distca"), tiny_llama("sdpa")
    written = []
    for one in (model, plain):
        if rank == 0:  # nothing may wait for the other rank
            prompt = torch.tensor([[1, 5, 9, 3, 11, 4, 2, 17, 33]])
            written.append(one.generate(prompt, max_new_tokens=5, do_sample=False).tolist())
    assert not written or written[0] == written[1]
    alone = dispatches()
    batch = hf_distca.PackingCollator()([rows(2)[rank]])
    for one in (model, plain):
        one(**batch, use_cache=False).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    return alone, dispatches()


@pytest.mark.parametrize("ping_pong", [False, True])
def test_one_rank_generates_with_a_model_in_training_mode(rank_pool: Callable[[int], RankPool], ping_pong: bool) -> None:
    for alone, trained in rank_pool(2)(generate_in_training_mode, ping_pong):
        assert alone == 0 < trained
