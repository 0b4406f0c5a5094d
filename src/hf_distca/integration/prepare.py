"""`prepare`: what a model needs before its first step, done where all ranks are together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.integration.families import PING_PONG, check_family, check_layerdrop
from hf_distca.integration.layers import cut_layers
from hf_distca.integration.mesh import mesh_of
from hf_distca.integration.names import asks_for_distca, check_untouched
from hf_distca.integration.session import current_session

__all__ = ["distca_configs", "prepare"]

Model = TypeVar("Model", bound=torch.nn.Module)


def prepare(model: Model) -> Model:
    """Make a model ready to train under distca, before its first step; for loops of your own, as `DistCACallback` does it too.

    Call it on every rank, after `configure` and after torch.distributed has started. It makes the attention group, from the
    device mesh of the model where there is one, and lets decoder layers run as nano-batches if ping-pong is on. Without it the
    first forward does the same, as far as it finds the model among its callers. Again has no effect.

    Args:
        model: a model of transformers, or what holds one, such as a PEFT or a DDP model.

    Returns:
        The model.

    Raises:
        UnsupportedError: if the model, or a part of it that asks for distca, is of a family that is refused or drops layers,
            or if another package has put itself in front of distca.
        DistCADesyncError: if not all ranks come.
    """
    configs = distca_configs(model)
    for config in configs:
        check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
        check_layerdrop(config)
        check_untouched(config)
    if not configs:
        return model
    session = current_session()
    mesh = next((mesh for part in _models(model) if (mesh := mesh_of(part)) is not None), None)
    if mesh is not None and session.looks_for_mesh:
        session.found_mesh(mesh)
    if session.config.ping_pong:
        for part in _models(model):
            if part.config.model_type in PING_PONG:  # of others the first forward says why it leaves them whole
                cut_layers(part)
    if dist.is_available() and dist.is_initialized():
        _ = session.group  # made at the first use
    return model


def distca_configs(model: torch.nn.Module | None) -> list[PreTrainedConfig]:
    """The configurations of a model and its parts, like a language tower, that ask for distca, under whatever name."""
    configs = {id(part.config): part.config for part in _models(model)}
    return [config for config in configs.values() if asks_for_distca(config)]


def _models(model: torch.nn.Module | None) -> Iterator[PreTrainedModel]:
    """The models of transformers that a module is or holds, from the outside in."""
    for part in () if model is None else model.modules():
        if isinstance(part, PreTrainedModel):
            yield part
