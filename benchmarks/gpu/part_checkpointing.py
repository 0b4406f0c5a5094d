"""Activation checkpointing on one GPU: distca keeps the outputs of attention, plain varlen
attention computes it twice.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_models import Packed, Pair, documents_of, pairs, stack, step_seconds
from gpu_setting import Setting, free
from processes import median_ratio, medians

LAYERS = 3


def set_checkpointing(model: torch.nn.Module, enabled: bool) -> None:
    """Switch it on or off, by the name of this version of transformers."""
    verb = "enable" if enabled else "disable"
    switch = getattr(model, f"activation_checkpointing_{verb}", None)
    switch = switch or getattr(model, f"gradient_checkpointing_{verb}")
    switch(*[{"use_reentrant": False}] * enabled)


def one_case(setting: Setting, packed: Packed, pair: Pair) -> dict[str, Any]:
    """Seconds and peak bytes of steps of distca and of plain attention by the same kernel."""
    names = ["distca", pair.plain]
    seconds = step_seconds(setting, packed, names, setting.size(quick=1, cpu=3, gpu=4))
    row: dict[str, Any] = {"seconds": medians(seconds)}
    row["times_faster"] = 1 / median_ratio(*seconds.values())
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
    """Put one row a kernel, a way of checkpointing and a row of documents."""
    model = stack(setting, LAYERS)
    short, middle, long = setting.size(
        quick=(128, 256, 512), cpu=(1024, 2048, 4096), gpu=(8192, 32768, 65536)
    )
    cases = [
        (True, [short]),
        (True, [middle]),
        (True, [long]),
        (True, documents_of(long)),
        (False, [short]),
        (False, [middle]),
    ]
    for pair in pairs(setting):
        pair.use()
        for checkpointing, lengths in cases:
            tokens, count = sum(lengths), len(lengths)
            label = f"{tokens} tokens in {count}, checkpointing {checkpointing}, {pair.kernel}"
            if not setting.time_for(label, cpu=20.0, gpu=2.0 + 14 * (tokens / 65536) ** 2):
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
            setting.add("rows", row | one_case(setting, packed, pair))
            del packed
            free(setting.device)
