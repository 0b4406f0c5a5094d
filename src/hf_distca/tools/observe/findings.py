"""`Findings`: how uneven the attention of ranks was, which rank was slow, and what hf-distca would
gain.

The work of forward and backward is estimated in seconds, by the built-in rates of a cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.config import REPLACEABLE_ATTENTION, DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.gpus import make_gpu_cost
from hf_distca.schedule.layout import FloatArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.observe.watch import BatchFacts

_EVEN = 1.07  # give no advice if slowest rank / mean is at most this


class Row(NamedTuple):
    """A micro-batch.

    Attributes:
        tokens: number of tokens on all ranks.
        work: estimated attention seconds of each rank's documents.
        measured: measured attention seconds of each rank.
        plans: estimated seconds of the slowest rank under hf-distca, including messages, with
            documents as given and with documents dealt; None if the micro-batch was not planned.
    """

    tokens: int
    work: FloatArray
    measured: FloatArray
    plans: tuple[float, float] | None


class Findings:
    """Findings about one or more micro-batches, which took `elapsed` seconds together."""

    def __init__(self, rows: Sequence[Row], elapsed: float) -> None:
        self.elapsed, self.tokens = elapsed, sum(row.tokens for row in rows)
        self.work = np.array([row.work for row in rows])  # (micro-batches, ranks)
        self.measured = np.array([row.measured for row in rows])
        self.slowest = np.bincount(self.measured.argmax(1), minlength=self.work.shape[1])
        self.planned = self.work[[row.plans is not None for row in rows]]
        self.given, self.dealt = np.sum([row.plans or (0.0, 0.0) for row in rows], 0).tolist()

    def compute_figures(self) -> dict[str, float]:
        """Compute the figures to log. Return them by name, without the prefix of the log. Leave out
        figures without data.
        """
        measured, planned = self.measured.mean(1).sum(), self.planned.mean(1).sum()
        only_some = len(self.planned) < len(self.work)
        figures = {
            "documents": (self.work.max(1).sum(), self.work.mean(1).sum()),
            "measured": (self.measured.max(1).sum(), measured),
            "slowest_rank": (self.slowest.argmax(), measured > 0),
            "attention_share": (measured, self.elapsed),
            "planned": (self.planned.max(1).sum(), planned * only_some),
            "as_given": (self.given, planned),
            "dealt": (self.dealt, planned),
        }
        return {name: float(a / b) for name, (a, b) in figures.items() if b}

    def describe(self, attention: str) -> list[str]:
        """Describe the figures in lines of text.

        Args:
            attention: name of the attention that was watched.
        """
        batches, ranks = self.work.shape
        figures = self.compute_figures()
        labels = {
            "documents": "by documents and built-in rates",
            "measured": f"measured, under {attention}",
            "planned": f"estimated in {len(self.planned)} of {batches}, by documents",
            "as_given": "with hf-distca, messages included",
            "dealt": "the same, documents dealt",
        }
        lines = ["  attention, slowest rank / mean"]
        lines += [f"    {labels[n]:<36}{figures[n]:>8.3f}" for n in labels if n in figures]
        if share := figures.get("attention_share"):
            waits = share * (figures["measured"] - 1)
            lines.append(
                f"  time      on average, a rank spends {share:.0%} in attention, and {waits:.0%}"
                " waiting for the slowest"
            )
        if ranks > 1 and self.work.sum(0).all() and self.measured.all():
            times, rank = self.measured.sum(0) / self.work.sum(0), int(self.slowest.argmax())
            times /= np.median(times)
            lines.append(
                f"  slowest   rank {rank}, in {self.slowest[rank]} of {batches} micro-batches; for"
                f" equal documents rank {times.argmax()} takes longest, {times.max():.2f} x the"
                " median rank"
            )
        if ranks > 1 and figures.get("documents", 1.0) > _EVEN:
            lines += self._advise(attention)
        return lines

    def _advise(self, attention: str) -> list[str]:
        """Return advice for documents that make ranks uneven."""
        if len(self.planned) and min(self.given, self.dealt) >= self.planned.max(1).sum():
            return ["  note      by built-in rates, messages take longer than balancing saves here"]
        is_known = attention in REPLACEABLE_ATTENTION
        way = f"--instead-of {attention}" if is_known else "--attn-implementation distca"
        tokens = round(self.tokens / self.work.size)
        return [
            f"  balance   put hf-distca run {way} in front of your command",
            f"  deal      the same with --tokens-per-rank {tokens}: as many tokens a step as now",
        ][: 1 if self.given < self.dealt else 2]


def find(facts: Sequence[BatchFacts], per_node: int | None, *, plans: bool) -> Row:
    """Compute the row of a micro-batch.

    Args:
        facts: facts of each rank, with known documents.
        per_node: number of ranks on a node; None if it is not known.
        plans: whether to plan the micro-batch.
    """
    first, layout = facts[0], Layout.from_lengths([fact.lengths for fact in facts])
    # If training runs flash attention, use the rates with which distca would start for this kernel.
    is_flash = "flash" in first.attention
    kernel = first.attention.replace("attention", "attn") if is_flash else "cuda"
    cost = make_gpu_cost(AttentionShape(*first.shape), first.device, kernel)
    layers = [(replace(cost, window=window), count) for window, count in first.layers]
    seconds = np.zeros(len(layout.length))
    for cost, count in layers:
        seconds += cost.estimate_seconds(layout.length, layout.length) * count
    tokens = int(layout.length.sum())
    return Row(
        tokens,
        np.bincount(layout.rank, seconds, len(facts)).astype(np.float64),
        np.array([fact.seconds for fact in facts]),
        _plan(layers, layout, per_node) if plans and 1 < len(facts) <= tokens else None,
    )


def _plan(
    layers: Sequence[tuple[CostModel, int]], layout: Layout, per_node: int | None
) -> tuple[float, float]:
    """Estimate the seconds of the slowest rank under hf-distca, including messages, summed over all
    layers. Return two estimates: for the documents as given, and for dealt documents.
    """
    ranks, config, size = Ranks(per_node=per_node), DistCAConfig(), layout.world_size
    tokens, rest = divmod(int(layout.length.sum()), size)
    cost = next((cost for cost, _ in layers if cost.window is None), layers[0][0])
    dealt_layout = deal(
        layout.length,
        size,
        [tokens + (rank < rest) for rank in range(size)],
        cost,
        ranks_per_node=per_node,
    )
    given, dealt = (
        sum(
            PlanLoad(balance(placed, cost, config, ranks), cost, ranks=ranks).slowest_seconds * n
            for cost, n in layers
        )
        for placed in (layout, dealt_layout)
    )
    return float(given), float(dealt)
