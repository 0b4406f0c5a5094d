"""Rates of the heads of gpt-oss and Gemma 3: whole documents, and slices of every length, forward
and backward.
"""

from __future__ import annotations

import itertools

from gpu_setting import Setting
from gpu_workloads import iterate_variants
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4
from hf_distca.schedule.cost import AttentionShape
from part_kernels import measure_curve, measure_whole

# Query heads, key heads and widths from the config.json files on the Hub.
SHAPES = {
    "gpt-oss": AttentionShape(64, 8, 64, 64, 2),
    "Gemma 3 4B": AttentionShape(8, 4, 256, 256, 2),
}


def run(setting: Setting) -> None:
    """Record rates of whole documents with all kernels, then curves."""
    shapes = SHAPES if setting.device.type == "cuda" else dict(list(SHAPES.items())[:1])
    cases = list(itertools.product(iterate_variants(setting, (FLASH_ATTN_4, CUDA)), shapes.items()))
    for variant, (label, shape) in cases:
        measure_whole(setting, variant, label, shape)
    for variant, (label, shape) in cases:
        setting.add("curves", measure_curve(setting, variant, label, shape))
