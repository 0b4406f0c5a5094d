"""`estimate_ways`: estimates the seconds of a step with global batches as they are, with samples
balanced over ranks, under context parallelism, and under hf-distca.

The scheduler's cost model estimates attention and its messages. Everything else in a step is
estimated as matrix products, at the best rate of the GPU and in proportion to the tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel, count_causal_pairs
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.advise.known_models import Model

_WHOLE = 0.99  # if documents keep this fraction of their attention, they are treated as whole


@dataclass(frozen=True)
class Run:
    """A training run to estimate.

    Attributes:
        model: the model.
        costs: for each kind of layer with attention, its cost model and the number of such layers.
        product_rate: floating-point operations per second of large matrix products.
        ranks, tokens: number of ranks, and number of tokens on each rank.
        per_node: number of ranks on a node.
        checkpointing: whether backward repeats the forward. hf-distca does not repeat attention.
    """

    model: Model
    costs: tuple[tuple[CostModel, int], ...] = field(repr=False)
    product_rate: float
    ranks: int
    tokens: int
    per_node: int
    checkpointing: bool

    @property
    def forwards(self) -> int:
        """Number of times that a step computes the forward."""
        return 2 if self.checkpointing else 1

    def estimate_products(self, tokens: FloatArray) -> FloatArray:
        """Estimate the seconds of everything except attention."""
        return 2 * (self.forwards + 2) * self.model.met_weights * tokens / self.product_rate

    def estimate_attention(self, lengths: IntArray, heads: float = 1.0) -> FloatArray:
        """Estimate the attention seconds of whole documents in all layers. `heads` is the fraction
        of the heads to count.
        """
        total = np.zeros(len(lengths))
        for cost, layers in self.costs:
            forward, backward = cost.estimate_directions(lengths, lengths, heads)
            total += layers * (self.forwards * forward + backward)
        return total


class Way(NamedTuple):
    """A way to run a step. Over several batches, each figure is a mean, except `most_tokens`.

    Attributes:
        title: name of the way.
        attention: seconds of attention and messages on the slowest rank, divided by the mean
            attention seconds of all ranks.
        seconds: seconds of a step.
        waiting: fraction of the step in which a rank computes nothing, on average.
        kept: attention that is computed, as a fraction of the attention of whole documents.
        most_tokens: largest number of tokens on a rank.
    """

    title: str
    attention: float
    seconds: float
    waiting: float
    kept: float
    most_tokens: int

    @property
    def keeps_documents(self) -> bool:
        """True if almost no document is cut."""
        return self.kept >= _WHOLE


def estimate_ways(run: Run, batches: Iterable[IntArray]) -> list[Way]:
    """Estimate each way to run a step. Of the ways of context parallelism, return only the fastest
    that leaves documents whole. If all of them cut documents, return the one that keeps the most
    attention.
    """
    steps: dict[str, list[Way]] = {}
    for lengths in batches:
        for way in _estimate_batch(run, lengths):
            steps.setdefault(way.title, []).append(way)
    ways = [
        Way._make([title, *np.mean([way[1:-1] for way in of_way], axis=0).tolist(), most])
        for title, of_way in steps.items()
        for most in [max(way.most_tokens for way in of_way)]
    ]
    split = [way for way in ways if way.title.startswith("context parallel")]
    best = min(split, key=lambda way: (-min(way.kept, _WHOLE), way.seconds), default=None)
    return [way for way in ways if way not in split or way is best]


def pack_rows(lengths: IntArray, rows: int, tokens: int) -> Layout:
    """Fill rows of `tokens` tokens with documents in order.

    The part of a document after the end of a row becomes a separate document.
    """
    ends = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, rows + 1) * tokens]))
    pieces = np.diff(ends, prepend=0)
    offsets = np.searchsorted(ends, np.arange(rows + 1) * tokens, side="right")
    return Layout(np.arange(len(pieces)), np.zeros_like(pieces), pieces, offsets)


def _assign_longest_first(seconds: FloatArray, ranks: int) -> IntArray:
    """Assign each document, longest first, to the rank that has the fewest seconds so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(seconds), dtype=np.int64)
    for document in np.argsort(-seconds, kind="stable").tolist():
        load, rank_of[document] = loads[0]
        heapq.heapreplace(loads, (load + seconds[document], int(rank_of[document])))
    return rank_of


def _estimate_batch(run: Run, lengths: IntArray) -> Iterable[Way]:
    rows = pack_rows(lengths, run.ranks, run.tokens)
    documents = run.estimate_attention(lengths)
    token_seconds = run.estimate_products(np.ones(1))
    rank = _assign_longest_first(documents + token_seconds * lengths, run.ranks)
    whole = _count_pairs(run, lengths)
    for title, pieces, rank_of in (
        ("as it is", rows.length, rows.rank),
        ("samples balanced over ranks", lengths, rank),
    ):
        seconds, tokens = (
            np.bincount(rank_of, weights=weights, minlength=run.ranks).astype(np.float64)
            for weights in (run.estimate_attention(pieces), pieces)
        )
        yield _make_way(title, run, seconds, seconds, tokens, _count_pairs(run, pieces) / whole)
    yield from _share_rows(run, lengths, whole)
    yield _disaggregate(run, lengths, whole, dealt=False)
    yield _disaggregate(run, lengths, whole, dealt=True)


