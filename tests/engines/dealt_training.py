"""Training on dealt documents under every engine and client, which `equal_training.py` compares."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpointing import make_zero_config, start_deepspeed
from tiny_llama import settings
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import hf_distca
from engines import forget_accelerate
from tiny_runs import COMMON

TOKENS = 3072  # tokens of a global batch; 768 for each of four ranks
LONGEST = 2304


@dataclass(frozen=True)
class Case:
    """A way to train on the documents.

    Attributes:
        client: "Trainer", "TRL", or "loop" for a loop with accelerate.
        engine: "DDP", "FSDP2" (transformers'), "ZeRO-2" or "ZeRO-3".
        resumed: whether training ends in the middle of an epoch and resumes from a checkpoint.
        workers: number of loader workers.
        steps: number of optimizer steps.
        precision: "bf16", as `bf16=True` sets it, or "float32".
    """

    ranks: int = 2
    client: str = "Trainer"
    engine: str = "DDP"
    accumulation: int = 1
    lora: bool = False
    checkpointing: bool = False
    ping_pong: bool = False
    resumed: bool = False
    workers: int = 0
    implementation: str = "distca"
    steps: int = 20
    precision: str = "bf16"

    def __str__(self) -> str:
        said = [f"x{self.accumulation} accumulated"] * (self.accumulation > 1) + [
            "LoRA"
        ] * self.lora
        said += (
            ["checkpointing"] * self.checkpointing
            + ["ping-pong"] * self.ping_pong
            + ["resumed"] * self.resumed
        )
        said += [f"{self.workers} worker"] * self.workers
        ranks, other = (
            f"{self.ranks} rank" + "s" * (self.ranks > 1),
            [self.precision] * (self.precision != "bf16"),
        )
        other += [self.implementation] * (self.implementation != "distca")
        return ", ".join([self.client, self.engine, *said, ranks, *other])

    @property
    def reference(self) -> Case:
        """Return the same case under sdpa on one process. ZeRO stays for its bfloat16 weights."""
        engine = "ZeRO-2" if self.engine.startswith("ZeRO") and self.precision == "bf16" else "DDP"
        found = Case(
            1, engine=engine, accumulation=self.accumulation, lora=self.lora, implementation="sdpa"
        )
        return replace(found, steps=self.steps, precision=self.precision)


def cases() -> Iterator[Case]:
    """Yield every number of ranks, engine and way of training, and some combinations, in bfloat16
    and in float32.
    """
    yield from (
        replace(case, precision=precision) for precision in ("bf16", "float32") for case in _ways()
    )


def _ways() -> Iterator[Case]:
    yield from (Case(ranks) for ranks in (1, 2, 3, 4))
    for engine in ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3"):
        case = Case(engine=engine)
        if engine != "DDP":
            yield case
        yield replace(case, accumulation=2)
        yield replace(case, lora=True)
        yield replace(case, checkpointing=True)
        yield replace(case, ping_pong=True)
        yield replace(case, accumulation=2, checkpointing=True, ping_pong=True, workers=1)
        yield replace(case, ranks=4, ping_pong=True)
    yield Case(resumed=True)
    yield Case(resumed=True, workers=1, ping_pong=True)
    for client in ("TRL", "loop"):
        yield from (Case(ranks, client) for ranks in (2, 3, 4))
        yield Case(2, client, accumulation=2, ping_pong=True, checkpointing=True)


@dataclass(frozen=True)
class Run:
    """The results on rank 0.

    Attributes:
        losses: the loss of each optimizer step.
        weights: the trained weights at the end.
        spanning: number of documents that lay on several ranks, in all global batches.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    spanning: int


def train(rank: int, case: Case, folder: str) -> Run | None:
    """Train on this rank; every rank of the world must call it."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    forget_accelerate()
    if case.engine.startswith("ZeRO"):
        start_deepspeed()
    hf_distca.configure(settings(ping_pong=case.ping_pong))
    with tempfile.TemporaryDirectory() as output:
        outputs = [output]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(outputs)
        losses, model, dataset = (_train_loop if case.client == "loop" else _run_trainer)(
            case, Path(folder), outputs[0]
        )
        weights = _gather_weights(model)
        if dist.get_world_size() > 1:
            dist.barrier()
    items = (
        range(0, case.steps * case.accumulation * case.ranks, case.ranks)
        if case.ranks > 1
        else range(0)
    )
    spanning = sum(
        int(dataset[item]["distca_documents"].dealt_share.whole_layout.has_many_ranks.sum())
        for item in items
    )
    return Run(losses, weights, spanning) if rank == 0 else None


def _load_model(case: Case, folder: Path) -> PreTrainedModel:
    options: dict[str, Any] = {}
    if case.engine == "FSDP2":
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(fsdp_size=case.ranks)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=case.implementation, **options
    )
    if not case.lora:
        return model.train()
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    ).train()


def _make_shares(case: Case, model: Any, folder: Path) -> Any:
    from datasets import load_from_disk

    documents = load_from_disk(str(folder / "tokens"))
    return hf_distca.document_shares(
        documents, _tokens_per_rank(case), model=model.config, ranks=case.ranks, fill="cut"
    )


def _tokens_per_rank(case: Case) -> int:
    """Return the tokens of a share. Documents are cut to fill shares, so a step has the same
    documents however many micro-batches it has.
    """
    return TOKENS // case.ranks // case.accumulation


def _run_trainer(case: Case, folder: Path, output: str) -> tuple[list[float], Any, Any]:
    options = {
        **COMMON,
        "output_dir": output,
        "max_steps": case.steps,
        "seed": 0,  # the default seed of document_shares, which the loop uses
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": case.precision == "bf16",
        "gradient_checkpointing": case.checkpointing,
        "dataloader_num_workers": case.workers,
        "save_strategy": "steps" if case.resumed else "no",
        "save_steps": case.steps // 2,
    }
    if case.engine.startswith("ZeRO"):
        options["deepspeed"] = make_zero_config(int(case.engine[-1]))
    made = [_make_trainer(case, folder, options)]
    made[0].train()
    if case.resumed:
        forget_accelerate()
        made.append(_make_trainer(case, folder, options))
        made[1].train(resume_from_checkpoint=str(Path(output, f"checkpoint-{case.steps // 2}")))
    logs = [log["loss"] for log in made[-1].state.log_history if "loss" in log]
    return logs, made[-1].model_wrapped, made[-1].train_dataset


def _make_trainer(case: Case, folder: Path, options: dict[str, Any]) -> Trainer:
    from datasets import load_from_disk

    kinds: tuple[Any, Any] = Trainer, TrainingArguments
    more: dict[str, Any] = {}
    if case.client == "TRL":
        from trl import SFTConfig, SFTTrainer

        kinds = SFTTrainer, SFTConfig
        # TRL has other defaults.
        options |= {"max_length": None, "lr_scheduler_type": "linear"}
        more = {"processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    arguments = kinds[1](**options)
    model = _load_model(case, folder)
    trainer = kinds[0](
        model=model, args=arguments, train_dataset=load_from_disk(str(folder / "tokens")), **more
    )
    trainer.remove_callback(PrinterCallback)
    hf_distca.deal(trainer, _tokens_per_rank(case), fill="cut")
    return trainer


def _train_loop(case: Case, folder: Path, output: str) -> tuple[list[float], Any, Any]:
    """Train in a loop with accelerate."""
    from accelerate import Accelerator
    from transformers import get_scheduler

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if case.precision == "bf16" else "no"
    )
    model = _load_model(case, folder)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    shares = _make_shares(case, model, folder)
    loader = DataLoader(
        shares, batch_size=1, collate_fn=hf_distca.PackingCollator(), num_workers=case.workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, 0, case.steps * accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, batches = [], iter(loader)
    for _ in range(case.steps):
        step = [next(batches) for _ in range(case.accumulation)]
        targets = sum((batch["shift_labels"] != -100).sum() for batch in step)
        targets = accelerator.reduce(targets, "sum")
        total = torch.zeros(())
        for batch in step:
            # DDP averages gradients over ranks.
            loss = (
                model(**batch, num_items_in_batch=targets, use_cache=False).loss
                * accelerator.num_processes
            )
            accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "mean").item())
    return losses, model, shares


def _gather_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights, unsharded, under their names in the model without an engine."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        else:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name.removeprefix("module.")] = whole.detach().cpu().clone()
    return found
