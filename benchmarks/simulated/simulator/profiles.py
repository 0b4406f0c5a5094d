"""Rates of GPUs, their attention kernels and links, fitted to timings (heads of 128, bfloat16).

The simulator predicts seconds with these rates. The library plans with one factor per GPU and
kernel (`hf_distca.schedule.gpus`).

Forward and backward are fitted separately to whole sequences of 1K to 32K tokens and packed rows of
1K, 4K and 16K; on an H100 also to our own whole documents of 2K to 64K tokens and batches of slices
of at least 128 rows. A profile has the rates with the least squared errors among all rates that are
within 9.95 % of every fitted timing; README.md lists the errors. For the A100, only the sum of
forward and backward is published: its rates are those of the H100 with scaled bytes and flops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import FloatArray

ELEMENT_BYTES = 2
EXCHANGE_SECONDS = 3e-5
# An all-to-all of 8 MiB over 64 H800 takes 338 us (NVIDIA/nccl issue 1531), of which 30 us and the
# bytes explain 228.
PEER_SECONDS = 1.7400120120120112e-06


@dataclass(frozen=True, slots=True)
class FittedCost(KernelCost):
    """The cost of a kernel and of its calls. Calls cost about the same on all ranks, so plans leave
    them out.

    Attributes:
        call_seconds: seconds of a call besides its tasks.
        least_seconds: least seconds of a call, for its launch.
    """

    call_seconds: float = 0.0
    least_seconds: float = 0.0


def add_call_overhead(
    cost: KernelCost, seconds: npt.ArrayLike, calls: npt.ArrayLike = 1
) -> FloatArray:
    """Return the seconds of `calls` calls whose tasks take `seconds`; no call without tasks."""
    tasks = np.asarray(seconds, dtype=np.float64)
    if not isinstance(cost, FittedCost):
        return tasks
    whole = np.maximum(
        tasks + cost.call_seconds * np.asarray(calls), cost.least_seconds * np.asarray(calls)
    )
    return np.where(tasks > 0, whole, 0.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of a kernel on a kind of GPU, for any number of heads, and of its links.

    Attributes:
        forward, backward: costs of the kernel.
        node_rate, link_rate: bytes per second that one rank sends while it receives as many, inside
            a node and between nodes.
    """

    forward: FittedCost
    backward: FittedCost
    node_rate: float
    link_rate: float

    def make_cost_model(self, shape: AttentionShape) -> CostModel:
        """Make the cost model of layers without a window."""
        return CostModel(
            *(shape, self.forward, self.backward, self.link_rate, EXCHANGE_SECONDS),
            node_bytes_per_second=self.node_rate,
            peer_seconds=PEER_SECONDS,
        )


# Sources of kernels: MagiAttention (commit 2c641357, kernel level), read off the charts to +-3 %.
# For the A100: Dao-AILab/flash-attention (commit 0251105a, assets; hidden size 2048, 16K tokens in
# all). For the H100 with flash_attn_2 and 4: also our own timings (one H100 80GB HBM3, 2026-11-26,
# torch 2.11, flash-attn-4 4.0.0b36). For flash_attn_4, llama3.1_20260928_130009.csv of
# NVIDIA/cudnn-frontend (an H200) replaces the charts.
# Sources of links: NVIDIA GTC25 S72583 (in stas00/ml-engineering, network), bus rates of an
# all-to-all of 8 GPUs: 320 GB/s on H100, 210 on A100, 640 on B200. Between nodes: nccl-tests issue
# 130, 48 GB/s on 4 nodes of H100, and 24 GB/s on 32 A100, of which 3/4 leaves a node; for B200,
# P6-B200 over EFA in ml-engineering.
# By GPU and kernel: task seconds, bytes and flops per second, how often the bytes of rows count,
# call seconds, least seconds.
PROFILES = {
    "a100_flash_attn_2": Profile(
        FittedCost(0.0, 2.039e12, 204203994990661.7, 1.0, 8.867e-06, 8.7993e-05),
        FittedCost(0.0, 2.039e12, 187167101251345.25, 1.75, 4.8421e-05, 0.000202748),
        *(2.1e11, 1.8e10),
    ),
    "h100_flash_attn_2": Profile(
        FittedCost(0.0, 3.35e12, 340949833577129.75, 1.0, 8.867e-06, 8.7993e-05),
        FittedCost(0.0, 2252179617196.316, 312504131105163.8, 1.75, 4.8421e-05, 0.000202748),
        *(3e11, 3.7e10),
    ),
    "h100_flash_attn_3": Profile(
        FittedCost(0.0, 2337568842181.571, 726869748841909.8, least_seconds=6.2812e-05),
        FittedCost(0.0, 1695556656155.1262, 625144558158511.0, 1.0, 2.5496e-05, 0.000183596),
        *(3e11, 3.7e10),
    ),
    "h100_flash_attn_4": Profile(
        FittedCost(0.0, 2194423339774.0264, 682422683503441.8),
        FittedCost(0.0, 2388751303440.774, 638804485464963.6),
        *(3e11, 3.7e10),
    ),
    "b200_flash_attn_4": Profile(
        FittedCost(0.0, 4063921251733.8774, 1474257701495290.8, least_seconds=0.00018312),
        FittedCost(0.0, 8e12, 1167668551417570.5, call_seconds=0.000494354),
        *(6.4e11, 3.7e10),
    ),
}


def find_profile(name: str) -> Profile:
    """Find a profile by name.

    Raises:
        ConfigError: if no profile has this name.
    """
    if name not in PROFILES:
        raise ConfigError(f"profile {name!r} is not one of {', '.join(PROFILES)}.")
    return PROFILES[name]
