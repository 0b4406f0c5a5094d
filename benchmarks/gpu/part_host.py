"""Host seconds and Python calls of a layer: steps so small that the GPU waits for the host, beside plain varlen attention."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from typing import Any

import torch

from gpu_models import Packed, Pair, documents_of, pairs, stack, step_seconds
from gpu_setting import Setting, synchronize

LAYERS = 4


def profiled(setting: Setting, packed: Packed, name: str, steps: int) -> dict[str, Any]:
    """Python calls of a step, functions and built-ins, and the functions that take longest; backward in the same thread."""
    packed.use(name)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            packed.step(name)
        synchronize(setting.device)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(steps):
            packed.step(name)
        profile.disable()
        synchronize(setting.device)
    printed = io.StringIO()
    found = pstats.Stats(profile, stream=printed)
    found.sort_stats("tottime").print_stats(40)
    return {"calls_a_step": found.total_calls / steps, "longest": printed.getvalue().splitlines()}  # type: ignore[attr-defined]


def one_length(setting: Setting, packed: Packed, pair: Pair) -> dict[str, Any]:
    names = ["distca", pair.plain]
    seconds = step_seconds(setting, packed, names, setting.size(quick=2, cpu=10, gpu=30))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    more = [(a - b) / LAYERS for a, b in zip(seconds["distca"], seconds[pair.plain], strict=True)]
    return {"seconds": medians, "more_seconds_a_layer": statistics.median(more)}


def run(setting: Setting) -> None:
    """Put one row a kernel and a number of tokens, and a profile of each attention."""
    model = stack(setting, LAYERS, small=True).to(setting.dtype)
    rows: list[dict[str, Any]] = []
    for pair in pairs(setting):
        pair.use()
        for tokens in setting.size(quick=(128,), cpu=(512, 2048), gpu=(512, 2048, 8192)):
            if setting.time_for(f"{tokens} tokens, {pair.kernel}", setting.size(quick=0.0, cpu=10.0, gpu=3.0)):
                packed = Packed(setting, model, documents_of(tokens))
                row = {"kernel": pair.kernel, "tokens": tokens, "layers": LAYERS, "plain": pair.plain}
                rows.append({**row, **one_length(setting, packed, pair)})
                setting.put(rows=rows)
    pair = pairs(setting)[-1]
    pair.use()
    packed = Packed(setting, model, documents_of(setting.size(quick=128, cpu=2048, gpu=2048)))
    steps = setting.size(quick=2, cpu=10, gpu=20)
    setting.put(profiles={name: profiled(setting, packed, name, steps) for name in ("distca", pair.plain)})
