"""Bounds of the house in figures (tools/house.py): what makes a file or a function hard to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "house.py"


class Bounds(NamedTuple):
    """Upper limits of a room: lines of a file and of a function, parameters, pronouns as names."""

    longest_file: int
    longest_function: int
    parameters: int
    pronouns: int


BOUNDS = {
    "agreement": Bounds(longest_file=312, longest_function=29, parameters=5, pronouns=0),
    "cli": Bounds(longest_file=220, longest_function=51, parameters=13, pronouns=0),
    "data": Bounds(longest_file=250, longest_function=32, parameters=6, pronouns=0),
    "doctor": Bounds(longest_file=195, longest_function=31, parameters=4, pronouns=0),
    "integration": Bounds(longest_file=421, longest_function=86, parameters=16, pronouns=0),
    "kernels": Bounds(longest_file=300, longest_function=35, parameters=5, pronouns=0),
    "measure": Bounds(longest_file=298, longest_function=34, parameters=8, pronouns=0),
    "pipeline": Bounds(longest_file=423, longest_function=41, parameters=6, pronouns=0),
    "plugins": Bounds(longest_file=91, longest_function=28, parameters=2, pronouns=0),
    "pool": Bounds(longest_file=342, longest_function=36, parameters=5, pronouns=0),
    "recurrent": Bounds(longest_file=260, longest_function=37, parameters=5, pronouns=0),
    "run_report": Bounds(longest_file=246, longest_function=27, parameters=4, pronouns=0),
    "runtime": Bounds(longest_file=385, longest_function=36, parameters=5, pronouns=0),
    "schedule": Bounds(longest_file=401, longest_function=45, parameters=7, pronouns=0),
    "simulate": Bounds(longest_file=265, longest_function=43, parameters=6, pronouns=0),
    "top": Bounds(longest_file=354, longest_function=30, parameters=5, pronouns=0),
}
# Names that may still occur more than once. Of each other name there is one.
SHARED_FILE_NAMES: set[str] = set()
REPEATED_CLASSES: set[str] = set()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("house") / "house.json"
    printed = subprocess.run([sys.executable, TOOL, "--json", file], check=True, timeout=60, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(file.read_text())
    assert all(room in printed.stdout for room in figures["rooms"])
    return figures


def test_no_room_becomes_harder_to_read(house: dict[str, Any]) -> None:
    assert set(house["rooms"]) == set(BOUNDS), "each room has its bounds"
    above = {
        f"{room}: {name}": (figures[name], bound)
        for room, figures in house["rooms"].items()
        for name, bound in BOUNDS[room]._asdict().items()
        if figures[name] > bound
    }
    assert not above, "(figure, bound) of what is above it"


def test_names_are_given_once(house: dict[str, Any]) -> None:
    assert set(house["shared_file_names"]) <= SHARED_FILE_NAMES
    assert set(house["repeated_classes"]) <= REPEATED_CLASSES


def test_figures_are_those_of_the_sources(tmp_path: Path) -> None:
    """A small house, counted by hand."""
    package, file = tmp_path / "hf_distca", tmp_path / "house.json"
    sources = {
        "errors.py": "class Wrong(Exception):\n    pass\n",
        "cli/plan.py": "def plan() -> None:\n    from hf_distca.schedule.plan import Plan\n",
        "cli/tables.py": "one = 1\n",
        "schedule/plan.py": (
            "from hf_distca import errors\n\n\nclass Plan:\n    def cut(self, start, *, end, **more):\n"
            "        at = start\n        at += self.one\n        return at\n\n\nclass Wrong:\n    pass\n"
        ),
        "runtime/tables.py": "",
    }
    for name, text in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    subprocess.run([sys.executable, TOOL, "--source", package, "--json", file], check=True, timeout=60, capture_output=True)
    house = json.loads(file.read_text())
    schedule = house["rooms"]["schedule"]
    assert (schedule["files"], schedule["lines"], schedule["longest_function"], schedule["parameters"]) == (1, 12, 4, 3)
    assert {room: figures["pronouns"] for room, figures in house["rooms"].items()} == {
        "cli": 1,
        "runtime": 0,
        "schedule": 3,
        "top": 0,
    }
    assert house["shared_file_names"] == {"tables.py": ["cli", "runtime"]}
    assert house["repeated_classes"] == {"Wrong": ["errors.py", "schedule/plan.py"]}
    assert house["arrows"] == {"cli": ["schedule"], "runtime": [], "schedule": ["errors"], "top": []}
