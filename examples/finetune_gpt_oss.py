r"""Fine-tune a model with gpt-oss' architecture on documents that may be longer than a rank holds.

Takes up to 10 minutes on two CPU cores, about 2 if nothing else runs. At the end it checks that
losses are equal with and without balancing, and prints the gain and the most that it could be.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/finetune_gpt_oss.py

Every other layer of gpt-oss attends to a window, and all heads have sinks: accelerate's context
parallelism refuses the windows. By default the weights are random and few; the real ones are
`--model_name_or_path openai/gpt-oss-20b --bf16`. Otherwise this is `finetune_long_documents.py`.
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
    """Of this script."""

    output_dir: str = field(
        default="outputs/finetune_gpt_oss", metadata={"help": "Where results are written."}
    )


def small_gpt_oss(data: DataArguments, training: GptOssArguments) -> str:
    """The folder of a small new model with windows, sinks and experts, and its tokenizer."""
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
