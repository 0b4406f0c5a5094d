"""A rank that raises in a kernel, runs out of memory or is killed, while the other one waits:
seconds until the other rank raises.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import hf_distca
from gpu_models import Packed, make_stack
from gpu_ranks import Ranks
from gpu_setting import Setting, synchronize
from hf_distca.runtime.call import AttentionServer
from hf_distca.schedule.cost import AttentionShape, CostModel
from part_ranks import choose_lengths

FAULTS = ("raises", "out of memory", "killed")
FAILS_AT, LAYERS = 2, 2


def fail(setting: Setting, fault: str) -> None:
    """Make the next kernel call on this rank fail."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

    def run(*_: Any, **__: Any) -> None:
        if fault == "raises":
            raise RuntimeError("planted: the kernel raised")
        torch.empty(2**50, dtype=torch.uint8, device=setting.device)

    AttentionServer.run = run  # type: ignore[method-assign, assignment]


class Faulty:
    """Work in which rank 1 fails; rank 0 records the error that it raised, and when."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, rank: int, ranks: int, setting: Setting, keep: Any) -> None:
        model = make_stack(setting, LAYERS, small=True).to(torch.bfloat16)
        heads = model.config.num_attention_heads, model.config.num_key_value_heads
        cost = CostModel.make_of_pairs(
            AttentionShape(*heads, model.config.head_dim, model.config.head_dim, 2)
        )
        hf_distca.configure(hf_distca.DistCAConfig(cost_model=cost, tile=32, timeout_seconds=30.0))
        packed = Packed(
            setting, model, choose_lengths(rank, setting.size(quick=256, cpu=512, gpu=2048))
        )
        packed.use("distca")
        began = time.monotonic()
        try:
            for step in range(FAILS_AT + 4):
                if step == FAILS_AT:
                    synchronize(setting.device)
                    began = time.monotonic()
                    if rank == 1:
                        fail(setting, self.fault)
                packed.step("distca")
                model.zero_grad(set_to_none=True)
                synchronize(setting.device)
        except Exception as error:
            keep(
                raised=type(error).__name__, said=str(error)[:500], seconds=time.monotonic() - began
            )
            os._exit(0)  # the process group can no longer be destroyed cleanly


def prepare(setting: Setting) -> dict[str, Ranks]:
    """Start the ranks of the first fault, so that they import in the meantime."""
    return {FAULTS[0]: Ranks(setting, Faulty(FAULTS[0]), 2)}


def run(setting: Setting, started: dict[str, Ranks]) -> None:
    """Record the error of the waiting rank, and the seconds until it was raised, by fault."""
    found: dict[str, Any] = {}
    for fault in FAULTS:
        if not setting.has_time_for(fault, cpu=15.0, gpu=20.0):
            continue
        ranks = started.get(fault) or Ranks(setting, Faulty(fault), 2)
        found[fault] = {
            key: value for key, value in ranks.run(setting.left()).items() if key != "failed"
        }
        setting.put(faults=found)
