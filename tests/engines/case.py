"""A training case, the measurements of one rank, and helpers for engines with and without a
Trainer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tiny_llama import LAYERS, settings
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import hf_distca
from hf_distca.integration.current_session import current_session

# The dtype in which layers compute, by precision.
COMPUTED = {
    "bf16": torch.bfloat16,
    "mixed": torch.bfloat16,
    "bf16 weights": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
}
# Engines that under `bf16=True` keep bfloat16 parameters for forward and backward, and give layers
# bfloat16 inputs.
KEEPING_BF16 = {"FSDP2, accelerate", "ZeRO-1", "ZeRO-2", "ZeRO-3"}

CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "off": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}


@dataclass(frozen=True)
class Case:
    """A model, its engine and its way of training.

    Attributes:
        precision: "bf16", the effect of `bf16=True`: autocast, or bfloat16 parameters if the engine
            is in `KEEPING_BF16`; "mixed", bfloat16 parameters under an engine that also has
            autocast; "bf16 weights", autocast for a model loaded in bfloat16; "fp16" with a
            gradient scaler, and one step that overflows; or "float32".
    """

    engine: str
    checkpointing: str = "off"
    peft: bool = False
    ping_pong: bool = False
    accumulation: int = 1
    precision: str = "bf16"
    ranks: int = 2
    steps: int = 3

    def __str__(self) -> str:
        said = (
            [self.checkpointing] * (self.checkpointing != "off")
            + ["LoRA"] * self.peft
            + ["ping-pong"] * self.ping_pong
        )
        said += [f"x{self.accumulation} accumulated"] * (self.accumulation > 1)
        said += [self.precision] * (self.precision != "bf16")
        return ", ".join([self.engine, *said, f"{self.ranks} ranks"])

    @property
    def settings(self) -> hf_distca.DistCAConfig:
        """Return distca's settings for this case."""
        return settings(ping_pong=self.ping_pong)

    @property
    def mixed(self) -> bool:
        """Return whether the engine keeps bfloat16 parameters besides the optimizer's."""
        return self.precision == "mixed" or (
            self.precision == "bf16" and self.engine in KEEPING_BF16
        )

    @property
    def calls(self) -> int:
        """Count the core attention calls of a rank: one for each layer, two in ping-pong, and as
        many again for recomputes.
        """
        passes = 1 if self.checkpointing == "off" else 2
        return self.steps * self.accumulation * LAYERS * passes * (2 if self.ping_pong else 1)

    @property
    def gathers(self) -> int:
        """Return the most collectives of planning: documents and plans, once per micro-batch."""
        return 2 * self.steps * self.accumulation


@dataclass(frozen=True)
class Run:
    """The measurements of one rank.

    Attributes:
        losses, grad_norms: mean loss over ranks and norm of all gradients, by step.
        seconds: mean time of a step, without the first one, which makes groups and buffers.
        engine: evidence of the engine that trained.
        calls, sent_bytes: calls of core attention, including recomputes, and bytes sent for it; 0
            under sdpa.
        gathers: collectives of planning that the rank took part in; 0 under sdpa.
    """

    losses: list[float]
    grad_norms: list[float]
    seconds: float
    engine: str
    calls: int
    sent_bytes: int
    gathers: int = 0

    @classmethod
    def of(
        cls, losses: list[float], grad_norms: list[float], started: list[float], engine: str
    ) -> Run:
        """Make the `Run` that ends now. `started` holds the time at which each step began."""
        seconds = (time.perf_counter() - started[1]) / (len(started) - 1)
        meter = current_session().meter
        return cls(
            losses,
            grad_norms,
            seconds,
            engine,
            meter.calls + meter.recomputed_calls,
            meter.sent_bytes,
        )


class NotThisEngineError(AssertionError):
    """Another engine ran than the case asks for."""


def prepare_model(case: Case, model: PreTrainedModel) -> Any:
    """Add LoRA if the case asks for it, and a hook that checks the dtypes of each forward."""
    if case.precision == "bf16 weights":
        model = model.to(torch.bfloat16)
    model.model.layers[-1].mlp.gate_proj.register_forward_hook(partial(_check_dtypes, case))
    if not case.peft:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model,
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
    )


def _check_dtypes(case: Case, module: nn.Module, _: object, output: torch.Tensor) -> None:
    weights = torch.bfloat16 if case.mixed or case.precision == "bf16 weights" else torch.float32
    computed = output.dtype
    # A layer in 4 bits returns the dtype of its input, so check its compute dtype instead.
    if hasattr(module, "compute_dtype"):
        weights, computed = torch.uint8, module.compute_dtype
    if (module.weight.dtype, computed) != (weights, COMPUTED[case.precision]):
        raise NotThisEngineError(
            f"a layer has weights in {module.weight.dtype} and returns {computed}, not as in {case}"
        )


def describe_dtensors(model: nn.Module) -> str:
    """Describe placements and mesh of the parameters; all except adapters must be sharded."""
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    adapters = [name for name in plain if "lora_" in name]
    if len(plain) > len(adapters):
        raise NotThisEngineError(f"{len(plain)} parameters are not DTensors: {plain[:3]}")
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    meshes = {str(p.device_mesh.mesh_dim_names): tuple(p.device_mesh.shape) for p in sharded}
    placements = sorted({str(p.placements) for p in sharded})
    return f"DTensor {placements[0]} on {meshes}" + ", adapters whole" * bool(adapters)
