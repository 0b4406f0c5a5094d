"""`longest_documents`: the longest document that ranks hold together, and its step, under ways to
save memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from hf_distca.errors import ConfigError
from hf_distca.simulate.memory import TERMS
from hf_distca.simulate.predict import Prediction, best_of, predict_step
from hf_distca.simulate.setting import MOST_TOKENS, Setting
from hf_distca.simulate.strategies import OURS, find_strategy

DEALT = tuple(name for name in OURS if name.startswith("dealt"))
_CHECKPOINTING = {"checkpointing": "full", "offload": False, "loss_tokens": None, "fused": False}
# What each way sets, beside what the one before it does.
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "checkpointing": _CHECKPOINTING,
        "+ chunked loss": {**_CHECKPOINTING, "loss_tokens": 4096},
        "+ offload": {**_CHECKPOINTING, "loss_tokens": 4096, "offload": True},
        "+ fused layers": {**_CHECKPOINTING, "loss_tokens": 4096, "offload": True, "fused": True},
    }
)
_UNIT = 1024  # tokens a rank


@dataclass(frozen=True, slots=True)
class LongestDocument:
    """The longest document under one way to save memory.

    Attributes:
        way: its name in `WAYS`.
        tokens: number of tokens of the document, equally many on each rank; 0 if none fits.
        step: its step; None if none fits.
        limit: memory that a longer one would exceed, ``"device"`` or ``"host"``.
    """

    way: str
    tokens: int
    step: Prediction | None
    limit: str


def longest_documents(
    setting: Setting, strategies: tuple[str, ...] = DEALT
) -> list[LongestDocument]:
    """Find the longest document of each way, to within 1024 tokens a rank, by the fastest of these
    strategies that fits.

    Every micro-batch is one document, dealt to all ranks.

    Raises:
        ConfigError: if not even 1024 tokens a rank fit.
    """
    longest = [
        _longest(replace(setting, **changes), way, strategies) for way, changes in WAYS.items()
    ]
    if all(document.step is None for document in longest):
        least = _step(replace(setting, tokens_per_rank=_UNIT, **WAYS["+ fused layers"]), strategies)
        needed = (
            f"{least.peak_bytes / 1e9:.0f} GB, of which {_largest(least)}"
            if least
            else "more than one micro-batch can have"
        )
        raise ConfigError(
            f"{setting.model.name} on {setting.ranks} {setting.hardware.name} with"
            f" {setting.hardware.memory_bytes / 1e9:.0f} GB each: a document of {_UNIT} tokens a"
            f" rank needs {needed}. Use more ranks, --sharding fsdp, or a smaller model."
        )
    return longest


def _largest(step: Prediction) -> str:
    """Name the largest term of a step's memory."""
    name = max(TERMS, key=lambda term: float(getattr(step.memory, term)))
    return f"{float(getattr(step.memory, name)) / 1e9:.0f} GB are {name}"


def _longest(setting: Setting, way: str, strategies: tuple[str, ...]) -> LongestDocument:
    # A token has at least one layer's input on the device, or on the host.
    hardware = setting.hardware
    least_bytes = setting.model.hidden / setting.tensor * hardware.element_bytes
    most_tokens = int(max(hardware.memory_bytes, hardware.host_bytes) / least_bytes)

    def step(units: int) -> Prediction | None:
        return _step(replace(setting, tokens_per_rank=units * _UNIT), strategies)

    def is_full(units: int) -> bool:
        prediction = step(units)
        return prediction is None or not prediction.fits

    most = min(most_tokens, MOST_TOKENS - _UNIT) // _UNIT
    units = bisect_left(range(1, most + 1), True, key=is_full)
    beyond = step(units + 1)
    fits_device = beyond is not None and beyond.peak_bytes <= hardware.memory_bytes
    return LongestDocument(
        way=way,
        tokens=units * _UNIT * setting.group,
        step=step(units) if units else None,
        limit="host" if fits_device else "device",
    )


def _step(setting: Setting, strategies: tuple[str, ...]) -> Prediction | None:
    """Predict the step of a document that fills all ranks: the fastest that fits, or else the one
    that needs the least.
    """
    batches = [np.array([setting.tokens])] * setting.micro_batches
    steps = [
        step
        for name in strategies
        if (step := predict_step(setting, batches, find_strategy(name))) is not None
    ]
    return best_of(steps, strategies) or min(steps, key=lambda step: step.peak_bytes, default=None)
