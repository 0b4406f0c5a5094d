"""Trains the example's model on the example's documents, dealt to ranks, and prints how far it is from one process under sdpa.

A global batch has the same tokens on any number of ranks, and documents are up to three times as long as what one of four ranks
holds. Losses of all optimizer steps and the final weights are compared.

    python tests/engines/equal_training.py --json equal_training.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from checkpointing import start_deepspeed
from tiny_llama import settings
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

import hf_distca
from engines import forget_accelerate
from ranks import RankPool
from tiny_runs import COMMON

TOKENS = 3072  # of a global batch; 768 a rank on four
LONGEST = 2304
STEPS = 20
LOSS, WEIGHTS = 1e-5, 1e-4  # relative difference of losses, absolute difference of weights
TIMEOUT = 300.0


@dataclass(frozen=True)
class Case:
    """How the documents are trained on.

    Attributes:
        client: "Trainer", "TRL" or "loop", of accelerate.
        engine: "DDP", "FSDP2" of transformers, "ZeRO-2" or "ZeRO-3".
        resumed: whether training ends in the middle of an epoch and goes on from a checkpoint.
        workers: of the loader.
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

    def __str__(self) -> str:
        said = [f"x{self.accumulation} accumulated"] * (self.accumulation > 1) + ["LoRA"] * self.lora
        said += ["checkpointing"] * self.checkpointing + ["ping-pong"] * self.ping_pong + ["resumed"] * self.resumed
        said += [f"{self.workers} worker"] * self.workers
        return ", ".join([self.client, self.engine, *said, f"{self.ranks} rank" + "s" * (self.ranks > 1)])

    @property
    def reference(self) -> Case:
        """One process under sdpa."""
        return Case(1, accumulation=self.accumulation, lora=self.lora, implementation="sdpa")


def cases() -> Iterator[Case]:
    """Every number of ranks, engine and way of training, and some together."""
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
    """What rank 0 saw.

    Attributes:
        losses: of each optimizer step.
        weights: the trained ones, in the end.
        spanning: documents that lay on several ranks, in all global batches.
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
        losses, model, dataset = (_loop if case.client == "loop" else _trainer)(case, Path(folder), outputs[0])
        weights = _weights(model)
        if dist.get_world_size() > 1:
            dist.barrier()
    items = range(0, STEPS * case.accumulation * case.ranks, case.ranks)
    spanning = sum(len(dataset[item]["distca_documents"].dealt.whole.spanning) for item in items)
    return Run(losses, weights, spanning) if rank == 0 else None


def _model(case: Case, folder: Path) -> PreTrainedModel:
    options: dict[str, Any] = {}
    if case.engine == "FSDP2":
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(fsdp_size=case.ranks)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=case.implementation, **options)
    if not case.lora:
        return model.train()
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).train()


def _shares(case: Case, model: Any, folder: Path) -> Any:
    from datasets import load_from_disk

    # A step has the same documents however many micro-batches it is divided into.
    tokens = TOKENS // case.ranks // case.accumulation
    return hf_distca.document_shares(load_from_disk(str(folder / "tokens")), tokens, model=model.config, ranks=case.ranks)


def _trainer(case: Case, folder: Path, output: str) -> tuple[list[float], Any, Any]:
    options = {
        **COMMON,
        "output_dir": output,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "train_sampling_strategy": "sequential",
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "dataloader_num_workers": case.workers,
        "save_strategy": "steps" if case.resumed else "no",
        "save_steps": STEPS // 2,
    }
    if case.engine.startswith("ZeRO"):
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": int(case.engine[-1])},
            "zero_allow_untested_optimizer": True,
        }
    made = [_made(case, folder, options)]
    made[0].train()
    if case.resumed:
        forget_accelerate()
        made.append(_made(case, folder, options))
        made[1].train(resume_from_checkpoint=str(Path(output, f"checkpoint-{STEPS // 2}")))
    logs = [log["loss"] for log in made[-1].state.log_history if "loss" in log]
    return logs, made[-1].model_wrapped, made[-1].train_dataset


def _made(case: Case, folder: Path, options: dict[str, Any]) -> Trainer:
    kinds: tuple[Any, Any] = Trainer, TrainingArguments
    more: dict[str, Any] = {}
    if case.client == "TRL":
        from trl import SFTConfig, SFTTrainer

        kinds = SFTTrainer, SFTConfig
        options |= {"packing": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        options |= {"bf16": False, "lr_scheduler_type": "linear"}  # TRL has defaults of its own
        more = {"processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    arguments = kinds[1](**options)
    model = _model(case, folder)
    trainer = kinds[0](
        model=model,
        args=arguments,
        train_dataset=_shares(case, model, folder),
        data_collator=hf_distca.PackingCollator(),
        callbacks=[hf_distca.DistCACallback()],
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _loop(case: Case, folder: Path, output: str) -> tuple[list[float], Any, Any]:
    """A loop of its own, with accelerate."""
    from accelerate import Accelerator
    from transformers import get_scheduler

    accelerator = Accelerator(cpu=True)
    model = _model(case, folder)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    shares = _shares(case, model, folder)
    loader = DataLoader(shares, batch_size=1, collate_fn=hf_distca.PackingCollator(), num_workers=case.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, 0, STEPS * accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, batches = [], iter(loader)
    for _ in range(STEPS):
        step = [next(batches) for _ in range(case.accumulation)]
        targets = sum((batch["shift_labels"] != -100).sum() for batch in step)
        targets = accelerator.reduce(targets, "sum")
        total = torch.zeros(())
        for batch in step:
            # Gradients are means over the ranks.
            loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss * accelerator.num_processes
            accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "mean").item())
    return losses, model, shares


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights, whole, under the names that the model has without an engine."""
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


