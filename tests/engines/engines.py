"""Training runs under every engine, and what proves that it was this engine that ran.

Each engine is a function of a `Case`, a rank and an attention implementation. It trains a few steps and returns a `Run`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpointing import start_deepspeed
from tiny_llama import LAYERS, micro_batch, row, settings, tiny_llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_distca
from hf_distca.integration.session import current_session

CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "off": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    engine: str
    checkpointing: str = "off"
    peft: bool = False
    ping_pong: bool = False
    accumulation: int = 1
    bf16: bool = False
    steps: int = 3

    @property
    def settings(self) -> hf_distca.DistCAConfig:
        """What distca runs with."""
        return settings(ping_pong=self.ping_pong)

    @property
    def calls(self) -> int:
        """Calls of core attention that a rank makes in training: twice by half, and once more by recomputed layer."""
        passes = 1 if self.checkpointing == "off" else 2
        return self.steps * self.accumulation * LAYERS * passes * (2 if self.ping_pong else 1)


@dataclass(frozen=True)
class Run:
    """What one rank saw.

    Attributes:
        losses, grad_norms: mean loss over ranks and norm of all gradients, by step.
        seconds: of a step, the first one left out: it makes groups and buffers.
        engine: what trained.
        calls, sent_bytes: calls of core attention, and bytes sent for it; 0 under sdpa.
    """

    losses: list[float]
    grad_norms: list[float]
    seconds: float
    engine: str
    calls: int
    sent_bytes: int

    @classmethod
    def of(cls, losses: list[float], grad_norms: list[float], started: list[float], engine: str) -> Run:
        """The run that ends now, with the times at which steps began."""
        seconds = (time.perf_counter() - started[1]) / (len(started) - 1)
        meter = current_session().meter
        return cls(losses, grad_norms, seconds, engine, meter.calls, meter.sent_bytes)


class NotThisEngineError(AssertionError):
    """Another engine ran than the one that was meant."""


def train(rank: int, case: Case, implementation: str) -> Run:
    """Train on this rank; every rank of the world must call it."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    _forget_accelerate()
    # Else accelerate starts a thread for each core in every process, and threads that spin make a busy machine crawl.
    os.environ["OMP_NUM_THREADS"] = "1"
    hf_distca.configure(case.settings)
    return ENGINES[case.engine](case, rank, implementation)


def _forget_accelerate() -> None:
    """accelerate keeps the engine of a process in shared state and environment variables: an earlier run's must not stay."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]


def prepared(case: Case, model: PreTrainedModel) -> Any:
    """The model with LoRA if the case asks for it."""
    if not case.peft:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))


# Bare loops


def bare(
    case: Case,
    rank: int,
    implementation: str,
    wrap: Callable[[Any], tuple[Any, str]],
    make: Callable[[str], PreTrainedModel] = tiny_llama,
) -> Run:
    """A training loop as people write them, around a model wrapped by `wrap`, which says what it made.

    `rank` is where the data comes from: the same for ranks that hold the same tokens.
    """
    model = prepared(case, make(implementation))
    kwargs = CHECKPOINTING[case.checkpointing]
    if kwargs is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(kwargs)
    model, engine = wrap(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, norms, started = [], [], []
    for step in range(case.steps):
        started.append(time.perf_counter())
        total = 0.0
        for n in range(case.accumulation):
            last = n == case.accumulation - 1
            with synchronized(model, last), torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                loss = model(**batch(rank, case, step, n), use_cache=False).loss / case.accumulation
            with synchronized(model, last):
                loss.backward()
            total += float(loss.detach())
        norms.append(norm_of(model, trained))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
    return Run.of(losses, norms, started, engine)


def batch(rank: int, case: Case, step: int, micro: int) -> dict[str, Any]:
    world = dist.get_world_size()
    return micro_batch((step * case.accumulation + micro) * world + rank)


def synchronized(model: Any, last: bool) -> Any:
    """Where the engine can wait with reducing gradients until the last micro-batch, it does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def norm_of(model: Any, trained: list[nn.Parameter]) -> float:
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(1e9))
    # One by one: with tensor parallelism parameters lie on different meshes.
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in trained if p.grad is not None]
    return float(nn.utils.get_total_norm(grads))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ddp(model: Any) -> tuple[Any, str]:
    model = DistributedDataParallel(model)
    return model, f"{type(model).__name__}, {dist.get_world_size()} ranks"


def shard(model: Any, mesh: DeviceMesh) -> tuple[Any, str]:
    for layer in list(model.modules()):
        if isinstance(layer, LlamaDecoderLayer):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, evidence_of_dtensors(model)


def fully_sharded(model: Any) -> tuple[Any, str]:
    return shard(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)))


def hybrid_sharded(model: Any) -> tuple[Any, str]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    hf_distca.configure(current_session().config, group=mesh)
    return shard(model, mesh)


def fsdp1(model: Any) -> tuple[Any, str]:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return model, f"{type(model).__name__}, {units} units"


