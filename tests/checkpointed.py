"""Activation checkpointing as transformers calls it, which is not the same in all versions that the
tests run with.
"""

from __future__ import annotations

from dataclasses import fields

from transformers import PreTrainedModel, TrainingArguments

# What `TrainingArguments` call it: "activation_checkpointing" since transformers 5.21.
ARGUMENT = next(
    field.name
    for field in fields(TrainingArguments)
    if field.name in ("activation_checkpointing", "gradient_checkpointing")
)


def checkpoint_layers(model: PreTrainedModel, *, use_reentrant: bool) -> None:
    """Let the layers of a model checkpoint their activations."""
    switch = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    switch({"use_reentrant": use_reentrant})


def keep_activations(model: PreTrainedModel) -> None:
    """Switch activation checkpointing off again."""
    switch = (
        getattr(model, "activation_checkpointing_disable", None)
        or model.gradient_checkpointing_disable
    )
    switch()
