"""Fine-tune a causal language model on whole long documents, with core attention balanced over the ranks.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py

What differs from any other fine-tuning script: `attn_implementation="distca"`, a collator that packs documents without
padding, and a callback. At the end some of the batches run again with balancing off and on, to show what it changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from arguments import ModelArguments, PackingArguments, ShortTrainingArguments, end, parse
from balance_report import compare_balancing, draw_comparison, print_comparison
from hf_distca import DistCACallback, PackingCollator
from packing import load_documents, pack, small_model


@dataclass
class DataArguments(PackingArguments):
    """Which documents, how they are packed, and what is compared at the end."""

    comparison_batches: int = field(
        default=4, metadata={"help": "Micro-batches that are timed with balancing off and on after training; 0 for none."}
    )


@dataclass
class FinetuningArguments(ShortTrainingArguments):
    """Of this script."""

    output_dir: str = field(default="outputs/finetune_long_documents", metadata={"help": "Where results are written."})


def finetune(model_arguments: ModelArguments, data: DataArguments, training: FinetuningArguments) -> None:
    """Prepare, train, save, and report what balancing changed."""
    set_seed(training.seed)
    # Rank 0 fills the caches on disk; the others then read them.
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(data)
        source = model_arguments.model_name_or_path or small_model(
            documents, data.text_column, training.output_dir, max_length=data.max_length, seed=training.seed
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        rows = pack(documents, tokenizer, data, training.world_size)
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
        print(f"Picture: {draw_comparison(comparison, Path(training.output_dir, 'balance.png'))}")


def main() -> None:
    """Read the arguments, run, and end."""
    finetune(*parse((ModelArguments, DataArguments, FinetuningArguments)))
    end()


if __name__ == "__main__":
    main()
