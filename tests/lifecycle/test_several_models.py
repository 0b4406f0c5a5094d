"""More than one model in a process, and one model under more than one attention implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, TrainerCallback

import hf_distca
from ranks import RankPools, join_world
from tiny_runs import dispatches, documents, losses, make_trainer, rows, settings, tiny_llama
from turns import in_turn


def batch(rank: int, seed: int = 0) -> dict[str, Any]:
    return hf_distca.PackingCollator()(
        [{"documents": documents(*((96,), (24, 1, 23, 24, 24))[rank], seed=seed)}]
    )


class Switch(TrainerCallback):
    """Changes the attention implementation of the model before some steps."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.moved = names, []

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step in self.names:
            model.set_attn_implementation(self.names[state.global_step])
            self.moved.append(dispatches())


def switch(
    rank: int, names: dict[int, str], ping_pong: bool
) -> tuple[list[float], list[int], list[int]]:
    callback = Switch(names)
    trainer = make_trainer(
        "sdpa",
        rows(12),
        callbacks=[callback],
        config=settings(ping_pong=ping_pong),
        bf16=False,
        max_steps=6,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    reported = [row["step"] for row in trainer.state.log_history if "distca/planning_ms" in row]
    return losses(trainer), [*callback.moved, dispatches()], reported


@pytest.mark.parametrize("ping_pong", in_turn([False, True], 2))
def test_attention_implementation_may_change_during_a_run(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    pool = rank_pool(2)
    ours, theirs = pool(switch, {2: "distca", 4: "sdpa"}, ping_pong), pool(switch, {}, ping_pong)
    for (run, moved, reported), (plain, *_) in zip(ours, theirs, strict=True):
        assert run == pytest.approx(plain, rel=1e-4)
        before, during, after = moved
        assert before == 0
        assert during == after > 0
        assert reported == [3, 4], "exactly the steps under distca"


def train_with_a_reference(
    rank: int, policy_name: str, reference_name: str, mode: str, ping_pong: bool
) -> tuple[list[float], int]:
    """Train two steps of a preference loss. A policy and a reference of another size alternate on
    two batches for each step.
    """
    hf_distca.configure(settings(ping_pong=ping_pong))
    policy = DistributedDataParallel(tiny_llama(policy_name))
    reference = tiny_llama(reference_name, seed=1, layers=3, heads=2)
    reference.train(mode != "eval")
    trained = [*policy.parameters(), *(reference.parameters() if mode == "with gradients" else ())]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    seen: list[float] = []
    for step in range(2):
        margins = []
        for seed in (2 * step, 2 * step + 1):
            ours = policy(**batch(rank, seed), use_cache=False).loss
            with torch.set_grad_enabled(mode == "with gradients"):
                theirs = reference(**batch(rank, seed), use_cache=False).loss
            margins.append(ours - theirs)
        loss = -logsigmoid(margins[0] - margins[1])
        optimizer.zero_grad()
        loss.backward()
        norms = [parameter.grad.norm().item() for parameter in trained]
        optimizer.step()
        seen += [loss.item(), *norms]
    return seen, dispatches()


@pytest.mark.parametrize("mode", in_turn(["eval", "train", "with gradients"], 3))
def test_two_alternating_models_train_as_under_sdpa(rank_pool: RankPools, mode: str) -> None:
    pool = rank_pool(2)
    theirs = pool(train_with_a_reference, "sdpa", "sdpa", mode, False)
    for policy, reference, ping_pong in (
        ("distca", "sdpa", False),
        ("sdpa", "distca", False),
        ("distca", "distca", False),
        ("distca", "distca", True),
    ):
        ours = pool(train_with_a_reference, policy, reference, mode, ping_pong)
        for (run, moved), (plain, _) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(run), torch.tensor(plain), rtol=1e-3, atol=1e-6)
            assert (moved > 0) == (policy == "distca" or mode != "eval")


def compute_gradients(model: LlamaForCausalLM, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(**batch(rank), use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def train_around_the_start(rank: int, store: str, used_before: bool) -> list[int]:
    """Train a model before torch.distributed starts, and after it."""
    hf_distca.configure(settings())
    model, plain = tiny_llama("distca"), tiny_llama("sdpa")
    wanted = compute_gradients(plain, rank)
    if used_before:  # in the process group that ends below
        torch.testing.assert_close(compute_gradients(model, rank), wanted, rtol=1e-4, atol=1e-6)
    moved = [dispatches()]
    dist.destroy_process_group()
    torch.testing.assert_close(compute_gradients(model, rank), wanted, rtol=1e-4, atol=1e-6)
    moved.append(dispatches())
    # Forward without a process group, and backward after one has started.
    loss = model(**batch(rank), use_cache=False).loss
    join_world(rank, 2, Path(store))
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()], wanted, rtol=1e-4, atol=1e-6
    )
    moved.append(dispatches())
    torch.testing.assert_close(compute_gradients(model, rank), wanted, rtol=1e-4, atol=1e-6)
    return [*moved, dispatches()]


@pytest.mark.parametrize("used_before", [False, True])
def test_model_used_before_the_process_group_starts_trains_after_it(
    rank_pool: RankPools, tmp_path: Path, used_before: bool
) -> None:
    for with_group, alone, begun_alone, together in rank_pool(2)(
        train_around_the_start, str(tmp_path / "store"), used_before
    ):
        assert (with_group > 0) == used_before
        assert with_group == alone == begun_alone < together
