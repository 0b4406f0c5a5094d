"""What no way to run a step can be faster than: equal parts of all work on all devices, and no
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_distca.schedule.layout import IntArray
from simulator.predict import estimate_linear_seconds
from simulator.setting import Setting
from simulator.work import estimate_head_seconds


def ideal_seconds(setting: Setting, batches: Sequence[IntArray]) -> float:
    """Return the seconds of a step in which every rank has an equal part of all work, and never
    waits.
    """
    parts = setting.group * setting.stages
    total = 0.0
    for lengths in batches:
        tokens = np.full(1, float(lengths.sum()) / setting.group)
        total += (
            float(
                estimate_linear_seconds(setting, tokens).sum()
                + estimate_head_seconds(setting, tokens)[0]
            )
            / setting.stages
        )
        total += (
            sum(
                layers * float(setting.make_cost_model(w).estimate_seconds(lengths, lengths).sum())
                for w, layers in setting.model.kinds
            )
            / parts
        )
    return total
