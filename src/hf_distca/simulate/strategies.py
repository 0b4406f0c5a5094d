"""The strategies that are compared, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.simulate import context, loader_rules
from hf_distca.simulate.disaggregated import Placement, dealt, given, published, work_of
from hf_distca.simulate.memory import most_tokens
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.work import MicroBatchWork, of_documents, side_by_side

__all__ = ["DISAGGREGATED", "OURS", "STRATEGIES", "Candidate", "Strategy"]

Batches = Sequence[IntArray]


@dataclass(frozen=True)
class Candidate:
    """One way in which a strategy can run a step; of several, the fastest that fits in memory counts.

    Attributes:
        works: the work of each micro-batch, or, with `ticks`, of each tick of all stages' ranks.
        degree: ranks that share a document or a row, where that is chosen.
        ticks: whether stages run the same phase, and idle ones serve.
    """

    works: list[MicroBatchWork]
    degree: int | None = None
    ticks: bool = False


@dataclass(frozen=True)
class Strategy:
    """A way to place documents and share attention.

    Attributes:
        name, title: for options, and for tables.
        candidates: the ways to run the micro-batches of a step.
        keeps_attention: whether attention is not repeated under full checkpointing.
        about: how it is modelled.
    """

    name: str
    title: str
    candidates: Callable[[Setting, Batches], list[Candidate]] = field(repr=False)
    about: str
    keeps_attention: bool = False


def _plain(setting: Setting, batches: Batches) -> list[Candidate]:
    works = []
    for lengths in batches:
        rows = loader_rules.packed_rows(lengths, setting.group, setting.tokens_per_rank)
        works.append(of_documents(setting, rows.length, rows.rank, setting.group))
    return [Candidate(works)]


def _loader(bins: Callable[[Setting, IntArray, int], IntArray], setting: Setting, batches: Batches) -> list[Candidate]:
    works = [of_documents(setting, lengths, bins(setting, lengths, setting.group), setting.group) for lengths in batches]
    return [Candidate(works)]


def _lpt(setting: Setting, lengths: IntArray, bins: int) -> IntArray:
    return loader_rules.longest_first(loader_rules.document_seconds(setting, lengths), lengths, bins)


def _batch_rebalance(_: Setting, lengths: IntArray, bins: int) -> IntArray:
    return loader_rules.batch_rebalance(lengths, bins)


def _context(
    work_of_rows: Callable[[Setting, context.SharedRows, int], MicroBatchWork], setting: Setting, batches: Batches
) -> list[Candidate]:
    """Rows of equally many tokens, each shared by as many ranks; documents are cut at the end of a row."""
    candidates = []
    for degree in context.degrees(setting.group):
        if work_of_rows is context.ulysses and setting.shape.query_heads % degree:
            continue
        count, tokens = setting.group // degree, setting.tokens_per_rank * degree
        packed = [loader_rules.packed_rows(lengths, count, tokens) for lengths in batches]
        works = [work_of_rows(setting, context.SharedRows(rows.length, rows.rank, count), degree) for rows in packed]
        candidates.append(Candidate(works, degree))
        if work_of_rows is context.all_gather and _comes_again(setting, degree):
            candidates.append(Candidate([context.gathered_again(setting, work, degree) for work in works], degree))
    return candidates


def _comes_again(setting: Setting, degree: int) -> bool:
    """Whether it makes a difference that gathered keys are not kept for backward."""
    return degree > 1 and setting.checkpointing != "full"


def _wlb(setting: Setting, batches: Batches) -> list[Candidate]:
    """Rows of about equal seconds, as many tokens as memory allows, over all micro-batches of a step."""
    lengths = np.concatenate(batches)
    seconds = loader_rules.document_seconds(setting, lengths)
    candidates = []
    for degree in context.degrees(setting.group):
        rows, count = setting.group // degree, len(batches)
        row, fullest = np.zeros(0, dtype=np.int64), math.inf
        for again in (True, False) if _comes_again(setting, degree) else (False,):
            room = most_tokens(setting, context.key_bytes(setting, degree, again=again))
            cap = max(room, setting.tokens_per_rank) * degree
            if int(lengths.max()) > cap:
                continue
            if fullest > cap:  # else rows that were not filled to this cap are as they would be under it
                row = loader_rules.longest_first(seconds, lengths, rows * count, cap)
                fullest = float(np.bincount(row, weights=lengths).max())
            batch = row // rows
            shared = [context.SharedRows(lengths[batch == n], row[batch == n] - n * rows, rows) for n in range(count)]
            works = [context.wlb(setting, documents, degree) for documents in shared]
            if again:
                works = [context.gathered_again(setting, work, degree) for work in works]
            candidates.append(Candidate(works, degree))
    return candidates


def _disaggregated(place: Callable[[Setting, IntArray], Placement], setting: Setting, batches: Batches) -> list[Candidate]:
    placed = [place(setting, lengths) for lengths in batches]
    if setting.stages == 1:
        return [Candidate([work_of(setting, placement) for placement in placed])]
    return [Candidate([work_of(setting, tick) for tick in _ticks(setting, placed)], ticks=True)]


def _ours(
    place: Callable[..., Placement],
    share: Callable[[IntArray, int, int], list[IntArray]],
    ping_pong: bool,
    setting: Setting,
    batches: Batches,
) -> list[Candidate]:
    if ping_pong and setting.stages > 1:
        return []  # hf_distca.pipeline refuses it
    count = setting.group // setting.shared
    if count == 1:
        return _disaggregated(partial(place, ping_pong=ping_pong), setting, batches)
    group_setting, works = replace(setting, ranks=setting.ranks // count), []
    for lengths in batches:
        placed = [place(group_setting, group, ping_pong=ping_pong) for group in share(lengths, count, group_setting.tokens)]
        works.append(side_by_side([work_of(group_setting, placement) for placement in placed]))
    return [Candidate(works)]


def _ticks(setting: Setting, placed: Sequence[Placement]) -> list[Placement]:
    """What lies on the ranks of all stages in each tick of one direction; stages without a micro-batch have nothing."""
    ticks = []
    for tick in range(len(placed) + setting.stages - 1):
        running = [placed[tick - stage] if 0 <= tick - stage < len(placed) else None for stage in range(setting.stages)]
        layouts = tuple(
            _side_by_side([None if placement is None else placement.layouts[nano] for placement in running], setting.group)
            for nano in range(len(placed[0].layouts))
        )
        ticks.append(Placement(layouts, placed[0].planner))
    return ticks


def _side_by_side(layouts: Sequence[Layout | None], ranks: int) -> Layout:
    """The ranks of several layouts one after another; their documents are different ones."""
    none = np.zeros(0, dtype=np.int64)
    empty = Layout(none, none, none, np.zeros(ranks + 1, dtype=np.int64))
    present = [empty if layout is None else layout for layout in layouts]
    documents, first = [], 0
    for layout in present:
        documents.append(layout.document + first)
        first += int(layout.document.max(initial=-1)) + 1
    segments = np.concatenate([np.diff(layout.offsets) for layout in present])
    return Layout(
        np.concatenate(documents),
        np.concatenate([layout.start for layout in present]),
        np.concatenate([layout.length for layout in present]),
        np.concatenate([[0], np.cumsum(segments)]),
        np.concatenate([layout.context for layout in present]),
    )


_CUT = "a row's end cuts documents, and each part attends to itself alone"
_BEST = "the fastest degree that fits in memory, for each batch anew"
_KEPT = "gathered keys are kept for backward if that fits, or come again"

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("plain", "packed rows", _plain, f"documents in order in rows of equal tokens; {_CUT}"),
        Strategy(
            "lpt", "loader: longest first", partial(_loader, _lpt), "whole documents, each to the rank with the least to do"
        ),
        Strategy(
            "batch-rebalance",
            "loader: batch_rebalance",
            partial(_loader, _batch_rebalance),
            "transformers' rule at its best: documents sorted by length in runs of equal cost, not padded",
        ),
        Strategy(
            "ring", "context parallel: ring", partial(_context, context.ring), f"head and tail of each document; {_BEST}; {_CUT}"
        ),
        Strategy(
            "all-gather",
            "context parallel: all-gather",
            partial(_context, context.all_gather),
            f"head and tail of each document, keys gathered before attention; {_KEPT}; {_BEST}; {_CUT}",
        ),
        Strategy(
            "ulysses", "Ulysses", partial(_context, context.ulysses), f"heads instead of tokens in attention; {_BEST}; {_CUT}"
        ),
        Strategy(
            "wlb",
            "WLB-LLM",
            _wlb,
            f"rows of equal seconds, tokens as memory allows, cut by document or by row; {_KEPT}; {_BEST}; nothing is deferred",
        ),
        Strategy(
            "published",
            "published DistCA planner",
            partial(_disaggregated, published),
            "documents in order over ranks; greedy on pairs, tolerance 0.05; two nano-batches in turns",
            keeps_attention=True,
        ),
        *(
            Strategy(
                f"{way}{'-ping-pong' if ping_pong else ''}",
                f"hf-distca, {'as given' if way == 'given' else way}{', ping-pong' if ping_pong else ''}",
                partial(_ours, place, share, ping_pong),
                about + ("; two nano-batches in turns, and no pipelines" if ping_pong else "; one stream"),
                keeps_attention=True,
            )
            for way, place, share, about in (
                ("given", given, loader_rules.cut_into_batches, f"rows as packed; {_CUT}"),
                ("dealt", dealt, loader_rules.filled_batches, "whole documents dealt with equal tokens"),
            )
            for ping_pong in (False, True)
        ),
    )
}
OURS = tuple(name for name in STRATEGIES if name.startswith(("given", "dealt")))
DISAGGREGATED = (*OURS, "published")
