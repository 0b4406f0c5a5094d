"""What `max_transient_bytes` bounds, over NCCL: bytes of a call of core attention beyond what it
keeps, forward and backward, without a bound and with several.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

import call_memory
from gpu_ranks import Ranks
from gpu_setting import Setting

RANKS = 2


def work(rank: int, ranks: int, setting: Setting, keep: Any) -> None:
    arguments = argparse.Namespace(
        device=str(setting.device),
        heads=setting.size(quick=4, cpu=4, gpu=32),
        tokens=setting.size(quick=4096, cpu=8192, gpu=32768),
        bounds=setting.size(quick=(4,), cpu=(4, 16), gpu=(16, 64, 256)),
        rounds=0,
    )
    modes = call_memory.measure(rank, ranks, arguments)
    keep(tokens=arguments.tokens, heads=arguments.heads, width=call_memory.DIM, modes=modes)
    dist.barrier()


def prepare(setting: Setting) -> Ranks:
    """Start the ranks, which import what they need meanwhile."""
    return Ranks(setting, work, RANKS)


def run(setting: Setting, ranks: Ranks) -> None:
    """Put bytes of every rank, by mode."""
    setting.put(**ranks.run(setting.left()))
