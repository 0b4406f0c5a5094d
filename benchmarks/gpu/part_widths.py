"""Rates of gpt-oss's and Gemma 3's heads: whole documents, and slices of every length, forward and
backward.
"""

from __future__ import annotations

import itertools

from gpu_setting import Setting
from gpu_workloads import variants
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4
from hf_distca.schedule.cost import AttentionShape
from part_kernels import curve, whole

# Query heads, key heads and widths of their config.json on the Hub.
SHAPES = {
    "gpt-oss": AttentionShape(64, 8, 64, 64, 2),
    "Gemma 3 4B": AttentionShape(8, 4, 256, 256, 2),
}


def run(setting: Setting) -> None:
    """Put rates of whole documents of all kernels first, then curves."""
    shapes = SHAPES if setting.device.type == "cuda" else dict(list(SHAPES.items())[:1])
    cases = list(itertools.product(variants(setting, (FLASH_ATTN_4, CUDA)), shapes.items()))
    for variant, (label, shape) in cases:
        whole(setting, variant, label, shape)
    for variant, (label, shape) in cases:
        setting.add("curves", curve(setting, variant, label, shape))
