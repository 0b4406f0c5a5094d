"""Peak bytes of a step at 64K tokens: distca compared with plain varlen attention and with the
simulator.

The model has two layers of Llama-8B's shape, a head of 32,768 words, weights in the model's dtype,
and no optimizer. The simulator counts float32 gradients and an optimizer; here its gradients are
scaled to the dtype of the weights, and the optimizer is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaForCausalLM

from call_memory import LiveBytes
from gpu_models import list_pairs, make_documents
from gpu_setting import Setting, free
from gpu_training import arguments, make_batches
from models import make_llama_config
from part_checkpointing import set_checkpointing
from simulator.hardware import find_hardware
from simulator.memory import find_fullest_moment
from simulator.model_shape import ModelShape
from simulator.setting import Setting as Simulated

LAYERS = 2


def make_shape(setting: Setting) -> ModelShape:
    sizes = setting.size(
        quick=(128, 4, 2, 32, 256, 64),
        cpu=(256, 4, 2, 64, 704, 512),
        gpu=(4096, 32, 8, 128, 14336, 32768),
    )
    hidden, heads, key_heads, width, wide, words = sizes
    return ModelShape("layers", hidden, LAYERS, heads, key_heads, width, wide, words)


def build(setting: Setting, shape: ModelShape) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = make_llama_config(
        (shape.hidden, shape.feed_forward, shape.layers),
        (shape.query_heads, shape.key_value_heads),
        shape.vocabulary,
        head_dim=shape.head_dim,
        use_cache=False,
    )
    with torch.device(setting.device):
        return LlamaForCausalLM(config).to(setting.dtype).train()


def measure_peak_bytes(
    setting: Setting, model: LlamaForCausalLM, row: dict[str, Any], name: str
) -> dict[str, int]:
    """Return the bytes after forward and at the peak of the second step, weights included."""
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


def simulate_terms(
    setting: Setting, shape: ModelShape, tokens: int, checkpointing: bool
) -> dict[str, float]:
    """Return the terms of the simulator's fullest moment."""
    hardware = replace(find_hardware("h100"), element_bytes=setting.dtype.itemsize)
    case = Simulated(shape, hardware, 1, tokens, sharding="ddp", fused=False)
    kept = "selective" if checkpointing else "none"
    case = replace(case, checkpointing=kept, loss_tokens=None)  # as in the loss of transformers
    memory = find_fullest_moment(case, tokens)
    terms = {name: float(getattr(memory, name)) for name in memory.__dataclass_fields__}
    terms["gradients"] *= setting.dtype.itemsize / 4
    terms["optimizer"] = 0.0
    return {**terms, "total": sum(value for name, value in terms.items() if name != "host")}


def run(setting: Setting) -> None:
    """Record one row per way of checkpointing."""
    tokens = setting.size(quick=512, cpu=4096, gpu=65536)
    shape = make_shape(setting)
    model = build(setting, shape)
    (row_of_documents,) = make_batches(setting, model, tokens, 1)
    pair = list_pairs(setting)[0]
    pair.use()
    for checkpointing in (True, False):
        if not setting.has_time_for(f"checkpointing {checkpointing}", cpu=10.0, gpu=6.0):
            continue
        set_checkpointing(model, checkpointing)
        row: dict[str, Any] = {
            "tokens": tokens,
            "layers": LAYERS,
            "checkpointing": checkpointing,
            "kernel": pair.kernel,
            "documents": make_documents(tokens),
            "simulated": simulate_terms(setting, shape, tokens, checkpointing),
            "plain": pair.plain,
        }
        try:
            for name in ("distca", pair.plain):
                row[name] = measure_peak_bytes(setting, model, row_of_documents, name)
            row["peak_ratio"] = row["distca"]["peak"] / row[pair.plain]["peak"]
            row["simulated_ratio"] = row["simulated"]["total"] / row["distca"]["peak"]
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error)[:300]
        setting.add("rows", row)
        free(setting.device)
