"""docs/scheduler.md: its example, its length, and the names and files that it mentions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "src" / "hf_distca" / "schedule").glob("*.py")
}


def test_example_prints_the_output_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = PAGE.split("```python\n")[1].split("```\n")[0::2][:2]
    exec(code, {})
    assert capsys.readouterr().out.strip() == printed.strip()


def test_page_has_at_most_1500_words() -> None:
    assert len(PAGE.split()) <= 1500


def test_names_and_files_on_the_page_are_in_the_sources() -> None:
    text = "".join(SOURCES.values())
    for name in re.findall(r"`schedule/(\w+\.py)`", PAGE):
        assert name in SOURCES
    for name in re.findall(r"`(\w+)`", PAGE):
        assert re.search(rf"\b{name}\b", text), name
