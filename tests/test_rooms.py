"""Which room may import which, read from the sources: the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pages import ROOT

SOURCE = Path(__file__).parents[1] / "src" / "hf_distca"

# What each room may import besides itself, `config`, `errors`, `input_files` and what lies above
# all rooms. A module stands for itself alone. The docstring of a room repeats them, and so does the
# page.
ARROWS = {
    "config": {"schedule.cost", "schedule.profiles"},
    "errors": set(),
    "input_files": set(),
    "package_versions": set(),
    "borrowed": set(),
    "late_imports": set(),
    "schedule": set(),
    "kernels": {"borrowed"},
    "runtime": {"borrowed", "kernels", "schedule"},
    "recurrent": {"runtime", "schedule"},
    "measure": {"kernels", "runtime", "schedule"},
    "agreement": {
        "schedule",
        "runtime.group",
        "runtime.meter",
    },
    "data": {
        "schedule",
        "agreement.documents",
        "agreement.document_starts",
        "agreement.dealt_share",
    },
    "run_report": {"schedule", "agreement.batch_plan"},
    "integration": {
        "borrowed",
        "late_imports",
        "data",
        "agreement",
        "measure",
        "recurrent",
        "runtime",
        "kernels",
        "schedule",
        "run_report.rows",
    },
    "observe": {
        "agreement.documents",
        "borrowed",
        "integration.callers",
        "integration.processes",
        "integration.training.callback",
        "runtime.meter",
        "schedule",
    },
    "pipeline": {"borrowed", "integration", "agreement", "runtime", "kernels", "schedule"},
    "plugins": {"integration"},
    "doctor": {"integration", "kernels", "runtime"},
    "pool": {
        "agreement",
        "borrowed",
        "doctor.exchange",
        "integration",
        "kernels",
        "late_imports",
        "runtime",
        "schedule",
    },
    "advise": {"schedule", "integration", "doctor.model"},
    "cli": {
        "schedule",
        "measure",
        "advise",
        "run",
        "run_report",
        "doctor",
        "pool",
    },
    "run": {"late_imports", "integration", "observe", "cli", "pool"},
}
# Files beside the rooms that each may use.
SHARED = ("config", "errors", "input_files", "package_versions")
# Folders of `integration`, and the others that each may import besides files beside the folders.
INNER_ARROWS = {
    "integration": set(),
    "integration.checks": set(),
    "integration.hooks": {"integration.checks"},
    "integration.training": {"integration.checks", "integration.hooks"},
}
# An import path that users have, above all folders.
ENTRANCE = "mixin.py"
FREE_OF = {
    "schedule": {"torch", "transformers", "accelerate"},
    "kernels": {"transformers", "accelerate"},
    "runtime": {"transformers", "accelerate"},
    "recurrent": {"transformers", "accelerate"},
    "measure": {"transformers", "accelerate"},
    "agreement": {"transformers", "accelerate"},
    "data": {"transformers", "accelerate"},
    "run_report": {"transformers", "accelerate", "torch"},
    "cli": {"transformers", "accelerate", "torch"},
}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All that a file says."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def is_allowed(room: str, name: str) -> bool:
    """Whether a room may import a module."""
    inner = name.removeprefix("hf_distca.")
    allowed = {room, *SHARED, *ARROWS[room]}
    return name == inner or any(inner == one or inner.startswith(f"{one}.") for one in allowed)


def test_a_room_imports_only_what_its_arrows_say() -> None:
    assert not [
        f"{path.relative_to(SOURCE)} must not import {name}: see ARROWS, and Rooms in"
        " docs/architecture.md"
        for path in FILES
        for name in sorted(imports(path))
        if not is_allowed(room_of(path), name)
    ]


@pytest.mark.parametrize("folder", INNER_ARROWS)
def test_folders_of_integration_have_arrows_one_way(folder: str) -> None:
    inside = SOURCE / folder.replace(".", "/")
    imported = {
        "integration"
        if (SOURCE / f"{name.replace('.', '/')}.py").parent == SOURCE / "integration"
        else ".".join(name.split(".")[:2])
        for path in inside.glob("*.py")
        if (path.parent.name, path.name) != ("integration", ENTRANCE)
        for name in (each.removeprefix("hf_distca.") for each in imports(path))
        if name.startswith("integration.")
    }
    assert imported <= {"integration", folder, *INNER_ARROWS[folder]}
    if folder != "integration":
        described = ast.get_docstring(ast.parse((inside / "__init__.py").read_text()))
        named = re.findall(r"`(\w+)`", (described or "").partition("May import")[2])
        assert {f"integration.{name}" for name in named} == INNER_ARROWS[folder]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.glob("*/__init__.py")), ids=lambda path: path.parent.name
)
def test_a_room_says_what_it_may_import(path: Path) -> None:
    described = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    (said,) = re.findall(r"^May import (.*?)\.$", described, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([\w.]+)`", said)) == ARROWS[path.parent.name]


def test_the_page_says_what_each_room_may_import() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## Rooms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", section, flags=re.MULTILINE)
    # The observer's verbs have a table of their own.
    said = {room: set(re.findall(r"`([\w.]+)`", cell)) for room, cell in rows if room in ARROWS}
    assert said == {
        path.parent.name: ARROWS[path.parent.name] for path in SOURCE.glob("*/__init__.py")
    }


def test_a_room_is_free_of_what_it_does_not_know() -> None:
    assert not [
        f"{path.relative_to(SOURCE)} must not import {name}"
        for path in FILES
        for name in sorted(imports(path))
        if name.partition(".")[0] in FREE_OF.get(room_of(path), set())
    ]


def test_rooms_run_without_torch() -> None:
    """Not only no import of their own: nothing that they import brings torch in."""
    rooms = (
        "schedule.balance",
        "schedule.placement",
        "tools.report.page",
        "tools.report.run_figures",
    )
    modules = ", ".join(f"hf_distca.{room}" for room in rooms)
    code = f"import sys, {modules}\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Verbs of `GroupObserver`, at most so many places that call them, and the steps that ranks take
# together: each has its place in `Server`.
OBSERVER_VERBS, MOST_PLACES = {"make_group", "take_step", "enter_phase"}, 4
JOINT_STEPS = {
    "exchange",
    "gather_measurements",
    "make_cost",
    "plan_documents",
    "plan_share",
    "make_layer_plan",
}
# Rooms that name servers of a pool: where a user asks for them, and the room itself.
OF_THE_POOL = {"pool", "run", "cli"}


def nodes_outside_the_pool() -> list[ast.AST]:
    return [node for path in FILES if room_of(path) != "pool" for node in nodes_of(path)]


def test_the_observer_is_called_at_few_places() -> None:
    places = [
        node.func.attr
        for node in nodes_outside_the_pool()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    counts = {verb: places.count(verb) for verb in OBSERVER_VERBS}
    assert all(counts.values()), "verbs have these names"
    assert sum(counts.values()) <= MOST_PLACES, counts


def test_marked_steps_are_those_that_servers_know() -> None:
    marked = [
        node.name
        for node in nodes_outside_the_pool()
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(name, ast.Name) and name.id == "mark_joint_step"
            for name in node.decorator_list
        )
    ]
    assert sorted(marked) == sorted(JOINT_STEPS)


def test_no_other_room_has_a_line_on_servers_of_a_pool() -> None:
    said = re.compile(r"(?i)servers? of (?:a|the) pool|pool of servers|server_?pool")
    assert not [
        f"{path.relative_to(SOURCE)}: {line}"
        for path in FILES
        if room_of(path) not in OF_THE_POOL
        for line in said.findall(" ".join(path.read_text(encoding="utf-8").split()))
    ]


def test_what_is_registered_imports_no_trainer() -> None:
    """What registers distca runs while transformers imports a module of a model: the Trainer, and
    all that waits for it, would begin in the middle of that.
    """
    inner = SOURCE / "integration"
    registered = [path for path in inner.rglob("*.py") if path.parent.name != "training"]
    assert not [
        f"{path.relative_to(SOURCE)} imports {name} when it is imported"
        for path in registered
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for name in [node.module, *(alias.name for alias in node.names)]
        if "trainer" in str(name).lower() or name == "TrainingArguments"
    ]


def test_at_most_three_files_ask_for_the_session() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if path.name != "current_session.py"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "current_session"
    }
    assert asking == {
        "integration/hooks/mask.py",
        "integration/training/callback.py",
        "pipeline/stage_schedule.py",
    }, "others get it handed down"
