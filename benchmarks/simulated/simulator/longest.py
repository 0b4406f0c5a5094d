"""`find_longest_documents`: the longest document that all ranks hold together and its step, for
several ways to save memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from hf_distca.errors import ConfigError
from simulator.memory import TERMS
from simulator.predict import Prediction, find_best, predict_step
from simulator.setting import MOST_TOKENS, Setting
from simulator.strategies import OURS, find_strategy

_DEALT = tuple(name for name in OURS if name.startswith("dealt"))
_CHECKPOINTING = {"checkpointing": "full", "offload": False, "loss_tokens": None, "fused": False}
# The options of each way, on top of the way before it.
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
        way: key of the way in `WAYS`.
        tokens: tokens of the document, equally many on each rank; 0 if none fits.
        step: step of the document; None if none fits.
        limit: memory that a longer document would exceed, ``"device"`` or ``"host"``.
    """

    way: str
    tokens: int
    step: Prediction | None
    limit: str


def find_longest_documents(setting: Setting) -> list[LongestDocument]:
    """Find the longest document of each way to save memory, to within 1024 tokens a rank. The step
    is the faster of hf-distca's ways to deal that fit.

    Every micro-batch is one document, dealt to all ranks.

    Raises:
        ConfigError: if not even 1024 tokens a rank fit.
    """
    longest = [_find_longest(replace(setting, **changes), way) for way, changes in WAYS.items()]
    if all(document.step is None for document in longest):
        least = _step(replace(setting, tokens_per_rank=_UNIT, **WAYS["+ fused layers"]))
        largest = max(TERMS, key=lambda term: float(getattr(least.memory, term)))
        raise ConfigError(
            f"{setting.model.name} on {setting.ranks} {setting.hardware.name} with"
            f" {setting.hardware.memory_bytes / 1e9:.0f} GB each: a document of {_UNIT} tokens a"
            f" rank needs {least.peak_bytes / 1e9:.0f} GB, of which"
            f" {float(getattr(least.memory, largest)) / 1e9:.0f} GB are {largest}. Use more ranks,"
            " --sharding fsdp, or a smaller model."
        )
    return longest


def _find_longest(setting: Setting, way: str) -> LongestDocument:
    # Each token needs at least one layer's input on the device, or on the host.
    hardware = setting.hardware
    least_bytes = setting.model.hidden / setting.tensor * hardware.element_bytes
    most_tokens = int(max(hardware.memory_bytes, hardware.host_bytes) / least_bytes)

    def step(units: int) -> Prediction:
        return _step(replace(setting, tokens_per_rank=units * _UNIT))

    most = min(most_tokens, MOST_TOKENS - _UNIT) // _UNIT
    end = 1  # doubling, because steps far longer than what fits take long to predict
    while end < most and step(end).fits:
        end = min(2 * end, most)
    units = bisect_left(range(1, end + 1), True, end // 2, key=lambda units: not step(units).fits)
    return LongestDocument(
        way=way,
        tokens=units * _UNIT * setting.group,
        step=step(units) if units else None,
        limit="host" if step(units + 1).peak_bytes <= hardware.memory_bytes else "device",
    )


def _step(setting: Setting) -> Prediction:
    """Predict the step of a document that fills all ranks: the fastest step that fits, otherwise
    the one with the least memory.
    """
    batches = [np.array([setting.tokens])] * setting.micro_batches
    steps = [
        step
        for name in _DEALT
        if (step := predict_step(setting, batches, find_strategy(name))) is not None
    ]
    return find_best(steps, _DEALT) or min(steps, key=lambda step: step.peak_bytes)
