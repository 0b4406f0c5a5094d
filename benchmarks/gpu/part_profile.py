"""A cost model from timing the kernel, its error on shapes it was not fitted to, and plans that are
made with it.

Fitted twice: to calls of one task, and to calls of many equal tasks, more like what servers run. On
a GPU these differ: a single short task leaves most of the processor idle.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gpu_setting import Setting, free, seconds_of
from gpu_workloads import LLAMA, Calls, batch_of, fastest, made_up, placements, shapes
from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.load import summarize_plan
from simulator.fits import fit_kernel

PLACEMENTS = [
    f"{documents}_r{ranks}_t{tokens}_s0"
    for ranks in (8, 64, 512)
    for tokens in ("64k", "128k")
    for documents in ("wlbllm_raw", "wlbllm_e8", "prolong_e8_lcr03_shuf")
]


class Case(NamedTuple):
    """One call: so many equal tasks of `rows` query rows and `keys` keys."""

    count: int
    rows: int
    keys: int


def grid(
    rows: Sequence[int], contexts: Sequence[int], least: int, most_keys: int, tile: int
) -> list[Case]:
    """Tasks without a context and, from `tile` rows on, with each of them; repeated to `least` rows
    as far as keys fit.

    The model counts rows in whole tiles, as kernels on a GPU do and that on a CPU does not; plans
    cut slices on tiles.
    """
    sizes = [
        (n, n + context) for n in rows for context in (0, *contexts) if not context or n >= tile
    ]
    return [
        Case(min(max(1, least // n), max(1, most_keys // m)), n, m)
        for n, m in sizes
        if m <= most_keys
    ]


def measured(
    setting: Setting, shape: AttentionShape, cases: list[Case], reserve: float
) -> list[dict[str, Any]]:
    """Seconds of each case, forward and backward, in no order, until only so many seconds of the
    part are left.
    """
    random.Random(0).shuffle(cases)
    found = []
    with fastest(setting).active() as kernel:
        batches = [batch_of([(case.rows, case.keys)] * case.count) for case in cases]
        calls = Calls(shape, setting, batches)
        for case, batch in zip(cases, batches, strict=True):
            if not setting.time_for(f"{case}", reserve):
                continue
            outputs = calls.forward(kernel, batch)
            forward = seconds_of(lambda b=batch: calls.forward(kernel, b), setting.device)
            backward = seconds_of(
                lambda b=batch, o=outputs: calls.backward(kernel, b, o), setting.device
            )
            found.append({**case._asdict(), "forward": forward, "backward": backward})
    free(setting.device)
    return found


def fitted(model: CostModel, rows: Sequence[dict[str, Any]], name: str) -> CostModel:
    counts = np.concatenate(
        [model.count_work(row["rows"], row["keys"]) * row["count"] for row in rows], axis=1
    )
    forward, backward = map(
        fit_kernel, counts, np.array([(row["forward"], row["backward"]) for row in rows]).T
    )
    return replace(model, forward=forward, backward=backward, name=name)


def errors(model: CostModel, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Relative errors of estimates, estimate over measurement less one, by direction."""
    result: dict[str, Any] = {}
    for which, direction in enumerate(("forward", "backward")):
        off = [
            float(model.estimate_directions(row["rows"], row["keys"])[which, 0])
            * row["count"]
            / row[direction]
            - 1
            for row in rows
        ]
        size = sorted(map(abs, off))
        ninetieth = size[min(len(size) - 1, int(0.9 * len(size)))]
        result[direction] = {
            "median": statistics.median(size),
            "90%": ninetieth,
            "largest": size[-1],
            "all": off,
        }
    return result


def simulated(setting: Setting, model: CostModel) -> list[dict[str, Any]]:
    """Plans of the placements under the model's rates, for Llama's shapes: imbalance, the slowest
    rank, bytes.
    """
    found = []
    others = [made_up(8, 16384 if setting.quick else 65536)]
    for name, layout in placements(
        setting, PLACEMENTS[:1] if setting.quick else PLACEMENTS, others
    ):
        for label, shape in LLAMA.items():
            if not setting.time_for(f"plan of {name} for {label}", 0.5):
                continue
            cost = replace(model, shape=shape)
            figures = summarize_plan(balance(layout, cost, DistCAConfig()), cost)
            found.append({"placement": name, "model": label, **figures})
    return found


def run(setting: Setting) -> None:
    """Put measurements, fits with their errors, and simulations; write the models beside them."""
    label, shape = next(iter(shapes(setting).items()))
    analytic = CostModel.make_analytic(shape, device_type=setting.device.type)
    # On a GPU, thousands of tasks of a few rows would steer the fit, and plans have none of them.
    rows = setting.size(
        quick=(16, 128),
        cpu=(1, 16, 128, 512, 1024, 2048),
        gpu=(128, 256, 512, 1024, 2048, 8192, 32768),
    )
    other = setting.size(
        quick=(64,),
        cpu=(48, 256, 768, 1536, 4096),
        gpu=(192, 384, 640, 1536, 4096, 16384, 65536),
    )
    contexts = setting.size(quick=(256,), cpu=(1024, 4096), gpu=(1024, 8192, 65536))
    others = setting.size(quick=(128,), cpu=(512, 6144), gpu=(3072, 24576, 131072))
    least, keys = setting.size(quick=(256, 2048), cpu=(2048, 16384), gpu=(16384, 2**20))
    tile = 1 if setting.device.type == "cuda" else analytic.tile
    grids = [
        grid(*sizes, count, keys, tile)
        for sizes in ((rows, contexts), (other, others))
        for count in (1, least)
    ]
    single, batched, held_single, held = (
        measured(setting, shape, cases, reserve=setting.seconds * (0.75 - 0.2 * place))
        for place, cases in enumerate(grids)
    )
    setting.put(
        shape=label,
        single=single,
        batched=batched,
        held_out_single=held_single,
        held_out_batched=held,
    )
    hardware = f"{setting.device.type}, {shape}"
    fits = {
        "built in": analytic,
        "fitted to single tasks": fitted(analytic, single, f"fitted to single tasks, {hardware}"),
        "fitted to batches": fitted(analytic, batched, f"fitted to batches, {hardware}"),
    }
    checked = {
        "held-out single tasks": held_single,
        "held-out batches": held,
        "its own measurements": None,
    }
    own = {"fitted to single tasks": single, "fitted to batches": batched}
    setting.put(
        models={name: model.to_json() for name, model in fits.items()},
        errors={
            name: {
                what: errors(model, data or own.get(name, batched))
                for what, data in checked.items()
            }
            for name, model in fits.items()
        },
    )
    (setting.out / "cost_model.json").write_text(fits["fitted to batches"].to_json())
    setting.put(simulation=simulated(setting, fits["fitted to batches"]))
