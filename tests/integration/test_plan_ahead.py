"""A step planned ahead: two collectives for all its micro-batches, and the numbers of a step
planned as it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from test_dealt import model_for
from test_parity import PAIRS
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
)

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.agreement.history import BalanceTotals
from hf_distca.integration.current_session import current_session
from hf_distca.integration.training.mixin import plan_ahead
from ranks import RankPool
from recorded import counted_planning
from tiny_runs import losses as logged_losses
from tiny_runs import make_trainer
from turns import in_turn

STEPS, MICRO_BATCHES = 3, 3
LENGTHS = ([[96], [70, 26], [5, 91]], [[16] * 6, [96], [32] * 3])  # of each rank's micro-batches


def batches(rank: int, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for lengths in LENGTHS[rank]:
        documents = [
            torch.randint(0, 61, (n + step,), generator=generator).tolist() for n in lengths
        ]
        made.append(hf_distca.PackingCollator()([{"documents": documents}]))
    return made


def train(
    rank: int, ahead: bool, kind: str, wrapper: str
) -> tuple[list[float], list[dict[str, float]], list[int], int]:
    """Losses, balance figures of each step, rows exchanged for planning in each step, and the
    number of the last micro-batch.
    """
    hf_distca.configure(
        hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, ping_pong=kind == "halves")
    )
    model = model_for(kind, "distca")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, figures, gathers = [], [], list[int]()
    for step in range(STEPS):
        before = hf_distca.metrics()
        with counted_planning() as gather:
            micro_batches = plan_ahead(batches(rank, step)) if ahead else batches(rank, step)
            for batch in micro_batches:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(len(gather))
        figures.append((hf_distca.metrics(gather=True) - before).figures())
    return losses, figures, gathers, current_session().planner.resume_progress().number


@pytest.mark.parametrize(
    ("kind", "wrapper", "plans"),
    in_turn(
        [("full", "ddp", 1), ("windows", "ddp", 2), ("halves", "ddp", 1), ("full", "fsdp1", 1)],
        3,
        [("halves", "ddp", 1)],
    ),
)
def test_steps_planned_ahead_are_those_planned_as_they_run(
    rank_pool: Callable[[int], RankPool], kind: str, wrapper: str, plans: int
) -> None:
    lazily, ahead = (rank_pool(2)(train, planned, kind, wrapper) for planned in (False, True))
    for (losses, figures, gathers, number), (same_losses, same_figures, fewer, same_number) in zip(
        lazily, ahead, strict=True
    ):
        assert same_losses == losses
        assert number == same_number == STEPS * MICRO_BATCHES
        assert gathers == [2 * MICRO_BATCHES * plans] * STEPS, (
            "both nano-batches are planned in one go"
        )
        assert fewer == [2 * MICRO_BATCHES * plans, 2, 2], (
            "the first step tells what there is to plan"
        )
        for one, other in zip(figures, same_figures, strict=True):
            assert one["distca/micro_batches"] == other["distca/micro_batches"] == MICRO_BATCHES
            for name in ("before", "after"):
                assert (
                    other[f"distca/imbalance_estimated_{name}"]
                    == one[f"distca/imbalance_estimated_{name}"]
                )
            assert (
                other["distca/exchanged_mb_per_layer"] == one["distca/exchanged_mb_per_layer"] > 0
            )


def changed(rank: int) -> str:
    hf_distca.configure(
        hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, timeout_seconds=5)
    )
    model = model_for("full", "distca")
    for batch in batches(rank, 0):
        model(**batch, use_cache=False).loss.backward()
    (batch, *_) = plan_ahead(batches(rank, 1))
    if rank == 1:  # documents of other lengths, under the plans for those announced
        packed = batch["distca_documents"]
        batch["distca_documents"] = PackedDocuments((*packed.lengths[2:], 34))
        batch["distca_documents"].prepared_plans = packed.prepared_plans
    with pytest.raises(hf_distca.DistCAError) as caught:
        model(**batch, use_cache=False).loss.backward()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_batch_changed_after_planning_is_refused(rank_pool: Callable[[int], RankPool]) -> None:
    waits, own = rank_pool(2)(changed, timeout=60)
    assert own.startswith("LayoutError: rank 1: a micro-batch has documents of")
    assert "leave batches as they are after plan_ahead" in own
    assert waits.startswith("DistCADesyncError")
    assert "rank 1 raised LayoutError" in waits


def padded(rank: int, ahead: bool) -> tuple[list[float], int]:
    """Losses of two steps in which the mask of rank 1 has zeros, and the rows exchanged for
    planning in the second.
    """
    hf_distca.configure(
        hf_distca.DistCAConfig(
            tile=8, min_gain=0.0, cost_model=PAIRS, ping_pong=True, timeout_seconds=5
        )
    )
    model, losses = model_for("halves", "distca"), []
    for step in range(2):
        made = batches(rank, step)
        for batch in made[rank:]:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, -3 * rank :] = 1 - rank
        with counted_planning() as gather:
            for batch in plan_ahead(made) if ahead else made:
                losses.append(model(**batch, use_cache=False).loss)
                losses[-1].backward()
    return [loss.item() for loss in losses], len(gather)


def test_padding_is_planned_ahead(rank_pool: Callable[[int], RankPool]) -> None:
    lazily, ahead = (rank_pool(2)(padded, planned, timeout=60) for planned in (False, True))
    assert [losses for losses, _ in ahead] == [losses for losses, _ in lazily]
    assert [gathers for _, gathers in ahead] == [2, 2]


def unequal(rank: int, first: int) -> str:
    hf_distca.configure(
        hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, timeout_seconds=5)
    )
    model = model_for("full", "distca")
    for batch in batches(rank, 0):
        model(**batch, use_cache=False).loss.backward()
    with pytest.raises(hf_distca.DistCADesyncError) as caught:
        plan_ahead(batches(rank, 1)[rank * first :])
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (1, "different numbers of plans at once in {}: rank 0: 3, rank 1: 2"),
        (3, "different batches to plan (0: none) in {}: rank 0: 1, rank 1: 0"),
    ],
)
def test_ranks_with_unequal_micro_batches_all_get_an_error(
    rank_pool: Callable[[int], RankPool], first: int, said: str
) -> None:
    """Ranks with other numbers of micro-batches all get an error."""
    began = time.monotonic()
    for rank, message in enumerate(rank_pool(2)(unequal, first, timeout=60)):
        assert said.format(f"micro-batches 4 to {6 - first * rank}, ahead") in message
    assert time.monotonic() - began < 5, "at once, not after the timeout"


def nothing(rank: int) -> list[Any]:
    hf_distca.configure(
        hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, timeout_seconds=5)
    )
    model = model_for("full", "distca")
    for batch in batches(rank, 0):
        model(**batch, use_cache=False).loss.backward()
    return plan_ahead([])


def test_ranks_that_all_have_no_micro_batches_go_on(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2)(nothing, timeout=60) == [[], []]


def test_batches_without_documents_or_ranks_are_unchanged() -> None:
    """Batches without documents and ranks alone are left as they are."""
    plain = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}, (1, 2)]
    assert plan_ahead(plain) == plain
    assert plan_ahead([]) == []
    packed = batches(0, 0)
    assert [one is other for one, other in zip(plan_ahead(packed), packed, strict=True)] == [
        True
    ] * MICRO_BATCHES


class PlanningTrainer(hf_distca.DistCATrainerMixin, Trainer):
    pass


def train_with(rank: int, ahead: bool) -> tuple[list[dict[str, float]], BalanceTotals, int, int]:
    """Log history and balance of a Trainer's run, the number of its last micro-batch, and the rows
    exchanged for planning.
    """
    trainer = make_trainer(
        "distca",
        [
            {"documents": [[7] * n for n in LENGTHS[at % 2][at // 2 % MICRO_BATCHES]]}
            for at in range(2 * 4 * 2)
        ],
        kind=PlanningTrainer if ahead else Trainer,
        gradient_accumulation_steps=3,
        num_train_epochs=2,  # of 8 micro-batches a rank: the last step of an epoch has two
        train_sampling_strategy="sequential",
    )
    with counted_planning() as gather:
        trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    return (
        history,
        hf_distca.metrics().balance,
        current_session().planner.resume_progress().number,
        len(gather),
    )


def test_a_trainer_plans_its_steps_ahead(rank_pool: Callable[[int], RankPool]) -> None:
    lazily, ahead = (rank_pool(2)(train_with, planned, timeout=120) for planned in (False, True))
    for (history, balance, number, gathers), (same, same_balance, same_number, fewer) in zip(
        lazily, ahead, strict=True
    ):
        assert number == same_number == balance.micro_batches == same_balance.micro_batches == 16
        assert (gathers, fewer) == (2 * 16 + 6, 2 * 3 + 2 * 5 + 6), (
            "after the first of six steps, two a step; one a log"
        )
        for one, other in zip(history, same, strict=True):
            for name in ("loss", "grad_norm"):
                assert one.get(name) == other.get(name)
        for name in (
            "imbalance_estimated_before",
            "imbalance_estimated_after",
            "exchanged_mb_per_layer",
        ):
            assert balance.compute_figures()[f"distca/{name}"] == pytest.approx(
                same_balance.compute_figures()[f"distca/{name}"]
            )


def order(rank: int) -> list[int]:
    """Rows exchanged for planning before the first forward of each step: at its start, or while the
    one before ran.
    """
    trainer = make_trainer(
        "distca",
        [
            {"documents": [[7] * n for n in LENGTHS[at % 2][at // 2 % MICRO_BATCHES]]}
            for at in range(2 * 4 * 2)
        ],
        kind=PlanningTrainer,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        train_sampling_strategy="sequential",
    )
    at_start: list[int] = []
    original = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        if trainer.state.global_step == len(at_start):
            at_start.append(sum("what ranks measured" not in doing for doing in gather))
        return original(*args, **kwargs)

    trainer.training_step = training_step
    with counted_planning() as gather:
        trainer.train()
    return at_start


def test_a_trainer_announces_a_step_when_the_one_before_begins(
    rank_pool: Callable[[int], RankPool],
) -> None:
    # A step that is planned as it runs takes two collectives a micro-batch; the first of an epoch,
    # two for all of them. Any other one is announced, with one, when the step before begins, and
    # its plans are compared, with another, when it begins itself.
    for at_start in rank_pool(2)(order, timeout=120):
        assert at_start == [0, 6 + 3, 10, 10 + 3, 13 + 2, 16]


class Stop(TrainerCallback):
    """Ends the first epoch early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


