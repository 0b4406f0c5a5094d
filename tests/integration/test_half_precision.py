"""Dealt documents in bfloat16 under every engine, compared with one process."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from test_losses_over_shares import LENGTHS, make_labels_trainer
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig

import hf_distca
from checkpointed import ARGUMENT
from ranks import RankPool, RankPools
from tiny_runs import documents, exact_arguments, losses, settings, tiny_llama

TOKENS, STEPS = 96, 6  # in a global batch, on any number of ranks; two documents are longer
TOLERANCE = 4e-3

# By case: arguments of the Trainer, and settings of distca.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DDP": ({}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "ping-pong": ({}, {"ping_pong": True}),
    "checkpointing": ({ARGUMENT: True}, {}),
    "FSDP2": ({}, {}),
    "FSDP2, ping-pong, accumulation": ({"gradient_accumulation_steps": 2}, {"ping_pong": True}),
    "LoRA": ({}, {}),
    "compiled": ({"torch_compile": True}, {}),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 2}, {}),
}
if "fsdp_size" not in inspect.signature(DistributedConfig).parameters:
    # Older releases of transformers cannot load a sharded model.
    WAYS = {way: said for way, said in WAYS.items() if not way.startswith("FSDP2")}


def make_model(ranks: int, implementation: str, way: str) -> Any:
    model = tiny_llama(implementation)
    if way == "LoRA":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if not way.startswith("FSDP2") or ranks == 1:
        return model
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]  # only rank 0 writes
        dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])
        dist.barrier()
        options = {
            "attn_implementation": implementation,
            "distributed_config": DistributedConfig(fsdp_size=ranks),
        }
        loaded = AutoModelForCausalLM.from_pretrained(folders[0], **options).train()
        dist.barrier()
        return loaded


def make_trainer(kind: type[Trainer], ranks: int, implementation: str, way: str) -> Trainer:
    disable_progress_bars()
    torch._dynamo.reset()
    changes, said = WAYS[way]
    hf_distca.configure(settings(cost_model="analytic", **said))
    unset = {"bf16": True, "ddp_find_unused_parameters": None}
    rate = {"learning_rate": 1e-2, "adam_epsilon": 1e-2}  # rounding of tiny gradients does not grow
    args = exact_arguments(**{"max_steps": STEPS, **unset, **rate, **changes})
    rows = Dataset.from_dict({"input_ids": documents(*LENGTHS)})
    trainer = kind(
        make_model(ranks, implementation, way), args, train_dataset=rows, eval_dataset=rows
    )
    return hf_distca.deal(trainer, TOKENS // ranks, evaluation=way == "evaluation")


def train(rank: int, ranks: int, implementation: str, way: str) -> list[float]:
    trainer = make_trainer(Trainer, ranks, implementation, way)
    trainer.train()
    names = ("loss", "eval_loss")
    return [float(row[name]) for row in trainer.state.log_history for name in names if name in row]


@cache
def train_alone(way: str) -> list[float]:
    """Train in one process under sdpa, with the same adapter or compiler."""
    return train(0, 1, "sdpa", way)


def compare_losses(pool: Callable[..., list[list[float]]], ranks: int, way: str) -> float:
    found, expected = pool(train, ranks, "distca", way)[0], train_alone(way)
    assert len(found) == len(expected) >= STEPS
    return max(abs(ours / theirs - 1) for ours, theirs in zip(found, expected, strict=True))


# peft uses renamed parts of transformers, and the compiler uses replaced parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FEW = ["DDP", "FSDP2, ping-pong, accumulation"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way", [way if way in FEW else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_bfloat16_on_shares_has_the_losses_of_one_process(rank_pool: RankPools, way: str) -> None:
    assert compare_losses(rank_pool(2), 2, way) <= TOLERANCE


def train_on_nothing(rank: int, ranks: int, way: str) -> tuple[str, int, list[float]]:
    trainer = make_trainer(make_labels_trainer("after the model"), ranks, "distca", way)
    with pytest.raises(hf_distca.UnsupportedError) as refused:
        trainer.train()
    return str(refused.value), trainer.state.global_step, losses(trainer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way", [way if way == "FSDP2" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_a_loss_of_labels_is_refused_under_every_engine(rank_pool: RankPools, way: str) -> None:
    for message, step, logged in rank_pool(2)(train_on_nothing, 2, way):
        assert "shifts_labels.compute_loss is not made of `shift_labels`" in message
        assert (step, logged) == (0, [])


def start_zero(stage: int) -> dict[str, Any]:
    """Start DeepSpeed in a running process group; return its configuration for the Trainer."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    names = (
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {**dict.fromkeys(names, "auto"), "bf16": {"enabled": "auto"}, **zero}


def train_by_zero(rank: int, ranks: int, stage: int) -> list[float]:
    WAYS["ZeRO"] = ({"deepspeed": start_zero(stage)}, {})
    message, step, logged = train_on_nothing(rank, ranks, "ZeRO")
    assert "is not made of `shift_labels`" in message
    assert (step, logged) == (0, [])
    return train(rank, ranks, "distca", "ZeRO")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_in_bfloat16_trains_and_refuses_a_loss_of_labels(stage: int) -> None:
    pytest.importorskip("deepspeed", reason='needs pip install -e ".[deepspeed]"')
    pool = RankPool(2)  # only for this test, because DeepSpeed stays initialized
    try:
        found = pool(train_by_zero, 2, stage)[0]
    finally:
        pool.close()
    # Weights are in bfloat16, too.
    assert found == pytest.approx(train_alone("DDP"), rel=2e-2)
