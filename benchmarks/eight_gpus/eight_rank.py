"""One rank of a part: a model on a set of lengths. Each arm is compared before it is timed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hf_distca
from eight_arms import Arm, Rows, count_half_node, list_references, resolve
from eight_attention import find_packed, resolve_name
from eight_lengths import read_lengths, rows_of_step
from eight_models import Batches, build, count_targets, read_model
from gpu_setting import synchronize
from hf_distca.schedule.cost import AttentionShape, CostModel

LOSS, GRADIENT = 1e-3, 2e-2  # largest relative differences of equal arms


@dataclass(frozen=True)
class Part:
    """A model on a set of lengths, and how it is run.

    Attributes:
        model, lengths: names of their files.
        ranks, device: number of processes, and type of their device.
        tokens, shrink: tokens of a rank in a step; lengths are divided by `shrink`.
        layers: of the model; None for all.
        tiny: whether the model is that of a dry run.
        batches, steps: number of different batches, and steps of an arm in each turn.
        out: folder of the figures.
    """

    model: str
    lengths: str
    ranks: int
    device: str
    tokens: int
    shrink: int
    layers: int | None
    tiny: bool
    batches: int
    steps: int
    out: Path

    @property
    def name(self) -> str:
        """Name of the part's file."""
        return f"{self.model}--{self.lengths}"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def config(self) -> Any:
        return read_model(self.model, tiny=self.tiny, layers=self.layers)

    def resolve(self, arm: str) -> Arm:
        """Return the arm as it runs on this device."""
        return resolve(arm, self.config(), self.ranks, self.device)

    def rows(self) -> list[Rows]:
        """List the rows of each step."""
        lengths = read_lengths(self.lengths, shrink=self.shrink)
        return [
            rows_of_step(lengths, self.ranks, self.tokens, step) for step in range(self.batches)
        ]

    def make_batches(self, device: torch.device, operations_a_token: float) -> Batches:
        """Make the `Batches` of this part."""
        return Batches(
            self.config(), self.dtype, device, self.ranks, self.tokens, operations_a_token
        )


def make_tiny_settings() -> dict[str, Any]:
    """Make settings under which even tiny documents move: exchanges cost nothing."""
    cost = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 4))
    return {"tile": 16, "min_gain": 0.0, "cost_model": cost}


class Records:
    """Rows of the arms, which rank 0 writes to a file as they are found."""

    def __init__(self, part: Part, rank: int) -> None:
        self.path, self.rank = part.out / f"{part.name}.json", rank
        self.rows: dict[str, dict[str, Any]] = read_rows(self.path)

    def begin(self, arm: str, what: str) -> None:
        """Record which arm runs, so that the parent can blame it if the ranks die."""
        if self.rank == 0:
            self.path.with_suffix(".running").write_text(json.dumps([arm, what]))

    def put(self, arm: str, **figures: Any) -> None:
        self.rows.setdefault(arm, {}).update(figures)
        if self.rank == 0:
            write_rows(self.path, self.rows)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(rows, indent=1))
    temporary.rename(path)


