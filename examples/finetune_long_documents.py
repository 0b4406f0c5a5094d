r"""Fine-tune a causal language model on documents of any length, with equal work on all ranks.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/finetune_long_documents.py

Documents may be longer than a rank holds. What differs from other fine-tuning scripts:
`attn_implementation="distca"`, and one line, `hf_distca.deal`. To show what dealing changed, some
global batches run again after training, in three ways: in order with balancing off, in order with
balancing on, and dealt.

To train the same global batches on one process, set `--tokens_per_rank` to the tokens of all ranks
together. One process can also use another attention:

    python examples/finetune_long_documents.py --tokens_per_rank 16384 --attn_implementation sdpa
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

import hf_distca
from arguments import DocumentArguments, ModelArguments, ShortTrainingArguments, end, parse
from balance_report import compare_placements, draw_comparison, draw_global_batch
from comparison import check_losses, print_comparison
from packing import load_documents, small_model, tokenized


@dataclass
class DataArguments(DocumentArguments):
    """Options that select documents, deal them, and compare batches at the end."""

    tokens_per_rank: int = field(
        default=8192, metadata={"help": "Tokens of each rank in a micro-batch."}
    )
    max_length: int = field(
        default=16384,
        metadata={
            "help": (
                "Maximum tokens of a document, which may be more than a rank holds; longer"
                " documents are cut."
            )
        },
    )
    fill: str = field(
        default="whole",
        metadata={
            "help": (
                "whole: no document is divided between global batches; cut: documents are divided"
                " so that every global batch is full."
            ),
            "choices": ["cut", "whole"],
        },
    )
    comparison_batches: int = field(
        default=2,
        metadata={
            "help": "Global batches that are timed in order and dealt after training; 0 for none."
        },
    )


@dataclass
class FinetuningArguments(ShortTrainingArguments):
    """`TrainingArguments` with the defaults of this script."""

    output_dir: str = field(
        default="outputs/finetune_long_documents", metadata={"help": "Where results are written."}
    )
    max_steps: int = field(
        default=4, metadata={"help": "Optimizer steps; -1 to train for num_train_epochs."}
    )


def finetune(
    model_arguments: ModelArguments, data: DataArguments, training: FinetuningArguments
) -> None:
    """Prepare, train, save, and report what dealing changed."""
    compared = (
        model_arguments.attn_implementation == "distca"
        and training.world_size > 1
        and data.comparison_batches > 0
    )
    if training.process_index == 0:
        announce(model_arguments, data, training, compared)
    set_seed(training.seed)
    # Rank 0 fills the caches on disk; the others then read them.
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(data)
        source = model_arguments.model_name_or_path or small_model(
            documents,
            data.text_column,
            training.output_dir,
            max_length=data.max_length,
            seed=training.seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokens = tokenized(documents, tokenizer, data, data.max_length)
    model = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation=model_arguments.attn_implementation
    )

    trainer = Trainer(model=model, args=training, train_dataset=tokens, processing_class=tokenizer)
    hf_distca.deal(trainer, data.tokens_per_rank, fill=data.fill)
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    if compared:
        compare(trainer, tokens, data)


def announce(
    model_arguments: ModelArguments,
    data: DataArguments,
    training: FinetuningArguments,
    compared: bool,
) -> None:
    """Print what this run does, and, for the default model and documents, how long it takes."""
    steps = (
        f"{training.max_steps} steps"
        if training.max_steps > 0
        else f"{training.num_train_epochs:g} epoch(s)"
    )
    print(
        f"Trains {model_arguments.model_name_or_path or 'a small new model'} on"
        f" {data.dataset_name or data.train_file or 'the source files of Python itself'}: {steps}"
        f" on {training.world_size} process(es) of {data.tokens_per_rank:,} tokens."
    )
    if compared:
        print(
            f"Then runs {data.comparison_batches} global batches in three ways: in order with"
            " balancing off, in order with balancing on, and dealt. A table and two pictures show"
            " what dealing changed."
        )
    if not (model_arguments.model_name_or_path or data.dataset_name or data.train_file):
        print(
            "On two CPU cores, this run takes a few minutes. The first step begins after about 20"
            " seconds.",
            flush=True,
        )


def compare(trainer: Trainer, tokens: Dataset, data: DataArguments) -> None:
    """Time the first global batches in order and dealt, print a table, draw two pictures, and check
    that losses are equal.
    """
    dealt, training = trainer.train_dataset, trainer.args
    in_order = hf_distca.document_shares(
        tokens,
        data.tokens_per_rank,
        model=trainer.model,
        dtype=torch.bfloat16 if training.bf16 else None,
        seed=training.seed if training.data_seed is None else training.data_seed,
        fill=data.fill,
        placement="in order",
    )
    timings = compare_placements(trainer, in_order, dealt, data.comparison_batches)
    if trainer.is_world_process_zero():
        print_comparison(timings)
        output = Path(training.output_dir)
        print(f"Pictures: {draw_comparison(timings, output / 'balance.png')}")
        picture = output / "global_batch.png"
        print(f"          {draw_global_batch(in_order, dealt, picture, training.world_size)}")
    check_losses(timings, torch.bfloat16 if training.bf16 else torch.float32)


def main() -> None:
    """Read the arguments, run, and end."""
    finetune(*parse((ModelArguments, DataArguments, FinetuningArguments)))
    end()


if __name__ == "__main__":
    main()
