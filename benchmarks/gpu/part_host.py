"""Host seconds and Python calls per layer, compared with plain varlen attention: steps so small
that the GPU waits for the host.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from typing import Any

import torch
from transformers import LlamaModel

from gpu_models import Packed, Pair, list_pairs, make_documents, make_stack, time_steps
from gpu_setting import Setting, synchronize
from processes import compute_medians

# Two depths separate the cost of one more layer from the cost of a micro-batch, such as its plan.
FEW, MANY = 2, 10


def profile_steps(setting: Setting, packed: Packed, name: str, steps: int) -> dict[str, Any]:
    """Count the Python calls of a step (functions and built-ins) and find the slowest functions;
    backward runs in the same thread.
    """
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


def measure_added_seconds(
    setting: Setting, packed: Packed, pair: Pair
) -> tuple[dict[str, float], float]:
    """Return the median seconds of steps, and the median that distca adds to plain attention."""
    names = ["distca", pair.plain]
    seconds = time_steps(setting, packed, names, setting.size(quick=2, cpu=10, gpu=30))
    more = statistics.median(
        a - b for a, b in zip(seconds["distca"], seconds[pair.plain], strict=True)
    )
    return compute_medians(seconds), more


def measure_length(
    setting: Setting, models: dict[int, LlamaModel], pair: Pair, tokens: int
) -> dict[str, Any]:
    """Measure what distca adds in the first layer, and in a layer that moves nothing."""
    found = {
        n: measure_added_seconds(setting, Packed(setting, model, make_documents(tokens)), pair)
        for n, model in models.items()
    }
    layer = (found[MANY][1] - found[FEW][1]) / (MANY - FEW)
    return {
        "kernel": pair.kernel,
        "tokens": tokens,
        "layers": MANY,
        "plain": pair.plain,
        "seconds": found[MANY][0],
        "more_seconds_a_layer": layer,
        "more_seconds_first_layer": found[FEW][1] - (FEW - 1) * layer,
    }


def run(setting: Setting) -> None:
    """Record one row per kernel and number of tokens, and a profile of each attention."""
    models = {
        layers: make_stack(setting, layers, small=True).to(setting.dtype) for layers in (FEW, MANY)
    }
    for pair in list_pairs(setting)[::-1]:
        pair.use()
        for tokens in setting.size(quick=(128,), cpu=(512, 2048), gpu=(512, 2048, 8192)):
            if setting.has_time_for(f"{tokens} tokens, {pair.kernel}", cpu=10.0, gpu=4.0):
                setting.add("rows", measure_length(setting, models, pair, tokens))
    pair = list_pairs(setting)[-1]
    pair.use()
    steps, profiles = setting.size(quick=2, cpu=10, gpu=20), {}
    for name in ("distca", pair.plain):
        counts = []
        for layers in (FEW, MANY):
            packed = Packed(
                setting, models[layers], make_documents(setting.size(quick=128, cpu=2048, gpu=2048))
            )
            found = profile_steps(setting, packed, name, steps)
            counts.append(found["calls_a_step"])
        profiles[name] = {**found, "calls_a_layer": (counts[1] - counts[0]) / (MANY - FEW)}
        setting.put(profiles=profiles)