def _make_way(
    title: str, run: Run, ends: FloatArray, computed: FloatArray, tokens: FloatArray, kept: float
) -> Way:
    """Make a `Way` from three figures of each rank: the seconds until its attention ends, the
    seconds in which it computes attention, and its tokens.
    """
    products = run.estimate_products(tokens)
    seconds = float((products + ends).max())
    waiting = 1 - float((products + computed).mean()) / seconds
    uneven = float(ends.max() / computed.mean())
    return Way(title, uneven, seconds, waiting, kept, int(tokens.max()))


def _count_pairs(run: Run, lengths: IntArray) -> float:
    return sum(
        layers * float(count_causal_pairs(lengths, lengths, cost.window).sum())
        for cost, layers in run.costs
    )


def _share_rows(run: Run, lengths: IntArray, whole: float) -> Iterable[Way]:
    """Estimate steps with context parallelism, in which several ranks share a row. In a ring, ranks
    pass on keys while they compute. Under Ulysses, each rank computes some of the heads.
    """
    for degree in (n for n in range(2, run.ranks + 1) if run.ranks % n == 0):
        rows = pack_rows(lengths, run.ranks // degree, run.tokens * degree)
        kept = _count_pairs(run, rows.length) / whole
        seconds = run.estimate_attention(rows.length, 1 / degree)
        computed = np.bincount(rows.rank, weights=seconds).astype(np.float64)
        tokens = np.full(len(computed), float(run.tokens))
        merged, ring, ulysses = _estimate_exchanges(run, degree)
        ways = {"ring": np.maximum(computed + merged, ring)}
        if not any(cost.shape.query_heads % degree for cost, _ in run.costs):
            ways["Ulysses"] = computed + ulysses
        for name, ends in ways.items():
            yield _make_way(
                f"context parallel: {name} over {degree} ranks", run, ends, computed, tokens, kept
            )


def _estimate_exchanges(run: Run, degree: int) -> FloatArray:
    """Estimate the extra seconds of a rank if `degree` ranks share a row. Return three figures:
    merging the results of a ring, the messages of a ring, and the messages of Ulysses.
    """
    total = np.zeros(3)
    inside = min(degree, run.per_node)
    for cost, layers in run.costs:
        shape, link = cost.shape, cost.exchange_bytes_per_second
        node = cost.node_bytes_per_second or link
        # In a ring, each of `degree` calls reads the rows again, and adds its results to float32
        # sums.
        sums = 1 + 8 / shape.element_bytes
        forward = shape.row_bytes + sums * shape.output_bytes
        backward = 2 * shape.row_bytes + sums * (shape.query_bytes + shape.key_value_bytes)
        merged = run.tokens * degree * forward * run.forwards / cost.forward.bytes_per_second
        merged += run.tokens * degree * backward / cost.backward.bytes_per_second
        # Ranks pass on keys and values. In backward, they also pass on the gradients of these.
        passed = run.tokens * (degree - 1) * shape.key_value_bytes * (run.forwards + 2)
        # If there are more ranks than key/value heads, Ulysses sends each head to several ranks.
        keys = shape.key_value_bytes * max(degree / shape.key_value_heads, 1)
        turned = run.tokens / degree * (shape.row_bytes + keys) * (run.forwards + 1)
        turned *= max((inside - 1) / node, (degree - inside) / link)
        total += layers * np.array([merged, passed / (node if degree == inside else link), turned])
    return total


def _disaggregate(run: Run, lengths: IntArray, whole: float, *, dealt: bool) -> Way:
    """Estimate a step with hf-distca. Every kind of layer is planned as in training. If there are
    many ranks, they form several groups, each with its own documents.
    """
    config = DistCAConfig()
    group = config.group_ranks(run.ranks)
    per_node = min(run.per_node, group)
    nodes = Ranks(per_node=None if group % per_node or per_node == 1 else per_node)
    groups = pack_rows(lengths, run.ranks // group, group * run.tokens)
    ends, computed, kept = [], [], 0.0
    for documents in np.split(groups.length, groups.offsets[1:-1]):
        layout = (
            deal(documents, group, run.tokens, run.costs[0][0], ranks_per_node=nodes.per_node)
            if dealt
            else pack_rows(documents, group, run.tokens)
        )
        loads = [
            (PlanLoad(balance(layout, cost, config, nodes), cost, ranks=nodes), layers)
            for cost, layers in run.costs
        ]
        # Ranks of a group wait for each other in every layer.
        ends.append(sum(layers * load.slowest_seconds for load, layers in loads))
        computed.append(sum(layers * load.compute_seconds.mean() for load, layers in loads))
        kept += sum(layers * float(load.pairs.sum()) for load, layers in loads) / whole
    tokens = np.full(len(ends), float(run.tokens))
    return _make_way(
        f"hf-distca, {'dealt' if dealt else 'as given'}",
        *(run, np.array(ends), np.array(computed), tokens, kept),
    )
