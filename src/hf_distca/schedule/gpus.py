"""Factors for the built-in costs (`schedule.cost`), one for each GPU and kernel.

One factor is enough: separate rates for tasks, bytes and flops, fitted to timings of forward and of
backward, give no better plans (`benchmarks/schedule/one_factor.py` compares them).
"""

from __future__ import annotations

import re
from dataclasses import replace

from hf_distca.schedule.cost import AttentionShape, CostModel

# Each factor comes from the profile of its GPU and kernel in
# benchmarks/simulated/simulator/profiles.py. Profiles are fitted to published timings and to our
# own (benchmarks/results/h100_2026-11-26).
_FACTORS = {
    ("A100", "flash_attn"): 1.50,
    ("H100", "flash_attn"): 0.92,
    ("H100", "flash_attn_3"): 0.48,
    ("H100", "flash_attn_4"): 0.47,
    ("B200", "flash_attn_4"): 0.24,
}
# Bytes per second that a rank sends to other nodes and inside its node, from the profiles in
# benchmarks/simulated.
_LINKS = {"A100": (1.8e10, 2.1e11), "H100": (3.7e10, 3.0e11), "B200": (3.7e10, 6.4e11)}
# GPUs that have the same multiprocessors as a GPU of the tables.
_SAME_GPU = {"H200": "H100", "GH200": "H100", "GB200": "B200"}
_SAME_KERNEL = {"cuda": "flash_attn", "kernels-community/flash-attn3": "flash_attn_3"}


def find_factor(device: str, kernel: str) -> tuple[str, float] | None:
    """Find the table's GPU for a device, and the factor of this GPU for a kernel.

    The device is named as in torch, and the kernel as in `DistCAConfig`. The result is None if the
    table has no factor for them. Cards with fewer multiprocessors than the timed cards, such as
    PCIe cards of Hopper, have no factor.
    """
    words = re.split(r"[\s-]+", device)
    gpus = {_SAME_GPU.get(word, word) for word in words} & _LINKS.keys()
    if not gpus or {"PCIe", "NVL"} & set(words):
        return None
    gpu = gpus.pop()
    factor = _FACTORS.get((gpu, _SAME_KERNEL.get(kernel, kernel)))
    return None if factor is None else (gpu, factor)


def make_gpu_cost(shape: AttentionShape, device: str, kernel: str, *, tile: int = 128) -> CostModel:
    """Make the cost model of a GPU and a kernel, before anything is measured.

    It has the built-in figures times the factor of the GPU and the kernel, and the links of the
    GPU. If the table has no factor, the built-in figures stay unchanged.
    """
    cost = CostModel.make_analytic(shape, device_type=device, tile=tile)
    row = find_factor(device, kernel)
    if row is None:
        return cost
    gpu, factor = row
    between, inside = _LINKS[gpu]
    return replace(
        cost.scale(factor),
        exchange_bytes_per_second=between,
        node_bytes_per_second=inside,
        name=f"analytic {gpu}, {kernel}",
    )
