"""Peak bytes of a step at 64K tokens: distca beside plain varlen attention and beside what the
simulator counts.

Two layers of Llama-8B's shape with a head of 32,768 words, weights in the model's dtype, no
optimizer. The simulator counts gradients in float32, and an optimizer: gradients count here as they
are, in the weights' dtype, without the optimizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaForCausalLM

from call_memory import LiveBytes
from gpu_models import documents_of, pairs
from gpu_setting import Setting, free
from gpu_training import arguments, batches
from models import llama_config
from part_checkpointing import set_checkpointing
from simulator.hardware import find_hardware
from simulator.memory import find_fullest_moment
from simulator.model_shape import ModelShape
from simulator.setting import Setting as Simulated

LAYERS = 2


def shape_of(setting: Setting) -> ModelShape:
    sizes = setting.size(
        quick=(128, 4, 2, 32, 256, 64),
        cpu=(256, 4, 2, 64, 704, 512),
        gpu=(4096, 32, 8, 128, 14336, 32768),
    )
    hidden, heads, key_heads, width, wide, words = sizes
    return ModelShape("layers", hidden, LAYERS, heads, key_heads, width, wide, words)


def build(setting: Setting, shape: ModelShape) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama_config(
        (shape.hidden, shape.feed_forward, shape.layers),
        (shape.query_heads, shape.key_value_heads),
        shape.vocabulary,
        head_dim=shape.head_dim,
        use_cache=False,
    )
    with torch.device(setting.device):
        return LlamaForCausalLM(config).to(setting.dtype).train()


def peak_bytes(
    setting: Setting, model: LlamaForCausalLM, row: dict[str, Any], name: str
) -> dict[str, int]:
    """Bytes after forward and at most, weights included. The second of two steps is counted."""
    model.set_attn_implementation(name)
    model(**arguments(row, name)).loss.backward()
    model.zero_grad(set_to_none=True)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = model(**arguments(row, name)).loss
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        live = LiveBytes()
        with live:
            loss = model(**arguments(row, name)).loss
            kept = live.alive() + weights
            loss.backward()
        peak = live.peak + weights
    del loss
    model.zero_grad(set_to_none=True)
    return {"kept_after_forward": kept, "peak": peak}


def simulated(
    setting: Setting, shape: ModelShape, tokens: int, checkpointing: bool
) -> dict[str, float]:
    """The simulator's fullest moment, by term."""
    hardware = replace(find_hardware("h100"), element_bytes=setting.dtype.itemsize)
    case = Simulated(shape, hardware, 1, tokens, sharding="ddp", fused=False)
    kept = "selective" if checkpointing else "none"
    case = replace(case, checkpointing=kept, loss_tokens=None)  # as transformers' own loss
    memory = find_fullest_moment(case, tokens)
    terms = {name: float(getattr(memory, name)) for name in memory.__dataclass_fields__}
    terms["gradients"] *= setting.dtype.itemsize / 4
    terms["optimizer"] = 0.0
    return {**terms, "total": sum(value for name, value in terms.items() if name != "host")}


def run(setting: Setting) -> None:
    """Put one row a way of checkpointing."""
    tokens = setting.size(quick=512, cpu=4096, gpu=65536)
    shape = shape_of(setting)
    model = build(setting, shape)
    (row_of_documents,) = batches(setting, model, tokens, 1)
    pair = pairs(setting)[0]
    pair.use()
    for checkpointing in (True, False):
        if not setting.time_for(f"checkpointing {checkpointing}", cpu=10.0, gpu=6.0):
            continue
        set_checkpointing(model, checkpointing)
        row: dict[str, Any] = {
            "tokens": tokens,
            "layers": LAYERS,
            "checkpointing": checkpointing,
            "kernel": pair.kernel,
            "documents": documents_of(tokens),
            "simulated": simulated(setting, shape, tokens, checkpointing),
            "plain": pair.plain,
        }
        try:
            for name in ("distca", pair.plain):
                row[name] = peak_bytes(setting, model, row_of_documents, name)
            row["peak_ratio"] = row["distca"]["peak"] / row[pair.plain]["peak"]
            row["simulated_ratio"] = row["simulated"]["total"] / row["distca"]["peak"]
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error)[:300]
        setting.add("rows", row)
        free(setting.device)
