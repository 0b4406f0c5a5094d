"""What the core may import, read from the sources, and what it knows of rooms above it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "hf_distca"

# The core in order: each room may import those before it, and the files next to the rooms.
CORE = ("schedule", "kernels", "runtime", "agreement", "data", "integration")
# Rooms that the core does not know: it works without them.
OPTIONAL = {"hybrids", "pipeline", "pool", "plugins", "tools"}
FREE_OF = {
    "schedule": {"torch", "transformers", "accelerate"},
    **{room: {"transformers", "accelerate"} for room in CORE[1:-1]},
}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All that a file says."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, wherever in it, but not for types only."""
    found, left = set(), list[ast.AST]([ast.parse(path.read_text(encoding="utf-8"))])
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "hf_distca":
            found |= {f"hf_distca.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        left += () if is_for_types(node) else ast.iter_child_nodes(node)
    return frozenset(found)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


def imported_rooms(path: Path) -> set[str]:
    inside = (name.split(".") for name in imports(path))
    return {parts[1] for parts in inside if parts[0] == "hf_distca" and len(parts) > 1}


def test_the_core_imports_no_optional_room() -> None:
    core = [path for path in FILES if room_of(path) not in OPTIONAL]
    assert {room_of(path) for path in core if path.parent != SOURCE} == {*CORE}
    assert not [
        f"{path.relative_to(SOURCE)} must not import {rooms}"
        for path in core
        if (rooms := imported_rooms(path) & OPTIONAL)
    ]


def test_only_tools_import_tools() -> None:
    others = [path for path in FILES if room_of(path) != "tools"]
    assert not [path for path in others if "tools" in imported_rooms(path)]


def test_rooms_of_the_core_import_those_before_them() -> None:
    assert not [
        f"{path.relative_to(SOURCE)} must not import {rooms}"
        for place, room in enumerate(CORE)
        for path in (SOURCE / room).rglob("*.py")
        if (rooms := imported_rooms(path) & {*CORE[place + 1 :]})
    ]


def test_the_package_describes_the_core() -> None:
    described = ast.get_docstring(ast.parse((SOURCE / "__init__.py").read_text())) or ""
    assert re.findall(r"^- `(\w+)`: \w", described, flags=re.MULTILINE) == [*CORE]


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
        "tools.cli",
        "schedule.balance",
        "schedule.placement",
        "tools.report.page",
        "tools.report.run_figures",
    )
    modules = ", ".join(f"hf_distca.{room}" for room in rooms)
    # Settings, so that `hf-distca run` finds at once what is wrong.
    made = "hf_distca.config.DistCAConfig()"
    code = f"import sys, hf_distca.config, {modules}\n{made}\nsys.exit('torch' in sys.modules)"
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


def test_the_core_has_no_line_on_servers_of_a_pool() -> None:
    said = re.compile(r"(?i)servers? of (?:a|the) pool|pool of servers|server_?pool")
    assert not [
        f"{path.relative_to(SOURCE)}: {line}"
        for path in FILES
        if room_of(path) in CORE
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


def test_few_files_ask_for_the_session() -> None:
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
        "integration/hooks/other_models.py",
        "integration/training/callback.py",
        "pipeline/stage_schedule.py",
    }, "others get it handed down"