def compiled(model: Any) -> tuple[Any, str]:
    """Dynamo and AOTAutograd; code generation by Inductor needs a C++ compiler and changes nothing for distca."""
    torch._dynamo.reset()  # it does not notice that a model has other hooks than the one of the run before
    compiled_model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    return compiled_model, f"{type(compiled_model).__name__} of {type(compiled_model._orig_mod).__name__}"


def evidence_of_dtensors(model: nn.Module) -> str:
    """Kind of parameters and mesh; parameters that are not sharded, but for adapters, make it another engine."""
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    adapters = [name for name in plain if "lora_" in name]
    if len(plain) > len(adapters):
        raise NotThisEngineError(f"{len(plain)} parameters are no DTensors: {plain[:3]}")
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    meshes = {str(p.device_mesh.mesh_dim_names): tuple(p.device_mesh.shape) for p in sharded}
    placements = sorted({str(p.placements) for p in sharded})
    return f"DTensor {placements[0]} on {meshes}" + ", adapters whole" * bool(adapters)


# Trainer


def hugging_face(
    case: Case,
    rank: int,
    implementation: str,
    evidence: Callable[[Trainer], str],
    make: Callable[[str, Path], PreTrainedModel] | None = None,
    **options: Any,
) -> Run:
    """The Trainer on the same documents; `evidence` says which engine it prepared."""
    kwargs = CHECKPOINTING[case.checkpointing]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(implementation) if make is None else make(implementation, Path(folder, "model"))
        arguments = TrainingArguments(**training_options(case, folder, kwargs), **options)
        trainer = Trainer(
            prepared(case, model),
            arguments,
            data_collator=hf_distca.PackingCollator(),
            train_dataset=[row(n) for n in range(case.steps * case.accumulation * dist.get_world_size())],
            callbacks=[hf_distca.DistCACallback(case.settings)],
        )
        return finished(case, trainer, evidence)


def training_options(case: Case, folder: str, checkpointing: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "gradient_checkpointing": checkpointing is not None,
        "gradient_checkpointing_kwargs": checkpointing,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "bf16": case.bf16,
        "max_grad_norm": 1e9,
    }


def finished(case: Case, trainer: Trainer, evidence: Callable[[Trainer], str]) -> Run:
    trainer.remove_callback(PrinterCallback)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return Run.of([log["loss"] for log in logs], [log["grad_norm"] for log in logs], clock.started, evidence(trainer))


class Clock(TrainerCallback):
    """Notes when steps begin."""

    def __init__(self) -> None:
        self.started: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started.append(time.perf_counter())


def wrapped_in_ddp(trainer: Trainer) -> str:
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        raise NotThisEngineError(f"{type(wrapped).__name__} in place of DistributedDataParallel")
    return f"{type(trainer).__name__} with {type(wrapped).__name__}"


def wrapped_in_deepspeed(stage: int, trainer: Trainer) -> str:
    engine = trainer.model_wrapped
    seen = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    whole = [p for p in engine.module.parameters() if not hasattr(p, "ds_tensor")]
    if seen != stage or (stage == 3 and whole):
        raise NotThisEngineError(f"{type(engine).__name__} at ZeRO stage {seen} with {len(whole)} whole parameters, not {stage}")
    return f"{type(engine).__name__}, ZeRO-{seen}, {type(engine.optimizer).__name__}"


def sharded_by_trainer(trainer: Trainer) -> str:
    evidence = evidence_of_dtensors(trainer.model)
    return evidence + f", {type(trainer.model_wrapped).__name__}"


def zero(stage: int, case: Case, rank: int, implementation: str) -> Run:
    start_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return hugging_face(case, rank, implementation, partial(wrapped_in_deepspeed, stage), deepspeed=config)


def native(sizes: dict[str, int], case: Case, rank: int, implementation: str) -> Run:
    """transformers' own FSDP2."""
    return hugging_face(case, rank, implementation, sharded_by_trainer, partial(natively_sharded, sizes))


def tensor_parallel(case: Case, rank: int, implementation: str) -> Run:
    """transformers' own tensor parallelism and FSDP2 on four ranks, neighbours with the same tokens and different heads.

    A bare loop: on CPUs the Trainer refuses this mesh under any attention.
    """

    def wrap(model: nn.Module) -> tuple[nn.Module, str]:
        evidence = evidence_of_dtensors(model)
        if "tp" not in evidence:
            raise NotThisEngineError(evidence)
        return model.train(), evidence

    with tempfile.TemporaryDirectory() as folder:
        make = partial(natively_sharded, {"tp_size": 2, "fsdp_size": 2}, folder=Path(folder))
        return bare(case, rank // 2, implementation, wrap, make)


def natively_sharded(sizes: dict[str, int], implementation: str, folder: Path) -> PreTrainedModel:
    """The tiny model, laid out on its ranks by transformers."""
    from transformers.distributed import DistributedConfig

    return loaded(implementation, folder, distributed_config=DistributedConfig(**sizes))


def loaded(implementation: str, folder: Path, **options: Any) -> PreTrainedModel:
    """The tiny model, written and loaded with `from_pretrained`."""
    folders = [folder]  # in a distributed world only rank 0 writes: all read what it wrote
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        tiny_llama(implementation).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folders[0], attn_implementation=implementation, **options)
    dist.barrier()  # the folder may be removed now
    return model


