"""Pipeline stages as they could be: in every tick, ranks with linear layers get less attention, so
that all ranks end together.

hf-distca spreads the attention of a tick evenly over all ranks. Those without a micro-batch have
nothing else to do, and wait for the linear layers of the others. In ping-pong a rank need not wait
for attention that others compute, so it could have less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from simulator.disaggregated import deal_documents, make_candidates
from simulator.predict import estimate_linear_seconds
from simulator.setting import Setting
from simulator.strategies import Strategy
from simulator.work import Candidate

LEAST = 0.02  # of the mean attention, for ranks whose linear layers take longer than the tick


def in_even_ticks(setting: Setting, batches: Sequence[IntArray]) -> list[Candidate]:
    """Dealt documents in two nano-batches."""

    def planner(layout: Layout, cost: CostModel, config: DistCAConfig, nodes: Ranks) -> Plan:
        seconds = float(cost.estimate_seconds(layout.length, layout.end).sum())
        linear = (
            estimate_linear_seconds(setting, layout.query_tokens.astype(np.float64)).sum(axis=0)
            / setting.model.layers
        )
        if seconds and np.ptp(linear):
            nodes = replace(nodes, speeds=tuple(attention_beside(linear, seconds).tolist()))
        return balance(layout, cost, config, nodes)

    return make_candidates(
        setting, [deal_documents(setting, lengths, ping_pong=True) for lengths in batches], planner
    )


def attention_beside(linear: FloatArray, seconds: float) -> FloatArray:
    """How much of `seconds` of attention each rank gets beside these seconds of linear layers,
    about 1 on average.
    """
    rising, count = np.sort(linear), np.arange(1, len(linear) + 1)
    # Where so many ranks with the least linear layers end.
    levels = (seconds + np.cumsum(rising)) / count
    level = levels[np.flatnonzero(levels >= rising)[-1]]
    attention = np.maximum(level - linear, LEAST * seconds / len(linear))
    return np.asarray(attention / attention.mean())


EVEN_TICKS = Strategy(
    "even-ticks",
    "hf-distca, even ticks",
    in_even_ticks,
    "dealt, ping-pong, and less attention for ranks with linear layers; not built",
    disaggregated=True,
)
