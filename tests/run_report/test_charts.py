"""The data of the charts, and that the page is one file."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from some_run import plan_row, some_rows, write_record, write_state, write_trace

from hf_distca.errors import ReportError
from hf_distca.run_report.charts import Chart, charts
from hf_distca.run_report.figures import Figures, collect
from hf_distca.run_report.folder import RunFolder
from hf_distca.run_report.page import render

pytest.importorskip("plotly", reason='needs pip install -e ".[report]"')


def figures(folder: Path, ranks: int = 4) -> Figures:
    write_record(folder, some_rows(ranks))
    for rank in range(2):
        write_trace(folder / "timeline", rank, 0.2, 0.05)
    return collect(RunFolder.read(folder))


def by_name(found: Figures) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(found)}


def test_every_chart_is_there_and_shows_the_figures(tmp_path: Path) -> None:
    found = figures(tmp_path)
    drawn = by_name(found)
    assert list(drawn) == ["balance", "ranks", "plan", "bytes", "hidden"]
    lines = {line.name: line for line in drawn["balance"].figures[""].data}
    assert list(lines["measured before"].y) == [row["imbalance_measured_before"] for row in found.steps]
    assert list(lines["measured before"].x) == [1, 2, 3, 4]
    assert found.per_rank is not None
    before, after = drawn["ranks"].figures[""].data
    assert (list(before.y), list(after.y)) == (found.per_rank.measured_before, found.per_rank.measured_after)
    meanwhile, waited = drawn["hidden"].figures[""].data
    np.testing.assert_allclose([meanwhile.x, waited.x], [[150.0, 150.0], [50.0, 50.0]])
    sent = drawn["bytes"].figures["each rank, the whole run"].data[0]
    np.testing.assert_allclose(sent.y, np.array(found.per_rank.sent_bytes) / 1e6)


def test_pieces_of_a_plan_lie_one_behind_the_other(tmp_path: Path) -> None:
    chart = by_name(figures(tmp_path))["plan"]
    ends = {"as the documents lie": plan_row(4).per_rank.estimated_before, "as planned": plan_row(4).per_rank.estimated_after}
    for side, seconds in ends.items():
        bars = sorted(
            (rank, base, width)
            for trace in chart.figures[side].data
            for rank, base, width in zip(trace.y, trace.base, trace.x, strict=True)
        )
        for number, rank in enumerate(sorted({rank for rank, *_ in bars})):
            mine = [(base, width) for name, base, width in bars if name == rank]
            starts = np.cumsum([0.0, *(width for _, width in mine)])
            np.testing.assert_allclose([base for base, _ in mine], starts[:-1], atol=1e-9)
            assert starts[-1] == pytest.approx(seconds[number] * 1e3, rel=1e-3)
    hatched = [trace for trace in chart.figures["as planned"].data if trace.marker.pattern.shape == "/"]
    assert hatched
    assert not [trace for trace in chart.figures["as the documents lie"].data if trace.marker.pattern.shape]


def test_borders_hide_no_narrow_pieces(tmp_path: Path) -> None:
    traces = by_name(figures(tmp_path))["plan"].figures["as the documents lie"].data
    widths = [(x, border) for trace in traces for x, border in zip(trace.x, trace.marker.line.width, strict=True)]
    longest = max(x for x, _ in widths)
    assert {border > 0 for x, border in widths if x > longest / 50} == {True}
    assert {border > 0 for x, border in widths if x < longest / 500} == {False}


def test_many_ranks_are_drawn_as_what_can_be_seen(tmp_path: Path) -> None:
    """80 bars a side are a line, and of a plan those ranks are drawn whose work changes most."""
    drawn = by_name(figures(tmp_path, ranks=80))
    assert {trace.type for trace in drawn["ranks"].figures[""].data} == {"scatter"}
    assert "32 of 80 ranks are drawn" in drawn["plan"].text
    rows = {row for trace in drawn["plan"].figures["as planned"].data for row in trace.y}
    assert len(rows) == 32
    assert "rank 79" in rows, "the one with the long document"


class References(HTMLParser):
    """Attributes that make a browser load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_is_one_file(tmp_path: Path) -> None:
    page = render(figures(tmp_path))
    references = References()
    references.feed(page)
    assert references.found == ["data:,"]
    assert len(page) < 6e6


def test_the_log_alone_makes_a_page(tmp_path: Path) -> None:
    write_state(tmp_path, {"step": 1, "distca/imbalance_estimated_after": 1.0, "distca/imbalance_estimated_before": 2.0})
    found = collect(RunFolder.read(tmp_path))
    assert list(by_name(found)) == ["balance", "bytes"]
    assert "Not on this page" in render(found)


def test_without_plotly_the_install_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "plotly").is_dir()])
    with pytest.raises(ReportError, match=r"drawn with plotly, not installed here: pip install 'hf-distca\[report\]'"):
        render(found)
