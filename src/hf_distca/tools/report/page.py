"""`render`: makes the page, an HTML file without external parts. It has two SVG pictures: seconds
by rank, and a plan.

All colours have a contrast of at least 3 to 1 to both backgrounds of the page, light and dark.
Colours of documents have a contrast of at least 4.5 to 1 to the white text on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment

from hf_distca.agreement.record_rows import PerRank
from hf_distca.tools.report.run_figures import Figures, PlanFigures, PlanPiece

_MORE = (
    ("imbalance_measured_before", "imbalance before, measured", "{:.2f}"),
    ("imbalance_measured_after", "imbalance after, measured", "{:.2f}"),
    ("imbalance_estimated_before", "imbalance before, estimated", "{:.2f}"),
    ("imbalance_estimated_after", "imbalance after, estimated", "{:.2f}"),
    ("imbalance_tokens", "imbalance of tokens", "{:.2f}"),
    ("exchanged_mb_per_layer", "MB sent per layer and micro-batch, busiest rank", "{:.3g}"),
    (
        "between_nodes_mb_per_layer",
        "MB sent to other nodes per layer and micro-batch, busiest rank",
        "{:.3g}",
    ),
    ("servers_share", "share of attention that servers without tokens compute", "{:.0%}"),
    ("servers_idle", "share of time in which servers without tokens are idle", "{:.0%}"),
    ("planning_ms", "ms to plan a micro-batch", "{:.3g}"),
    (
        "imbalance_estimated_in_order",
        "imbalance with documents in their original order, estimated",
        "{:.2f}",
    ),
    (
        "imbalance_estimated_replaced",
        "imbalance of batches that dealing replaced, estimated",
        "{:.2f}",
    ),
)

REPLACED, BEFORE, AFTER = "#c0501a", "#d97706", "#2f74c0"
DOCUMENTS = (
    "#2f74c0",
    "#c0501a",
    "#2c8154",
    "#b13f86",
    "#857000",
    "#6a63cf",
    "#0f7f8c",
    "#c8403a",
    "#5d7183",
    "#9a6a00",
)
_MOST_DRAWN = 32  # ranks in a picture; the table lists all ranks
_LABELLED = 0.06  # fraction of the width; narrower bars have no room for a number


class Bar(NamedTuple):
    """A bar of a row.

    `start` and `length` are fractions of the picture's width. `tip` is shown under the pointer.

    A `moved` bar shows work that a rank computes for another rank. It is hatched.
    """

    start: float
    length: float
    colour: str
    tip: str
    label: str = ""
    moved: bool = False


Rows = dict[str, list[list[Bar]]]  # the lines of bars of each row, by a name such as "rank 3"


class Picture(NamedTuple):
    """A picture.

    Attributes:
        name: name of the HTML element.
        title, text: texts above the picture.
        width: time that the whole width stands for.
        sides: rows of each side, by the caption of the side. Two sides are drawn next to each
            other.
        legend: colours, by their meaning.
    """

    name: str
    title: str
    text: str
    width: str
    sides: dict[str, Rows]
    legend: dict[str, str]


def render(figures: Figures) -> str:
    """Render the page."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    more = [
        (label, text.format(figures.total[name]))
        for name, label, text in _MORE
        if name in figures.total
    ]
    page = environment.from_string(template).render(
        figures=figures, pictures=draw_pictures(figures), more=more, version=version("hf-distca")
    )
    return page.encode(errors="replace").decode()  # the name of the folder may not be valid text


def draw_pictures(figures: Figures) -> list[Picture]:
    """Draw all pictures for which the run has data."""
    return [
        _draw_seconds(figures.per_rank, figures.total.get("imbalance_estimated_replaced")),
        *([] if figures.plan is None else [_plan(figures.plan)]),
    ]


def _draw_seconds(figures: PerRank, replaced: float | None) -> Picture:
    """Draw the attention seconds of each rank. If dealing replaced the Trainer's own batches, also
    draw the slowest rank of those batches. `replaced` is the estimated imbalance in those batches.
    """
    before, after = figures.measured_before, figures.measured_after
    slowest = (replaced or 0.0) * sum(before) / len(before)
    longest = max(*before, *after, slowest) or 1.0

    def draw(name: str, seconds: float, colour: str) -> list[Bar]:
        return [Bar(0.0, seconds / longest, colour, f"{name}: {_format_time(seconds)}")]

    rows = {
        f"rank {rank}": [
            draw(f"rank {rank}, before", before[rank], BEFORE),
            draw(f"rank {rank}, after", after[rank], AFTER),
        ]
        for rank in _choose_ranks(before, after)
    }
    legend = {"before": BEFORE, "after": AFTER}
    if replaced is not None:
        rows = {"replaced": [draw("slowest rank, not dealt", slowest, REPLACED)], **rows}
        legend["slowest rank of the batches that dealing replaced, by estimate"] = REPLACED
    return Picture(
        "ranks",
        "Attention seconds by rank",
        "Measured seconds in attention kernels, forward and backward, over the whole run. Before:"
        " seconds that each rank's own documents took, on all ranks together. After: seconds"
        f" that each rank spent.{_describe_ranks_left_out(len(before))}",
        _format_time(longest),
        {"": rows},
        legend,
    )


def _plan(plan: PlanFigures) -> Picture:
    before, after = plan.per_rank.estimated_before, plan.per_rank.estimated_after
    longest = max(*before, *after) or 1.0
    ranks = _choose_ranks(before, after)
    return Picture(
        "plan",
        "The plan of a step",
        f"Micro-batch {plan.micro_batch}, step {plan.step}: estimated seconds of one layer on each"
        " rank. Each bar is a part of a document, with the document's index. Work that a rank"
        f" computes for another rank is hatched.{_describe_ranks_left_out(len(before))}",
        _format_time(longest),
        {
            "as the documents lie": _draw_stacked(plan.before, ranks, longest),
            "as planned": _draw_stacked(plan.after, ranks, longest),
        },
        legend={},
    )


def _format_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _choose_ranks(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Choose the ranks to draw: those whose work changes most, in ascending order."""
    return sorted(
        sorted(range(len(before)), key=lambda rank: -abs(before[rank] - after[rank]))[:_MOST_DRAWN]
    )


def _describe_ranks_left_out(ranks: int) -> str:
    return (
        f" {_MOST_DRAWN} of {ranks} ranks are drawn: those whose work changes most."
        if ranks > _MOST_DRAWN
        else ""
    )


def _draw_stacked(pieces: Sequence[PlanPiece], ranks: Sequence[int], longest: float) -> Rows:
    rows: Rows = {f"rank {rank}": [[]] for rank in ranks}
    for piece in pieces:
        for bars in rows.get(f"rank {piece.rank}", []):
            length = piece.seconds / longest
            bar = Bar(
                start=sum(bars[-1][:2]) if bars else 0.0,
                length=length,
                colour=DOCUMENTS[piece.document % len(DOCUMENTS)],
                tip=f"rank {piece.rank}: document {piece.document} of {piece.length} tokens,"
                f" {piece.tokens} queries of rank {piece.home}, {_format_time(piece.seconds)}",
                label=str(piece.document) if length >= _LABELLED else "",
                moved=piece.rank != piece.home,
            )
            bars.append(bar)
    return rows
