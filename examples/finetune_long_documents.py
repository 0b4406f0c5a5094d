"""Fine-tune a causal language model on whole long documents, with core attention balanced over the ranks.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py

What differs from any other fine-tuning script: `attn_implementation="distca"`, a collator that packs documents without
padding, and a callback. At the end some of the batches run again with balancing off and on, to show what it changed.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from balance_report import compare_balancing, draw_comparison, print_comparison
from hf_distca import DistCACallback, PackingCollator
from stdlib_corpus import load_corpus, write_initial_model

FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}
# First-fit looks at this many unfinished rows, so that packing stays linear in the number of documents.
OPEN_ROWS = 256


@dataclass
class ModelArguments:
    """Which model, and which attention."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Causal language model to train. Default: a small new one with its own tokenizer."}
    )
    attn_implementation: str = field(default="distca", metadata={"help": "Attention implementation, as in from_pretrained."})


@dataclass
class DataArguments:
    """Which documents, and how they are packed."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset whose train split is used. Default: Python's standard library."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    train_file: str | None = field(
        default=None, metadata={"help": "File to train on instead: .txt (the file is one document), .json, .jsonl or .csv."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds a document's text."})
    max_length: int = field(default=16384, metadata={"help": "Longest document in tokens; longer ones are cut."})
    tokens_per_batch: int = field(default=16384, metadata={"help": "Most tokens that a rank holds in a micro-batch."})
    comparison_batches: int = field(
        default=4, metadata={"help": "Micro-batches that are timed with balancing off and on after training; 0 for none."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise ValueError(f"--dataset_name {self.dataset_name} and --train_file {self.train_file} exclude each other.")
        if self.train_file and Path(self.train_file).suffix not in FILE_FORMATS:
            raise ValueError(f"--train_file {self.train_file} must end in one of {', '.join(FILE_FORMATS)}.")
        if not 2 <= self.max_length <= self.tokens_per_batch:
            raise ValueError(
                f"--max_length {self.max_length} must be at least 2 and at most --tokens_per_batch {self.tokens_per_batch}: "
                "a document is never split between micro-batches."
            )


@dataclass
class FinetuningArguments(TrainingArguments):
    """TrainingArguments with defaults for a short run on two CPU processes."""

    output_dir: str = field(default="outputs/finetune_long_documents", metadata={"help": "Where results are written."})
    max_steps: int = field(default=6, metadata={"help": "Optimizer steps; -1 to train for num_train_epochs."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Packed rows of tokens_per_batch a rank and step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    logging_steps: float = field(default=2, metadata={"help": "Steps between two logged losses."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints; the final model always is."})
    # The row's documents are no argument of the model's forward; the collator turns them into what is.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep False: the collator needs all columns."})
    # Every parameter takes part in every step, so DDP need not look for those that do not.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Passed to DistributedDataParallel."})

    def __post_init__(self) -> None:
        # accelerate's MULTI_GPU launcher, the one that starts several CPU processes, does not tell them about use_cpu.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.dataloader_pin_memory = self.dataloader_pin_memory and not self.use_cpu
        super().__post_init__()


class PackedRows(TorchDataset[dict[str, list[list[int]]]]):
    """Rows of whole documents, each row at most `tokens_per_batch` tokens, filled first-fit in corpus order.

    Equal tokens per rank is what data-parallel training asks for. It is not equal attention: that grows with the square of
    a document's length.
    """

    def __init__(self, documents: Dataset, tokens_per_batch: int) -> None:
        self.documents = documents
        self.rows: list[list[int]] = []
        unfinished: deque[tuple[int, int]] = deque(maxlen=OPEN_ROWS)  # (row, free tokens)
        for document, length in enumerate(documents["length"]):
            for place, (row, free) in enumerate(unfinished):
                if length <= free:
                    self.rows[row].append(document)
                    unfinished[place] = (row, free - length)
                    break
            else:
                unfinished.append((len(self.rows), tokens_per_batch - length))
                self.rows.append([document])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[list[int]]]:
        return {"documents": self.documents[self.rows[index]]["input_ids"]}


def load_documents(data: DataArguments) -> Dataset:
    """The documents as a dataset with a text column."""
    if data.train_file:
        kind = FILE_FORMATS[Path(data.train_file).suffix]
        options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
        documents = load_dataset(kind, data_files=data.train_file, split="train", **options)
    elif data.dataset_name:
        documents = load_dataset(data.dataset_name, data.dataset_config_name, split="train")
    else:
        documents = load_corpus()
    if data.text_column not in documents.column_names:
        raise ValueError(f"--text_column {data.text_column!r} is not among the columns {documents.column_names}.")
    return documents


def tokenize(
    batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, text_column: str, max_length: int
) -> dict[str, list[Any]]:
    """Token ids of each document, closed by the end-of-text token and cut at `max_length`."""
    ids: list[list[int]] = tokenizer(batch[text_column], verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    cut = [(document + end)[:max_length] for document in ids]
    return {"input_ids": cut, "length": [len(document) for document in cut]}


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> PackedRows:
    """Tokenize with a progress bar, then fill rows."""
    options = {"tokenizer": tokenizer, "text_column": data.text_column, "max_length": data.max_length}
    tokenized = documents.map(
        tokenize, batched=True, batch_size=64, fn_kwargs=options, remove_columns=documents.column_names, desc="Tokenizing"
    )
    tokenized = tokenized.filter(lambda length: length > 1, input_columns="length", desc="Dropping empty documents")
    return PackedRows(tokenized, data.tokens_per_batch)


def finetune(model_arguments: ModelArguments, data: DataArguments, training: FinetuningArguments) -> None:
    """Prepare, train, save, and report what balancing changed."""
    output = Path(training.output_dir)
    source = model_arguments.model_name_or_path or str(output / "initial_model")
    set_seed(training.seed)
    # Rank 0 fills the caches on disk; the others then read them.
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(data)
        if model_arguments.model_name_or_path is None and training.process_index == 0:
            write_initial_model(Path(source), documents, max_length=data.max_length, seed=training.seed)
        tokenizer = AutoTokenizer.from_pretrained(source)
        rows = pack(documents, tokenizer, data)
    if len(rows) < training.world_size:
        raise ValueError(f"{len(rows)} row(s) of packed documents for {training.world_size} ranks: lower --tokens_per_batch.")
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=model_arguments.attn_implementation)

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=PackingCollator(),
        processing_class=tokenizer,
        callbacks=[DistCACallback()],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)

    if model_arguments.attn_implementation != "distca" or training.world_size == 1 or data.comparison_batches == 0:
        return
    comparison = compare_balancing(trainer, data.comparison_batches)
    if trainer.is_world_process_zero():
        print_comparison(comparison)
        print(f"Picture: {draw_comparison(comparison, output / 'balance.png')}")


def main() -> None:
    """Read the arguments, or a single .json or .yaml file that holds them, and run."""
    parser = HfArgumentParser((ModelArguments, DataArguments, FinetuningArguments))
    match sys.argv[1:]:
        case [path] if path.endswith(".json"):
            arguments = parser.parse_json_file(path)
        case [path] if path.endswith((".yaml", ".yml")):
            arguments = parser.parse_yaml_file(path)
        case _:
            arguments = parser.parse_args_into_dataclasses()
    finetune(*arguments)
    # gloo's threads may abort the process at exit while a wrapped model still holds the group.
    gc.collect()
    arguments[2].distributed_state.destroy_process_group()


if __name__ == "__main__":
    main()