class Counted(Dataset[dict[str, Any]]):
    """Rows of documents with labels on some of their tokens; counts what is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, Any]:
        self.asked += 1
        ids = torch.randint(2, 61, (20 + 7 * at,), generator=torch.Generator().manual_seed(at))
        labels = ids.clone()
        labels[: at * 5] = -100  # so that the number of items in a step matters
        return {"input_ids": ids, "labels": labels}


class Ends(TrainerCallback):
    """Whether accelerate took the loader to be at its end, after each step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(GradientState().end_of_dataloader)


def dropping(
    rank: int, ahead: bool, folder: str, resume_from: str | None, changes: dict[str, Any]
) -> tuple[list[float], int, list[bool]]:
    """What a model with dropout logs, how many rows were read, and `Ends`: rows in random order,
    two epochs of 3 + 3 + 2.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
    )
    config._attn_implementation = "distca"
    data, ends = Counted(), Ends()
    trainer = make_trainer(
        "distca",
        data,
        folder=folder,
        kind=PlanningTrainer if ahead else Trainer,
        model=GPT2LMHeadModel(config),
        callbacks=[ends, *([Stop()] if changes.pop("stop", False) else [])],
        gradient_accumulation_steps=3,
        **{"num_train_epochs": 2, **changes},
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return logged_losses(trainer), data.asked, ends.seen


@pytest.mark.parametrize(
    "changes",
    in_turn([{}, {"max_steps": 2}, {"stop": True}], 3),
    ids=["epochs", "max_steps", "epoch stopped"],
)
def test_drawing_early_changes_no_batch_and_no_random_number(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain, ahead = (
        rank_pool(2)(dropping, early, str(tmp_path), None, changes, timeout=120)
        for early in (False, True)
    )
    for (wanted, read, ends), (seen, read_early, ends_early) in zip(plain, ahead, strict=True):
        assert seen == wanted
        assert all(early or not late for late, early in zip(ends, ends_early, strict=True)), (
            "the end is told early, not hidden"
        )
        assert len(wanted) == 2 * {"max_steps": 2, "stop": 5}.get(next(iter(changes), ""), 6)
        assert read_early == read or "stop" in changes, "nothing is read past the end"


@pytest.mark.slow
def test_a_run_planned_ahead_is_resumed(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = rank_pool(2)(dropping, True, str(tmp_path), None, saving, timeout=120)
    for step in (1, 3, 4):  # within an epoch, at its end, within the next one
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed = rank_pool(2)(dropping, True, str(tmp_path / "again"), checkpoint, {}, timeout=120)
        for (wanted, *_), (seen, *_) in zip(whole, resumed, strict=True):
            assert seen == pytest.approx(wanted, rel=1e-6)
