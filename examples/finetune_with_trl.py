r"""Fine-tune on long documents with TRL's SFTTrainer, which packs documents into rows itself.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/finetune_with_trl.py

What differs from other TRL scripts: `attn_implementation="distca"` and a callback. Importing
hf_distca registers the name "distca".

To install what this script needs:

    pip install -c constraints.txt -e ".[examples,trl]"

`--use_peft` also needs the extra `peft`, and `--load_in_4bit` also needs the extra `quantization`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset, load_dataset
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from arguments import CpuWithoutAccelerator, end
from comparison import compare_balancing, step_of
from hf_distca import DistCACallback
from packing import small_model
from stdlib_corpus import load_corpus


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`, with distca as the default attention."""

    attn_implementation: str | None = field(
        default="distca", metadata={"help": "Attention implementation."}
    )


@dataclass
class SftArguments(CpuWithoutAccelerator, SFTConfig):
    """SFTConfig with defaults for a short run on two CPU processes."""

    output_dir: str = field(
        default="outputs/finetune_with_trl", metadata={"help": "Where results are written."}
    )
    packing: bool = field(default=True, metadata={"help": "Pack documents into rows."})
    max_length: int | None = field(
        default=16384, metadata={"help": "Maximum tokens of a row, and of a document."}
    )
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


def load_documents(script: ScriptArguments) -> Dataset:
    """Load the training documents in any format that SFTTrainer takes: text, conversations, or
    prompts and completions.
    """
    if script.dataset_name is None:
        return load_corpus()
    return load_dataset(
        script.dataset_name, script.dataset_config, split=script.dataset_train_split
    )


def finetune(script: ScriptArguments, model: ModelArguments, training: SftArguments) -> None:
    """Prepare, train, and save."""
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(script)
        source = model.model_name_or_path or small_model(
            documents,
            training.dataset_text_field,
            training.output_dir,
            max_length=training.max_length,
            seed=training.seed,
        )
    training.model_init_kwargs = {
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "revision": model.model_revision,
    }
    # By default, TRL packs with `bfd`: rows have whole documents, and documents are cut at
    # max_length. With `bfd_split`, the rest of a cut document goes into another row. For both, keep
    # TRL's own collator. It makes cu_seq_lens_q, and position_ids that restart in each document,
    # under any attention (TRL's help mentions only FlashAttention). distca reads the documents from
    # these columns. Rows packed with `wrapped` lack the columns, so each row is one document.
    trainer = SFTTrainer(
        model=source,
        args=training,
        train_dataset=documents,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
        callbacks=[DistCACallback()],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    compare_balancing(trainer.model, step_of(trainer), trainer.get_train_dataloader(), dtype)


def main() -> None:
    """Read the arguments, run, and end."""
    finetune(*TrlParser((ScriptArguments, ModelArguments, SftArguments)).parse_args_and_config())
    end()


if __name__ == "__main__":
    main()
