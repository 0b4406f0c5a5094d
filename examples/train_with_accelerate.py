r"""Train a causal language model on long documents in a loop with accelerate, without a Trainer.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/train_with_accelerate.py

What differs from other loops: `attn_implementation="distca"`, a collator that packs documents
without padding, and `hf_distca.metrics()` for the log. With distca, all ranks must run equally many
forwards in training. accelerate's data loaders ensure this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed

from arguments import ModelArguments, PackingArguments, end, parse
from comparison import compare_balancing
from hf_distca import PackingCollator, metrics
from packing import load_documents, pack, small_model


@dataclass
class LoopArguments:
    """Options of the training loop."""

    output_dir: str = field(
        default="outputs/train_with_accelerate", metadata={"help": "Where the model is written."}
    )
    max_steps: int = field(default=4, metadata={"help": "Optimizer steps."})
    gradient_accumulation_steps: int = field(
        default=2, metadata={"help": "Micro-batches in an optimizer step."}
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Packed rows that a rank gets in a micro-batch."}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "Learning rate schedule."})
    warmup_steps: int = field(
        default=0, metadata={"help": "Steps until the learning rate is at its peak."}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "Maximum norm of the gradients."})
    logging_steps: int = field(default=1, metadata={"help": "Steps between two logs."})
    seed: int = field(default=42, metadata={"help": "Seed of weights and of the order of rows."})
    report_to: str | None = field(
        default=None, metadata={"help": "Tracker that also gets the log: tensorboard, wandb, ..."}
    )
    use_cpu: bool = field(
        default=False, metadata={"help": "Train on the CPU even if there is an accelerator."}
    )

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "gradient_accumulation_steps",
            "per_device_train_batch_size",
            "logging_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1.")


def prepare(
    model_arguments: ModelArguments,
    data: PackingArguments,
    loop: LoopArguments,
    accelerator: Accelerator,
) -> list[Any]:
    """Make the model, optimizer, schedule and loader, and prepare them for training."""
    # Rank 0 fills the caches on disk; the others then read them.
    with accelerator.main_process_first():
        documents = load_documents(data)
        source = model_arguments.model_name_or_path or small_model(
            documents, data.text_column, loop.output_dir, max_length=data.max_length, seed=loop.seed
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        rows = pack(documents, tokenizer, data, accelerator.num_processes)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(loop.output_dir)
    model = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation=model_arguments.attn_implementation
    )
    loader = DataLoader(
        rows, loop.per_device_train_batch_size, shuffle=True, collate_fn=PackingCollator()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.learning_rate)
    # In each step, accelerate advances the schedule once per rank.
    steps = [n * accelerator.num_processes for n in (loop.warmup_steps, loop.max_steps)]
    schedule = get_scheduler(loop.lr_scheduler_type, optimizer, *steps)
    return list(accelerator.prepare(model.train(), optimizer, schedule, loader))


def endlessly(loader: DataLoader) -> Iterator[dict[str, Any]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def train(model_arguments: ModelArguments, data: PackingArguments, loop: LoopArguments) -> None:
    """Prepare, train, and save."""
    accelerator = Accelerator(
        cpu=loop.use_cpu or not torch.accelerator.is_available(),
        # Steps continue over the end of an epoch, so all steps have equally many micro-batches.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            loop.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        log_with=loop.report_to,
        project_dir=loop.output_dir,
    )
    set_seed(loop.seed)
    model, optimizer, schedule, loader = prepare(model_arguments, data, loop, accelerator)
    if loop.report_to:
        accelerator.init_trackers(
            "train_with_accelerate", config={**vars(model_arguments), **vars(data), **vars(loop)}
        )
    progress = tqdm(total=loop.max_steps, disable=not accelerator.is_main_process)
    batches, losses = endlessly(loader), []
    seen = metrics()
    for step in range(1, loop.max_steps + 1):
        for batch in islice(batches, loop.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), loop.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        progress.update()
        if step % loop.logging_steps == 0:
            # Rows have about equally many tokens, so the mean over micro-batches and ranks is about
            # the mean over tokens.
            loss = accelerator.reduce(torch.stack(losses).mean(), "mean")
            losses.clear()
            figures = {
                "loss": loss.item(),
                "grad_norm": float(norm),
                "learning_rate": schedule.get_last_lr()[0],
            }
            before, seen = seen, metrics(gather=True)
            figures |= (seen - before).figures()
            accelerator.log(figures, step=step)
            if accelerator.is_main_process:
                progress.write(
                    str({name: float(f"{value:.4g}") for name, value in figures.items()})
                )
    progress.close()
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.unwrap_model(model).save_pretrained(
        loop.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    compare(model, loader, accelerator)


def compare(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> None:
    """Run batches with balancing off and on, and check that losses are equal."""

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        model.zero_grad()
        return loss.detach()

    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    compare_balancing(accelerator.unwrap_model(model), step, loader, dtype)


def main() -> None:
    """Read the arguments, run, and end."""
    train(*parse((ModelArguments, PackingArguments, LoopArguments)))
    end()


if __name__ == "__main__":
    main()
