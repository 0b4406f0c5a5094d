"""Command-line options that the examples share, and functions that start and end a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import HfArgumentParser, TrainingArguments

FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class ModelArguments:
    """Options that select the model and its attention."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Causal language model to train. Default: a small new model and tokenizer."
        },
    )
    attn_implementation: str = field(
        default="distca", metadata={"help": "Attention implementation, as in from_pretrained."}
    )


@dataclass
class DocumentArguments:
    """Options that select the documents."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Dataset whose train split is used. Default: Python's standard library."},
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Name of the dataset's configuration."}
    )
    train_file: str | None = field(
        default=None,
        metadata={
            "help": (
                "File to train on instead of a dataset: .txt (one document), .json, .jsonl or .csv."
            )
        },
    )
    text_column: str = field(
        default="text", metadata={"help": "Column that holds a document's text."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise ValueError(
                f"--dataset_name {self.dataset_name} and --train_file {self.train_file} exclude"
                " each other: give only one."
            )
        if self.train_file and Path(self.train_file).suffix not in FILE_FORMATS:
            raise ValueError(
                f"--train_file {self.train_file} must end in one of {', '.join(FILE_FORMATS)}."
            )


@dataclass
class PackingArguments(DocumentArguments):
    """Options that select documents and pack them whole into rows."""

    max_length: int = field(
        default=16384, metadata={"help": "Maximum tokens of a document; longer documents are cut."}
    )
    tokens_per_batch: int = field(
        default=16384, metadata={"help": "Maximum tokens of a packed row."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.max_length <= self.tokens_per_batch:
            raise ValueError(
                f"--max_length {self.max_length} must be at least 2 and at most --tokens_per_batch"
                f" {self.tokens_per_batch}: a document is never split between micro-batches."
            )


class CpuWithoutAccelerator:
    """Mixin that makes `TrainingArguments` train on the CPU if there is no accelerator."""

    def __post_init__(self) -> None:
        # accelerate starts several CPU processes with its MULTI_GPU launcher, which does not pass
        # use_cpu on to the processes.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.dataloader_pin_memory = self.dataloader_pin_memory and not self.use_cpu
        super().__post_init__()


@dataclass
class ShortTrainingArguments(CpuWithoutAccelerator, TrainingArguments):
    """TrainingArguments with defaults for a short run of the Trainer on two CPU processes."""

    max_steps: int = field(
        default=6, metadata={"help": "Optimizer steps; -1 to train for num_train_epochs."}
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Packed rows that a rank gets in a micro-batch."}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    logging_steps: float = field(default=2, metadata={"help": "Steps between two logged losses."})
    save_strategy: str = field(
        default="no",
        metadata={"help": "When to write checkpoints. The final model is always written."},
    )
    # The collator needs the column of documents. By default, the Trainer removes this column,
    # because the model's forward does not take it.
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep False: the collator needs all columns."}
    )
    # Every step uses every parameter, so DDP need not look for unused parameters.
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Passed to DistributedDataParallel."}
    )


def parse(kinds: Iterable[type]) -> tuple[Any, ...]:
    """Parse the command line into one object of each class in `kinds`.

    If the only argument is a .json or .yaml file, read the options from this file.
    """
    parser = HfArgumentParser(tuple(kinds))
    match sys.argv[1:]:
        case [path] if path.endswith(".json"):
            return parser.parse_json_file(path)
        case [path] if path.endswith((".yaml", ".yml")):
            return parser.parse_yaml_file(path)
    return parser.parse_args_into_dataclasses()


def end() -> None:
    """Close the process group before the process exits.

    If a wrapped model still holds the process group at exit, gloo's threads may abort the process.
    """
    gc.collect()
    PartialState().destroy_process_group()
