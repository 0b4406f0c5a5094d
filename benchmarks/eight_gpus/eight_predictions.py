"""Predicted seconds of a step of each arm, by hf-distca's cost model, before anything has run."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from eight_arms import Arm, Rows, count_half_node, place_documents
from eight_models import Batches
from eight_rank import Part
from hf_distca.kernels import KernelRequest, ScoreOptions
from hf_distca.kernels.flash import FLASH_ATTN_4
from hf_distca.schedule.cost import AttentionShape, CostModel, count_causal_pairs
from simulator import context, disaggregated
from simulator.hardware import Hardware, find_hardware
from simulator.model_shape import ModelShape, count_shape
from simulator.predict import predict_step
from simulator.setting import Setting
from simulator.strategies import Strategy
from simulator.work import (
    Candidate,
    MicroBatchWork,
    compute_document_work,
    concatenate_groups,
)

_CARDS = ("gb200", "b200", "h200", "h100", "a100")
# Dense bf16 peaks of data sheets, to which achieved rates are compared.
PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "gb200": 2450e12, "b200": 2250e12}


def count_weights(part: Part) -> ModelShape:
    path = part.out / f"{part.model}.config.json"
    path.write_text(part.config().to_json_string(use_diff=False))
    return count_shape(path)


def count_token_operations(shape: ModelShape) -> float:
    """Count the forward floating-point operations per token outside attention."""
    active = shape.active if shape.active is not None else shape.layers * shape.dense_parameters
    return 2.0 * (active + shape.hidden * shape.vocabulary)


def count_operations(shape: ModelShape, rows: Rows) -> float:
    """Count the operations of a step, forward and backward, without recomputed ones."""
    lengths = np.concatenate(rows)
    pairs = sum(
        layers * float(count_causal_pairs(lengths, lengths, window).sum())
        for window, layers in shape.kinds
    )
    attention = 4.0 * shape.attention_width * pairs
    return 3.0 * (count_token_operations(shape) * float(lengths.sum()) + attention)


def find_card() -> str | None:
    """Find the known name of this machine's GPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((card for card in _CARDS if card in name), None)


def find_rates(part: Part, shape: ModelShape, links: dict[str, Any]) -> Hardware:
    """Return the rates of the card with the measured bandwidth of the all-to-all; without a GPU,
    built-in rates and the measured rate of a matrix product.
    """
    if part.device == "cuda":
        widths = (shape.head_dim, shape.head_dim)
        case = KernelRequest(torch.device("cuda", 0), part.dtype, *widths, ScoreOptions(1.0))
        fourth = not FLASH_ATTN_4.unsupported_reason(case)
        card = find_card() or "h100"
        hopper = card in ("h100", "h200")
        found = find_hardware(card, "flash_attn_4" if fourth and hopper else None)
    else:
        attention = AttentionShape(*(shape.query_heads, shape.key_value_heads), *(16, 16), 4)
        cost = CostModel.make_analytic(attention, device_type="cpu")
        found = replace(
            find_hardware("h100"),
            name="this processor",
            matmul_flops=_measure_product_rate(),
            memory_rate=5e9,
            gather_rate=1e9,
            forward=cost.forward,
            backward=cost.backward,
            element_bytes=4,
            exchange_seconds=cost.exchange_seconds,
        )
    rate = links.get("all_to_all_gb_s")
    return replace(found, node_rate=1e9 * rate) if rate else found


def _measure_product_rate() -> float:
    """Measure the floating-point operations per second of a matrix product on one thread."""
    threads, x = torch.get_num_threads(), torch.randn(512, 512)
    torch.set_num_threads(1)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        x @ x
        taken.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 2 * 512**3 / min(taken)


def _compute_work(setting: Setting, arm: Arm, rows: Rows, batches: Batches) -> MicroBatchWork:
    """Compute the work of a step on all ranks."""
    lengths = np.concatenate(rows).astype(np.int64)
    ranks = setting.ranks
    if arm.attention == "ulysses":
        shared = context.SharedRows(lengths, np.zeros_like(lengths), 1)
        return context.compute_ulysses(setting, shared, ranks)
    if arm.place == "dealt":
        halves = bool(arm.settings.get("ping_pong"))
        placed = disaggregated.deal_documents(setting, lengths, ping_pong=halves)
        return disaggregated.compute_placement_work(setting, placed)
    numbers = place_documents(rows, arm.place, batches.tokens, batches.cost)
    if arm.attention == "distca" and arm.settings.get("balance", True):
        node = count_half_node(ranks) if arm.place == "placed" else ranks
        group = replace(setting, ranks=node)
        groups = [
            np.concatenate([lengths[of_rank] for of_rank in numbers[first : first + node]])
            for first in range(0, ranks, node)
        ]
        placements = [disaggregated.fill_given_rows(group, one, ping_pong=False) for one in groups]
        return concatenate_groups(
            [disaggregated.compute_placement_work(group, placed) for placed in placements]
        )
    rank = np.repeat(np.arange(ranks), [len(of_rank) for of_rank in numbers])
    return compute_document_work(setting, lengths[np.concatenate(numbers).astype(int)], rank)


def predict(part: Part, arms: dict[str, Arm], links: dict[str, Any]) -> dict[str, Any]:
    """Predict each arm's mean step in seconds; nothing for arms without a cost model."""
    shape = count_weights(part)
    hardware = find_rates(part, shape, links)
    batches = part.make_batches(torch.device("cpu"), count_token_operations(shape))
    setting = Setting(
        *(shape, hardware, part.ranks, part.tokens), checkpointing="full", fused=False
    )

    def of_arm(arm: Arm) -> dict[str, float]:
        if arm.attention == "ring":  # a ring cuts no document here, and still gathers all keys
            return {}
        steps = [_predict_step(setting, arm, rows, batches) for rows in part.rows()]
        return {name: statistics.mean(step[name] for step in steps) for name in steps[0]}

    return {
        "rates": hardware.name,
        "node_rate": hardware.node_rate,
        "operations": statistics.mean(count_operations(shape, rows) for rows in part.rows()),
        "weights": shape.parameters,
        "arms": {name: of_arm(arm) for name, arm in arms.items()},
    }


def _predict_step(setting: Setting, arm: Arm, rows: Rows, batches: Batches) -> dict[str, float]:
    """Predict the seconds of a step, and of attention on the slowest rank and on average."""
    work = _compute_work(setting, arm, rows, batches)
    disaggregated = arm.attention == "distca"
    strategy = Strategy(arm.title, arm.title, lambda *_: [Candidate([work])], disaggregated)
    step = predict_step(setting, [np.concatenate(rows).astype(np.int64)], strategy)
    forward, backward = work.attention
    attention = forward + backward
    return {
        "seconds": step.step_seconds if step else math.nan,
        "slowest": float(attention.max()),
        "mean": float(attention.mean()),
    }


def put_predictions(part: Part, links: dict[str, Any], arms: dict[str, Arm]) -> dict[str, Any]:
    """Read the predictions of a part; make them only if there are none from an earlier call."""
    path = part.out / f"predictions--{part.name}.json"
    if not path.exists():
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        path.write_text(json.dumps({"made": made, **predict(part, arms, links)}, indent=1))
    return dict(json.loads(path.read_text()))
