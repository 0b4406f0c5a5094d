"""Fine-tune a causal language model on documents of any length, also longer than a rank holds, with equal work on all ranks.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py

What differs from any other fine-tuning script: `attn_implementation="distca"`, `document_shares`, which deals documents to ranks,
its collator and reading order, and a callback. At the end some global batches run again as they would lie on the ranks without
dealing, with balancing off and on, and dealt, to show what it changed.

On one process it trains the same global batches with as many tokens a rank as all had together, also under another attention:

    python examples/finetune_long_documents.py --tokens_per_rank 32768 --attn_implementation sdpa
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from arguments import DocumentArguments, ModelArguments, ShortTrainingArguments, end, parse
from balance_report import compare_placements, draw_comparison, draw_global_batch, print_comparison
from hf_distca import DistCACallback, PackingCollator, document_shares
from packing import load_documents, small_model, tokenized


@dataclass
class DataArguments(DocumentArguments):
    """Which documents, how they are dealt, and what is compared at the end."""

    tokens_per_rank: int = field(default=16384, metadata={"help": "Tokens of each rank in a micro-batch."})
    max_length: int = field(
        default=32768, metadata={"help": "Longest document in tokens, which may be more than a rank holds; longer ones are cut."}
    )
    fill: str = field(
        default="whole",
        metadata={
            "help": "whole: no document is divided between global batches; cut: batches are filled to the token instead.",
            "choices": ["cut", "whole"],
        },
    )
    comparison_batches: int = field(
        default=4, metadata={"help": "Global batches that are timed in order and dealt after training; 0 for none."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens_per_rank", "max_length"):
            if getattr(self, name) < 2:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 2.")


@dataclass
class FinetuningArguments(ShortTrainingArguments):
    """Of this script."""

    output_dir: str = field(default="outputs/finetune_long_documents", metadata={"help": "Where results are written."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Keep 1: --tokens_per_rank sets the size."})
    train_sampling_strategy: str = field(
        default="sequential", metadata={"help": "Keep sequential: shares are shuffled inside, the same on all ranks."}
    )


def finetune(model_arguments: ModelArguments, data: DataArguments, training: FinetuningArguments) -> None:
    """Prepare, train, save, and report what dealing changed."""
    set_seed(training.seed)
    # Rank 0 fills the caches on disk; the others then read them.
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(data)
        source = model_arguments.model_name_or_path or small_model(
            documents, data.text_column, training.output_dir, max_length=data.max_length, seed=training.seed
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokens = tokenized(documents, tokenizer, data, data.max_length)
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=model_arguments.attn_implementation)
    options = {
        "model": model,
        "dtype": torch.bfloat16 if training.bf16 else None,
        "seed": training.seed,
        "fill": data.fill,
        "pad_token_id": tokenizer.pad_token_id or 0,
    }
    dealt = document_shares(tokens, data.tokens_per_rank, **options)

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=dealt,
        data_collator=PackingCollator(),
        processing_class=tokenizer,
        callbacks=[DistCACallback()],
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)

    if model_arguments.attn_implementation != "distca" or training.world_size == 1 or data.comparison_batches == 0:
        return
    in_order = document_shares(tokens, data.tokens_per_rank, placement="in order", **options)
    timings = compare_placements(trainer, in_order, dealt, data.comparison_batches)
    if trainer.is_world_process_zero():
        print_comparison(timings)
        output = Path(training.output_dir)
        print(f"Pictures: {draw_comparison(timings, output / 'balance.png')}")
        print(f"          {draw_global_batch(in_order, dealt, output / 'global_batch.png', training.world_size)}")


def main() -> None:
    """Read the arguments, run, and end."""
    finetune(*parse((ModelArguments, DataArguments, FinetuningArguments)))
    end()


if __name__ == "__main__":
    main()
