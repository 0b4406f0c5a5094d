"""World of one: a stack of Llama layers under distca and under plain varlen attention. Step ratio,
host time, syncs.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

from gpu_models import (
    PLAIN,
    PLAIN_4,
    Packed,
    Pair,
    documents_of,
    median_ratio,
    pairs,
    plain_flash_attention_4,
    plain_varlen,
    stack,
    step_seconds,
    timed,
)
from gpu_setting import Setting, free, synchronize
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.integration.hooks.mask import distca_mask

LAYERS = 2
SYNCS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "Memcpy DtoH",
)


def implementations(setting: Setting, tokens: int) -> list[str]:
    """Attention functions beside distca and its plain pair."""
    names = []
    if setting.device.type == "cuda" and is_flash_attn_2_available():
        names.append("flash_attention_2")
    # A dense mask of all tokens: 128 MiB at 8K, 32 GiB at 128K.
    return [*names, "sdpa"] if tokens <= 8192 else names


def host_seconds(
    setting: Setting, packed: Packed, plain: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Host seconds of a call of the attention function: in the first layer, which plans, and in the
    others.
    """
    found = {}
    functions = {PLAIN: plain_varlen, PLAIN_4: plain_flash_attention_4}
    for name, function, mask in (
        ("distca", distca_attention, distca_mask),
        (plain, functions[plain], lambda **_: None),
    ):
        taken: list[float] = []
        AttentionInterface.register(f"{name}_timed", timed(function, time.perf_counter, taken))
        AttentionMaskInterface.register(f"{name}_timed", mask)
        packed.use(f"{name}_timed")
        for _ in range(rounds + 1):
            synchronize(setting.device)
            packed.step(f"{name}_timed")
            packed.model.zero_grad(set_to_none=True)
        taken = taken[LAYERS:]
        first, others = taken[::LAYERS], [t for i, t in enumerate(taken) if i % LAYERS]
        found[name] = {
            "first_layer": statistics.median(first),
            "other_layers": statistics.median(others),
        }
    return found


def syncs(setting: Setting, packed: Packed, name: str) -> dict[str, Any]:
    """What makes the host wait in one step, counted by the profiler; and what torch warns of as a
    wait.
    """
    packed.use(name)
    packed.step(name)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device.type == "cuda")
    with profile(activities=activities) as recorded:
        packed.step(name)
    counts = Counter()
    for event in recorded.key_averages():
        for sync in SYNCS:
            if event.key.startswith(sync):
                counts[sync] += event.count
    warned: list[str] = []
    if setting.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                packed.step(name)
            warned = [
                f"{warning.filename}:{warning.lineno} {warning.message}" for warning in caught
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    packed.model.zero_grad(set_to_none=True)
    return {"profiler": dict(counts), "sync_debug_mode": warned[:10], "warned": len(warned)}


def compared(packed: Packed, plain: str) -> float:
    """Norm of the difference of the outputs over their norm: that both compute the same."""
    outs = []
    for name in ("distca", plain):
        packed.use(name)
        with torch.no_grad():
            outs.append(packed.forward(name).float())
    return float((outs[0] - outs[1]).norm() / outs[1].norm())


def one_length(setting: Setting, packed: Packed, pair: Pair, tokens: int) -> dict[str, Any]:
    """Steps, host seconds and waits of distca with one kernel and of plain attention by the same
    kernel.
    """
    names = ["distca", pair.plain, *implementations(setting, tokens)]
    row: dict[str, Any] = {
        "tokens": tokens,
        "documents": packed.lengths,
        "layers": LAYERS,
        "kernel": pair.kernel,
    }
    row |= {"plain": pair.plain, "difference": compared(packed, pair.plain)}
    seconds = step_seconds(
        setting, packed, names, setting.size(quick=1, cpu=5, gpu=12 if tokens < 100_000 else 5)
    )
    row["seconds"] = {name: statistics.median(taken) for name, taken in seconds.items()}
    row["ratio"] = median_ratio(seconds, "distca", pair.plain)
    row["ratios"] = [a / b for a, b in zip(seconds["distca"], seconds[pair.plain], strict=True)]
    row["host_seconds"] = host_seconds(
        setting, packed, pair.plain, setting.size(quick=1, cpu=3, gpu=5)
    )
    row["syncs"] = {name: syncs(setting, packed, name) for name in ("distca", pair.plain)}
    return row


def run(setting: Setting) -> None:
    """Put one row a number of tokens and kernel."""
    model = stack(setting, LAYERS)
    rows: list[dict[str, Any]] = []
    for tokens in setting.size(quick=(512,), cpu=(2048, 8192), gpu=(8192, 32768, 131072)):
        for pair in pairs(setting):
            # Of 128K tokens, 16 steps of a second; of 8K, 60 of 45 ms.
            guess = setting.size(quick=0.0, cpu=60.0, gpu=3.0 + 15 * tokens / 131072)
            if not setting.time_for(f"{tokens} tokens, {pair.kernel}, about {guess:.0f} s", guess):
                continue
            pair.use()
            packed = Packed(setting, model, documents_of(tokens))
            rows.append(one_length(setting, packed, pair, tokens))
            setting.put(rows=rows)
            del packed
            free(setting.device)
