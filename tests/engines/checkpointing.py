"""The ways to switch on activation checkpointing, by name. Each changes a model in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel, modeling_utils
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
# Kernels use these operations, too. A policy saves outputs of the rest of the layer, which must not
# get mixed up with outputs of kernels.
ARITHMETIC = MATMULS | {
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.cat.default,
    aten.index_select.default,
    aten._to_copy.default,
    aten.silu.default,
}


def decide(
    saved: set[Any], _context: object, operation: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def make_selective(saved: set[Any]) -> dict[str, Any]:
    return {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, partial(decide, saved)),
    }


def make_switch(kwargs: dict[str, Any], every_n_layers: int = 1) -> Callable[..., None]:
    return lambda model: model.activation_checkpointing_enable(kwargs, every_n_layers)


def make_offload(reentrant: bool) -> Callable[..., None]:
    """Offload to unpinned memory. transformers asks for pinning, which needs an accelerator."""

    def unpinned(pin_memory: bool, device_type: str) -> save_on_cpu:
        return save_on_cpu(pin_memory=False, device_type=device_type)

    def switch(model: PreTrainedModel) -> None:
        modeling_utils.save_on_cpu = unpinned
        model.activation_checkpointing_enable({"use_reentrant": reentrant}, offload=True)

    return switch


def trl_selective(model: PreTrainedModel) -> None:
    from trl.models import enable_selective_activation_checkpointing

    enable_selective_activation_checkpointing(model)
    model.activation_checkpointing_enable({})


def make_wrapper(implementation: CheckpointImpl) -> Callable[..., None]:
    def switch(model: PreTrainedModel) -> None:
        model.enable_input_require_grads()
        wrap = partial(checkpoint_wrapper, checkpoint_impl=implementation, preserve_rng_state=False)
        apply_activation_checkpointing(
            model, wrap, check_fn=lambda module: isinstance(module, LlamaDecoderLayer)
        )

    return switch


def make_deepspeed(function: str, **options: Any) -> Callable[..., None]:
    def switch(model: PreTrainedModel) -> None:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        start_deepspeed()
        checkpointing.configure(
            None, **{"partition_activations": False, "checkpoint_in_cpu": False, **options}
        )
        model.enable_input_require_grads()
        model._set_gradient_checkpointing(True, getattr(checkpointing, function))

    return switch


def start_deepspeed() -> None:
    """Start DeepSpeed in a gloo world, without compiling its extension for shared memory."""
    import deepspeed
    from deepspeed import comm, ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def make_zero_config(stage: int) -> dict[str, Any]:
    """Make the configuration of DeepSpeed for a Trainer."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


SWITCHES: dict[str, Callable[[PreTrainedModel], None]] = {
    "non-reentrant": make_switch({"use_reentrant": False}),
    "reentrant": make_switch({"use_reentrant": True}),
    "every 2 layers": make_switch({"use_reentrant": False}, every_n_layers=2),
    "every 3 layers, reentrant": make_switch({"use_reentrant": True}, every_n_layers=3),
    "offload": make_offload(reentrant=False),
    "offload, reentrant": make_offload(reentrant=True),
    "policy: matmuls": make_switch(make_selective(MATMULS)),
    "policy: arithmetic": make_switch(make_selective(ARITHMETIC)),
    "TRL selective": trl_selective,
    "checkpoint_wrapper": make_wrapper(CheckpointImpl.NO_REENTRANT),
    "checkpoint_wrapper, reentrant": make_wrapper(CheckpointImpl.REENTRANT),
    "DeepSpeed": make_deepspeed("checkpoint"),
    "DeepSpeed, in CPU memory": make_deepspeed(
        "checkpoint", partition_activations=True, checkpoint_in_cpu=True
    ),
    "DeepSpeed, non-reentrant": make_deepspeed("non_reentrant_checkpoint"),
}
