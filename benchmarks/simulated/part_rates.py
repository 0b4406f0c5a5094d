"""Rates of this machine for the simulator, each measured by itself: layers without attention, the
attention kernel, messages.

Unlike those of `machine_rates.py`, which come from steps of data parallel training, they need no
step that all take part in.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from hf_distca.kernels import select_kernel
from hf_distca.kernels.base import Case, Scores
from hf_distca.schedule.cost import CostModel, KernelCost
from kernel_timings import measure
from machine_rates import shape_of
from simulator.hardware import Hardware
from simulator_validation import VOCABULARY, model_shape
from step_time import model_of

_MESSAGES = (2**16, 2**20, 2**22)  # bytes


def no_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """In place of attention: all its inputs get gradients, and next to nothing is computed."""
    groups = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(groups, dim=1)).transpose(1, 2), None


class PartRates:
    """What a process measures of its machine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        AttentionInterface.register("no attention", no_attention)
        AttentionMaskInterface.register("no attention", lambda *_, **__: None)
        self.tokens, self.shape = arguments.tokens, shape_of(arguments)
        self.models = {
            layers: model_of(
                argparse.Namespace(**{**vars(arguments), "layers": layers}), "no attention"
            ).module
            for layers in (1, 3)
        }

    def here(self) -> list[float]:
        """Seconds of models of one and of three layers without attention, and the coefficients of
        the kernel.
        """
        ids = torch.randint(
            0, VOCABULARY, (1, self.tokens), generator=torch.Generator().manual_seed(0)
        )
        seconds = []
        for model in self.models.values():
            started = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            seconds.append(time.process_time() - started)
            model.zero_grad()
        kernel = select_kernel(
            "auto", Case(torch.device("cpu"), torch.float32, 64, 64, Scores(64**-0.5))
        )
        model, device = CostModel.make_analytic(self.shape, device_type="cpu"), torch.device("cpu")
        found = measure(model, kernel, torch.float32, device, clock=time.process_time)
        return [
            *seconds,
            *(
                x
                for cost in found
                for x in (cost.task_seconds, 1 / cost.bytes_per_second, 1 / cost.flops_per_second)
            ),
        ]


def message_seconds(ranks: int) -> list[float]:
    """Seconds in which every process sends so many bytes to all others together, for each of
    `_MESSAGES`.
    """
    found = []
    for size in _MESSAGES:
        sent = torch.zeros(size // 4 // (ranks - 1) * ranks)
        received = torch.empty_like(sent)
        dist.barrier()
        started = time.process_time()
        for _ in range(4):
            dist.all_to_all_single(received, sent)
        found.append((time.process_time() - started) / 4)
    return found


def machine_of(
    arguments: argparse.Namespace, here: list[list[float]], messages: list[list[float]]
) -> Hardware:
    """This machine, from medians of what was measured by itself."""
    one, three, *kernel = np.median(np.array(here), axis=0).tolist()
    latency, per_byte = np.polyfit(_MESSAGES, np.median(np.array(messages), axis=0), 1)[
        ::-1
    ].tolist()
    model = model_shape(arguments, 1)
    layer = (three - one) / 2
    rest = max(one - layer, 1e-9)
    # Products of a layer and of the output layer, and bytes between them, take these seconds;
    # neither rate is negative.
    products = (
        6 * arguments.tokens * np.array([model.layer_parameters, model.hidden * model.vocabulary])
    )
    elements = (
        10 * model.hidden + 2 * (model.attention_width + model.key_width) + 3 * model.feed_forward
    )
    moved = arguments.tokens * np.array([3 * elements * 4, model.vocabulary * 12])
    per_flop, per_moved = np.linalg.solve(np.stack([products, moved], axis=1), [layer, rest])
    if min(per_flop, per_moved) <= 0:
        per_flop, per_moved = layer / products[0], 1e-18
    costs = [
        KernelCost(kernel[at], 1 / max(kernel[at + 1], 1e-18), 1 / max(kernel[at + 2], 1e-18))
        for at in (0, 3)
    ]
    rate = 1 / max(per_byte, 1e-12)
    links = (rate, rate, rate * 8 / 1e9, 1.0, max(latency, 0.0), 0.0)
    return Hardware(
        "this machine", 1 / per_flop, 1 / per_moved, 1e12, *links, costs[0], costs[1], 4, ()
    )
