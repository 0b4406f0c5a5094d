"""`render`: the page, one HTML file that holds all it needs."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from hf_distca.errors import ReportError
from hf_distca.run_report.charts import charts
from hf_distca.run_report.figures import Figures

__all__ = ["check_installed", "render"]

_EXTRA = "pip install 'hf-distca[report]'"
_PACKAGES = ("plotly", "jinja2")
# No toolbar, for a page is read and not worked with; the page keeps its scrolling, on phones too.
_CONFIG = {"displayModeBar": False, "responsive": True, "scrollZoom": False}
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


def check_installed() -> None:
    """Refuse to make a page without what draws it.

    Raises:
        ReportError: names the package, and the command that installs it.
    """
    absent = [package for package in _PACKAGES if find_spec(package) is None]
    if absent:
        raise ReportError(
            f"a page is drawn with {' and '.join(absent)}, not installed here: {_EXTRA}. Without, --json prints the figures."
        )


def render(figures: Figures) -> str:
    """The page.

    Raises:
        ReportError: if plotly is missing.
    """
    check_installed()
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    shown = charts(figures)
    drawn = {
        chart.name: [
            (
                caption,
                Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=f"{chart.name}-{number}")),
            )
            for number, (caption, figure) in enumerate(chart.figures.items())
        ]
        for chart in shown
    }
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    page: str = template.render(
        figures=figures, charts=shown, drawn=drawn, tiles=_tiles(figures), plotly=Markup(get_plotlyjs()), version=_version()
    )
    return page.encode(errors="replace").decode()  # names of folders need not be text


def _tiles(figures: Figures) -> list[tuple[str, str]]:
    tiles = [(text.format(figures.total[name]), label) for name, label, text in _TILES if name in figures.total]
    shares = [share for one in figures.hidden if (share := one["share"]) is not None]
    if shares:
        tiles.append((f"{sum(shares) / len(shares):.0%}", "of the messages' time hidden, mean of the traced ranks"))
    return tiles


def _version() -> Any:
    from importlib.metadata import version

    return version("hf-distca")
