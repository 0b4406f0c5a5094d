"""Seconds of a training step in pipeline stages: torch's 1F1B against stages that share attention, side by side in one run.

Every stage is a process with one thread; micro-batches hold equally many tokens, in documents of long-tailed or of even lengths.
Modes take turns within each round, so that a drifting machine slows all of them; the figures are medians over rounds.

    python benchmarks/pipeline.py --json

Beside them stands the ideal: every tick takes the longest linear work of a stage, and the attention of all stages spread evenly
over them; or, where processes share cores, at least the work of the tick over the number of cores. Work is processor time of
micro-batches that each stage runs by itself. The share gained is what balancing takes off 1F1B over what the ideal does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import hf_distca
from hf_distca.integration.session import current_session
from hf_distca.pipeline import Schedule, split
from hf_distca.pipeline.ticks import ticks
from machine import describe
from output import add_json_option, put_out

PLACEMENT = Path(__file__).with_name("placements") / "long_tail_8_ranks.json"
VOCABULARY = 512


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def scaled(lengths: list[int], tokens: int) -> list[int]:
    """Documents in the same proportions that have so many tokens together."""
    ends, total, begin, found = 0, sum(lengths), 0, []
    for length in lengths:
        ends += length
        end = round(ends * tokens / total)
        if end > begin:
            found.append(end - begin)
        begin = end
    return found


def batches(arguments: argparse.Namespace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and position ids of the micro-batches of a step."""
    real = json.loads(PLACEMENT.read_text())["lengths"]
    lengths = {
        "long tail": [scaled(real[at % len(real)], arguments.tokens) for at in range(arguments.micro_batches)],
        "even": [[arguments.tokens // 8] * 8] * arguments.micro_batches,
    }
    ids = torch.randint(0, VOCABULARY, (arguments.micro_batches, arguments.tokens), generator=torch.Generator().manual_seed(0))
    return {
        name: (ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])) for name, rows in lengths.items()
    }


