"""docs/hybrid_models.md: the names, files and steps that it mentions are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hybrid_models.md").read_text(encoding="utf-8")
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "src" / "hf_distca" / "hybrids").glob("*.py")
}


def test_every_name_is_in_the_sources() -> None:
    table = PAGE.split("## From notation to names\n")[1].split("\n## ")[0]
    names = re.findall(r"`(\w+(?:\.\w+)?)`", table)
    assert {"RowNeeds", "RecurrentKernel", "Segments.inner_segments"} <= set(names)
    text = "".join(SOURCES.values())
    for name in names:
        assert name == "hybrids" or all(
            re.search(rf"\b{word}\b", text) for word in name.split(".")
        ), name


def test_every_file_is_there() -> None:
    files = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert {"delta_rule.py", "carryover.py"} <= files <= set(SOURCES)


def test_the_sources_have_the_steps_of_the_page() -> None:
    steps = re.findall(r"^(\d)\. \*\*", PAGE, flags=re.MULTILINE)
    assert re.findall(r"# (\d)\. ", SOURCES["carryover.py"]) == steps
