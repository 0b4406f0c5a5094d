"""Engines under a Trainer: each consists of the Trainer's arguments and a check that it prepared
this engine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import (
    CHECKPOINTING,
    COMPUTED,
    Case,
    NotThisEngineError,
    Run,
    describe_dtensors,
    prepare_model,
)
from checkpointing import make_zero_config, start_deepspeed
from tiny_llama import LAYERS, load_model, load_sharded, row, tiny_llama
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_distca
from tiny_runs import COMMON, make_tokenizer


def run_trainer(
    case: Case,
    rank: int,
    implementation: str,
    evidence: Callable[[Trainer], str],
    make: Callable[[str, Path], PreTrainedModel] | None = None,
    **options: Any,
) -> Run:
    """Train on the same documents with a Trainer. `evidence` checks and names its engine."""
    kwargs = CHECKPOINTING[case.checkpointing]
    with tempfile.TemporaryDirectory() as folder:
        model = (
            tiny_llama(implementation)
            if make is None
            else make(implementation, Path(folder, "model"))
        )
        arguments = TrainingArguments(**training_options(case, folder, kwargs), **options)
        trainer = Trainer(
            prepare_model(case, model),
            arguments,
            data_collator=hf_distca.PackingCollator(),
            train_dataset=[
                row(n) for n in range(case.steps * case.accumulation * dist.get_world_size())
            ],
            callbacks=[hf_distca.DistCACallback(case.settings)],
        )
        return finish(case, trainer, evidence)


def training_options(
    case: Case, folder: str, checkpointing: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        **COMMON,
        "output_dir": folder,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "gradient_checkpointing": checkpointing is not None,
        "gradient_checkpointing_kwargs": checkpointing,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-3,
        "bf16": case.precision in ("bf16", "bf16 weights"),
        "fp16": case.precision == "fp16",
        "max_grad_norm": 1e9,
        # Under recomputes, DDP must not look for unused parameters. The Trainer sets this, but not
        # with PEFT.
        **(
            {"ddp_find_unused_parameters": False}
            if case.peft and checkpointing == CHECKPOINTING["reentrant"]
            else {}
        ),
    }


def finish(case: Case, trainer: Trainer, evidence: Callable[[Trainer], str]) -> Run:
    trainer.remove_callback(PrinterCallback)
    clock = Clock()
    trainer.add_callback(clock)
    if case.precision == "fp16":
        scale_losses(trainer)
        trainer.add_callback(Overflow())
    trainer.train()
    said = evidence(trainer) + (check_scaler(trainer) if case.precision == "fp16" else "")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return Run.of(
        [log["loss"] for log in logs], [log["grad_norm"] for log in logs], clock.started, said
    )


class Clock(TrainerCallback):
    """Records the time at which each step begins."""

    def __init__(self) -> None:
        self.started: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started.append(time.perf_counter())


class Overflow(TrainerCallback):
    """Makes gradients of rank 1 alone infinite in the second step, from the end of the last layer
    on.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None

    def on_step_begin(
        self, _args: Any, state: Any, _control: Any, model: Any, **kwargs: Any
    ) -> None:
        if state.global_step == 1 and dist.get_rank() == 1:
            self._hook = model.model.norm.register_forward_hook(self._overflow)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()

    @staticmethod
    def _overflow(_module: nn.Module, _inputs: object, hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda grad: grad * torch.inf)


def scale_losses(trainer: Trainer) -> None:
    """Add the gradient scaler that accelerate uses for `fp16=True` on a GPU. On a CPU it silently
    trains in float32.
    """
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")


def check_scaler(trainer: Trainer) -> str:
    scaler = trainer.accelerator.scaler
    began, scale = scaler._init_scale, scaler.get_scale()
    if scale != began * scaler.get_backoff_factor():
        raise NotThisEngineError(
            f"the scale of gradients went from {began:g} to {scale:g}, not by one overflow"
        )
    return f", scale {scale:g}"


def check_ddp(trainer: Trainer) -> str:
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        raise NotThisEngineError(f"{type(wrapped).__name__} in place of DistributedDataParallel")
    return f"{type(trainer).__name__} with {type(wrapped).__name__}"


def check_deepspeed(stage: int, trainer: Trainer) -> str:
    engine = trainer.model_wrapped
    seen = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    whole = [p for p in engine.module.parameters() if not hasattr(p, "ds_tensor")]
    if seen != stage or (stage == 3 and whole):
        raise NotThisEngineError(
            f"{type(engine).__name__} at ZeRO stage {seen} with {len(whole)} whole parameters, not"
            f" {stage}"
        )
    return f"{type(engine).__name__}, ZeRO-{seen}, {type(engine.optimizer).__name__}"


