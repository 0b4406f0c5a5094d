"""Imported for its effect: it plans, which loads the scheduler's compiled loop."""

from __future__ import annotations

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout

_COST = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))
_LAYOUT = Layout.from_lengths([[96], [24, 24, 24, 24]])
for _changes in ({}, {"ping_pong": True}, {"max_transient_bytes": 20_000}):
    balance(_LAYOUT, _COST, DistCAConfig(tile=8, min_gain=0.0, **_changes))
