"""Engines for training loops without a Trainer: each function wraps the model and returns evidence
of the engine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import CHECKPOINTING, Case, NotThisEngineError, Run, describe_dtensors, prepare_model
from tiny_llama import load_sharded, micro_batch, tiny_llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_distca
from hf_distca.integration.current_session import current_session


def train_loop(
    case: Case,
    rank: int,
    implementation: str,
    wrap: Callable[[Case, Any], tuple[Any, str]],
    make: Callable[[str], PreTrainedModel] = tiny_llama,
) -> Run:
    """Run a typical training loop around a model that `wrap` has wrapped. `wrap` also returns
    evidence of the engine.

    `rank` selects the data: it is equal for ranks that hold the same tokens.
    """
    model = prepare_model(case, make(implementation))
    kwargs = CHECKPOINTING[case.checkpointing]
    if kwargs is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(kwargs)
    model, engine = wrap(case, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, norms, started = [], [], []
    for step in range(case.steps):
        started.append(time.perf_counter())
        total = 0.0
        batches = [make_batch(rank, case, step, n) for n in range(case.accumulation)]
        for n, one in enumerate(batches):
            last = n == case.accumulation - 1
            with (
                synchronize_last(model, last),
                torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"),
            ):
                loss = model(**one, use_cache=False).loss / case.accumulation
            with synchronize_last(model, last):
                loss.backward()
            total += float(loss.detach())
        norms.append(compute_norm(model, trained))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(average_over_ranks(total))
    return Run.of(losses, norms, started, engine)


def make_batch(rank: int, case: Case, step: int, micro: int) -> dict[str, Any]:
    world = dist.get_world_size()
    return micro_batch((step * case.accumulation + micro) * world + rank)


def synchronize_last(model: Any, last: bool) -> Any:
    """Reduce gradients only at the last micro-batch if the engine can wait until then."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def compute_norm(model: Any, trained: list[nn.Parameter]) -> float:
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(1e9))
    # Gather gradients one by one: with tensor parallelism, parameters lie on different meshes.
    grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for p in trained
        if p.grad is not None
    ]
    # Use float64, because float32 hides small differences.
    return float(nn.utils.get_total_norm([grad.double() for grad in grads]))


def average_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ddp(_case: Case, model: Any) -> tuple[Any, str]:
    model = DistributedDataParallel(model)
    return model, f"{type(model).__name__}, {dist.get_world_size()} ranks"


def shard(case: Case, model: Any, mesh: DeviceMesh) -> tuple[Any, str]:
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if case.precision == "mixed"
        else MixedPrecisionPolicy()
    )
    for layer in list(model.modules()):
        if isinstance(layer, LlamaDecoderLayer):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, describe_dtensors(model)


def fully_sharded(case: Case, model: Any) -> tuple[Any, str]:
    return shard(
        case, model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    )


def hybrid_sharded(case: Case, model: Any) -> tuple[Any, str]:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    hf_distca.configure(current_session().config, group=mesh)
    return shard(case, model, mesh)


def fsdp1(case: Case, model: Any) -> tuple[Any, str]:
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
        if case.precision == "mixed"
        else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return model, f"{type(model).__name__}, {units} units"


def compiled(_case: Case, model: Any) -> tuple[Any, str]:
    """Compile with Dynamo and AOTAutograd but without generated code, which
    `trainer_engines.compiled_by_trainer` tests.
    """
    # Dynamo does not notice that this model has other hooks than the model of the previous run.
    torch._dynamo.reset()
    compiled_model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    return (
        compiled_model,
        f"{type(compiled_model).__name__} of {type(compiled_model._orig_mod).__name__}",
    )


def tensor_parallel(case: Case, rank: int, implementation: str) -> Run:
    """Run transformers' tensor parallelism and FSDP2 on four ranks. Neighbours have the same tokens
    and different heads.

    The Trainer refuses this mesh on CPUs under any attention, so the loop is our own.
    """

    def wrap(_case: Case, model: nn.Module) -> tuple[nn.Module, str]:
        evidence = describe_dtensors(model)
        if "tp" not in evidence:
            raise NotThisEngineError(evidence)
        return model.train(), evidence

    with tempfile.TemporaryDirectory() as folder:
        make = partial(load_sharded, {"tp_size": 2, "fsdp_size": 2}, folder=Path(folder))
        return train_loop(case, rank // 2, implementation, wrap, make)