def check_sharding(trainer: Trainer) -> str:
    evidence = describe_dtensors(trainer.model)
    return evidence + f", {type(trainer.model_wrapped).__name__}"


def zero(stage: int, case: Case, rank: int, implementation: str) -> Run:
    start_deepspeed()
    config = make_zero_config(stage)
    return run_trainer(
        case, rank, implementation, partial(check_deepspeed, stage), deepspeed=config
    )


def native(case: Case, rank: int, implementation: str, replicas: int = 1) -> Run:
    """Train with transformers' FSDP2, or HSDP with several replicas."""
    sizes = {"fsdp_size": case.ranks // replicas} | (
        {"dp_replicate_size": replicas} if replicas > 1 else {}
    )
    return run_trainer(case, rank, implementation, check_sharding, partial(load_sharded, sizes))


def compiled_by_trainer(case: Case, rank: int, implementation: str) -> Run:
    """Train with `torch_compile=True`, which generates C++ (Inductor)."""
    # Dynamo does not notice that this model has other hooks than the model of the previous run.
    torch._dynamo.reset()
    return run_trainer(case, rank, implementation, check_compiled_ddp, torch_compile=True)


def check_compiled_ddp(trainer: Trainer) -> str:
    wrapped, backend = trainer.model_wrapped, trainer.accelerator.state.dynamo_plugin.backend.value
    inner = getattr(wrapped, "_orig_mod", None)
    if not isinstance(inner, DistributedDataParallel) or backend != "INDUCTOR":
        raise NotThisEngineError(f"{type(wrapped).__name__} of {type(inner).__name__} by {backend}")
    return f"{type(wrapped).__name__} of {type(inner).__name__}, {backend.lower()}"


def quantized(case: Case, rank: int, implementation: str) -> Run:
    """Train with QLoRA: adapters on a frozen base in 4 bits."""

    def make(implementation: str, folder: Path) -> PreTrainedModel:
        compute = COMPUTED[case.precision]
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
        return load_model(implementation, folder, quantization_config=config)

    return run_trainer(case, rank, implementation, check_4_bits, make)


def check_4_bits(trainer: Trainer) -> str:
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in trainer.model.modules() if isinstance(module, Linear4bit)]
    packed = [
        layer
        for layer in layers
        if layer.weight.dtype == torch.uint8 and not layer.weight.requires_grad
    ]
    if len(packed) != 7 * LAYERS or len(layers) != len(packed):
        raise NotThisEngineError(
            f"{len(packed)} of {len(layers)} layers are frozen in 4 bits, not {7 * LAYERS}"
        )
    return f"{check_ddp(trainer)}, {len(packed)} linear layers in 4 bits"


def accelerate_fsdp2(case: Case, rank: int, implementation: str) -> Run:
    """Train with accelerate's FSDP2 plugin. accelerate skips it on a CPU, so its state names
    another accelerator.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    wrapped_checkpointing = case.checkpointing == "non-reentrant"
    if wrapped_checkpointing:  # the checkpointing of this engine: torch's checkpoint_wrapper
        wrap["activation_checkpointing"] = True
        case = replace(case, checkpointing="off")
    state = {"use_configured_state": True}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap, "accelerator_config": state}
    return run_trainer(case, rank, implementation, check_sharding, **options)


def trl(case: Case, rank: int, implementation: str) -> Run:
    """Train with TRL's SFTTrainer, which packs the documents itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    documents = [
        ids
        for n in range(case.ranks * case.steps * case.accumulation)
        for ids in row(n)["documents"]
        if len(ids) > 1
    ]
    checkpointing = CHECKPOINTING[case.checkpointing]
    with tempfile.TemporaryDirectory() as folder:
        options = training_options(case, folder, checkpointing) | {"remove_unused_columns": True}
        arguments = SFTConfig(**options, packing=True, max_length=96, dataset_num_proc=None)
        trainer = SFTTrainer(
            prepare_model(case, tiny_llama(implementation)),
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": documents}),
            processing_class=make_tokenizer(),
            callbacks=[hf_distca.DistCACallback(case.settings)],
        )
        # Packing puts rows of long documents first. Alternate them with the others, so that work
        # moves in every step.
        rows, half = trainer.train_dataset, len(trainer.train_dataset) // 2
        trainer.train_dataset = rows.select([n // 2 + n % 2 * half for n in range(2 * half)])
        return finish(case, trainer, check_ddp)
