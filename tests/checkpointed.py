"""Activation checkpointing by the names that transformers uses, which differ between the tested
versions.
"""

from __future__ import annotations

from dataclasses import fields

from transformers import PreTrainedModel, TrainingArguments

# The name in `TrainingArguments`: "activation_checkpointing" since transformers 5.21.
ARGUMENT = next(
    field.name
    for field in fields(TrainingArguments)
    if field.name in ("activation_checkpointing", "gradient_checkpointing")
)


def checkpoint_layers(model: PreTrainedModel, *, use_reentrant: bool) -> None:
    """Switch on activation checkpointing in a model."""
    switch = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    switch({"use_reentrant": use_reentrant})


def keep_activations(model: PreTrainedModel) -> None:
    """Switch off activation checkpointing."""
    switch = (
        getattr(model, "activation_checkpointing_disable", None)
        or model.gradient_checkpointing_disable
    )
    switch()