class Rank:
    """Runs steps of arms on one rank."""

    def __init__(self, part: Part, rank: int, operations_a_token: float) -> None:
        self.part, self.rank = part, rank
        on_gpu = part.device == "cuda"
        self.device = torch.device(part.device, torch.cuda.current_device() if on_gpu else None)
        self.batches = part.make_batches(self.device, operations_a_token)
        self.trained = build(self.batches.config, self.device, part.dtype)
        self.packed = find_packed(self.batches.config, self.device, part.dtype)
        # With a rate of 0, the weights stay as compared.
        self.optimizer = torch.optim.AdamW(
            self.trained.parameters(), lr=0.0, weight_decay=0.0, fused=part.device == "cuda"
        )
        self.rows = part.rows()
        self.arm: Arm
        self._made: list[dict[str, Any]] = []

    def take(self, arm: str) -> None:
        """Make the batches of an arm, and set the model's attention to it."""
        self.arm = self.part.resolve(arm)
        small = make_tiny_settings() if self.part.tiny else {}
        placed = self.arm.place == "placed"
        nodes = {"group_size": count_half_node(self.part.ranks)} if placed else {}
        config = hf_distca.DistCAConfig(**{**small, **nodes, **self.arm.settings})
        if self.arm.attention == "distca":
            hf_distca.configure(config)
        name = resolve_name(self.arm.attention, self.packed)
        self.trained.model.set_attn_implementation(name)
        self._made = [
            self.batches.make(self.arm, rows, step, self.rank, config)
            for step, rows in enumerate(self.rows)
        ]

    def step(self, number: int) -> float:
        """Train on a step's batch; return the rank's mean loss, times the number of ranks."""
        number %= len(self.rows)
        loss = self.trained(**self._made[number]) / count_targets(self.rows[number])
        (loss * self.part.ranks).backward()  # FSDP takes the mean over ranks
        return float(loss.detach())

    def compare(self) -> dict[str, list[float]]:
        """Compute the loss of each global batch, and the gradient norm of the q and k projections,
        which depends on the attention of every document.
        """
        found: dict[str, list[float]] = {"losses": [], "gradients": []}
        for number in range(len(self.rows)):
            sums = torch.zeros(2, dtype=torch.float64)
            sums[0] = self.step(number)
            for name, weight in self.trained.named_parameters():
                if ("q_proj" in name or "k_proj" in name) and weight.grad is not None:
                    gradient = weight.grad
                    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    sums[1] += own.double().square().sum().cpu()
            self.optimizer.zero_grad()
            sums = sums.to(self.device)
            dist.all_reduce(sums)
            found["losses"].append(float(sums[0]))
            found["gradients"].append(float(sums[1].sqrt()))
        return found

    def time(self) -> list[float]:
        """Time steps with the optimizer until all ranks are done; the first does not count."""
        taken = []
        for number in range(self.part.steps + 1):
            synchronize(self.device)
            dist.barrier()
            started = time.perf_counter()
            self.step(number)
            self.optimizer.step()
            self.optimizer.zero_grad()
            synchronize(self.device)
            dist.barrier()
            taken.append(time.perf_counter() - started)
        return taken[1:]

    def figures(self) -> dict[str, float]:
        """Return the fullest rank's peak memory in two steps, and the figures of
        hf-distca's log.
        """
        before, on_gpu = hf_distca.metrics(), self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        for number in range(2):
            self.step(number)
            self.optimizer.zero_grad()
        found = {}
        if on_gpu:
            peak = torch.tensor(float(torch.cuda.max_memory_allocated()), device=self.device)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            found["peak_gb"] = float(peak) / 1e9
        if self.arm.attention == "distca":
            found |= (hf_distca.metrics(gather=True) - before).figures()
        return found

    def trace(self, path: Path) -> None:
        """Write rank 0's trace of a step. The other ranks run the step without a profiler."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        if self.rank:
            self.step(0)
        else:
            with torch.profiler.profile(activities=kinds) as profile:
                self.step(0)
                synchronize(self.device)
            profile.export_chrome_trace(str(path))
        self.optimizer.zero_grad()


def run_part(rank: int, part: Part, arms: list[str], end: float, operations: float) -> None:
    """Compare each arm, time the equal ones forwards and backwards, then trace them.

    Args:
        rank: rank of this process, whose process group exists.
        part: what to run.
        arms: arms that can be started and have not failed, the most important first.
        end: wall-clock time after which nothing new begins.
        operations: floating-point operations per token outside attention.
    """
    runner, records = Rank(part, rank, operations), Records(part, rank)
    for arm in arms:
        if "losses" in records.rows.get(arm, {}) or not has_time(end, runner.device):
            continue
        records.begin(arm, "parity")
        runner.take(arm)
        attention = resolve_name(runner.arm.attention, runner.packed)
        records.put(arm, attention=attention, **runner.compare())
    right = find_reference(part, records.rows)
    passed = [arm for arm in arms if judge(records, arm, right)]
    for turn, arm in iterate_turns(passed):
        done = records.rows[arm].get("seconds", {})
        if turn not in done and has_time(end, runner.device):
            records.begin(arm, f"steps, {turn}")
            runner.take(arm)
            records.put(arm, seconds={**done, turn: runner.time()})
    for arm in passed:
        if "trace" not in records.rows[arm] and has_time(end, runner.device):
            records.begin(arm, "trace")
            runner.take(arm)
            name = f"trace--{part.name}--{arm}.json.gz"
            runner.trace(part.out / name)
            records.put(arm, figures=runner.figures(), trace=name)


def iterate_turns(arms: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the arms forwards, then backwards."""
    yield from (("forwards", arm) for arm in arms)
    yield from (("backwards", arm) for arm in arms[::-1])


def find_reference(part: Part, rows: dict[str, dict[str, Any]]) -> str | None:
    """Find the reference arm, whose losses count as correct."""
    wanted = list_references(part.config().model_type)
    return next((arm for arm in wanted if "losses" in rows.get(arm, {})), None)


def judge(records: Records, arm: str, right: str | None) -> bool:
    """Record how far an arm is from the reference; return whether it may be timed."""
    row = records.rows.get(arm, {})
    if "losses" not in row or right is None:
        return False
    off = {
        f"{name}_off": max(
            abs(a / b - 1) for a, b in zip(row[name], records.rows[right][name], strict=True)
        )
        for name in ("losses", "gradients")
    }
    passed = off["losses_off"] <= LOSS and off["gradients_off"] <= GRADIENT
    records.put(arm, **off, compared_with=right, parity=passed)
    return passed


def has_time(end: float, device: torch.device) -> bool:
    """Return whether rank 0 has time left, so that all ranks agree."""
    left = torch.tensor(end - time.time(), device=device, dtype=torch.float32)
    dist.broadcast(left, 0)
    return float(left) > 0