def prepare(folder: Path) -> None:
    """Write the example's tokens and model."""
    from arguments import DocumentArguments
    from packing import load_documents, tokenized
    from stdlib_corpus import write_initial_model

    data = DocumentArguments()
    documents = load_documents(data)
    write_initial_model(folder / "model", documents, max_length=LONGEST, seed=0)
    tokenized(documents, AutoTokenizer.from_pretrained(folder / "model"), data, LONGEST).save_to_disk(str(folder / "tokens"))


@dataclass(frozen=True)
class Outcome:
    """Of a case: the largest relative difference of a loss and difference of a weight, and documents over several ranks."""

    case: Case
    loss_difference: float
    weight_difference: float
    spanning: int
    error: str = ""

    @property
    def held(self) -> bool:
        """Whether it is as one process is."""
        spans = self.spanning > 0 or self.case.ranks == 1
        return not self.error and spans and self.loss_difference <= LOSS and self.weight_difference <= WEIGHTS


class Runs:
    """Runs cases in processes that stay up; DeepSpeed, which patches torch, has its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool: RankPool | None = None
        self._kind: object = None
        self._references: dict[Case, Run] = {}

    def outcome(self, case: Case) -> Outcome:
        """Train and compare. Raises AssertionError if a rank fails."""
        if case.reference not in self._references:
            self._references[case.reference] = self._run(case.reference)
        ours, theirs = self._run(case), self._references[case.reference]
        if len(ours.losses) != STEPS or ours.weights.keys() != theirs.weights.keys():
            raise AssertionError(f"{case}: {len(ours.losses)} losses; weights {ours.weights.keys() ^ theirs.weights.keys()}")
        return Outcome(
            case,
            max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
            max(float((ours.weights[name] - weight).abs().max()) for name, weight in theirs.weights.items()),
            ours.spanning,
        )

    def _run(self, case: Case) -> Run:
        kind = case.engine.startswith("ZeRO"), case.ranks
        if self._pool is None or not self._pool.alive or kind != self._kind:
            self.close()
            self._pool, self._kind = RankPool(case.ranks, daemon=False), kind  # which may have workers
        return self._pool(train, case, str(self.folder), timeout=TIMEOUT)[0]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs = Runs(Path(folder))
        for case in (case for case in cases() if arguments.only.lower() in str(case).lower()):
            try:
                found.append(runs.outcome(case))
            except AssertionError as error:
                found.append(Outcome(case, float("nan"), float("nan"), 0, str(error).strip()))
            one = found[-1]
            result = (
                one.error.splitlines()[-1]
                if one.error
                else f"loss {one.loss_difference:.1e}, weights {one.weight_difference:.1e}"
            )
            console.print(f"{len(found)} {case}: {result}", highlight=False, soft_wrap=True)
        runs.close()
    table = Table(title=f"{STEPS} steps on dealt documents against one process under sdpa")
    for column in ("case", "loss", "weights", "documents over ranks", ""):
        table.add_column(column, overflow="fold")
    for one in found:
        figures = (f"{one.loss_difference:.1e}", f"{one.weight_difference:.1e}", str(one.spanning))
        table.add_row(str(one.case), *figures, "" if one.held else "differs")
    Console(width=150).print(table)
    if arguments.json:
        rows = [{**asdict(one), "name": str(one.case), "held": one.held} for one in found]
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    sys.exit(not all(one.held for one in found))


if __name__ == "__main__":
    main()
