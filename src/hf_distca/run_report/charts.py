"""The charts of the page, as figures of plotly.

Colours are in between light and dark: each has a contrast of 3 to 1 or more to both backgrounds of the page, and those of
documents 4.5 to 1 to the white text on them. What is neither (text, grid lines) gets its colour from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_distca.run_report.figures import Figures, Piece, PlanFigures
from hf_distca.run_report.rows import PerRank

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["AFTER", "BEFORE", "DOCUMENTS", "Chart", "charts"]

BEFORE, AFTER, _NEUTRAL = "#d97706", "#2f74c0", "#7c7f86"
DOCUMENTS = ("#2f74c0", "#c0501a", "#2c8154", "#b13f86", "#857000", "#6a63cf", "#0f7f8c", "#c8403a", "#5d7183", "#9a6a00")
_MOST_BARS = 64  # ranks whose bars can be told apart
_BORDERED = 0.005  # of the longest bar: borders of narrower pieces would hide them
_MOST_POINTS = 200  # of a line that has markers
_MOST_DRAWN = 32  # ranks of a plan
_CLEAR = "rgba(0,0,0,0)"
_HATCH = {"fgopacity": 0.4, "size": 7, "solidity": 0.3, "fillmode": "overlay"}
_ROW, _FRAME = 30, 110  # pixels of a rank of a plan, and of what is around them


@dataclass(frozen=True)
class Chart:
    """A chart, with a heading and what there is to see.

    Attributes:
        name: of the element.
        title, text: what stands above it.
        figures: one, or two beside each other, by what they show, if that needs to be said.
    """

    name: str
    title: str
    text: str
    figures: dict[str, Figure]


def charts(figures: Figures) -> list[Chart]:
    """Those that there are data for, in the order of the page."""
    found = [_balance(figures.steps)]
    if figures.per_rank is not None:
        found.append(_ranks(figures.per_rank))
    if figures.plan is not None:
        found.append(_plan(figures.plan))
    found.append(_bytes(figures))
    if any(one["share"] is not None for one in figures.hidden):
        found.append(_hidden(figures.hidden))
    return found


def _figure(traces: Sequence[dict[str, Any]], x: str, y: str, **layout: Any) -> Figure:
    from plotly.graph_objects import Figure

    axis = {"automargin": True, "fixedrange": True}
    return Figure(
        data=list(traces),
        layout={
            "template": "none",
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "height": 320,
            "dragmode": False,
            "hovermode": "closest",
            "hoverlabel": {"bgcolor": "#1f2430", "font": {"color": "#ffffff"}},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "bgcolor": _CLEAR},
            "xaxis": {**axis, "title": {"text": x, "standoff": 8}, "zeroline": False, **layout.pop("xaxis", {})},
            "yaxis": {**axis, "title": {"text": y, "standoff": 8}, "zeroline": False, **layout.pop("yaxis", {})},
            **layout,
        },
    )


def _line(x: Sequence[float], y: Sequence[float], name: str, colour: str, dash: str = "solid") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= _MOST_POINTS else "lines",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"color": colour, "size": 6},
        "hovertemplate": f"step %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
    }


def _over_steps(
    steps: Sequence[dict[str, float]], column: str, name: str, colour: str, dash: str = "solid"
) -> list[dict[str, Any]]:
    rows = [row for row in steps if column in row]
    return [_line([row["step"] for row in rows], [row[column] for row in rows], name, colour, dash)] if rows else []


def _balance(steps: Sequence[dict[str, float]]) -> Chart:
    traces = [
        *_over_steps(steps, "imbalance_measured_before", "measured before", BEFORE),
        *_over_steps(steps, "imbalance_measured_after", "measured after", AFTER),
        *_over_steps(steps, "imbalance_estimated_before", "estimated before", BEFORE, "dot"),
        *_over_steps(steps, "imbalance_estimated_after", "estimated after", AFTER, "dot"),
        *_over_steps(steps, "imbalance_tokens", "tokens", _NEUTRAL, "dash"),
    ]
    text = (
        "Slowest rank over mean of all ranks, of attention seconds. At 1 nobody waits. Before: if every rank computed its own; "
        "where no work was moved, that line lies under the one after."
    )
    return Chart(
        "balance",
        "Balance over steps",
        text,
        {"": _figure(traces, "step", "slowest / mean", height=360, xaxis=_whole([row["step"] for row in steps]))},
    )


def _by_rank(values: Sequence[float], name: str, colour: str, unit: str) -> dict[str, Any]:
    """Bars, or a line where there are too many."""
    ranks = list(range(len(values)))
    hover = f"rank %{{x}}<br>{name} %{{y:.4g}} {unit}<extra></extra>"
    kind = {"type": "bar"} if len(ranks) <= _MOST_BARS else {"type": "scatter", "mode": "lines", "line": {"color": colour}}
    return {**kind, "x": ranks, "y": list(values), "name": name, "marker": {"color": colour}, "hovertemplate": hover}


def _whole(numbers: Sequence[float]) -> dict[str, Any]:
    """An axis of whole numbers: few of them would get ticks in between."""
    return {"dtick": 1} if len(numbers) and max(numbers) - min(numbers) < 10 else {}


def _ranks(ranks: PerRank) -> Chart:
    traces = [
        _by_rank(ranks.measured_before, "before", BEFORE, "s"),
        _by_rank(ranks.measured_after, "after", AFTER, "s"),
    ]
    text = (
        "Measured seconds in attention kernels, forward and backward, over the whole run. Before: seconds given back to the rank "
        "whose documents they were spent on."
    )
    axis = _whole(range(len(ranks.tokens)))
    figure = _figure(traces, "rank", "seconds", xaxis=axis, yaxis={"rangemode": "tozero"}, bargap=0.25)
    return Chart("ranks", "Attention seconds by rank", text, {"": figure})


def _bytes(figures: Figures) -> Chart:
    steps, ranks = figures.steps, figures.per_rank
    traces = _over_steps(steps, "exchanged_mb_per_layer", "busiest rank", AFTER)
    found = {
        "busiest rank, a layer and micro-batch": _figure(
            traces, "step", "MB", xaxis=_whole([row["step"] for row in steps]), yaxis={"rangemode": "tozero"}
        )
    }
    if ranks is not None:
        bars = _by_rank([value / 1e6 for value in ranks.sent_bytes], "sent", AFTER, "MB")
        axis = _whole(range(len(ranks.tokens)))
        found["each rank, the whole run"] = _figure([bars], "rank", "MB", xaxis=axis, yaxis={"rangemode": "tozero"}, bargap=0.4)
    return Chart("bytes", "Bytes", "What ranks sent for attention, forward and backward.", found)


def _hidden(hidden: Sequence[dict[str, float | None]]) -> Chart:
    rows = [(f"rank {one['rank']}", one["travelled_seconds"] or 0.0, one["waited_seconds"] or 0.0) for one in hidden]
    names = [name for name, *_ in rows]
    sides = (
        ("computed meanwhile", AFTER, [travelled - waited for _, travelled, waited in rows]),
        ("waited for", BEFORE, [waited for *_, waited in rows]),
    )
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [1e3 * value for value in values],
            "name": name,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{name} %{{x:.4g}} ms<extra></extra>",
        }
        for name, colour, values in sides
    ]
    height = _FRAME + _ROW * len(names)
    figure = _figure(
        traces, "ms", "", barmode="stack", height=height, yaxis={"autorange": "reversed"}, legend_traceorder="normal"
    )
    text = "Of the traced step: how long messages of attention travelled, and in how much of that nothing else was computed."
    return Chart("hidden", "Share of messages hidden", text, {"": figure})


def _plan(plan: PlanFigures) -> Chart:
    ranks = len(plan.per_rank.tokens)
    shown = _drawn_ranks(plan)
    longest = max(max(plan.per_rank.estimated_before), max(plan.per_rank.estimated_after)) * 1e3
    sides = (("as the documents lie", plan.before), ("as planned", plan.after))
    figures = {name: _side(pieces, shown, longest) for name, pieces in sides}
    text = (
        f"Micro-batch {plan.micro_batch}, step {plan.step}: estimated milliseconds of one layer by rank, in pieces of documents, "
        "with the document's number. What a rank computes for another one is hatched."
    )
    if len(shown) < ranks:
        text += f" {len(shown)} of {ranks} ranks are drawn: those whose work changes most."
    return Chart("plan", "The plan of a step", text, figures)


def _drawn_ranks(plan: PlanFigures) -> list[int]:
    pairs = list(zip(plan.per_rank.estimated_before, plan.per_rank.estimated_after, strict=True))
    order = sorted(range(len(pairs)), key=lambda rank: -abs(pairs[rank][0] - pairs[rank][1]))
    return sorted(order[:_MOST_DRAWN])


def _side(pieces: Sequence[Piece], shown: Sequence[int], longest: float) -> Figure:
    ends = dict.fromkeys(shown, 0.0)
    placed: dict[tuple[str, bool], list[tuple[Piece, float]]] = {}
    for piece in pieces:
        if piece.rank in ends:
            look = DOCUMENTS[piece.document % len(DOCUMENTS)], piece.rank != piece.home
            placed.setdefault(look, []).append((piece, ends[piece.rank]))
            ends[piece.rank] += piece.seconds * 1e3
    traces = [_pieces(some, *look, longest * _BORDERED) for look, some in placed.items()]
    rows = [f"rank {rank}" for rank in shown]
    return _figure(
        traces,
        "ms",
        "",
        barmode="overlay",
        bargap=0.2,
        height=_FRAME + _ROW * len(rows),
        xaxis={"range": [0, longest * 1.02]},
        yaxis={"categoryorder": "array", "categoryarray": rows[::-1], "range": [-0.5, len(rows) - 0.5]},
        uniformtext={"mode": "hide", "minsize": 9},
    )


def _pieces(placed: Sequence[tuple[Piece, float]], colour: str, moved: bool, bordered: float) -> dict[str, Any]:
    """Pieces of one look, each with the milliseconds before it on its rank; those of `bordered` or more have a border."""
    pieces = [piece for piece, _ in placed]
    borders = [0.5 if piece.seconds * 1e3 >= bordered else 0.0 for piece in pieces]
    hatched = {"pattern": {"shape": "/", "fgcolor": "#000000", **_HATCH}} if moved else {}
    return {
        "type": "bar",
        "orientation": "h",
        "y": [f"rank {piece.rank}" for piece in pieces],
        "x": [piece.seconds * 1e3 for piece in pieces],
        "base": [before for _, before in placed],
        "marker": {"color": colour, "line": {"color": "#ffffff", "width": borders}, **hatched},
        "text": [str(piece.document) for piece in pieces],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "#ffffff"},
        "customdata": [[piece.document, piece.length, piece.tokens, piece.home] for piece in pieces],
        "hovertemplate": (
            "%{y}: document %{customdata[0]} of %{customdata[1]} tokens<br>%{customdata[2]} queries of rank %{customdata[3]}"
            "<br>%{x:.4g} ms<extra></extra>"
        ),
        "showlegend": False,
    }
