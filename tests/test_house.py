"""Bounds of the house in figures (tools/house.py): what makes a file or a function hard to read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "house.py"


class Bounds(NamedTuple):
    """Upper limits of a room: parameters of a function, pronouns as names, riddles as first
    words.
    """

    parameters: int
    pronouns: int = 0
    riddles: int = 0


BOUNDS = {
    "advise": Bounds(parameters=6),
    "agreement": Bounds(parameters=5),
    "cli": Bounds(parameters=5),
    "data": Bounds(parameters=6),
    "doctor": Bounds(parameters=4),
    "integration": Bounds(parameters=16),
    "kernels": Bounds(parameters=5),
    "observe": Bounds(parameters=5),
    "pipeline": Bounds(parameters=6),
    "plugins": Bounds(parameters=2),
    "pool": Bounds(parameters=5),
    "recurrent": Bounds(parameters=5),
    "run": Bounds(parameters=3),
    "run_report": Bounds(parameters=3),
    "runtime": Bounds(parameters=5),
    "schedule": Bounds(parameters=7),
    "top": Bounds(parameters=5),
}
# Statements of a file and of a function, in any room.
MOST_OF_FILE, MOST_OF_FUNCTION = 230, 38
MOST_COMPLEX = 10  # ruff's limit
# Names that may still occur more than once. Of each other name there is one.
SHARED_FILE_NAMES: set[str] = set()
REPEATED_CLASSES: set[str] = set()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("house") / "house.json"
    printed = subprocess.run(
        [sys.executable, TOOL, "--json", file],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    figures: dict[str, Any] = json.loads(file.read_text())
    assert all(room in printed.stdout for room in figures["rooms"])
    return figures


def test_no_room_becomes_harder_to_read(house: dict[str, Any]) -> None:
    assert set(house["rooms"]) == set(BOUNDS), "each room has its bounds"
    above = {
        f"{room}: {name}": (figures[name], bound, house["largest"][room].get(name))
        for room, figures in house["rooms"].items()
        for name, bound in BOUNDS[room]._asdict().items()
        if figures[name] > bound
    }
    assert not above, "(figure, bound, function) of what is above its bound"


def test_files_and_functions_are_read_in_a_sitting(house: dict[str, Any]) -> None:
    bounds = {
        "longest_file": MOST_OF_FILE,
        "longest_function": MOST_OF_FUNCTION,
        "complexity": MOST_COMPLEX,
    }
    for name, bound in bounds.items():
        figure, place = house["total"][name], house["largest"]["all"][name]
        assert figure <= bound, f"{name} of {place}: split it"


def test_files_import_only_files_below_them(house: dict[str, Any]) -> None:
    assert not house["circles"], "files that import each other, be it inside functions"


def test_docstrings_begin_with_what_they_are_about(house: dict[str, Any]) -> None:
    """An imperative or the noun itself: no "What", "Whether", "Those", "Of" that a reader has to
    solve.
    """
    assert not house["riddles"]


def test_names_are_given_once(house: dict[str, Any]) -> None:
    files, classes = house["shared_file_names"], house["repeated_classes"]
    assert set(files) <= SHARED_FILE_NAMES, f"rooms with a file of the same name: {files}"
    assert set(classes) <= REPEATED_CLASSES, f"files with a class of the same name: {classes}"


def test_figures_are_those_of_the_sources(tmp_path: Path) -> None:
    """A small house, counted by hand."""
    package, file = tmp_path / "hf_distca", tmp_path / "house.json"
    sources = {
        "errors.py": '"""What went wrong."""\n\nclass Wrong(Exception):\n    """One of those."""\n',
        "cli/plan.py": (
            "def plan() -> None:\n"
            "    from hf_distca.cli import tables\n"
            "    from hf_distca.schedule.plan import Plan\n"
        ),
        "cli/tables.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n"
            "    import hf_distca.cli.plan\n"
            "one = 1\n"
        ),
        "schedule/plan.py": (
            "from hf_distca import errors\n\n\n"
            "class Plan:\n"
            "    def cut(self, start, *, end, **more):\n"
            "        at = start\n"
            "        at += self.one\n"
            "        return at\n\n\n"
            "class Wrong:\n"
            "    pass\n"
        ),
        "runtime/__init__.py": "import hf_distca.runtime.tables\n",
        "runtime/tables.py": (
            "def look(runtime):\n    if runtime:\n        from hf_distca import runtime\n"
        ),
    }
    for name, text in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    subprocess.run(
        [sys.executable, TOOL, "--source", package, "--json", file],
        check=True,
        timeout=60,
        capture_output=True,
    )
    house = json.loads(file.read_text())
    schedule = house["rooms"]["schedule"]
    sizes = {
        name: schedule[name]
        for name in (
            "files",
            "lines",
            "statements",
            "longest_file",
            "longest_function",
            "parameters",
        )
    }
    assert sizes == {
        "files": 1,
        "lines": 12,
        "statements": 8,
        "longest_file": 8,
        "longest_function": 4,
        "parameters": 3,
    }
    assert {room: figures["pronouns"] for room, figures in house["rooms"].items()} == {
        "cli": 1,
        "runtime": 0,
        "schedule": 3,
        "top": 0,
    }
    assert house["riddles"] == ["errors.py:1: what", "errors.py:4: one"]
    assert {room: figures["riddles"] for room, figures in house["rooms"].items()}["top"] == 2
    assert house["shared_file_names"] == {"tables.py": ["cli", "runtime"]}
    assert house["circles"] == [["runtime/__init__.py", "runtime/tables.py"]], (
        "in a function, but not for types only"
    )
    assert [house["rooms"][room]["complexity"] for room in ("schedule", "runtime")] == [1, 2]
    assert house["largest"]["schedule"] == {
        "longest_file": "schedule/plan.py",
        "longest_function": "schedule/plan.py:5 cut",
        "parameters": "schedule/plan.py:5 cut",
        "complexity": "schedule/plan.py:5 cut",
    }
    assert house["repeated_classes"] == {"Wrong": ["errors.py", "schedule/plan.py"]}
    assert house["arrows"] == {
        "cli": ["schedule"],
        "runtime": [],
        "schedule": ["errors"],
        "top": [],
    }


def test_names_of_tests_have_at_most_60_characters() -> None:
    """The sentence goes into the docstring."""
    names = [
        name
        for path in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 60] == []
