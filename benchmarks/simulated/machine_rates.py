"""Rates of this machine for the simulator, from training steps in which all processes take part.

Rates of a kernel that is timed alone are not those of training. There it runs between other layers,
on tensors that were just made, beside other processes; and messages are packed, put into pools and
summed by the processors that compute. So the parts of whole steps are timed here, those of other
documents than are predicted. Seconds are the processor's, which other programs disturb less than
the clock on the wall.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from scipy.optimize import nnls

import hf_distca
from dealt_step_time import WAYS, Steps
from hf_distca.integration.current_session import current_session
from hf_distca.runtime import meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.plan import Plan
from simulator.disaggregated import compute_plan_work
from simulator.fits import fit_kernel
from simulator.hardware import Hardware, find_hardware
from simulator.model_shape import ModelShape, find_model
from simulator.setting import Setting

Array = npt.NDArray[np.float64]
_ALONE, _BALANCED, _OVER_ALL = (
    "in order, unbalanced",
    "in order, balanced",
    "every document over all ranks",
)
# Bytes per second of memory: all of a linear layer's seconds are counted to its products.
_FREE = 1e30


class Sample(NamedTuple):
    """A step whose parts are timed: layers, way and documents of the global batch."""

    layers: int
    way: str
    lengths: list[int]
    ping_pong: bool = False


class Machine(NamedTuple):
    """What the samples say.

    Attributes:
        hardware: rates.
        beside: seconds of a step beside layers and messages: embedding, output layer, loss, and
            what Python does once.
    """

    hardware: Hardware
    beside: float


def samples(tokens: int, ranks: int) -> list[Sample]:
    """Steps of long to short documents in which nothing moves, and steps in which much does."""

    def equal(count: int) -> list[int]:
        return [tokens // count] * (count - 1) + [tokens - tokens // count * (count - 1)]

    alone = [
        [tokens - tokens // 4, tokens // 4],
        [tokens // 8 * 3] * 2 + [tokens // 4],
        *map(equal, (5, 10, 20, 40)),
    ]
    halves, quarters = [tokens * ranks // 2] * 2, [tokens * ranks // 4] * 4
    return [
        *(
            Sample(3 if place % 2 else 1, _ALONE, lengths * ranks)
            for place, lengths in enumerate(alone)
        ),
        Sample(2, _BALANCED, halves),
        Sample(2, _OVER_ALL, quarters),
        Sample(3, _BALANCED, [tokens - tokens // 4, *equal(10) * (ranks - 1), *[tokens // 8] * 2]),
        Sample(2, "dealt", quarters, ping_pong=True),
    ]


def shape_of(arguments: argparse.Namespace) -> AttentionShape:
    """Attention of the model of `step_time`."""
    return AttentionShape(arguments.heads, max(arguments.heads // 2, 1), 64, 64, 4)


def planned(steps: Steps, way: str, cost: CostModel, config: hf_distca.DistCAConfig) -> list[Plan]:
    """The plans of a step as training makes them: one, or those of both nano-batches."""
    placement, balanced = WAYS[way]
    layouts = steps.dealings[placement].deal_layouts(np.array(steps.lengths))
    config = replace(config, balance=balanced, ping_pong=len(layouts) > 1)
    return [balance(layout, cost, config) for layout in layouts]


class Sampler:
    """Runs the samples on one rank, and makes rates of them."""

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int) -> None:
        self.ranks, self.tokens, self.cost = (
            ranks,
            arguments.tokens,
            CostModel.make_analytic(shape_of(arguments), device_type="cpu"),
        )
        self.samples = samples(arguments.tokens, ranks)
        self.configs = [
            hf_distca.DistCAConfig(ping_pong=one.ping_pong, measured_rates=False)
            for one in self.samples
        ]
        self.steps = [
            Steps(
                argparse.Namespace(**{**vars(arguments), "layers": one.layers, "ranks": ranks}),
                rank,
                one.lengths,
                config,
            )
            for one, config in zip(self.samples, self.configs, strict=True)
        ]
        self._found: list[list[Array]] = []

    def round(self) -> None:
        """Time every sample once: of each rank, seconds of a step, of forward kernels and of
        backward kernels.
        """
        found = []
        for one, config, steps in zip(self.samples, self.configs, self.steps, strict=True):
            current_session().config = config
            parts = torch.zeros(self.ranks, 3, dtype=torch.float64)
            parts[steps.rank] = torch.tensor(_parts(steps, one.way), dtype=torch.float64)
            dist.all_reduce(parts)
            found.append(parts.numpy())
        self._found.append(found)

    def machine(self, model: ModelShape) -> Machine:
        """Rates from the medians of all rounds but the first, which pays for buffers and caches."""
        parts = np.median(np.array(self._found[1:]), axis=0)  # (samples, ranks, 3)
        plans = [planned(steps, one.way, self.cost, config) for one, config, steps in self._each()]
        depths = np.array([one.layers for one in self.samples])
        counts = np.stack(
            [_counts(step, self.cost) * layers for step, layers in zip(plans, depths, strict=True)]
        )
        kernels = [
            fit_kernel(counts[:, way].reshape(-1, 3), parts[:, :, way + 1].ravel())
            for way in (0, 1)
        ]
        rest = parts[:, :, 0] - parts[:, :, 1:].sum(axis=2)
        alone = np.array([one.way == _ALONE for one in self.samples])
        layer, beside = np.polyfit(depths[alone], rest[alone].mean(axis=1), 1)
        latency, per_byte = self._exchange(plans, depths, rest - layer * depths[:, None] - beside)
        flops = 6 * self.tokens * model.layer_parameters / layer
        gbps = 8 / per_byte / 1e9
        sizes = (
            flops,
            _FREE,
            1e12,
            1 / per_byte,
            1 / per_byte,
            gbps,
            1.0,
            latency,
            0.0,
            *kernels,
            4,
        )
        return Machine(Hardware("this machine", *sizes, ()), float(beside))

    def _each(self) -> Sequence[tuple[Sample, hf_distca.DistCAConfig, Steps]]:
        return list(zip(self.samples, self.configs, self.steps, strict=True))

    def _exchange(
        self, plans: Sequence[Sequence[Plan]], depths: npt.NDArray[np.int64], seconds: Array
    ) -> tuple[float, float]:
        """Seconds of an exchange, and of a byte that a rank sends or receives in it, neither
        negative.
        """
        one = replace(self.cost, exchange_bytes_per_second=np.inf, exchange_seconds=1.0)
        byte = replace(self.cost, exchange_bytes_per_second=1.0, exchange_seconds=0.0)
        # What is measured has the copies in it: of a setting, only memory counts here, and it takes
        # nothing.
        hardware = replace(find_hardware("h100"), memory_rate=_FREE)
        setting = Setting(find_model("llama-3-8b"), hardware, self.ranks, self.tokens)
        asked = np.array(
            [
                [
                    sum(compute_plan_work(setting, plan, unit).wire for plan in step)
                    for unit in (one, byte)
                ]
                for step in plans
            ]
        )
        # (samples * ranks, 2).
        asked = (asked * depths[:, None, None]).transpose(0, 2, 1).reshape(-1, 2)
        moving = asked[:, 1] > 0
        # Seconds and bytes are of unlike sizes, and nnls has one tolerance.
        sizes = np.linalg.norm(asked[moving], axis=0)
        latency, per_byte = nnls(asked[moving] / sizes, seconds.ravel()[moving])[0] / sizes
        return float(latency), max(float(per_byte), 1e-12)


def _parts(steps: Steps, way: str) -> tuple[float, float, float]:
    """Processor seconds of a step without the exchange of gradients, and those of attention
    kernels, forward and backward.
    """
    batch, counted = steps.batch(way), current_session().meter
    dist.barrier()
    with (
        patch.object(meter, "time", SimpleNamespace(perf_counter=time.thread_time)),
        hf_distca.balancing(WAYS[way][1]),
    ):
        started, before = time.process_time(), counted.seconds
        loss = steps.model.module(**batch, use_cache=False, num_items_in_batch=steps.targets).loss
        between = counted.seconds
        loss.backward()
        taken = time.process_time() - started
    dist.barrier()
    steps.model.module.zero_grad()
    return taken, between - before, counted.seconds - between


def _counts(plans: Sequence[Plan], cost: CostModel) -> Array:
    """What the tasks of each server count in a layer, (2, ranks, 3), as `CostModel.counts`."""
    found = np.zeros((2, plans[0].layout.world_size, 3))
    for plan in plans:
        np.add.at(
            found,
            (slice(None), plan.server),
            cost.count_work(plan.end - plan.start, plan.end, plan.heads),
        )
    return found
