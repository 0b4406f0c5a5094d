"""`Findings`: how uneven the attention of ranks was, which rank was slow and why, and what
hf-distca would make of it.

Work is seconds by the built-in rates of a cost model, forward and backward.
"""

from __future__ import annotations

import math
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
from hf_distca.tools.observe.watch import DOCUMENTS, MASKED_ROWS, BatchFacts

_DIFFERENT = 0.07  # relative, of ranks that are not alike; less is noise
_FEWEST = 4  # micro-batches to compare
_PLANNING_SHARE = 0.005  # of the watched time, after the first plan


@dataclass(frozen=True)
class Findings:
    """Sums over micro-batches, which can be added; seconds and arrays of (ranks,).

    Attributes:
        batches, masked: number of micro-batches, and of those whose kernel computed what its mask
            hid.
        work, measured: of each rank: work of its documents, and measured seconds.
        comparable: number of micro-batches in which the kernels of all ranks computed the same part
            of a batch, so that seconds for equal work can be compared.
        computed, compared: of each rank in those: work that its kernel computed, and measured
            seconds.
        behind: number of those in which each rank took clearly longer than others for equal work.
        slowest: number of micro-batches in which each rank was the slowest by measured seconds.
        slowest_work, slowest_measured: of the slowest rank of each micro-batch.
        elapsed: of a mean rank.
        tokens: of all ranks.
        planned: number of micro-batches that were planned.
        planned_mean, planned_slowest, given, dealt: of these, work of the mean rank and of the
            slowest one, and of the slowest one with its messages.
        planning: seconds of planning.
    """

    batches: int = 0
    masked: int = 0
    work: FloatArray = field(default_factory=lambda: np.zeros(1))
    measured: FloatArray = field(default_factory=lambda: np.zeros(1))
    comparable: int = 0
    computed: FloatArray = field(default_factory=lambda: np.zeros(1))
    compared: FloatArray = field(default_factory=lambda: np.zeros(1))
    behind: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    slowest: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    slowest_work: float = 0.0
    slowest_measured: float = 0.0
    elapsed: float = 0.0
    tokens: int = 0
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
        """True if another plan would not take long beside the steps."""
        return self.planning <= _PLANNING_SHARE * self.elapsed

    def compute_figures(self) -> dict[str, float]:
        """Compute the figures to log; those without data are left out."""
        work, measured = float(self.work.mean()), float(self.measured.mean())
        figures = {
            "documents": self.slowest_work / work if work else None,
            "measured": self.slowest_measured / measured if measured else None,
            "slowest_rank": int(np.argmax(self.slowest)) if measured else None,
            "attention_share": measured / self.elapsed if measured and self.elapsed else None,
            "as_given": self.given / self.planned_mean if self.planned_mean else None,
            "dealt": self.dealt / self.planned_mean if self.planned_mean else None,
        }
        return {
            f"distca/observed_{name}": value for name, value in figures.items() if value is not None
        }

    @property
    def slow_hardware(self) -> dict[int, float]:
        """Ranks that take longer than the median rank for equal work, in most micro-batches: how
        many times as long.
        """
        if self.comparable < _FEWEST or not self.compared.all():
            return {}
        times = self.compared / self.computed
        times /= np.median(times)
        slow = (times > 1 + _DIFFERENT) & (self.behind > self.comparable * 2 / 3)
        return {rank: float(times[rank]) for rank in np.flatnonzero(slow).tolist()}

    def describe(self, attention: str) -> list[str]:
        """Describe the figures in lines.

        Args:
            attention: name of the attention that was watched.
        """
        figures = self.compute_figures()
        ranks = len(self.work)
        lines = ["  attention, slowest rank / mean"]
        for name, label in (
            ("documents", "by documents and built-in rates"),
            ("measured", f"measured, under {attention}"),
            ("as_given", "with hf-distca, messages included"),
            ("dealt", "the same, documents dealt"),
        ):
            if (value := figures.get(f"distca/observed_{name}")) is not None:
                lines.append(f"    {label:<36}{value:>8.3f}")
        if self.planned_mean and self.planned < self.batches:
            before = self.planned_slowest / self.planned_mean
            label = f"estimated in {self.planned} of {self.batches}, by documents"
            lines.insert(-2, f"    {label:<36}{before:>8.3f}")
        if share := figures.get("distca/observed_attention_share"):
            waits = self.slowest_measured / self.elapsed - share
            lines.append(
                f"  time      a mean rank spends {share:.0%} in attention, and {waits:.0%} waiting"
                " for the slowest"
            )
        if ranks > 1 and "distca/observed_measured" in figures:
            lines.append(f"  slowest   {self._explain_slowest()}")
        if self.masked and figures.get("distca/observed_documents", 1.0) > 1 + _DIFFERENT:
            lines.append(
                f"  note      in {self.masked} micro-batches {attention} also computed what masks"
                " hide, such as padding; hf-distca does not, and saves more than is estimated here"
            )
        if ranks > 1 and figures.get("distca/observed_documents", 1.0) > 1 + _DIFFERENT:
            is_known = attention in REPLACEABLE_ATTENTION
            way = f"--instead-of {attention}" if is_known else "--attn-implementation distca"
            tokens = round(self.tokens / (ranks * self.batches))
            advice = [
                f"  balance   put hf-distca run {way} in front of your command",
                f"  deal      the same with --tokens-per-rank {tokens}: a step has as many as now",
            ]
            if min(self.given, self.dealt) < self.planned_slowest or not self.planned:
                lines += advice[: 1 if self.given < self.dealt else 2]
            else:
                lines.append(
                    "  note      by built-in rates, messages take longer than balancing saves here"
                )
        return lines

    def _explain_slowest(self) -> str:
        """Name the rank that is slow, and say whether its data or its hardware is different."""
        rank = int(self.slowest.argmax())
        hardware = self.slow_hardware
        count = self.slowest[rank]
        expected = self.batches / len(self.slowest)
        text = f"rank {rank}, in {count} of {self.batches} micro-batches"
        if hardware:
            slow = ", ".join(f"rank {n} takes {hardware[n]:.2f} x" for n in list(hardware)[:8])
            return f"{text}; by hardware: for equal work {slow} as long as the median rank"
        if self.comparable < _FEWEST:
            return f"{text}; too few had equal kernels on all ranks, to tell data from hardware"
        if count <= expected + 3 * math.sqrt(expected):
            text = f"no rank in particular; most often {text}"
        return f"{text}; by data: for equal work no rank takes longer than others"


