"""`render`: the page, one HTML file without external parts, with two pictures
drawn as SVG: seconds by rank, and a plan.

Colours have a contrast of 3 to 1 or more to both backgrounds of the page, light and dark, and those of documents 4.5 to 1 to the
white text on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment

from hf_distca.run_report.run_figures import Figures, PlanFigures, PlanPiece

__all__ = ["AFTER", "BEFORE", "DOCUMENTS", "Bar", "Picture", "RankRow", "Side", "pictures", "render"]

_TILES = (
    ("imbalance_measured_before", "imbalance before, measured", "{:.2f}"),
    ("imbalance_measured_after", "imbalance after, measured", "{:.2f}"),
    ("imbalance_estimated_before", "imbalance before, estimated", "{:.2f}"),
    ("imbalance_estimated_after", "imbalance after, estimated", "{:.2f}"),
    ("imbalance_tokens", "imbalance of tokens", "{:.2f}"),
    ("exchanged_mb_per_layer", "MB a layer and micro-batch, busiest rank", "{:.3g}"),
    ("between_nodes_mb_per_layer", "MB of these to other nodes, busiest rank", "{:.3g}"),
    ("server_time_share", "of rank 0's time in attention", "{:.0%}"),
    ("servers_share", "of attention computed by servers of the pool", "{:.0%}"),
    ("servers_idle", "of these servers' time idle", "{:.0%}"),
    ("planning_ms", "ms of planning a micro-batch", "{:.3g}"),
    ("moved_micro_batches", "micro-batches with moved work", "{:.0f}"),
    ("micro_batches", "micro-batches in all", "{:.0f}"),
)

BEFORE, AFTER = "#d97706", "#2f74c0"
DOCUMENTS = ("#2f74c0", "#c0501a", "#2c8154", "#b13f86", "#857000", "#6a63cf", "#0f7f8c", "#c8403a", "#5d7183", "#9a6a00")
_MOST_DRAWN = 32  # ranks; the table has all
_LABELLED = 0.06  # of the width: narrower bars have no room for a number


class Bar(NamedTuple):
    """A bar of a row.

    `start` and `length` are parts of the width, `tip` is shown under the pointer.

    A `moved` bar is computed for another rank, and hatched.
    """

    start: float
    length: float
    colour: str
    tip: str
    label: str = ""
    moved: bool = False


class RankRow(NamedTuple):
    """Bars of a rank: one behind another on one line, or on a line each."""

    rank: int
    lines: list[list[Bar]]


class Side(NamedTuple):
    """A half of a picture, or all of it."""

    caption: str
    rows: list[RankRow]


class Picture(NamedTuple):
    """A picture.

    Attributes:
        name: name of the element.
        title, text: text above it.
        width: meaning of its whole width.
        sides: one, or two beside each other.
        legend: colours by their meaning.
    """

    name: str
    title: str
    text: str
    width: str
    sides: list[Side]
    legend: dict[str, str]


def render(figures: Figures) -> str:
    """Render the page."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    page = template.render(figures=figures, pictures=pictures(figures), tiles=_tiles(figures), version=version("hf-distca"))
    return page.encode(errors="replace").decode()  # names of folders need not be text


def _tiles(figures: Figures) -> list[tuple[str, str]]:
    tiles = [(text.format(figures.total[name]), label) for name, label, text in _TILES if name in figures.total]
    shares = [trace.share for trace in figures.hidden if trace.share is not None]
    if shares:
        tiles.append((f"{sum(shares) / len(shares):.0%}", "of the messages' time hidden, mean of the traced ranks"))
    return tiles


def pictures(figures: Figures) -> list[Picture]:
    """Draw all pictures for which there are data."""
    drawn = []
    if figures.per_rank is not None:
        drawn.append(_seconds_by_rank(figures.per_rank.measured_before, figures.per_rank.measured_after))
    if figures.plan is not None:
        drawn.append(_plan(figures.plan))
    return drawn


def _seconds_by_rank(before: Sequence[float], after: Sequence[float]) -> Picture:
    longest = max(*before, *after) or 1.0

    def line(rank: int, seconds: float, when: str, colour: str) -> list[Bar]:
        return [Bar(0.0, seconds / longest, colour, f"rank {rank}, {when}: {_time(seconds)}")]

    rows = [
        RankRow(rank, [line(rank, before[rank], "before", BEFORE), line(rank, after[rank], "after", AFTER)])
        for rank in _changed_most(before, after)
    ]
    text = (
        "Measured seconds in attention kernels, forward and backward, over the whole run. Before: seconds given back to the rank "
        f"whose documents they were spent on.{_not_drawn(len(before))}"
    )
    legend = {"before": BEFORE, "after": AFTER}
    return Picture("ranks", "Attention seconds by rank", text, _time(longest), [Side("", rows)], legend)


def _plan(plan: PlanFigures) -> Picture:
    before, after = plan.per_rank.estimated_before, plan.per_rank.estimated_after
    longest, ranks = max(*before, *after) or 1.0, _changed_most(before, after)
    sides = [
        Side("as the documents lie", _stacked(plan.before, ranks, longest)),
        Side("as planned", _stacked(plan.after, ranks, longest)),
    ]
    text = (
        f"Micro-batch {plan.micro_batch}, step {plan.step}: estimated seconds of one layer by rank, in pieces of documents, with "
        f"the document's number. What a rank computes for another one is hatched.{_not_drawn(len(before))}"
    )
    return Picture("plan", "The plan of a step", text, _time(longest), sides, {})


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _changed_most(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Choose the ranks to draw, in order: those whose work changes most."""
    order = sorted(range(len(before)), key=lambda rank: -abs(before[rank] - after[rank]))
    return sorted(order[:_MOST_DRAWN])


def _not_drawn(ranks: int) -> str:
    return f" {_MOST_DRAWN} of {ranks} ranks are drawn: those whose work changes most." if ranks > _MOST_DRAWN else ""


def _stacked(pieces: Sequence[PlanPiece], ranks: Sequence[int], longest: float) -> list[RankRow]:
    lines: dict[int, list[Bar]] = {rank: [] for rank in ranks}
    ends = dict.fromkeys(ranks, 0.0)
    for piece in pieces:
        if piece.rank not in lines:
            continue
        length = piece.seconds / longest
        tip = (
            f"rank {piece.rank}: document {piece.document} of {piece.length} tokens, {piece.tokens} queries of rank "
            f"{piece.home}, {_time(piece.seconds)}"
        )
        label = str(piece.document) if length >= _LABELLED else ""
        colour = DOCUMENTS[piece.document % len(DOCUMENTS)]
        lines[piece.rank].append(Bar(ends[piece.rank], length, colour, tip, label, piece.rank != piece.home))
        ends[piece.rank] += length
    return [RankRow(rank, [bars]) for rank, bars in lines.items()]
