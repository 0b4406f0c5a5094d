"""Peak bytes of layers at 128K tokens: distca beside plain varlen attention, with activation checkpointing and without."""

from __future__ import annotations

from typing import Any

import torch

from gpu_models import PLAIN, Packed, documents_of, stack
from gpu_setting import Setting, free
from memory import LiveBytes

LAYERS = 2


def peak_bytes(setting: Setting, packed: Packed, name: str) -> dict[str, int]:
    """Bytes above those before the step: after forward, and at most. The second of two steps is counted."""
    packed.use(name)
    packed.step(name)
    packed.model.zero_grad(set_to_none=True)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = packed.forward(name)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        out.backward(packed.gradient)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        live = LiveBytes()
        with live:
            out = packed.forward(name)
            kept = live.alive()
            out.backward(packed.gradient)
        peak = live.peak
    packed.model.zero_grad(set_to_none=True)
    return {"kept_after_forward": kept, "peak": peak}


def run(setting: Setting) -> None:
    """Put one row a way of checkpointing."""
    tokens = setting.size(quick=512, cpu=8192, gpu=131072)
    model = stack(setting, LAYERS)
    packed = Packed(setting, model, documents_of(tokens))
    rows: list[dict[str, Any]] = []
    for checkpointing in (False, True):
        if not setting.time_for(f"checkpointing {checkpointing}", setting.size(quick=0.0, cpu=10.0, gpu=15.0)):
            continue
        if checkpointing:
            # Newer versions of transformers have the first name, older ones the second.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        found = {name: peak_bytes(setting, packed, name) for name in ("distca", PLAIN)}
        peaks = found["distca"]["peak"] / found[PLAIN]["peak"]
        rows.append({"tokens": tokens, "layers": LAYERS, "checkpointing": checkpointing, **found, "peak_ratio": peaks})
        setting.put(rows=rows)
        free(setting.device)
