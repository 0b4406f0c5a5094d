"""Predicted against measured seconds of training steps of 2 and 4 processes: placements, depths, balanced or not, ping-pong.

Processes have one thread each. What the simulator is given is measured by itself, between the steps and on as many cores as there
are processes for: a model without attention, the attention kernel, and an exchange between the processes. No step that is
predicted is among that. Where processes share cores, a step takes at least all their seconds over the number of cores.

Each case has two predictions: of the step, by the clock on the wall, which needs a machine that does nothing else; and of the
processor seconds of the busiest process, which other programs disturb little. Rates are measured in processor seconds.

    python benchmarks/simulator_validation.py --json

Attention rates of the simulated GPUs are compared with published timings in `benchmarks/published_timings.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

import hf_distca
from dealt_step_time import WAYS, Steps, lengths_of
from hf_distca.integration.session import current_session
from hf_distca.kernels import select_kernel
from hf_distca.kernels.base import Scores
from hf_distca.runtime.calibrate import measure
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.simulate.collectives import weight_exchange
from hf_distca.simulate.disaggregated import Placed, halved, work_of
from hf_distca.simulate.hardware import Hardware
from hf_distca.simulate.models import ModelShape
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.timelines import data_parallel, rank_seconds
from machine import describe
from output import add_json_option, put_out
from step_time import model_of

GOAL = 0.10  # median error
_VOCABULARY = 512
_CELLS = {
    "predicted_seconds": ".2f",
    "measured_seconds": ".2f",
    "error": "+.1%",
    "predicted_processor_seconds": ".2f",
    "measured_processor_seconds": ".2f",
    "processor_error": "+.1%",
}
_SHOWN = ("matmul_flops", "memory_rate", "link_gbps", "exchange_seconds", "forward", "backward")
_MESSAGES = (2**16, 2**20, 2**22)  # bytes


class Case(NamedTuple):
    """A step: which documents lie where, and how attention is shared."""

    name: str
    ranks: int
    layers: int
    documents: str
    way: str
    ping_pong: bool = False


CASES = (
    Case("one long document, unbalanced", 2, 2, "one long", "in order, unbalanced"),
    Case("one long document, balanced", 2, 2, "one long", "in order, balanced"),
    Case("one long document, dealt, ping-pong", 2, 2, "one long", "dealt", ping_pong=True),
    Case("equal documents, balanced", 2, 4, "equal", "in order, balanced"),
    Case("mixed documents, dealt", 2, 2, "mixed", "dealt"),
    Case("mixed documents, dealt, ping-pong", 2, 4, "mixed", "dealt", ping_pong=True),
    Case("mixed documents, in order, unbalanced", 2, 1, "mixed", "in order, unbalanced"),
    Case("mixed documents, over all ranks", 2, 2, "mixed", "every document over all ranks"),
    Case("mixed documents, dealt", 4, 2, "mixed", "dealt"),
    Case("mixed documents, dealt, ping-pong", 4, 2, "mixed", "dealt", ping_pong=True),
    Case("mixed documents, in order, unbalanced", 4, 4, "mixed", "in order, unbalanced"),
    Case("one long document, balanced", 4, 1, "one long", "in order, balanced"),
)


def documents_of(case: Case, tokens: int) -> list[int]:
    """Lengths of the global batch."""
    if case.documents == "mixed":
        return lengths_of(tokens, case.ranks)
    return [tokens // 8] * 8 * case.ranks if case.documents == "equal" else [tokens, *[tokens // 8] * 8 * (case.ranks - 1)]


def no_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """In place of attention: all its inputs get gradients, and next to nothing is computed."""
    groups = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(groups, dim=1)).transpose(1, 2), None


class Rates:
    """What a process measures of its machine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        AttentionInterface.register("no attention", no_attention)
        AttentionMaskInterface.register("no attention", lambda *_, **__: None)
        self.tokens, self.shape = arguments.tokens, shape_of(arguments)
        self.models = {
            layers: model_of(argparse.Namespace(**{**vars(arguments), "layers": layers}), "no attention").module
            for layers in (1, 3)
        }

    def here(self) -> list[float]:
        """Seconds of models of one and of three layers without attention, and the coefficients of the kernel."""
        ids = torch.randint(0, _VOCABULARY, (1, self.tokens), generator=torch.Generator().manual_seed(0))
        seconds = []
        for model in self.models.values():
            started = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            seconds.append(time.process_time() - started)
            model.zero_grad()
        kernel = select_kernel("auto", torch.device("cpu"), torch.float32, 64, 64, Scores(64**-0.5))
        model, device = CostModel.analytic(self.shape, device_type="cpu"), torch.device("cpu")
        found = measure(model, kernel, torch.float32, device, clock=time.process_time)
        return [
            *seconds,
            *(x for cost in found for x in (cost.task_seconds, 1 / cost.bytes_per_second, 1 / cost.flops_per_second)),
        ]


