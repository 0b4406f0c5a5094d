"""The strategies that are compared, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hf_distca.errors import ConfigError
from hf_distca.schedule.layout import IntArray
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
        name, title: name in options, and in tables.
        candidates: makes the ways to run the micro-batches of a step.
        about: description of the model.
        disaggregated: whether attention servers compute attention and homes keep its output, so
            that full checkpointing repeats none.
    """

    name: str
    title: str
    candidates: Callable[[Setting, Batches], list[Candidate]] = field(repr=False)
    about: str
    disaggregated: bool = False


def _make_plain(setting: Setting, batches: Batches) -> list[Candidate]:
    layouts = [
        loader_rules.pack_rows(lengths, setting.group, setting.tokens_per_rank)
        for lengths in batches
    ]
    return [
        Candidate(
            [compute_document_work(setting, layout.length, layout.rank) for layout in layouts]
        )
    ]


def _make_lpt(setting: Setting, batches: Batches) -> list[Candidate]:
    placed = (
        (
            n,
            loader_rules.assign_longest_first(
                loader_rules.estimate_document_seconds(setting, n), n, setting.group
            ),
        )
        for n in batches
    )
    return [Candidate([compute_document_work(setting, lengths, rank) for lengths, rank in placed])]


def _make_batch_rebalance(setting: Setting, batches: Batches) -> list[Candidate]:
    return [
        Candidate(
            [
                compute_document_work(
                    setting, n, loader_rules.assign_by_equal_cost(n, setting.group)
                )
                for n in batches
            ]
        )
    ]


def _make_context(
    work_of_rows: Callable[[Setting, context.SharedRows, int], MicroBatchWork],
    setting: Setting,
    batches: Batches,
) -> list[Candidate]:
    """Make candidates of rows with equally many tokens, each shared by as many ranks; documents are
    cut at the end of a row.
    """
    candidates = []
    for degree in context.list_degrees(setting.group):
        if work_of_rows is context.compute_ulysses and setting.shape.query_heads % degree:
            continue
        count, tokens = setting.group // degree, setting.tokens_per_rank * degree
        packed = [loader_rules.pack_rows(lengths, count, tokens) for lengths in batches]
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
    """Make candidates of rows with about equal seconds, as many tokens as memory allows, over all
    micro-batches of a step.
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
            # Else rows that were not filled to this cap are as they would be under it.
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


_CUT = "a row's end cuts documents, and each part attends to itself alone"
_BEST = "the fastest degree that fits in memory, for each batch anew"
_KEPT = "gathered keys are kept for backward if that fits, or come again"
_GIVEN = partial(make_group_candidates, fill_given_rows, loader_rules.cut_into_batches)
_DEALT = partial(make_group_candidates, deal_documents, loader_rules.distribute_documents)
_ONE_STREAM, _IN_TURNS = "; one stream", "; two nano-batches in turns"
_AS_GIVEN = f"rows as packed; {_CUT}"
_AS_DEALT = "whole documents dealt with equal tokens"

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "plain",
            "packed rows",
            _make_plain,
            f"documents in order in rows of equal tokens; {_CUT}",
        ),
        Strategy(
            "lpt",
            "loader: longest first",
            _make_lpt,
            "whole documents, each to the rank with the least to do",
        ),
        Strategy(
            "batch-rebalance",
            "loader: batch_rebalance",
            _make_batch_rebalance,
            "transformers' rule at its best: documents sorted by length in runs of equal cost, not"
            " padded",
        ),
        Strategy(
            "ring",
            "context parallel: ring",
            partial(_make_context, context.compute_ring),
            f"head and tail of each document; {_BEST}; {_CUT}",
        ),
        Strategy(
            "all-gather",
            "context parallel: all-gather",
            partial(_make_context, context.compute_all_gather),
            f"head and tail of each document, keys gathered before attention; {_KEPT}; {_BEST};"
            f" {_CUT}",
        ),
        Strategy(
            "ulysses",
            "Ulysses",
            partial(_make_context, context.compute_ulysses),
            f"heads instead of tokens in attention; {_BEST}; {_CUT}",
        ),
        Strategy(
            "wlb",
            "WLB-LLM",
            _make_wlb,
            f"rows of equal seconds, tokens as memory allows, cut by document or by row; {_KEPT};"
            f" {_BEST}; nothing is deferred",
        ),
        Strategy(
            "given",
            "hf-distca, as given",
            partial(_GIVEN, False),
            _AS_GIVEN + _ONE_STREAM,
            disaggregated=True,
        ),
        Strategy(
            "given-ping-pong",
            "hf-distca, as given, ping-pong",
            partial(_GIVEN, True),
            _AS_GIVEN + _IN_TURNS,
            disaggregated=True,
        ),
        Strategy(
            "dealt",
            "hf-distca, dealt",
            partial(_DEALT, False),
            _AS_DEALT + _ONE_STREAM,
            disaggregated=True,
        ),
        Strategy(
            "dealt-ping-pong",
            "hf-distca, dealt, ping-pong",
            partial(_DEALT, True),
            _AS_DEALT + _IN_TURNS,
            disaggregated=True,
        ),
    )
}
OURS = tuple(strategy.name for strategy in STRATEGIES.values() if strategy.disaggregated)


def find_strategy(strategy: str | Strategy) -> Strategy:
    """Find a strategy by name; return a strategy of the caller unchanged.

    Raises:
        ConfigError: if there is none of this name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy {strategy!r} is not known: it must be one of {', '.join(STRATEGIES)}."
        )
    return STRATEGIES[strategy]
