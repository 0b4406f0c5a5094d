"""`Findings`: how uneven the attention of ranks was, which rank was slow, and what hf-distca would
make of it.

Work is seconds by the built-in rates of a cost model, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from hf_distca.config import REPLACEABLE_ATTENTION, DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.profiles import Profile
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.observe.watch import BatchFacts

_EVEN = 1.07  # slowest rank / mean that is not worth a word
_PLANNING_SHARE = 0.005  # of the watched time, after the first plan


@dataclass(frozen=True)
class Findings:
    """Sums over micro-batches, which can be added; seconds and arrays of (ranks,).

    Attributes:
        batches, tokens: number of micro-batches, and of the tokens of all ranks.
        work, measured: of each rank: work of its documents, and measured seconds.
        slowest: number of micro-batches in which each rank was the slowest by measured seconds.
        slowest_work, slowest_measured: of the slowest rank of each micro-batch.
        elapsed: of the clock.
        planned: number of micro-batches that were planned.
        planned_mean, planned_slowest, given, dealt: of these, work of the mean rank and of the
            slowest one, and of the slowest one with its messages.
        planning: seconds of planning.
    """

    batches: int = 0
    tokens: int = 0
    work: FloatArray = field(default_factory=lambda: np.zeros(1))
    measured: FloatArray = field(default_factory=lambda: np.zeros(1))
    slowest: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    slowest_work: float = 0.0
    slowest_measured: float = 0.0
    elapsed: float = 0.0
    planned: int = 0
    planned_mean: float = 0.0
    planned_slowest: float = 0.0
    given: float = 0.0
    dealt: float = 0.0
    planning: float = 0.0

    def __add__(self, other: Findings) -> Findings:
        return Findings(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def may_plan(self) -> bool:
        """True if another plan would not take long compared with the steps."""
        return self.planning <= _PLANNING_SHARE * self.elapsed

    def compute_figures(self) -> dict[str, float]:
        """Compute the figures to log; those without data are left out."""
        mean = float(self.measured.mean())
        figures = {
            "documents": (self.slowest_work, float(self.work.mean())),
            "measured": (self.slowest_measured, mean),
            "slowest_rank": (int(np.argmax(self.slowest)), int(mean > 0)),
            "attention_share": (mean, self.elapsed),
            "as_given": (self.given, self.planned_mean),
            "dealt": (self.dealt, self.planned_mean),
        }
        return {f"distca/observed_{name}": a / b for name, (a, b) in figures.items() if b}

    def describe(self, attention: str) -> list[str]:
        """Describe the figures in lines.

        Args:
            attention: name of the attention that was watched.
        """
        work, mean = float(self.work.mean()), float(self.measured.mean())
        only_some = self.planned < self.batches
        rows = {
            "by documents and built-in rates": (self.slowest_work, work),
            f"measured, under {attention}": (self.slowest_measured, mean),
            f"estimated in {self.planned} of {self.batches}, by documents": (
                self.planned_slowest,
                self.planned_mean * only_some,
            ),
            "with hf-distca, messages included": (self.given, self.planned_mean),
            "the same, documents dealt": (self.dealt, self.planned_mean),
        }
        lines = ["  attention, slowest rank / mean"]
        lines += [f"    {label:<36}{a / b:>8.3f}" for label, (a, b) in rows.items() if b]
        if mean and self.elapsed:
            lines.append(
                f"  time      a mean rank spends {mean / self.elapsed:.0%} in attention, and"
                f" {(self.slowest_measured - mean) / self.elapsed:.0%} waiting for the slowest"
            )
        if len(self.work) > 1 and self.measured.all() and self.work.all():
            times, rank = self.measured / self.work, int(np.argmax(self.slowest))
            times /= np.median(times)
            lines.append(
                f"  slowest   rank {rank}, in {self.slowest[rank]} of {self.batches} micro-batches;"
                f" for equal documents rank {np.argmax(times)} takes longest,"
                f" {times.max():.2f} x the median rank"
            )
        if len(self.work) > 1 and self.slowest_work > _EVEN * work:
            lines += self._advise(attention)
        return lines

    def _advise(self, attention: str) -> list[str]:
        """Return what to do about documents that make ranks uneven."""
        if self.planned and min(self.given, self.dealt) >= self.planned_slowest:
            return ["  note      by built-in rates, messages take longer than balancing saves here"]
        is_known = attention in REPLACEABLE_ATTENTION
        way = f"--instead-of {attention}" if is_known else "--attn-implementation distca"
        tokens = round(self.tokens / (len(self.work) * self.batches))
        return [
            f"  balance   put hf-distca run {way} in front of your command",
            f"  deal      the same with --tokens-per-rank {tokens}: a step has as many as now",
        ][: 1 if self.given < self.dealt else 2]


def find(facts: Sequence[BatchFacts], per_node: int | None, *, plans: bool) -> Findings:
    """Find out about one micro-batch.

    Args:
        facts: of each rank, whose documents are known.
        per_node: ranks of a node; None if nodes are not told apart.
        plans: whether to plan it, too.
    """
    began, first, ranks = time.perf_counter(), facts[0], len(facts)
    cost = _make_cost(AttentionShape(*first.shape), first.device, first.attention)
    layers = [(replace(cost, window=window), count) for window, count in first.layers]
    lengths = [list(fact.lengths) for fact in facts]
    work, measured = _sum_work(layers, lengths), np.array([fact.seconds for fact in facts])
    tokens = sum(map(sum, lengths))
    planned = int(plans and 1 < ranks <= tokens)
    given, dealt = _plan(layers, lengths, per_node) if planned else (0.0, 0.0)
    return Findings(
        1,
        tokens,
        work,
        measured,
        np.bincount([int(measured.argmax())], minlength=ranks),
        float(work.max()),
        float(measured.max()),
        0.0,
        planned,
        float(work.mean()) * planned,
        float(work.max()) * planned,
        given,
        dealt,
        (time.perf_counter() - began) * planned,
    )


@cache
def _make_cost(shape: AttentionShape, device: str, attention: str) -> CostModel:
    """Make the cost model that distca begins with: the profile of the GPU and a flash kernel, if
    one is shipped, or else built-in figures.
    """
    kernel = attention.replace("attention", "attn") if "flash" in attention else "cuda"
    profile = Profile.find_gpu_profile(device, kernel)
    if profile is not None:
        return Profile.load(profile).make_cost_model(shape)
    return CostModel.make_analytic(shape, device_type=device)


def _sum_work(layers: Sequence[tuple[CostModel, int]], lengths: list[list[int]]) -> FloatArray:
    """Estimate the seconds of each rank in all layers, (ranks,)."""
    rank = np.repeat(np.arange(len(lengths)), [len(row) for row in lengths])
    length = np.array([count for row in lengths for count in row], dtype=np.int64)
    seconds = sum((cost.estimate_seconds(length, length) * count for cost, count in layers), 0.0)
    total: Any = np.bincount(rank, weights=seconds, minlength=len(lengths))
    return np.asarray(total, dtype=np.float64)


def _plan(
    layers: Sequence[tuple[CostModel, int]], lengths: list[list[int]], per_node: int | None
) -> tuple[float, float]:
    """Estimate the seconds of the slowest rank in all layers, with messages: as given and dealt."""
    ranks = Ranks(per_node=per_node)
    config = DistCAConfig()
    documents = [count for row in lengths for count in row]
    tokens, rest = divmod(sum(documents), len(lengths))
    cost = next((cost for cost, _ in layers if cost.window is None), layers[0][0])
    dealt_layout = deal(
        documents,
        len(lengths),
        [tokens + (rank < rest) for rank in range(len(lengths))],
        cost,
        ranks_per_node=per_node,
    )
    given, dealt = (
        sum(
            PlanLoad(balance(layout, cost, config, ranks), cost, ranks=ranks).slowest_seconds * n
            for cost, n in layers
        )
        for layout in (Layout.from_lengths(lengths), dealt_layout)
    )
    return float(given), float(dealt)
