"""Limits that tools/house.py measures: circles of imports, and complexity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOL = Path(__file__).parents[1] / "tools" / "house.py"
MOST_COMPLEX = 10  # ruff's limit


def survey(folder: Path, *options: str | Path) -> dict[str, Any]:
    """Return the figures that the tool writes."""
    file = folder / "house.json"
    subprocess.run(
        [sys.executable, TOOL, "--json", file, *options],
        check=True,
        timeout=180,
        capture_output=True,
    )
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def test_sources_have_no_import_circles_and_no_complex_functions(tmp_path: Path) -> None:
    house = survey(tmp_path)
    assert not house["circles"], "files that import each other, even inside functions"
    assert house["total"]["complexity"] <= MOST_COMPLEX, house["largest"]["all"]["complexity"]


def test_figures_of_a_small_package_equal_hand_counts(tmp_path: Path) -> None:
    """Imports in a function make a circle; imports for types only do not."""
    sources = {
        "errors.py": '"""Errors."""\n\nclass Wrong(Exception):\n    """An error."""\n',
        "tools/cli/plan.py": "def plan() -> None:\n    from hf_distca.tools.cli import tables\n",
        "tools/cli/tables.py": (
            "from typing import TYPE_CHECKING\n"
            "import hf_distca.schedule\n"
            "if TYPE_CHECKING:\n"
            "    import hf_distca.tools.cli.plan\n"
        ),
        "runtime/__init__.py": "import hf_distca.runtime.tables\n",
        "runtime/tables.py": (
            "def look(runtime):\n    if runtime:\n        from hf_distca import runtime\n"
        ),
    }
    for name, text in sources.items():
        file = tmp_path / "hf_distca" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    house = survey(tmp_path, "--source", tmp_path / "hf_distca")
    assert house["circles"] == [["runtime/__init__.py", "runtime/tables.py"]]
    assert {room: size["statements"] for room, size in house["rooms"].items()} == {
        "runtime": 4,
        "tools.cli": 6,
        "top": 1,
    }
    assert [house[total]["statements"] for total in ("core", "total")] == [5, 11]
    assert house["total"]["complexity"] == 2
    assert house["arrows"] == {"runtime": [], "tools.cli": ["schedule"], "top": []}
