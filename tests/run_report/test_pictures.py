"""The data of the pictures, and a page in a single file."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from some_run import plan_row, some_rows, write_record

from hf_distca.tools.report.folder import RunFolder
from hf_distca.tools.report.page import Picture, draw_pictures, render
from hf_distca.tools.report.run_figures import Figures, collect


def figures(folder: Path, ranks: int = 4) -> Figures:
    write_record(folder, some_rows(ranks))
    return collect(RunFolder.read(folder))


def draw_by_name(found: Figures) -> dict[str, Picture]:
    return {picture.name: picture for picture in draw_pictures(found)}


def test_bars_of_ranks_are_proportional_to_their_seconds(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert list(draw_by_name(found)) == ["ranks", "plan"]
    (rows,) = draw_by_name(found)["ranks"].sides.values()
    longest = max(found.per_rank.measured_before)
    for rank, ((before,), (after,)) in enumerate(rows.values()):
        assert before.length == pytest.approx(found.per_rank.measured_before[rank] / longest)
        assert after.length == pytest.approx(found.per_rank.measured_after[rank] / longest)
    assert draw_by_name(found)["ranks"].width == f"{longest:.3g} s"


def test_bars_of_pieces_follow_each_other_without_gaps(tmp_path: Path) -> None:
    seconds = plan_row(4).per_rank
    longest = max(seconds.estimated_before)
    sides = draw_by_name(figures(tmp_path))["plan"].sides.values()
    for side, expected in zip(
        sides, (seconds.estimated_before, seconds.estimated_after), strict=True
    ):
        for rank, (bars,) in enumerate(side.values()):
            ends = np.cumsum([bar.length for bar in bars])
            np.testing.assert_allclose([bar.start for bar in bars], [0.0, *ends[:-1]], atol=1e-9)
            assert ends[-1] == pytest.approx(expected[rank] / longest, rel=1e-3)
    before, after = ([bar for (bars,) in side.values() for bar in bars] for side in sides)
    assert not any(bar.moved for bar in before)
    moved = [bar for bar in after if bar.moved]
    assert moved
    assert all("queries of rank 3" in bar.tip for bar in moved), "the rank with the long document"
    assert {bar.label == "" for bar in (*before, *after) if bar.length < 0.05} == {True}


def test_bytes_to_other_nodes_are_shown_only_with_several_nodes(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert found.total["between_nodes_mb_per_layer"] > 0
    alone = {
        name: value for name, value in found.total.items() if name != "between_nodes_mb_per_layer"
    }
    for total, shown in ((found.total, True), (alone, False)):
        page = render(replace(found, total=total))
        assert ("MB sent to other nodes per layer and micro-batch, busiest rank" in page) == shown
        assert ("to other nodes, MB" in page) == shown


def test_picture_of_many_ranks_draws_the_ranks_that_change_most(tmp_path: Path) -> None:
    drawn = draw_by_name(figures(tmp_path, ranks=80))
    for picture in drawn.values():
        assert "32 of 80 ranks are drawn" in picture.text
        ranks = list([*picture.sides.values()][-1])
        assert len(ranks) == 32
        assert ranks[-1] == "rank 79", "the rank with the long document"


class References(HTMLParser):
    """Attributes that make a browser load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]


def test_page_loads_no_other_file(tmp_path: Path) -> None:
    page = render(figures(tmp_path))
    references = References()
    references.feed(page)
    assert references.found == ["data:,"]
    assert "<script" not in page
    assert len(page) < 100_000
