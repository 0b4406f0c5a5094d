r"""Fine-tune a model with gpt-oss' architecture on documents that may be longer than a rank holds.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/finetune_gpt_oss.py

Every other layer of gpt-oss attends to a window, which accelerate's context parallelism refuses.
All heads have sinks. By default, the script trains a small model with random weights. To train the
published model, add `--model_name_or_path openai/gpt-oss-20b --bf16`. Otherwise, the script is the
same as `finetune_long_documents.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM, set_seed

from arguments import ModelArguments, end, parse
from finetune_long_documents import DataArguments, FinetuningArguments, finetune
from packing import load_documents, small_model


@dataclass
class GptOssArguments(FinetuningArguments):
    """`TrainingArguments` with the defaults of this script."""

    output_dir: str = field(
        default="outputs/finetune_gpt_oss", metadata={"help": "Where results are written."}
    )


def small_gpt_oss(data: DataArguments, training: GptOssArguments) -> str:
    """Write a small model (with windows, sinks, experts) and its tokenizer. Return their folder."""
    with training.main_process_first(desc="preparing the model"):
        documents = load_documents(data)
        folder = small_model(
            documents,
            data.text_column,
            str(Path(training.output_dir, "gpt_oss")),
            max_length=data.max_length,
            seed=training.seed,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = GptOssConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,  # one of them with a window
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            sliding_window=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=data.max_length,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        set_seed(training.seed)
        if training.process_index == 0:
            GptOssForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Read the arguments, run, and end."""
    model, data, training = parse((ModelArguments, DataArguments, GptOssArguments))
    model.model_name_or_path = model.model_name_or_path or small_gpt_oss(data, training)
    finetune(model, data, training)
    end()


if __name__ == "__main__":
    main()
