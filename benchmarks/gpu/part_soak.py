"""FSDP2's prefetch beside ping-pong over NCCL: several communicators with messages under way, for
hundreds of steps.

NCCL asks that the operations of one device be launched in one order on all ranks. Attention's come
from its own communicators, FSDP2's all-gathers and reductions from its own, on streams of their
own: a deadlock between them would show here as a step that does not end. Every step has other
documents. Every twentieth is repeated with balancing off: both have the same loss.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hf_distca
from gpu_models import Packed, stack
from gpu_ranks import Ranks
from gpu_setting import Setting, synchronize
from hf_distca.schedule.cost import AttentionShape, CostModel
from part_ranks import TIMEOUT

LAYERS, RANKS, EVERY = 4, 2, 20
BOUND = 2e-2  # of the output's norm, in bfloat16


def lengths_of(rank: int, step: int, tokens: int) -> list[int]:
    """Documents of this rank: long ones here and short ones there, other ones in each step."""
    draw = random.Random(1000 * step + rank)
    if (rank + step) % 2 == 0:
        cut = draw.randrange(tokens // 16, tokens // 4)
        return [tokens - cut, cut]
    short = draw.randrange(tokens // 24, tokens // 12)
    return [short] * (tokens // short) + [tokens % short] * (tokens % short > 0)


def work(rank: int, ranks: int, setting: Setting, keep: Any) -> None:
    model = stack(setting, LAYERS, small=True)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    cost = CostModel.make_of_pairs(
        AttentionShape(*heads, model.config.head_dim, model.config.head_dim, 2)
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    settings = {
        "cost_model": cost,
        "tile": 32,
        "min_gain": 0.0,
        "timeout_seconds": TIMEOUT,
        "ping_pong": True,
    }
    hf_distca.configure(hf_distca.DistCAConfig(**settings))
    tokens, steps = (
        setting.size(quick=256, cpu=512, gpu=4096),
        setting.size(quick=3, cpu=20, gpu=200),
    )
    off, done, began = 0.0, 0, time.monotonic()
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        packed = Packed(setting, model, lengths_of(rank, step, tokens))
        packed.use("distca")
        out = packed.step("distca")
        if step % EVERY == 0:
            with hf_distca.balancing(False):
                alone = packed.forward("distca").detach()
            off = max(off, float((out - alone).float().norm() / alone.float().norm()))
            keep(
                steps=step,
                wanted=steps,
                off=off,
                passed=off <= BOUND,
                seconds=time.monotonic() - began,
            )
        model.zero_grad(set_to_none=True)
        done = step + 1
        left = torch.tensor([setting.left()], device=setting.device) if step % EVERY == 0 else None
        if left is not None:
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
            if float(left) < 5.0:
                break
    synchronize(setting.device)
    figures = hf_distca.metrics().figures()
    keep(
        steps=done,
        wanted=steps,
        off=off,
        passed=off <= BOUND,
        seconds=time.monotonic() - began,
        figures=figures,
    )
    dist.barrier()


def prepare(setting: Setting) -> Ranks:
    """Start the ranks, which import what they need meanwhile."""
    return Ranks(setting, work, RANKS)


def run(setting: Setting, ranks: Ranks) -> None:
    """Put steps, seconds, and how far outputs are from those without balancing."""
    setting.put(**ranks.run(setting.left()), bound=BOUND)
