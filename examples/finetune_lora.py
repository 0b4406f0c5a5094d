r"""Fine-tune LoRA adapters on long documents. With `--load_in_4bit`, the frozen base model is
quantized to 4 bits (QLoRA).

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/finetune_lora.py

What differs from other LoRA scripts: `attn_implementation="distca"`, a collator that packs
documents without padding, and a callback. Core attention has no weights, so adapters and quantized
projections do not affect it.

To install what this script needs:

    pip install -c constraints.txt -e ".[examples,peft,quantization]"
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    set_seed,
)
from transformers.utils import is_bitsandbytes_available

from arguments import ModelArguments, PackingArguments, ShortTrainingArguments, end, parse
from comparison import compare_balancing, step_of
from hf_distca import DistCACallback, PackingCollator
from packing import load_documents, pack, small_model


@dataclass
class AdapterArguments(ModelArguments):
    """Options that select the model, its attention and the adapters."""

    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(
        default=32, metadata={"help": "Adapters are scaled by lora_alpha / lora_r."}
    )
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout in front of adapters."})
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the linear layers that get adapters."},
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Quantize the frozen base model to 4 bits (nf4)."}
    )

    def __post_init__(self) -> None:
        if self.load_in_4bit and not is_bitsandbytes_available():
            raise ValueError(
                "--load_in_4bit needs bitsandbytes: pip install -c constraints.txt -e"
                ' ".[quantization]"'
            )

    @property
    def lora(self) -> LoraConfig:
        """PEFT's configuration of the adapters."""
        targets = self.target_modules[0] if len(self.target_modules) == 1 else self.target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )

    def quantization(self, compute_dtype: torch.dtype) -> BitsAndBytesConfig | None:
        """Return the configuration of the 4-bit base model, or None without `load_in_4bit`."""
        if not self.load_in_4bit:
            return None
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        )


@dataclass
class LoraTrainingArguments(ShortTrainingArguments):
    """`TrainingArguments` with the defaults of this script."""

    output_dir: str = field(
        default="outputs/finetune_lora", metadata={"help": "Where results are written."}
    )
    learning_rate: float = field(
        default=5e-3, metadata={"help": "Peak learning rate, higher than for whole models."}
    )


def adapted_model(
    source: str, arguments: AdapterArguments, training: LoraTrainingArguments
) -> PreTrainedModel:
    """Load the base model and add adapters. Only the adapters are trained."""
    model = AutoModelForCausalLM.from_pretrained(
        source,
        attn_implementation=arguments.attn_implementation,
        quantization_config=arguments.quantization(
            torch.bfloat16 if training.bf16 else torch.float32
        ),
    )
    if arguments.load_in_4bit:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=training.activation_checkpointing,
            gradient_checkpointing_kwargs=training.activation_checkpointing_kwargs,
        )
    return get_peft_model(model, arguments.lora)


def finetune(
    adapters: AdapterArguments, data: PackingArguments, training: LoraTrainingArguments
) -> None:
    """Prepare, train, and save the adapters."""
    set_seed(training.seed)
    # Rank 0 fills the caches on disk; the others then read them.
    with training.main_process_first(desc="preparing documents and model"):
        documents = load_documents(data)
        source = adapters.model_name_or_path or small_model(
            documents,
            data.text_column,
            training.output_dir,
            max_length=data.max_length,
            seed=training.seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
        rows = pack(documents, tokenizer, data, training.world_size)
    model = adapted_model(source, adapters, training)
    if training.process_index == 0:
        model.print_trainable_parameters()

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
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    compare_balancing(trainer.model, step_of(trainer), trainer.get_train_dataloader(), dtype)


def main() -> None:
    """Read the arguments, run, and end."""
    finetune(*parse((AdapterArguments, PackingArguments, LoraTrainingArguments)))
    end()


if __name__ == "__main__":
    main()
