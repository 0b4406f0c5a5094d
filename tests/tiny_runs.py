"""A Trainer on a tiny Llama with packed documents, as tests start it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel

VOCABULARY = 61
# With real costs nothing this small is worth moving: here only causal pairs count, and moving is
# free.
PAIRS = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))

# What `TrainingArguments` of all runs have in common: half precision, as people train, with DDP as
# the Trainer makes it. Runs whose digits are compared have `bf16=False`.
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
    """Settings under which work moves between the ranks of these tests."""
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
    """The same random weights for the same seed, in training mode."""
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


def rows(count: int) -> list[Row]:
    """Rows of packed documents. Read in order, rank 0 gets those with one long document, rank 1
    those with many short ones.
    """
    lengths = ((96,), (24, 1, 23, 24, 24))
    return [{"documents": documents(*lengths[number % 2], seed=number)} for number in range(count)]


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
    """A Trainer that logs every step, with distca's callback behind `callbacks`; `changes` are for
    `TrainingArguments`.

    Only in a folder of its own does it keep a record.
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
    """Whatever was logged in the order it was: losses, gradient norms, losses of evaluation."""
    names = ("loss", "grad_norm", "eval_loss")
    return [float(row[name]) for row in trainer.state.log_history for name in names if name in row]


def dispatches() -> int:
    """Exchanges of this process since the settings were made."""
    return current_session().meter.dispatches
