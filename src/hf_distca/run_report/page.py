"""`render`: the page, one HTML file that holds all it needs."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment

from hf_distca.run_report.pictures import pictures
from hf_distca.run_report.run_figures import Figures

__all__ = ["render"]

_TILES = (
    ("imbalance_measured_before", "imbalance before, measured", "{:.2f}"),
    ("imbalance_measured_after", "imbalance after, measured", "{:.2f}"),
    ("imbalance_estimated_before", "imbalance before, estimated", "{:.2f}"),
    ("imbalance_estimated_after", "imbalance after, estimated", "{:.2f}"),
    ("imbalance_tokens", "imbalance of tokens", "{:.2f}"),
    ("exchanged_mb_per_layer", "MB a layer and micro-batch, busiest rank", "{:.3g}"),
    ("server_time_share", "of rank 0's time in attention", "{:.0%}"),
    ("planning_ms", "ms of planning a micro-batch", "{:.3g}"),
    ("moved_micro_batches", "micro-batches with moved work", "{:.0f}"),
    ("micro_batches", "micro-batches in all", "{:.0f}"),
)


def render(figures: Figures) -> str:
    """The page."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    page = template.render(figures=figures, pictures=pictures(figures), tiles=_tiles(figures), version=version("hf-distca"))
    return page.encode(errors="replace").decode()  # names of folders need not be text


def _tiles(figures: Figures) -> list[tuple[str, str]]:
    tiles = [(text.format(figures.total[name]), label) for name, label, text in _TILES if name in figures.total]
    shares = [share for trace in figures.hidden if (share := trace["share"]) is not None]
    if shares:
        tiles.append((f"{sum(shares) / len(shares):.0%}", "of the messages' time hidden, mean of the traced ranks"))
    return tiles
