"""A Trainer with a tiny Llama on packed documents, and the data that tests share."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel

VOCABULARY = 61
# The sizes of tiny models of any family.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
# With real costs, moving such small work never pays off. Here only causal pairs count, and moving
# is free.
PAIRS = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))

# Common `TrainingArguments`: half precision, the usual case, and the Trainer's DDP. Runs that
# compare exact values set `bf16=False`.
COMMON = {
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "remove_unused_columns": False,
    "bf16": True,
    "disable_tqdm": True,
}

Row = dict[str, Any]
Data = Sequence[Row] | Dataset[Row] | IterableDataset[Row]


def settings(**changes: Any) -> hf_distca.DistCAConfig:
    """Make settings under which work moves between the ranks of these tests."""
    return hf_distca.DistCAConfig(
        **{"tile": 8, "min_gain": 0.0, "cost_model": PAIRS, "timeout_seconds": 60.0, **changes}
    )


def tiny_llama(
    implementation: str,
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int = 2,
) -> LlamaForCausalLM:
    """Create a model in training mode. The same seed gives the same random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16 * heads,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=VOCABULARY,
        attn_implementation=implementation,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).train()


def documents(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def pack(*lengths: int) -> dict[str, Any]:
    """Make a batch of one row of documents."""
    return hf_distca.PackingCollator()([{"documents": documents(*lengths)}])


def rows(count: int) -> list[Row]:
    """Make rows of packed documents. Read in order, they give rank 0 the rows with one long
    document, and rank 1 those with many short ones.
    """
    lengths = ((96,), (24, 1, 23, 24, 24))
    return [{"documents": documents(*lengths[number % 2], seed=number)} for number in range(count)]


def share_documents(lengths: Sequence[int], tokens: int, ranks: int | None = 1, **how: Any) -> Any:
    """Deal documents of these lengths by causal pairs, in global batches of `tokens` tokens."""
    given = {"shapes": [(PAIRS.shape, None)], "device": "cpu", "config": settings(), **how}
    per_rank = tokens // (ranks or 1)
    return hf_distca.document_shares(documents(*lengths), per_rank, ranks=ranks, **given)


def exact_arguments(**changes: Any) -> TrainingArguments:
    """Make arguments for a Trainer that compares exact values and saves nothing."""
    given = {**COMMON, "bf16": False, "output_dir": tempfile.gettempdir(), **changes}
    return TrainingArguments(**given)


def text_of(ids: Sequence[int]) -> str:
    """Return the text from which the tokenizer makes these tokens."""
    return "".join(f"{token:02} " for token in ids)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of two-digit numbers: 00 pads, and 01 ends texts."""
    words = Tokenizer(models.WordLevel({f"{word:02}": word for word in range(VOCABULARY)}, "00"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="00", eos_token="01")


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Record the messages that hf_distca logs."""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("hf_distca")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield said
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def make_trainer(
    implementation: str,
    train_dataset: Data,
    *,
    folder: str | None = None,
    kind: type[Trainer] = Trainer,
    config: hf_distca.DistCAConfig | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    model: LlamaForCausalLM | None = None,
    eval_dataset: Data | None = None,
    distca: hf_distca.DistCACallback | None = None,
    **changes: Any,
) -> Trainer:
    """Make a Trainer that logs every step, with distca's callback after `callbacks`. `changes` are
    for `TrainingArguments`.

    The run has a record only if `folder` is given.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments = {
        **COMMON,
        "output_dir": folder or tempfile.gettempdir(),
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        **changes,
    }
    return kind(
        model or tiny_llama(implementation),
        TrainingArguments(**arguments),
        data_collator=hf_distca.PackingCollator(),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        callbacks=[
            *callbacks,
            distca or hf_distca.DistCACallback(config or settings(), record=folder is not None),
        ],
    )


def losses(trainer: Trainer) -> list[float]:
    """Return the logged losses, gradient norms and evaluation losses, in the order of the log."""
    names = ("loss", "grad_norm", "eval_loss")
    return [float(row[name]) for row in trainer.state.log_history for name in names if name in row]


def dispatches() -> int:
    """Return the number of dispatches of this process since the last `configure`."""
    return current_session().meter.dispatches
