"""What no way to run a step can be faster than: equal parts of all work on all devices, and no
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_distca.schedule.layout import IntArray
from hf_distca.simulate.predict import linear_seconds
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import head_seconds


def ideal_seconds(setting: Setting, batches: Sequence[IntArray]) -> float:
    """Return the seconds of a step in which every rank has an equal part of all work, and never
    waits.
    """
    parts = setting.group * setting.stages
    total = 0.0
    for lengths in batches:
        tokens = np.full(1, float(lengths.sum()) / setting.group)
        total += (
            float(linear_seconds(setting, tokens).sum() + head_seconds(setting, tokens)[0])
            / setting.stages
        )
        total += (
            sum(
                layers * float(setting.cost(w).estimate_seconds(lengths, lengths).sum())
                for w, layers in setting.model.kinds
            )
            / parts
        )
    return total
