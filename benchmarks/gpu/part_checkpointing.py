"""Activation checkpointing on one GPU: distca keeps the outputs of attention, plain varlen
attention computes it twice.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from gpu_models import Packed, Pair, documents_of, median_ratio, pairs, stack, step_seconds
from gpu_setting import Setting, free

LAYERS = 3


def set_checkpointing(model: torch.nn.Module, enabled: bool) -> None:
    """Switch it on or off; newer versions of transformers have the first names, older ones the
    second.
    """
    if enabled:
        (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )({"use_reentrant": False})
    else:
        (
            getattr(model, "activation_checkpointing_disable", None)
            or model.gradient_checkpointing_disable
        )()


def one_case(setting: Setting, packed: Packed, pair: Pair) -> dict[str, Any]:
    """Seconds and peak bytes of steps of distca and of plain attention by the same kernel."""
    names = ["distca", pair.plain]
    seconds = step_seconds(setting, packed, names, setting.size(quick=1, cpu=3, gpu=4))
    row: dict[str, Any] = {
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()}
    }
    row["times_faster"] = 1 / median_ratio(seconds, *names)
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
    rows: list[dict[str, Any]] = []
    for pair in pairs(setting):
        pair.use()
        for checkpointing, lengths in cases:
            guess = setting.size(quick=0.0, cpu=20.0, gpu=2.0 + 14 * (sum(lengths) / 65536) ** 2)
            label = (
                f"{sum(lengths)} tokens in {len(lengths)}, checkpointing {checkpointing},"
                f" {pair.kernel}"
            )
            if not setting.time_for(label, guess):
                continue
            set_checkpointing(model, checkpointing)
            packed = Packed(setting, model, lengths)
            row = {
                "kernel": pair.kernel,
                "checkpointing": checkpointing,
                "tokens": sum(lengths),
                "documents": len(lengths),
            }
            rows.append(
                {**row, "layers": LAYERS, "plain": pair.plain, **one_case(setting, packed, pair)}
            )
            setting.put(rows=rows)
            del packed
            free(setting.device)