class Steps:
    """Times steps of one stage."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=arguments.heads * 64,
            intermediate_size=arguments.heads * 172,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=max(arguments.heads // 2, 1),
            vocab_size=VOCABULARY,
            max_position_embeddings=arguments.tokens,
            attn_implementation="distca",
        )
        mesh = init_device_mesh("cpu", (arguments.stages,), mesh_dim_names=("pp",))
        shape = (1, arguments.tokens, config.hidden_size)
        # Each schedule has a stage object of its own, and both have the same module.
        self.stage = split(LlamaForCausalLM(config).train(), mesh)
        self.shared = Schedule(self.stage, arguments.micro_batches, loss_of)
        self.classic = Schedule1F1B(self._classic_stage(mesh, shape), arguments.micro_batches, loss_of)
        self.batches, self.rank = batches(arguments), rank

    def _classic_stage(self, mesh: Any, shape: tuple[int, ...]) -> Any:
        from torch.distributed.pipelining import PipelineStage

        hidden = torch.empty(shape, device="meta", requires_grad=True)
        tokens = torch.empty(shape[:2], dtype=torch.long, device="meta")
        logits = torch.empty((*shape[:2], VOCABULARY), device="meta", requires_grad=True)
        inputs, outputs = tokens if self.stage.is_first else hidden, logits if self.stage.is_last else hidden
        here = self.stage.stage_index, self.stage.num_stages, self.stage.device
        return PipelineStage(self.stage.submod, *here, input_args=inputs, output_args=outputs, group=mesh.get_group())

    def step(self, lengths: str, mode: str) -> float:
        """Seconds until all stages are done."""
        ids, positions = self.batches[lengths]
        # Under 1F1B stages are in different micro-batches and must not wait for each other: a module that evaluates is alone.
        self.stage.submod.train(mode != "1f1b")
        schedule = self.classic if mode == "1f1b" else self.shared
        dist.barrier()
        started = time.perf_counter()
        with hf_distca.balancing(mode == "shared"):
            schedule.step(ids, position_ids=positions, target=ids, return_outputs=False)
        dist.barrier()
        seconds = time.perf_counter() - started
        self.stage.submod.zero_grad()
        return seconds

    def work(self, lengths: str) -> list[list[float]]:
        """Of each micro-batch: processor seconds of linear layers and of attention, forward and then backward."""
        self.stage.submod.eval()
        meter, found = current_session().meter, []
        for ids, positions in zip(*self.batches[lengths], strict=True):
            hidden = torch.randn(1, len(ids), self.stage.submod.model.config.hidden_size, requires_grad=True)
            clock, attention = [time.process_time()], [meter.seconds]
            out = self.stage.submod(ids[None] if self.stage.is_first else hidden, position_ids=positions[None])
            loss = loss_of(out, ids) if self.stage.is_last else out.sum()
            clock.append(time.process_time())
            attention.append(meter.seconds)
            loss.backward()
            clock.append(time.process_time())
            attention.append(meter.seconds)
            both = [(b - a, d - c) for a, b, c, d in zip(clock, clock[1:], attention, attention[1:], strict=False)]
            found.append([number for all_, kernel in both for number in (max(all_ - kernel, 0.0), min(kernel, all_))])
        self.stage.submod.zero_grad()
        return found


def ideal(work: list[list[list[float]]], cores: int) -> float:
    """Seconds of a step whose ticks share their attention evenly, from the work of [stage][micro-batch]."""
    seconds = 0.0
    for tick in ticks(len(work), len(work[0])):
        held = [(stage, at) for stage, at in enumerate(tick.micro_batches) if at is not None]
        linear = [work[stage][at][2 * tick.backward] for stage, at in held]
        attention = sum(work[stage][at][2 * tick.backward + 1] for stage, at in held)
        seconds += max(max(linear) + attention / len(work), (sum(linear) + attention) / cores)
    return seconds


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), arguments.stages)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.stages)
    steps, modes = Steps(arguments, rank), ("1f1b", "unshared", "shared")
    seconds: dict[str, dict[str, list[float]]] = {lengths: {mode: [] for mode in modes} for lengths in steps.batches}
    ideals: dict[str, list[float]] = {lengths: [] for lengths in steps.batches}
    cores = min(arguments.stages, os.cpu_count() or 1)
    for mode in modes:  # the first steps pay for buffers and connections
        steps.step("even", mode)
    for round_ in tqdm(range(arguments.rounds), desc="rounds", file=sys.stderr, disable=rank > 0):
        for lengths in steps.batches:
            for mode in modes[:: 1 if round_ % 2 == 0 else -1]:
                seconds[lengths][mode].append(steps.step(lengths, mode))
            every: list[Any] = [None] * arguments.stages
            dist.all_gather_object(every, steps.work(lengths))
            ideals[lengths].append(ideal(every, cores))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(summary(arguments, seconds, ideals)))
    dist.barrier()
    dist.destroy_process_group()


def summary(arguments: argparse.Namespace, seconds: dict[str, dict[str, list[float]]], ideals: dict[str, list[float]]) -> Any:
    rows = {}
    for lengths, modes in seconds.items():
        row = {mode: statistics.median(taken) for mode, taken in modes.items()}
        row["ideal"] = statistics.median(ideals[lengths])
        row["gained"] = (row["1f1b"] - row["shared"]) / (row["1f1b"] - row["ideal"])
        row["ratio"] = statistics.median(a / b for a, b in zip(modes["shared"], modes["1f1b"], strict=True))
        rows[lengths] = row
    names = ("stages", "micro_batches", "tokens", "layers", "heads", "rounds")
    return {"machine": describe(), "run": {name: getattr(arguments, name) for name in names}, "seconds": rows, "each": seconds}


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"seconds of a step, {result['run']['stages']} stages, medians of {result['run']['rounds']} rounds")
    columns = ("documents", "1F1B", "our ticks, unshared", "shared", "ideal", "gained of what is to be gained", "shared / 1F1B")
    for name in columns:
        table.add_column(name, justify="left" if name == "documents" else "right")
    for lengths, row in result["seconds"].items():
        figures = [f"{row[name]:.2f}" for name in ("1f1b", "unshared", "shared", "ideal")]
        table.add_row(lengths, *figures, f"{row['gained']:.0%}", f"{row['ratio']:.2f}")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2, help="processes, one a stage (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers of the whole model (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads of 64; half as many key/value heads")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode (default: %(default)s)")
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.tokens < 64 or arguments.layers < arguments.stages or min(arguments.stages, arguments.rounds) < 1:
        parser.error("give at least 64 tokens, one round, one stage and a layer for each stage")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (arguments, folder), nprocs=arguments.stages)
        put_out(json.loads(Path(folder, "result.json").read_text()), arguments.json, show)


if __name__ == "__main__":
    main()
