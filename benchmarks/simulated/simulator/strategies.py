"""The compared strategies, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hf_distca.errors import ConfigError
from hf_distca.schedule.layout import IntArray
from hf_distca.tools.advise.ways import pack_rows
from simulator import context, loader_rules
from simulator.disaggregated import deal_documents, fill_given_rows, make_group_candidates
from simulator.memory import find_most_tokens
from simulator.setting import Setting
from simulator.work import Candidate, MicroBatchWork, compute_document_work

Batches = Sequence[IntArray]


@dataclass(frozen=True)
class Strategy:
    """A way to place documents and share attention.

    Attributes:
        name, title: name in options and in tables.
        candidates: function that makes the ways to run the micro-batches of a step.
        disaggregated: whether attention servers compute attention and home ranks keep its outputs,
            so that full checkpointing repeats no attention.
    """

    name: str
    title: str
    candidates: Callable[[Setting, Batches], list[Candidate]] = field(repr=False)
    disaggregated: bool = False


def _place(
    assign: Callable[[Setting, IntArray], tuple[IntArray, IntArray]],
    setting: Setting,
    batches: Batches,
) -> list[Candidate]:
    """Make the only candidate for documents that each lie on one rank; `assign` returns lengths and
    ranks of the documents.
    """
    return [
        Candidate(
            [compute_document_work(setting, *assign(setting, lengths)) for lengths in batches]
        )
    ]


def _pack(setting: Setting, lengths: IntArray) -> tuple[IntArray, IntArray]:
    layout = pack_rows(lengths, setting.group, setting.tokens_per_rank)
    return layout.length, layout.rank


def _assign_longest_first(setting: Setting, lengths: IntArray) -> tuple[IntArray, IntArray]:
    seconds = loader_rules.estimate_document_seconds(setting, lengths)
    return lengths, loader_rules.assign_longest_first(seconds, lengths, setting.group)


def _rebalance(setting: Setting, lengths: IntArray) -> tuple[IntArray, IntArray]:
    return lengths, loader_rules.assign_by_equal_cost(lengths, setting.group)


def _make_context(
    work_of_rows: Callable[[Setting, context.SharedRows, int], MicroBatchWork],
    setting: Setting,
    batches: Batches,
) -> list[Candidate]:
    """Make candidates of rows with equally many tokens, each shared by equally many ranks. The end
    of a row cuts a document.
    """
    candidates = []
    for degree in context.list_degrees(setting.group):
        if work_of_rows is context.compute_ulysses and setting.shape.query_heads % degree:
            continue
        count, tokens = setting.group // degree, setting.tokens_per_rank * degree
        packed = [pack_rows(lengths, count, tokens) for lengths in batches]
        rows = [context.SharedRows(layout.length, layout.rank, count) for layout in packed]
        ways = [work_of_rows]
        if work_of_rows is context.compute_all_gather and context.is_gathered_again(
            setting, degree
        ):
            ways.append(partial(context.compute_all_gather, again=True))
        candidates += [
            Candidate([way(setting, documents, degree) for documents in rows], degree)
            for way in ways
        ]
    return candidates


def _make_wlb(setting: Setting, batches: Batches) -> list[Candidate]:
    """Make candidates of rows with about equal seconds and as many tokens as memory allows, over
    all micro-batches of a step.
    """
    lengths = np.concatenate(batches)
    seconds = loader_rules.estimate_document_seconds(setting, lengths)
    candidates = []
    for degree in context.list_degrees(setting.group):
        rows = setting.group // degree
        count = len(batches)
        row = np.zeros(0, dtype=np.int64)
        fullest = math.inf
        for again in (True, False) if context.is_gathered_again(setting, degree) else (False,):
            room = find_most_tokens(
                setting, *context.compute_key_bytes(setting, degree, again=again)
            )
            cap = max(room, setting.tokens_per_rank) * degree
            if int(lengths.max()) > cap:
                continue
            # Rows that do not reach the cap are the same without it.
            if fullest > cap:
                row = loader_rules.assign_longest_first(seconds, lengths, rows * count, cap)
                fullest = float(np.bincount(row, weights=lengths).max())
            batch = row // rows
            shared = [
                context.SharedRows(lengths[batch == n], row[batch == n] - n * rows, rows)
                for n in range(count)
            ]
            wlb = partial(context.compute_wlb, setting, degree=degree, again=again)
            candidates.append(Candidate([wlb(documents) for documents in shared], degree))
    return candidates


_GIVEN = partial(make_group_candidates, fill_given_rows, loader_rules.cut_into_batches)
_DEALT = partial(make_group_candidates, deal_documents, loader_rules.distribute_documents)
_ALL_GATHER = partial(_make_context, context.compute_all_gather)
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("plain", "packed rows", partial(_place, _pack)),
        Strategy("lpt", "loader: longest first", partial(_place, _assign_longest_first)),
        Strategy("batch-rebalance", "loader: batch_rebalance", partial(_place, _rebalance)),
        Strategy("ring", "context parallel: ring", partial(_make_context, context.compute_ring)),
        Strategy("all-gather", "context parallel: all-gather", _ALL_GATHER),
        Strategy("ulysses", "Ulysses", partial(_make_context, context.compute_ulysses)),
        Strategy("wlb", "WLB-LLM", _make_wlb),
        Strategy("given", "hf-distca, as given", partial(_GIVEN, False), True),
        Strategy("given-ping-pong", "hf-distca, as given, ping-pong", partial(_GIVEN, True), True),
        Strategy("dealt", "hf-distca, dealt", partial(_DEALT, False), True),
        Strategy("dealt-ping-pong", "hf-distca, dealt, ping-pong", partial(_DEALT, True), True),
    )
}
OURS = tuple(strategy.name for strategy in STRATEGIES.values() if strategy.disaggregated)


def find_strategy(strategy: str | Strategy) -> Strategy:
    """Find a strategy by name; return a `Strategy` unchanged.

    Raises:
        ConfigError: if no strategy has this name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy {strategy!r} is not known: it must be one of {', '.join(STRATEGIES)}."
        )
    return STRATEGIES[strategy]