def find(facts: Sequence[BatchFacts], per_node: int | None, *, plans: bool) -> Findings:
    """Find out about one micro-batch.

    Args:
        facts: of each rank, whose documents are known.
        per_node: ranks of a node; None if nodes are not told apart.
        plans: whether to plan it, too.
    """
    first = facts[0]
    ranks = len(facts)
    cost = _make_cost(AttentionShape(*first.shape), first.device, first.attention)
    layers = [(replace(cost, window=window), count) for window, count in first.layers]
    work = _sum_work(layers, [fact.lengths for fact in facts])
    computed = _sum_work(
        layers,
        [
            fact.lengths if fact.computed == DOCUMENTS else [fact.row_length] * fact.rows
            for fact in facts
        ],
    )
    measured = np.array([fact.seconds for fact in facts])
    comparable = len({fact.computed for fact in facts}) == 1 and computed.all() and measured.all()
    times = measured / computed if comparable else np.ones(ranks)
    findings = Findings(
        1,
        any(fact.computed == MASKED_ROWS for fact in facts),
        work,
        measured,
        int(comparable),
        computed * comparable,
        measured * comparable,
        (times > (1 + _DIFFERENT) * np.median(times)).astype(np.int64),
        np.bincount([int(measured.argmax())], minlength=ranks),
        float(work.max()),
        float(measured.max()),
        float(np.mean([fact.elapsed for fact in facts])),
        sum(sum(fact.lengths) for fact in facts),
    )
    if not plans or ranks == 1 or findings.tokens < ranks:
        return findings
    began = time.perf_counter()
    given, dealt = _plan(layers, [fact.lengths for fact in facts], per_node)
    return replace(
        findings,
        planned=1,
        planned_mean=float(work.mean()),
        planned_slowest=float(work.max()),
        given=given,
        dealt=dealt,
        planning=time.perf_counter() - began,
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
