"""`prepare`: a model made ready before its first step, for loops without a Trainer."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from hf_distca.integration.attention_names import (
    check_not_replaced,
    find_distca_configs,
    iterate_models,
)
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import PING_PONG_FAMILIES, check_family, check_layerdrop
from hf_distca.integration.hooks.nano_batch_layers import cut_layers

__all__ = ["prepare"]

Model = TypeVar("Model", bound=torch.nn.Module)


def prepare(model: Model) -> Model:
    """Make a model ready to train under distca, before its first step; for custom
    loops, like `DistCACallback` for Trainers.

    Call it on every rank, after `configure` and after torch.distributed has started. It makes the
    attention group, from the device mesh of the model if there is one, and lets decoder layers run
    as nano-batches if ping-pong is on. Without this call the first forward does the same, as far as
    it finds the model among its callers. Calling it again has no effect.

    Args:
        model: a model of transformers, or a module that holds one, such as a PEFT or a DDP model.

    Returns:
        The model.

    Raises:
        UnsupportedError: if the model, or a part of it that asks for distca, is of a family that is
            refused or drops layers, or if another package has put itself in front of distca.
        DistCADesyncError: if not all ranks come.
    """
    configs = find_distca_configs(model)
    for config in configs:
        check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
        check_layerdrop(config)
        check_not_replaced(config)
    if not configs:
        return model
    session = current_session()
    session.find_mesh(iterate_models(model))
    if session.config.ping_pong:
        for part in iterate_models(model):
            # Of others the first forward says why it leaves them whole.
            if part.config.model_type in PING_PONG_FAMILIES:
                cut_layers(part)
    if dist.is_available() and dist.is_initialized():
        session.join_group()
    return model