def quantized(case: Case, rank: int, implementation: str) -> Run:
    """QLoRA: adapters on a frozen base in 4 bits."""

    def make(implementation: str, folder: Path) -> PreTrainedModel:
        compute = torch.bfloat16 if case.bf16 else torch.float32
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
        return loaded(implementation, folder, quantization_config=config)

    return hugging_face(case, rank, implementation, frozen_in_4_bits, make)


def frozen_in_4_bits(trainer: Trainer) -> str:
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in trainer.model.modules() if isinstance(module, Linear4bit)]
    packed = [layer for layer in layers if layer.weight.dtype == torch.uint8 and not layer.weight.requires_grad]
    if len(packed) != 7 * LAYERS or len(layers) != len(packed):
        raise NotThisEngineError(f"{len(packed)} of {len(layers)} layers are frozen in 4 bits, not {7 * LAYERS}")
    return f"{wrapped_in_ddp(trainer)}, {len(packed)} linear layers in 4 bits"


def accelerate_fsdp2(case: Case, rank: int, implementation: str) -> Run:
    """accelerate's FSDP2 plugin, which it would leave out on a CPU: told here that the world is one of another accelerator."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    wrapped_checkpointing = case.checkpointing == "non-reentrant"
    if wrapped_checkpointing:  # the way of this engine: torch's checkpoint_wrapper
        wrap["activation_checkpointing"] = True
        case = replace(case, checkpointing="off")
    state = {"use_configured_state": True}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap, "accelerator_config": state}
    return hugging_face(case, rank, implementation, sharded_by_trainer, **options)


def trl(case: Case, rank: int, implementation: str) -> Run:
    """TRL's SFTTrainer, which packs the documents itself."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{n}": n for n in range(59)} | {"<pad>": 59, "<eos>": 60}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    documents = [ids for n in range(2 * case.steps * case.accumulation) for ids in row(n)["documents"] if len(ids) > 1]
    checkpointing = CHECKPOINTING[case.checkpointing]
    with tempfile.TemporaryDirectory() as folder:
        options = training_options(case, folder, checkpointing) | {"remove_unused_columns": True}
        arguments = SFTConfig(**options, packing=True, max_length=96, dataset_num_proc=None)
        trainer = SFTTrainer(
            prepared(case, tiny_llama(implementation)),
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": documents}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
            callbacks=[hf_distca.DistCACallback(case.settings)],
        )
        # Packing puts rows of long documents first: let them alternate with the others, for work to move in every step.
        rows, half = trainer.train_dataset, len(trainer.train_dataset) // 2
        trainer.train_dataset = rows.select([n // 2 + n % 2 * half for n in range(2 * half)])
        return finished(case, trainer, wrapped_in_ddp)


def _bare(wrap: Callable[[Any], tuple[Any, str]]) -> Callable[[Case, int, str], Run]:
    return lambda case, rank, implementation: bare(case, rank, implementation, wrap)


ENGINES: dict[str, Callable[[Case, int, str], Run]] = {
    "DDP": _bare(ddp),
    "DDP, Trainer": lambda case, rank, implementation: hugging_face(case, rank, implementation, wrapped_in_ddp),
    "DDP, TRL SFT with packing": trl,
    "DDP, torch.compile": _bare(compiled),
    "FSDP1": _bare(fsdp1),
    "FSDP2, fully_shard": _bare(fully_sharded),
    "FSDP2, transformers": partial(native, {"fsdp_size": 2}),
    "FSDP2, accelerate": accelerate_fsdp2,
    "ZeRO-1": partial(zero, 1),
    "ZeRO-2": partial(zero, 2),
    "ZeRO-3": partial(zero, 3),
}
# On four ranks.
MESHES: dict[str, Callable[[Case, int, str], Run]] = {
    "HSDP 2 x 2, fully_shard": _bare(hybrid_sharded),
    "HSDP 2 x 2, transformers": partial(native, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "TP 2 x FSDP2 2, transformers": tensor_parallel,
}
# The base is frozen: only adapters train.
QUANTIZED: dict[str, Callable[[Case, int, str], Run]] = {"DDP, Trainer, base in 4 bits": quantized}
ENGINES |= MESHES | QUANTIZED


def cases() -> Iterator[Case]:
    """The matrix."""
    for engine, ping_pong in product(ENGINES, (False, True)):
        if engine in MESHES:
            yield Case(engine, ping_pong=ping_pong)
            yield Case(engine, "non-reentrant", ping_pong=ping_pong)
            continue
        adapters = engine in QUANTIZED
        for peft, checkpointing in product((False, True)[adapters:], CHECKPOINTING):
            yield Case(engine, checkpointing, peft, ping_pong)
        yield Case(engine, "non-reentrant", adapters, ping_pong, accumulation=2)
        if not adapters:  # in bf16 the gradients of adapters alone are 5e-3 off those in float32, under any attention
            yield Case(engine, ping_pong=ping_pong, bf16=True)


def world_of(case: Case) -> int:
    return 4 if case.engine in MESHES else 2