def message_seconds(ranks: int) -> list[float]:
    """Seconds in which every process sends so many bytes to all others together, for each of `_MESSAGES`."""
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


def shape_of(arguments: argparse.Namespace) -> AttentionShape:
    return AttentionShape(arguments.heads, max(arguments.heads // 2, 1), 64, 64, 4)


def work(rank: int, arguments: argparse.Namespace, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, f"store{ranks}")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    rates, at_once = Rates(arguments), min(ranks, os.cpu_count() or 1)
    cases = {}
    for case in (case for case in CASES if case.ranks == ranks):
        of_case = argparse.Namespace(**{**vars(arguments), "layers": case.layers, "ranks": ranks})
        config = hf_distca.DistCAConfig(ping_pong=case.ping_pong)
        steps = Steps(of_case, rank, documents_of(case, arguments.tokens), config)
        cases[case] = (steps, config)
    here: list[list[float]] = []
    messages: list[list[float]] = []
    seconds: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    progress = tqdm(total=arguments.rounds + 1, desc=f"{ranks} processes", file=sys.stderr) if rank == 0 else nullcontext()
    with progress as bar:
        for round_ in range(arguments.rounds + 1):  # the first one pays for buffers and caches
            dist.barrier()
            taken = torch.tensor(rates.here() if rank < at_once else [0.0] * 8, dtype=torch.float64)
            dist.all_reduce(taken)
            here.append((taken / at_once).tolist())
            messages.append(message_seconds(ranks))
            for case, (steps, config) in list(cases.items())[:: 1 if round_ % 2 == 0 else -1]:
                current_session().config = config
                processor = time.process_time()
                wall, _ = steps.step(case.way)
                busy = torch.tensor(time.process_time() - processor, dtype=torch.float64)
                dist.all_reduce(busy, dist.ReduceOp.MAX)
                seconds[case].append((wall, float(busy)))
            if bar is not None:
                bar.update()
    if rank == 0:
        hardware = machine_of(arguments, here[1:], messages[1:])
        rows = [row_of(case, rounds[1:], predict(case, arguments, hardware, cases[case][0])) for case, rounds in seconds.items()]
        result = {"cases": rows, "machine": {name: str(getattr(hardware, name)) for name in _SHOWN}}
        Path(folder, f"result{ranks}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def machine_of(arguments: argparse.Namespace, here: list[list[float]], messages: list[list[float]]) -> Hardware:
    """This machine, from medians of what was measured by itself."""
    one, three, *kernel = np.median(np.array(here), axis=0).tolist()
    latency, per_byte = np.polyfit(_MESSAGES, np.median(np.array(messages), axis=0), 1)[::-1].tolist()
    model = model_shape(arguments, 1)
    layer = (three - one) / 2
    rest = max(one - layer, 1e-9)
    # Products of a layer and of the output layer, and bytes between them, take these seconds; neither rate is negative.
    products = 6 * arguments.tokens * np.array([model.layer_parameters, model.hidden * model.vocabulary])
    elements = 10 * model.hidden + 2 * (model.attention_width + model.key_width) + 3 * model.feed_forward
    moved = arguments.tokens * np.array([3 * elements * 4, model.vocabulary * 12])
    per_flop, per_moved = np.linalg.solve(np.stack([products, moved], axis=1), [layer, rest])
    if min(per_flop, per_moved) <= 0:
        per_flop, per_moved = layer / products[0], 1e-18
    costs = [KernelCost(kernel[at], 1 / max(kernel[at + 1], 1e-18), 1 / max(kernel[at + 2], 1e-18)) for at in (0, 3)]
    rate = 1 / max(per_byte, 1e-12)
    return Hardware(
        "this machine", 1 / per_flop, 1 / per_moved, 1e12, rate, rate * 8 / 1e9, 1.0, max(latency, 0.0), costs[0], costs[1], 4, ()
    )


def model_shape(arguments: argparse.Namespace, layers: int) -> ModelShape:
    heads = arguments.heads
    return ModelShape("small llama", heads * 64, layers, heads, max(heads // 2, 1), 64, heads * 172, _VOCABULARY)


class Predicted(NamedTuple):
    """Seconds of a step, and processor seconds of its busiest process."""

    step: float
    processor: float


def predict(case: Case, arguments: argparse.Namespace, hardware: Hardware, steps: Steps) -> Predicted:
    model = model_shape(arguments, case.layers)
    setting = Setting(model, hardware, case.ranks, arguments.tokens, ranks_per_node=case.ranks, sharding="ddp")
    placement, balanced = WAYS[case.way]
    layouts = steps.dealings[placement].layouts(np.array(steps.lengths))
    if case.ping_pong and len(layouts) == 1:
        layouts = halved(layouts[0], setting.tile)
    analytic = CostModel.analytic(setting.shape, device_type="cpu")

    def planner(layout: Layout, _: CostModel, config: hf_distca.DistCAConfig) -> Plan:
        return balance(layout, analytic, replace(config, balance=balanced))

    share = work_of(setting, Placed(layouts, planner))
    parts = rank_seconds(setting, share, keeps_attention=True)
    timeline = data_parallel(setting, [share], [parts])
    weights = weight_exchange(setting, float(parts.forward.mean()), float(parts.backward.mean()))
    shared = float(timeline.busy.sum()) / (os.cpu_count() or 1)
    # What other processes wait for costs a processor, too: on one machine messages are copied by those who send them.
    messages = float(share.wire.max()) - float((share.exposed.forward + share.exposed.backward)[int(share.wire.argmax())])
    return Predicted(max(timeline.seconds, shared) + weights.exposed, timeline.seconds + messages + weights.seconds)


def row_of(case: Case, rounds: list[tuple[float, float]], predicted: Predicted) -> dict[str, Any]:
    """A case beside what was measured: medians over rounds of seconds, and of the busiest process's processor seconds."""
    wall, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        **case._asdict(),
        "predicted_seconds": predicted.step,
        "measured_seconds": wall,
        "error": predicted.step / wall - 1,
        "predicted_processor_seconds": predicted.processor,
        "measured_processor_seconds": processor,
        "processor_error": predicted.processor / processor - 1,
        "all_seconds": rounds,
    }


def figures(arguments: argparse.Namespace, groups: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for group in groups for row in group["cases"]]
    sizes, of_processor = ([abs(row[name]) for row in rows] for name in ("error", "processor_error"))
    return {
        "machine": describe(),
        "setting": {"threads": 1, **{k: v for k, v in vars(arguments).items() if k != "json"}},
        "rates": {f"{group['cases'][0]['ranks']} processes": group["machine"] for group in groups},
        "cases": rows,
        "median_error": statistics.median(sizes),
        "largest_error": max(sizes),
        "median_processor_error": statistics.median(of_processor),
        "largest_processor_error": max(of_processor),
        "goal_met": statistics.median(sizes) <= GOAL,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"steps of {result['setting']['tokens']} tokens a process on {result['machine']['cores']} cores")
    for column in ("case", "processes", "layers", "predicted, s", "measured, s", "error", "processor, s", "measured, s", "error"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in result["cases"]:
        cells = [f"{row[name]:{form}}" for name, form in _CELLS.items()]
        table.add_row(row["name"], str(row["ranks"]), str(row["layers"]), *cells)
    Console(width=130).print(table)
    print(
        f"step: median error {result['median_error']:.1%}, largest {result['largest_error']:.1%}; goal: median at most {GOAL:.0%}"
    )
    print(f"processor: median error {result['median_processor_error']:.1%}, largest {result['largest_processor_error']:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a process (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads of 64; half as many key/value heads")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each running every case once (default: %(default)s)")
    add_json_option(parser)
    arguments = parser.parse_args()
    groups = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in CASES}):
            mp.spawn(work, (arguments, ranks, folder), nprocs=ranks)
            groups.append(json.loads(Path(folder, f"result{ranks}.json").read_text()))
    put_out(figures(arguments, groups), arguments.json, show)


if __name__ == "__main__":
    main()
