r"""Continue pretraining on a flat binary file of token ids, with attention balanced over ranks.

Takes up to 10 minutes on two CPU cores, or about 2 if nothing else runs. At the end, the script
checks that losses are equal with and without balancing. It prints how many times faster steps are
with balancing, and how many times faster they would be if balance were perfect.

    accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml \
        examples/pretrain_packed_tokens.py

What differs from other pretraining scripts: `attn_implementation="distca"`, a callback, and rows
that say where documents end. Rows are cut from the stream of tokens, so all ranks have equally many
tokens. If a cut divides a document, attention treats the parts as separate documents. Without
`--token_file`, the script first writes a token file from documents. To continue from a checkpoint,
repeat the arguments and add
`--resume_from_checkpoint outputs/pretrain_packed_tokens/checkpoint-3`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from arguments import DocumentArguments, ModelArguments, ShortTrainingArguments, end, parse
from comparison import compare_balancing, step_of
from hf_distca import DistCACallback, PackingCollator
from packing import check_rows, load_documents, small_model, tokenized
from token_file import TokenRows, read_numbers, smallest_dtype, write_tokens


@dataclass
class TokenArguments(DocumentArguments):
    """Options that select a token file, or the documents from which to write one."""

    token_file: str | None = field(
        default=None,
        metadata={
            "help": "Flat file of token ids. Default: a file in output_dir, made from documents."
        },
    )
    token_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Type of ids in the file. Default: the smallest type that fits the vocabulary.",
            "choices": ["uint16", "uint32"],
        },
    )
    index_file: str | None = field(
        default=None,
        metadata={
            "help": (
                "Flat int64 file with the end of each document, in tokens from the start of the"
                " token file. Default: documents end at end-of-text tokens."
            )
        },
    )
    tokens_per_batch: int = field(default=16384, metadata={"help": "Tokens of a row."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_batch < 2:
            raise ValueError(f"--tokens_per_batch {self.tokens_per_batch} must be at least 2.")
        if self.index_file and not self.token_file:
            raise ValueError(
                f"--index_file {self.index_file} needs the --token_file that it belongs to."
            )


@dataclass
class PretrainingArguments(ShortTrainingArguments):
    """`TrainingArguments` with the defaults of this script."""

    output_dir: str = field(
        default="outputs/pretrain_packed_tokens", metadata={"help": "Where results are written."}
    )
    save_strategy: str = field(
        default="steps",
        metadata={"help": "When to write checkpoints. The final model is always written."},
    )
    save_steps: float = field(default=3, metadata={"help": "Steps between two checkpoints."})


def prepare(
    model: ModelArguments, data: TokenArguments, training: PretrainingArguments
) -> tuple[str, TokenRows]:
    """Return the model's name or folder, and the rows. Without `--token_file`, first write a token
    file and its index.
    """
    source, token_file, index_file = model.model_name_or_path, data.token_file, data.index_file
    if token_file is None:
        documents = load_documents(data)
        source = source or small_model(
            documents,
            data.text_column,
            training.output_dir,
            max_length=data.tokens_per_batch,
            seed=training.seed,
        )
    elif source is None:
        raise ValueError(
            f"--token_file {token_file} needs --model_name_or_path, because token ids are"
            " valid for one tokenizer only."
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    dtype = data.token_dtype or smallest_dtype(len(tokenizer))
    if token_file is None:
        token_file, index_file = (
            str(Path(training.output_dir, name)) for name in ("tokens.bin", "tokens.idx")
        )
        if training.process_index == 0:
            write_tokens(
                tokenized(documents, tokenizer, data), Path(token_file), Path(index_file), dtype
            )
    ends = None if index_file is None else read_numbers(Path(index_file), "int64")
    tokens = read_numbers(Path(token_file), dtype)
    return source, TokenRows(
        tokens, data.tokens_per_batch, len(tokenizer), tokenizer.eos_token_id, ends
    )


def pretrain(
    model_arguments: ModelArguments, data: TokenArguments, training: PretrainingArguments
) -> None:
    """Prepare, train from the start or a checkpoint, and save."""
    set_seed(training.seed)
    # Rank 0 writes the files; the other ranks then read them.
    with training.main_process_first(desc="preparing tokens and model"):
        source, rows = prepare(model_arguments, data, training)
    check_rows(rows, data.tokens_per_batch, training.world_size)
    model = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation=model_arguments.attn_implementation
    )

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=rows,
        data_collator=PackingCollator(),
        processing_class=AutoTokenizer.from_pretrained(source),
        callbacks=[DistCACallback()],
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    compare_balancing(trainer.model, step_of(trainer), trainer.get_train_dataloader(), dtype)


def main() -> None:
    """Read the arguments, run, and end."""
    pretrain(*parse((ModelArguments, TokenArguments, PretrainingArguments)))
    end()


if __name__ == "__main__":
    main()
