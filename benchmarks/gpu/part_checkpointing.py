"""Activation checkpointing on one GPU: distca keeps the outputs of attention, plain varlen
attention computes them twice.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_models import Packed, Pair, list_pairs, make_documents, make_stack, time_steps
from gpu_setting import Setting, free
from processes import compute_median_ratio, compute_medians

LAYERS = 3


def set_checkpointing(model: torch.nn.Module, enabled: bool) -> None:
    """Switch checkpointing on or off, by its name in the installed version of transformers."""
    verb = "enable" if enabled else "disable"
    switch = getattr(model, f"activation_checkpointing_{verb}", None)
    switch = switch or getattr(model, f"gradient_checkpointing_{verb}")
    switch(*[{"use_reentrant": False}] * enabled)


def measure_case(setting: Setting, packed: Packed, pair: Pair) -> dict[str, Any]:
    """Measure seconds and peak bytes of steps under distca and plain attention, same kernel."""
    names = ["distca", pair.plain]
    seconds = time_steps(setting, packed, names, setting.size(quick=1, cpu=3, gpu=4))
    row: dict[str, Any] = {"seconds": compute_medians(seconds)}
    row["times_faster"] = 1 / compute_median_ratio(*seconds.values())
    if setting.device.type == "cuda":
        peaks = {}
        for name in names:
            packed.use(name)
            torch.cuda.reset_peak_memory_stats()
            packed.step(name)
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
            packed.model.zero_grad(set_to_none=True)
        row["peak_bytes"] = peaks
    return row


def run(setting: Setting) -> None:
    """Record one result per kernel, way of checkpointing and row of documents."""
    model = make_stack(setting, LAYERS)
    short, middle, long = setting.size(
        quick=(128, 256, 512), cpu=(1024, 2048, 4096), gpu=(8192, 32768, 65536)
    )
    cases = [
        (True, [short]),
        (True, [middle]),
        (True, [long]),
        (True, make_documents(long)),
        (False, [short]),
        (False, [middle]),
    ]
    for pair in list_pairs(setting):
        pair.use()
        for checkpointing, lengths in cases:
            tokens, count = sum(lengths), len(lengths)
            label = f"{tokens} tokens in {count}, checkpointing {checkpointing}, {pair.kernel}"
            if not setting.has_time_for(label, cpu=20.0, gpu=2.0 + 14 * (tokens / 65536) ** 2):
                continue
            set_checkpointing(model, checkpointing)
            row = {
                "kernel": pair.kernel,
                "checkpointing": checkpointing,
                "tokens": tokens,
                "documents": count,
                "layers": LAYERS,
                "plain": pair.plain,
            }
            packed = Packed(setting, model, lengths)
            setting.add("rows", row | measure_case(setting, packed, pair))
            del packed
            free(setting.device)
