"""Train a causal language model in pipeline stages that share the attention of every tick.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without sharing. It prints how many times faster steps are
with sharing, and how many times faster they would be if balance were perfect.

    torchrun --nproc_per_node 2 examples/train_pipeline.py

What differs from a loop with torch's own `Schedule1F1B`: `hf_distca.pipeline.split` makes a stage
of a transformers model, and `hf_distca.pipeline.Schedule` replaces torch's schedule. With more
processes than stages (for example `--stages 2` with 4 processes), there are several copies of the
model, and the ranks of all copies share attention. At the end, a picture shows how long each rank
computes attention in each tick, without and with sharing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_distca
from arguments import DocumentArguments, end, parse
from comparison import OFF, ON, Timing, check_losses, print_comparison
from hf_distca.pipeline import (
    Schedule,
    Stage,
    TickFigures,
    clip_grad_norm_,
    from_pretrained,
    save_pretrained,
    split,
)
from packing import load_documents, small_model, tokenized

mpl.use("Agg")
from matplotlib import pyplot as plt

IGNORED = -100


@dataclass
class PipelineArguments:
    """Options of the model, its stages and its training."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model to train. Default: a small new model."}
    )
    output_dir: str = field(
        default="outputs/train_pipeline",
        metadata={"help": "Where the model and the picture are written."},
    )
    stages: int | None = field(
        default=None, metadata={"help": "Pipeline stages. Default: one per process."}
    )
    layers: int = field(default=4, metadata={"help": "Layers of the small new model."})
    micro_batches: int = field(
        default=4, metadata={"help": "Micro-batches of a step, for each copy of the model."}
    )
    tokens: int = field(default=4096, metadata={"help": "Tokens of a micro-batch."})
    max_steps: int = field(default=4, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate."})
    max_grad_norm: float = field(
        default=1.0, metadata={"help": "Maximum norm of the gradients of all stages."}
    )
    seed: int = field(default=42, metadata={"help": "Seed of the weights."})

    def __post_init__(self) -> None:
        for name in ("micro_batches", "tokens", "max_steps", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1.")


class Rows:
    """Rows of exactly `tokens` tokens, cut from documents that follow one another."""

    def __init__(self, documents: Dataset, tokens: int) -> None:
        pieces = [torch.tensor(ids) for ids in documents["input_ids"]]
        count = sum(map(len, pieces)) // tokens
        stream = torch.cat(pieces)[: count * tokens]
        positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[: count * tokens]
        self.ids = stream.view(count, tokens)
        # The rest of a cut document is a separate document in the next row.
        begins = positions.view(count, tokens) == 0
        begins[:, 0] = True
        at = torch.arange(tokens).expand(count, tokens)
        self.positions = at - torch.where(begins, at, 0).cummax(1).values

    def step(
        self, number: int, rows: int, copies: int, copy: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return token ids, position ids and targets of one copy in a step, each (rows, tokens)."""
        first = number * rows * copies + copy * rows
        chosen = torch.arange(first, first + rows) % len(self.ids)
        ids, positions = self.ids[chosen], self.positions[chosen]
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = torch.where(positions[:, 1:] == 0, IGNORED, ids[:, 1:])
        return ids, positions, targets


def prepare(
    options: PipelineArguments, data: DocumentArguments, mesh: DeviceMesh
) -> tuple[Stage, Rows]:
    """Make the stage of this rank, and the rows of all ranks."""
    with PartialState().main_process_first():
        documents = load_documents(data)
        source = options.model_name_or_path or small_model(
            documents,
            data.text_column,
            options.output_dir,
            max_length=options.tokens,
            seed=options.seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        rows = Rows(tokenized(documents, tokenizer, data), options.tokens)
    if PartialState().is_main_process:
        tokenizer.save_pretrained(options.output_dir)
    if options.model_name_or_path:
        return from_pretrained(source, mesh["pp"]), rows
    config = AutoConfig.from_pretrained(source, num_hidden_layers=options.layers)
    set_seed(options.seed)  # all ranks make the same model
    return split(
        AutoModelForCausalLM.from_config(config, attn_implementation="distca"), mesh["pp"]
    ), rows


def of_all_ranks(figures: list[TickFigures]) -> list[list[TickFigures]]:
    """Gather the figures of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, figures)
    return found


def timings_of(figures: list[list[TickFigures]], loss: float) -> list[Timing]:
    """Make a `Timing` of each tick from the figures of all ranks and the loss of the step."""
    return [
        Timing(loss, max(one.seconds for one in ranks), [one.attention_seconds for one in ranks])
        for ranks in zip(*figures, strict=True)
    ]


def report(progress: Any, step: str, figures: list[list[TickFigures]]) -> None:
    """Write the times of all ranks in a step above the progress bar."""
    progress.write(f"{step}, {sum(one.seconds for one in figures[0]):.2f} s")
    for ranks in zip(*figures, strict=True):
        seconds = ", ".join(f"{one.attention_seconds:.3f}" for one in ranks)
        progress.write(f"  {ranks[0].tick}: attention seconds of ranks {seconds}")


def draw(before: list[list[TickFigures]], after: list[list[TickFigures]], path: Path) -> None:
    """Draw the attention seconds of each rank in each tick, without and with sharing."""
    seconds = [
        np.array([[one.attention_seconds for one in rank] for rank in ranks])
        for ranks in (before, after)
    ]
    figure, axes = plt.subplots(
        2, 1, figsize=(11, 1.6 + 0.9 * len(after)), sharex=True, layout="constrained"
    )
    for axis, values, title in zip(
        axes, seconds, ("without sharing", "shared by all stages"), strict=True
    ):
        image = axis.imshow(
            values, aspect="auto", cmap="Blues", vmin=0, vmax=max(value.max() for value in seconds)
        )
        slowest = values.max(0).sum()
        axis.set_title(
            f"{title}: {slowest:.2f} s, summed over the slowest rank of each tick",
            fontsize=10,
            loc="left",
        )
        axis.set_yticks(range(len(values)), [f"rank {rank}" for rank in range(len(values))])
        for (rank, tick), value in np.ndenumerate(values):
            axis.text(tick, rank, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axes[-1].set_xticks(
        range(len(after[0])),
        ["backward" if one.tick.backward else "forward" for one in after[0]],
        fontsize=7,
    )
    figure.colorbar(image, ax=axes, label="seconds of attention")
    figure.savefig(path, dpi=120)


def train(options: PipelineArguments, data: DocumentArguments) -> None:
    """Prepare, train, save, and compare steps with and without sharing."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    stages = options.stages or state.num_processes
    if state.num_processes % stages:
        raise ValueError(
            f"--stages {stages} must divide the number of processes, {state.num_processes}."
        )
    copies = state.num_processes // stages
    mesh = init_device_mesh(
        state.device.type, (copies, stages), mesh_dim_names=("dp_replicate", "pp")
    )
    stage, rows = prepare(options, data, mesh)
    stage.submod.to(state.device)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=options.learning_rate)
    if copies > 1:
        stage.submod = DistributedDataParallel(
            stage.submod, process_group=mesh["dp_replicate"].get_group()
        )
    tokens = options.micro_batches * options.tokens

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute a micro-batch's part of the mean loss of a step. The parts are added up."""
        return (
            cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            / tokens
        )

    schedule = Schedule(stage, options.micro_batches, loss_fn, scale_grads=False)

    def step(number: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        batch = rows.step(
            number, options.micro_batches, copies, mesh.get_local_rank("dp_replicate")
        )
        ids, positions, targets = (one.to(state.device) for one in batch)
        schedule.step(
            ids, position_ids=positions, target=targets, losses=losses, return_outputs=False
        )
        loss = (
            torch.stack(losses).detach().sum() if losses else torch.zeros((), device=state.device)
        )
        dist.all_reduce(loss)  # only last stages have a loss
        return loss / copies

    progress = tqdm(total=options.max_steps, disable=not state.is_main_process)
    for number in range(options.max_steps):
        loss = step(number)
        norm = clip_grad_norm_(stage, options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress.update()
        figures = of_all_ranks(schedule.figures)
        if state.is_main_process:
            report(
                progress,
                f"step {number + 1}: loss {loss.item():.4f}, norm of gradients {norm.item():.3f}",
                figures,
            )
    progress.close()
    save_pretrained(stage, options.output_dir)
    with hf_distca.balancing(False):
        alone = step(options.max_steps).item()
        before = of_all_ranks(schedule.figures)
    shared = step(options.max_steps).item()
    after = of_all_ranks(schedule.figures)
    timings = {OFF: timings_of(before, alone), ON: timings_of(after, shared)}
    if state.is_main_process:
        print_comparison(timings, "ticks of a step")
        draw(before, after, Path(options.output_dir, "ticks.png"))
    check_losses(timings, next(stage.submod.parameters()).dtype)


def main() -> None:
    """Read the arguments, run, and end."""
    train(*parse((PipelineArguments, DocumentArguments)))
    end()


if __name__ == "__main__":
    main()
