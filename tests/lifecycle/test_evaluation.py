"""Evaluation, prediction and generation between the steps of a training run, and the loss of dealt
evaluation sets.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_distca
from ranks import RankPools
from tiny_runs import (
    COMMON,
    dispatches,
    documents,
    losses,
    make_tokenizer,
    make_trainer,
    rows,
    settings,
    tiny_llama,
)
from turns import in_turn


class GenerateOnRankZero(TrainerCallback):
    """Generates text on rank 0 during training, as users do to inspect a model."""

    def __init__(self, rank: int) -> None:
        self.rank, self.written = rank, []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if self.rank or state.global_step % 2:
            return
        training = model.training
        model.eval()
        prompt = torch.tensor([[1, 5, 9, 3], [0, 0, 7, 4]])
        out = model.generate(
            prompt, attention_mask=(prompt > 0).long(), max_new_tokens=5, do_sample=False
        )
        model.train(training)
        self.written.append(out.tolist())


def train(
    rank: int, implementation: str, ping_pong: bool, balance_evaluation: bool
) -> dict[str, Any]:
    writer = GenerateOnRankZero(rank)
    # 5 rows of different lengths, for 2 ranks
    uneven = [*rows(4), {"documents": [[5, 6, 7], [8] * 30]}]
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


@pytest.mark.parametrize(
    ("ping_pong", "balance_evaluation"), in_turn([(False, False), (True, False), (True, True)], 3)
)
def test_evaluation_and_generation_during_training_equal_sdpa(
    rank_pool: RankPools, ping_pong: bool, balance_evaluation: bool
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
        if rank == 0:  # no call may wait for the other rank
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
def test_model_in_training_mode_generates_on_one_rank_alone(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    for alone, trained in rank_pool(2)(generate_in_training_mode, ping_pong):
        assert alone == 0 < trained


# Tokens of each document, and how many at its end are targets. Some ranks get few targets, some
# many; one batch has none, and the last batch is padded.
EVALUATED = ((190, 100), (90, 2), (80, 0), (200, 0), (30, 20), (70, 1), (7, 3))
TOKENS = 240  # tokens of a global batch, on any number of ranks
KINDS, FORMS = ("Trainer", "SFTTrainer"), ("float32", "bfloat16", "of two sets", "with metrics")


def make_set(numbers: Iterable[int] = range(len(EVALUATED))) -> Dataset:
    texts = documents(*(length for length, _ in EVALUATED), seed=1)
    labels = [
        [-100] * (len(ids) - targets) + ids[len(ids) - targets :]
        for ids, (_, targets) in zip(texts, EVALUATED, strict=True)
    ]
    return Dataset.from_list(
        [{"input_ids": texts[number], "labels": labels[number]} for number in numbers]
    )


def count_right(prediction: Any) -> dict[str, float]:
    kept = prediction.label_ids != -100
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"right": float((right & kept).sum()), "targets": float(kept.sum())}


def evaluate(
    rank: int, ranks: int, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], dict[str, float]]:
    return {case: evaluate_one(ranks, *case) for case in cases}


def evaluate_one(ranks: int, kind: str, form: str) -> dict[str, float]:
    hf_distca.configure(settings(cost_model="analytic"))
    warnings.simplefilter("ignore", FutureWarning)  # TRL raises some
    args = {**COMMON, "output_dir": tempfile.gettempdir(), "bf16": form == "bfloat16"}
    args["prediction_loss_only"] = form != "with metrics"
    if form == "with metrics" and kind == "Trainer":
        args["label_names"] = ["shift_labels"]
    sets: Any = (
        {"first": make_set(range(3)), "second": make_set()} if form == "of two sets" else make_set()
    )
    model = sharp_llama("distca")
    if kind == "Trainer":
        trainer = Trainer(
            model, TrainingArguments(**args), train_dataset=make_set(), eval_dataset=sets
        )
    else:
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            model,
            SFTConfig(**args, max_length=None),
            train_dataset=make_set(),
            eval_dataset=sets,
            processing_class=make_tokenizer(),
        )
    if form == "with metrics" and kind == "Trainer":
        trainer.compute_metrics = count_right
    found = hf_distca.deal(trainer, TOKENS // ranks, evaluation=True).evaluate()
    assert not vars(trainer).keys() & {"compute_loss", "prediction_step"}, "methods are restored"
    return {
        name: value for name, value in found.items() if name.endswith(("loss", "right", "targets"))
    }


def sharp_llama(implementation: str) -> Any:
    """Create a model whose losses differ from token to token."""
    model = tiny_llama(implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


@cache
def compute_mean_loss(numbers: tuple[int, ...] = tuple(range(len(EVALUATED)))) -> float:
    """Compute the mean loss over targets document by document, in float64."""
    model, total, count = sharp_llama("sdpa").double(), 0.0, 0
    for row in make_set(numbers):
        ids, targets = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum").detach())
        count += int((targets != -100).sum())
    return total / count


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "counts", [(1, 2), pytest.param((1, 2, 3), marks=pytest.mark.slow)], ids=str
)
def test_loss_of_dealt_evaluation_is_the_mean_over_targets(
    rank_pool: RankPools, counts: tuple[int, ...]
) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    cases = list(product(KINDS, FORMS))
    plain = [case for case in cases if case[1] == "float32"]
    by_ranks = {1: [evaluate(0, 1, plain)]}
    by_ranks |= {
        ranks: rank_pool(ranks)(evaluate, ranks, cases if ranks == 2 else plain)
        for ranks in counts[1:]
    }
    for ranks, (kind, form) in (
        (ranks, case) for ranks, found in by_ranks.items() for case in found[0]
    ):
        found = by_ranks[ranks]
        for of_rank in found:
            metrics, tolerance = of_rank[kind, form], 1e-2 if form == "bfloat16" else 1e-6
            if form == "of two sets":
                assert metrics["eval_first_loss"] == pytest.approx(
                    compute_mean_loss((0, 1, 2)), rel=tolerance
                )
                metrics["eval_loss"] = metrics["eval_second_loss"]
            assert metrics["eval_loss"] == pytest.approx(compute_mean_loss(), rel=tolerance)
            if "eval_targets" in metrics:
                assert metrics["eval_targets"] == sum(targets for _, targets in EVALUATED)
