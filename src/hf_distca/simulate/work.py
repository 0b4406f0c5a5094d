"""`Work`: what a micro-batch asks of every rank under a strategy, and how plans become it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, FloatArray, causal_pairs
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import NodeBytes, PlanLoad, wire_seconds
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.waves import TransientBytes
from hf_distca.simulate.layers import Directions, layer_seconds, tensor_seconds
from hf_distca.simulate.setting import Setting

__all__ = ["Work", "of_documents", "of_nano_batches", "of_plan", "side_by_side", "together"]


@dataclass(frozen=True)
class Work:
    """One micro-batch; arrays have shape (ranks,) and seconds are those of all layers of the model together.

    Attributes:
        tokens: tokens that the linear layers of each rank run on.
        attention: seconds of core attention.
        exposed: seconds that each rank waits for messages of core attention.
        wire: seconds that such messages take, hidden or not, both directions.
        received: bytes that one layer's exchange keeps on each rank.
        pairs: query-key pairs computed, of one layer.
        meeting: how many neighbours wait for each other's messages in every layer; 1 for ranks that wait for nobody, or whose
            neighbours take as long as they do.
    """

    tokens: FloatArray
    attention: Directions
    exposed: Directions
    wire: FloatArray
    received: FloatArray
    pairs: float
    meeting: int = 1

    def times(self, layers: int) -> Work:
        """The work of so many layers like this one."""
        attention, exposed = (Directions(*(layers * part for part in pair)) for pair in (self.attention, self.exposed))
        return replace(self, attention=attention, exposed=exposed, wire=layers * self.wire)


def together(kinds: list[Work]) -> Work:
    """The work of layers of several kinds, on the same tokens."""

    def both(one: Work, other: Work) -> Work:
        attention = Directions(*(a + b for a, b in zip(one.attention, other.attention, strict=True)))
        exposed = Directions(*(a + b for a, b in zip(one.exposed, other.exposed, strict=True)))
        received = np.maximum(one.received, other.received)
        meeting = max(one.meeting, other.meeting)
        return Work(one.tokens, attention, exposed, one.wire + other.wire, received, one.pairs + other.pairs, meeting)

    return reduce(both, kinds)


def side_by_side(groups: Sequence[Work]) -> Work:
    """The work of several groups of ranks, one after another."""

    def joined(name: str) -> Directions:
        pairs = [getattr(group, name) for group in groups]
        return Directions(*(np.concatenate(way) for way in zip(*pairs, strict=True)))

    names = ("tokens", "wire", "received")
    tokens, wire, received = (np.concatenate([getattr(group, name) for group in groups]) for name in names)
    meeting = len(groups[0].tokens) if wire.any() else 1
    return Work(tokens, joined("attention"), joined("exposed"), wire, received, sum(group.pairs for group in groups), meeting)


def of_documents(setting: Setting, length: IntArray, rank: IntArray, ranks: int) -> Work:
    """Whole documents, each on one rank, and nothing exchanged."""

    def sums(values: npt.NDArray[Any]) -> FloatArray:
        return np.bincount(rank, weights=values, minlength=ranks).astype(np.float64)

    nothing = np.zeros(ranks)
    kinds = []
    for window, layers in setting.model.kinds:
        cost = setting.cost(window)
        attention = Directions(sums(cost.forward_seconds(length, length)), sums(cost.backward_seconds(length, length)))
        pairs = float(causal_pairs(length, length, window).sum())
        kinds.append(Work(sums(length), attention, Directions(nothing, nothing), nothing, nothing, pairs).times(layers))
    return together(kinds)


class _Moves(NamedTuple):
    """One layer of a plan: seconds of each rank."""

    attention: Directions
    own: Directions  # of tasks that wait for nothing
    dispatch: Directions
    back: Directions
    received: FloatArray  # bytes
    pairs: float

    @property
    def wire(self) -> FloatArray:
        return np.asarray(sum((*self.dispatch, *self.back)))


def _moves(plan: Plan, cost: CostModel, nodes: Ranks) -> _Moves:
    load = PlanLoad(plan, cost, ranks=nodes)
    cost, shape, ranks = load.cost, cost.shape, plan.layout.world_size
    rows = plan.end - plan.start
    forward, backward = (directed(rows, plan.end, plan.heads) for directed in (cost.forward_seconds, cost.backward_seconds))

    def sums(values: npt.NDArray[Any], among: npt.NDArray[np.bool_] | None = None) -> FloatArray:
        weights = values if among is None else values * among
        return np.bincount(plan.server, weights=weights, minlength=ranks).astype(np.float64)

    attention, nothing = Directions(sums(forward), sums(backward)), np.zeros(ranks)
    pairs = float(load.pairs.sum())
    if not plan.moved:
        nowhere = Directions(nothing, nothing)
        return _Moves(attention, attention, nowhere, nowhere, nothing, pairs)
    queries, keys, sent = load.query_tokens, load.key_tokens, load.sent_keys
    away = plan.home != plan.server
    source, server = (np.concatenate(pair) for pair in ((plan.home[away], sent.source), (plan.server[away], sent.server)))
    query_tokens = (rows * plan.heads)[away]
    key_tokens = (sent.end - sent.start) * plan.layout.heads_of(sent.document)

    def seconds(query_bytes: int, key_bytes: int) -> FloatArray:
        # The way back takes as long as the way there: what counts is the busier of a rank's two roles.
        messages = source, server, np.concatenate([query_tokens * query_bytes, key_tokens * key_bytes])
        moved = NodeBytes.of(messages, ranks, load.ranks.per_node or 1)
        # Relays pass keys on, and get their gradients, in an exchange of their own.
        exchanges = 2 if plan.relays is not None and key_bytes else 1
        return np.asarray(np.maximum(*wire_seconds(moved, cost, load.ranks)) + exchanges * cost.exchange_seconds)

    dispatch = Directions(
        seconds(shape.query_bytes, shape.key_value_bytes),
        seconds(shape.query_bytes + 2 * shape.output_bytes + shape.lse_bytes, shape.key_value_bytes),
    )
    back = Directions(seconds(shape.output_bytes + shape.lse_bytes, 0), seconds(shape.query_bytes, shape.key_value_bytes))
    needed = load.needed_keys
    remote = needed.source != needed.server
    waits = np.isin(plan.document * ranks + plan.server, np.unique(needed.document[remote] * ranks + needed.server[remote]))
    own = (plan.home == plan.server) & ~waits
    each = TransientBytes.of(shape)
    received = each.query * queries[1] + each.key * keys[1] + each.sent_query * queries[0] + each.sent_key * keys[0]
    return _Moves(attention, Directions(sums(forward, own), sums(backward, own)), dispatch, back, received, pairs)


def of_plan(plan: Plan, cost: CostModel, nodes: Ranks = ALIKE) -> Work:
    """One layer of a plan, single-stream: a rank computes its own tasks while messages come, and waits for outputs."""
    layer = _moves(plan, cost, nodes)
    exposed = (
        np.maximum(dispatch - own, 0) + back for dispatch, own, back in zip(layer.dispatch, layer.own, layer.back, strict=True)
    )
    tokens = plan.layout.query_tokens.astype(np.float64)
    meeting = plan.layout.world_size if plan.moved else 1
    return Work(tokens, layer.attention, Directions(*exposed), layer.wire, layer.received, layer.pairs, meeting)


def of_nano_batches(setting: Setting, plans: tuple[Plan, Plan], cost: CostModel, nodes: Ranks = ALIKE) -> Work:
    """One layer of the plans of two nano-batches in ping-pong.

    In turns: linear layers of A beside the return of B, those of B beside the dispatch of A, attention of A beside the dispatch
    of B, attention of B beside the return of A. What of a message is longer than what runs beside it is waited for.
    """
    one, two = (_moves(plan, cost, nodes) for plan in plans)
    tokens = [plan.layout.query_tokens.astype(np.float64) for plan in plans]
    linear = [layer_seconds(setting, count) for count in tokens]
    hidden = [tensor_seconds(setting, count) for count in tokens]
    exposed = []
    for way in (0, 1):
        beside = (
            (one.dispatch[way], linear[1][way] + hidden[1]),
            (two.dispatch[way], one.attention[way]),
            (one.back[way], two.attention[way]),
            (two.back[way], linear[0][way] + hidden[0]),
        )
        exposed.append(np.asarray(sum(np.maximum(message - work, 0) for message, work in beside)))
    attention = Directions(*(a + b for a, b in zip(one.attention, two.attention, strict=True)))
    received = np.maximum(one.received, two.received)
    pairs, meeting = one.pairs + two.pairs, len(received) if any(plan.moved for plan in plans) else 1
    return Work(tokens[0] + tokens[1], attention, Directions(*exposed), one.wire + two.wire, received, pairs, meeting)
