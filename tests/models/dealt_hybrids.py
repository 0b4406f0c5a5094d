"""Trains tiny hybrid models on documents cut over ranks, or alone on one process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare import documents, quiet
from datasets import Dataset, disable_progress_bars
from tiny import FIRST_ORDINARY_TOKEN, VOCABULARY, build, class_of, lengthen_memory
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

import hf_distca
from hf_distca.integration.current_session import current_session
from tiny_runs import COMMON, losses, settings

LENGTHS = (250, 7, 1, 33, 90, 64, 12, 150, 5, 80, 2, 120)
# Tokens of a global batch; one document is longer, and some exceed a share of two ranks.
TOKENS = 192


@dataclass(frozen=True)
class Case:
    """A case of training.

    Attributes:
        checkpointing: whether checkpointing is reentrant; None without checkpointing.
        sharded: FSDP2 of transformers instead of DDP.
        steps: of the optimizer.
    """

    model_type: str
    ranks: int = 2
    checkpointing: bool | None = None
    sharded: bool = False
    ping_pong: bool = False
    lora: bool = False
    evaluation: bool = False
    steps: int = 3

    def __str__(self) -> str:
        said = ["FSDP2" if self.sharded else "DDP"] + ["LoRA"] * self.lora
        said += ["ping-pong"] * self.ping_pong + ["evaluated"] * self.evaluation
        said += {None: [], True: ["reentrant"], False: ["checkpointing"]}[self.checkpointing]
        return ", ".join([self.model_type, *said, f"{self.ranks} ranks", f"{self.steps} steps"])


@dataclass(frozen=True)
class Run:
    """The results of a rank.

    Attributes:
        losses: and gradient norms, of each step.
        weights: after training.
        state_exchanges, evaluation_exchanges: exchanges of recurrent layers in training, and in
            evaluation after it.
        halves: whether attention layers ran as nano-batches.
        spanning: how many documents of all global batches lay on several ranks.
        spanning_evaluations: in how many global batches of evaluation a document lay on several
            ranks.
        states_mb: megabytes of states in all micro-batches, from the log of this rank.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    state_exchanges: int
    evaluation_exchanges: int
    halves: bool
    spanning: int
    spanning_evaluations: int
    states_mb: float


class OneByOne(Trainer):
    """A Trainer that computes each document of a batch alone."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        sizes = list(inputs["distca_documents"].lengths)
        parts = (
            inputs[name].split(sizes, dim=1)
            for name in ("input_ids", "position_ids", "shift_labels")
        )
        total = torch.zeros(())
        for ids, positions, labels in zip(*parts, strict=True):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            total = total + cross_entropy(
                logits.float(), labels[0], reduction="sum", ignore_index=-100
            )
        targets = (
            (inputs["shift_labels"] != -100).sum()
            if num_items_in_batch is None
            else num_items_in_batch
        )
        return (total / targets, {}) if return_outputs else total / targets


def _build_model(case: Case, implementation: str, folder: Path) -> PreTrainedModel:
    model = lengthen_memory(build(case.model_type, implementation, torch.float32))
    if case.sharded:
        from transformers.distributed import DistributedConfig

        shared = [str(folder)]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(fsdp_size=case.ranks)
        model = class_of(case.model_type).from_pretrained(
            folder,
            attn_implementation=implementation,
            experts_implementation="eager",
            distributed_config=config,
        )
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["in_proj", "q_proj", "v_proj"])
        )
    return model.train()


def train(
    rank: int, case: Case, implementation: str = "distca", lengths: Sequence[int] = LENGTHS
) -> Run:
    """Train on this rank; every rank of the world must call it."""
    disable_progress_bars()
    hf_distca.configure(settings(ping_pong=case.ping_pong))
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (length,), generator=generator).tolist()
        for length in lengths
    ]
    arguments = {
        **COMMON,
        "bf16": False,
        "max_steps": case.steps,
        "learning_rate": 0.05,
        "optim": "sgd",  # which does not make large steps of small gradients
        "gradient_checkpointing": case.checkpointing is not None,
        "gradient_checkpointing_kwargs": None
        if case.checkpointing is None
        else {"use_reentrant": case.checkpointing},
    }
    with quiet(), tempfile.TemporaryDirectory() as folder:
        model = _build_model(case, implementation, Path(folder))
        kind = OneByOne if implementation == "sdpa" else Trainer
        rows = Dataset.from_dict({"input_ids": ids})
        evaluated = {"eval_dataset": rows} if case.evaluation else {}
        trainer = kind(
            model,
            TrainingArguments(output_dir=folder, **arguments),
            train_dataset=rows,
            **evaluated,
        )
        trainer.remove_callback(PrinterCallback)
        hf_distca.deal(trainer, TOKENS // case.ranks, fill="cut", evaluation=case.evaluation)
        trainer.train()
        meter = current_session().meter
        state_exchanges = meter.state_exchanges
        spanning = _count_spanning(trainer.train_dataset, case.ranks)[: case.steps]
        evaluated_spanning: list[int] = []
        if case.evaluation:
            trainer.evaluate()
            evaluated_spanning = _count_spanning(trainer.eval_dataset, case.ranks)
        weights = {name: _gather(parameter) for name, parameter in trainer.model.named_parameters()}
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
    halves = any(key.nano for key in current_session().planner._used_keys)
    logged = (row for row in trainer.state.log_history if "loss" in row)
    states_mb = sum(
        row.get("distca/states_mb", 0.0) * row.get("distca/micro_batches", 0) for row in logged
    )
    return Run(
        losses(trainer),
        weights,
        state_exchanges,
        meter.state_exchanges - state_exchanges,
        halves,
        sum(spanning),
        sum(map(bool, evaluated_spanning)),
        states_mb,
    )


def _count_spanning(shares: Any, ranks: int) -> list[int]:
    """Count the documents of each global batch that lie on several ranks."""
    return [
        int(shares[item]["distca_documents"].dealt_share.whole_layout.has_many_ranks.sum())
        for item in range(0, len(shares), ranks)
    ]


def _gather(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


# Document lengths of two global batches, and the batch that each rank reads.
BATCHES = {
    "parts of other documents": ((64, 20, 44), (0, 1)),
    "whole documents": ((64, 32, 32), (0, 1)),
    "lengths alone": ((64, 64), (0, 0)),
}


def train_on_other_documents(rank: int, model_type: str, what: str) -> str:
    """Return the error of this rank if the two ranks read different documents."""
    hf_distca.configure(settings(timeout_seconds=20.0))
    lengths, batches = BATCHES[what]
    rows = Dataset.from_dict({"input_ids": [doc.tolist() for doc in documents(lengths)]})
    with quiet():
        model = build(model_type, "distca", torch.float32)
        shares = hf_distca.document_shares(rows, model=model, tokens_per_rank=32)
        batch = hf_distca.PackingCollator()([shares[2 * batches[rank] + rank]])
        if what == "lengths alone" and rank:
            batch = hf_distca.PackingCollator()([{"input_ids": documents((32,))[0].tolist()}])
        given = {name: batch[name] for name in ("input_ids", "position_ids", "distca_documents")}
        try:
            model(**given, use_cache=False).logits.sum().backward()
        except hf_distca.DistCADesyncError as error:
            return str(error)
    return ""
