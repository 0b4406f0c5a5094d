"""A Trainer has the same world, data, checkpoints and losses with and without servers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dealt_hybrids import Case as Hybrid
from dealt_hybrids import train as train_hybrid
from launches import Launch, Launcher, Trained, pooled, run_both_ways, unpooled
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import hf_distca
from hf_distca.agreement.record_rows import RECORD_NAME
from tiny_runs import documents, losses, rows, settings
from tiny_runs import make_trainer as tiny_trainer
from turns import in_turn

WORLDS = [(2, 1), *(pytest.param(*world, marks=pytest.mark.slow) for world in ((3, 1), (2, 2)))]


class Noted(torch.utils.data.Dataset):
    """A data set that records the rows that this rank reads."""

    def __init__(self, count: int) -> None:
        self.rows, self.read = rows(count), list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.append(number)
        return self.rows[number]


class GenerateOnRankZero(TrainerCallback):
    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if args.process_index == 0:
            model.generate(torch.tensor([[1, 5, 9, 3]]), max_new_tokens=3, do_sample=False)
            model.train()


def make_trainer(*args: Any, **changes: Any) -> Trainer:
    """Make a Trainer with a large epsilon, so that Adam does not amplify rounded gradients."""
    return tiny_trainer("distca", *args, adam_epsilon=1e-2, bf16=False, **changes)


def check_losses(ours: list[Trained], theirs: list[Trained]) -> None:
    """Check that losses and gradient norms are equal, and that servers computed."""
    for here, there in zip(ours, theirs, strict=True):
        assert here.value["losses"] == pytest.approx(there.value["losses"], rel=2e-6)
    assert ours[0].told["begin"] > 0
    assert ours[0].share > 0.05


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    data = Noted(12)
    trainer = make_trainer(data, folder=folder, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    args, accelerator = trainer.args, trainer.accelerator
    world = (
        args.world_size,
        args.process_index,
        args.local_process_index,
        dist.get_world_size(),
        dist.get_rank(),
    )
    world += (
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.local_process_index,
        args.train_batch_size,
    )
    return {"losses": losses(trainer), "world": world, "read": data.read}


@pytest.mark.parametrize(("trainers", "servers"), WORLDS)
def test_world_samplers_and_checkpoints_are_the_same_with_servers(
    launch: Launcher, tmp_path: Path, trainers: int, servers: int
) -> None:
    started = launch(trainers, servers)
    theirs = started(unpooled, train_and_save, str(tmp_path / "without"))
    ours = started(pooled, train_and_save, str(tmp_path / "with"))
    check_losses(ours, theirs)
    for rank, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        assert here.value["world"] == there.value["world"]
        assert here.value["world"][:2] == (trainers, rank)
        assert here.value["read"] == there.value["read"]
    files = [
        {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.*")}
        for name in ("with", "without")
    ]
    assert files[0] == files[1]
    assert f"checkpoint-4/rng_state_{trainers - 1}.pth" in files[0]
    for name in files[0] - {RECORD_NAME}:
        check_equal_files(tmp_path / "with" / name, tmp_path / "without" / name)


def check_equal_files(ours: Path, theirs: Path) -> None:
    match ours.suffix:
        case ".safetensors":
            torch.testing.assert_close(load_file(ours), load_file(theirs), rtol=1e-6, atol=1e-7)
        case ".pt" | ".pth" if ours.name != "scheduler.pt":
            pair = [_to_tensors(torch.load(path, weights_only=False)) for path in (ours, theirs)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-7)
        case ".json" if ours.name == "trainer_state.json":
            states = [json.loads(path.read_text()) for path in (ours, theirs)]
            assert states[0].keys() == states[1].keys()
            assert states[0]["global_step"] == states[1]["global_step"]
        case ".json":
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
        case "":  # a folder
            assert ours.is_dir()


def _to_tensors(value: Any) -> Any:
    """Convert a saved state to values that can be compared."""
    match value:
        case dict():
            return {str(name): _to_tensors(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_to_tensors(inner) for inner in value]
        case torch.Tensor() | np.ndarray():
            return torch.as_tensor(np.asarray(value))
        case bool() | int() | float():
            return float(value)
    return str(value) and 0.0


def evaluate(rank: int, balance_evaluation: bool, ping_pong: bool) -> dict[str, Any]:
    trainer = make_trainer(
        rows(8),
        eval_dataset=[*rows(4), {"documents": [[5, 6, 7], [8] * 30]}],  # 5 rows, of several lengths
        callbacks=[GenerateOnRankZero()],
        config=settings(ping_pong=ping_pong, balance_evaluation=balance_evaluation),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    return {"losses": losses(trainer)}


@pytest.mark.parametrize("balance_evaluation", in_turn([False, True], 4))
def test_evaluation_between_steps_changes_no_losses(
    launch: Launcher, balance_evaluation: bool
) -> None:
    ours, theirs = run_both_ways(launch(2, 1), evaluate, balance_evaluation, True)
    check_losses(ours, theirs)
    halves, layers, batches = 2, 2, 3 if balance_evaluation else 0
    assert ours[0].told["begin"] == halves * layers * (2 * 4 + 2 * batches)


def train_in_turn(rank: int) -> dict[str, Any]:
    """Train twice with one Trainer, then with other settings, then with those of the process."""
    hf_distca.configure(settings())
    arguments: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
    first = make_trainer(rows(12), **arguments)
    first.train()
    first.train()
    second = make_trainer(rows(12), config=settings(ping_pong=True), **arguments)
    second.train()
    third = make_trainer(rows(12), distca=hf_distca.DistCACallback(record=False), **arguments)
    third.train()
    return {"losses": [*losses(first), *losses(second), *losses(third)]}


@pytest.mark.slow
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (3, 1)])
def test_consecutive_trainers_leave_few_plans_on_servers(
    launch: Launcher, trainers: int, servers: int
) -> None:
    started = launch(trainers, servers)
    ours, theirs = run_both_ways(started, train_in_turn)
    check_losses(ours, theirs)
    (server, *_) = started.ask_servers()
    assert server.kept["Call"] == 0
    assert server.kept["_UsedPlan"] + server.kept["MicroBatchPlan"] <= 4 * 2


def deal(rank: int, ping_pong: bool, workers: int) -> dict[str, Any]:
    data = datasets.Dataset.from_dict(
        {"input_ids": documents(200, 7, 1, 33, 90, 64, 12, 150, 5, 80)}
    )
    config = settings(ping_pong=ping_pong, balance_evaluation=True)
    trainer = make_trainer(
        data,
        config=config,
        max_steps=4,
        remove_unused_columns=True,
        eval_dataset=data,
        dataloader_num_workers=workers,
    )
    hf_distca.deal(trainer, 96, evaluation=True)
    trainer.train()
    trainer.evaluate()
    return {"losses": losses(trainer)}


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (3, 1), (2, 2)])
def test_trainer_with_dealt_documents_has_the_same_losses(
    launch: Launcher, trainers: int, servers: int, ping_pong: bool
) -> None:
    started = launch(trainers, servers)
    ours, theirs = run_both_ways(started, deal, ping_pong, 0)
    check_losses(ours, theirs)
    assert all(server.kernel_calls > 0 for server in started.ask_servers())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shares_planned_by_loader_workers_give_the_same_losses() -> None:
    with closing(Launch(2, 1, daemon=False)) as started:  # daemons cannot have workers
        check_losses(*run_both_ways(started, deal, True, 1, timeout=250.0))


def train_case(rank: int, case: Hybrid) -> dict[str, Any]:
    run = train_hybrid(rank, case)
    return {
        "losses": run.losses,
        "weights": run.weights,
        "cut": (run.spanning, run.state_exchanges, run.halves),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "servers"),
    [
        (Hybrid("nemotron_h"), 1),
        (Hybrid("qwen3_next", checkpointing=True), 1),
        (Hybrid("qwen3_next", ping_pong=True), 2),
        (Hybrid("nemotron_h", 3, checkpointing=False, sharded=True, ping_pong=True), 1),
        (Hybrid("nemotron_h", evaluation=True), 1),
    ],
    ids=str,
)
def test_hybrid_model_with_dealt_documents_has_the_same_weights(
    launch: Launcher, case: Hybrid, servers: int
) -> None:
    ours, theirs = run_both_ways(launch(case.ranks, servers), train_case, case, timeout=200.0)
    check_losses(ours, theirs)
    for here, there in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            here.value["weights"], there.value["weights"], rtol=1e-5, atol=1e-7
        )
        assert here.value["cut"] == there.value["cut"]
