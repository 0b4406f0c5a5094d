"""Import rules of the core, read from the sources, and its independence of the rooms above it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "hf_distca"

# The core in order: each room may import the rooms before it, and the files outside all rooms.
CORE = ("schedule", "kernels", "runtime", "agreement", "data", "integration")
# Rooms that the core does not know. It works without them.
OPTIONAL = {"hybrids", "pipeline", "pool", "plugins", "tools"}
FREE_OF = {
    "schedule": {"torch", "transformers", "accelerate"},
    **{room: {"transformers", "accelerate"} for room in CORE[1:-1]},
}


@cache
def list_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the syntax nodes of a file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def list_imports(path: Path) -> frozenset[str]:
    """List the modules that a file imports, except those for types only."""
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


def find_room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


def list_imported_rooms(path: Path) -> set[str]:
    inside = (name.split(".") for name in list_imports(path))
    return {parts[1] for parts in inside if parts[0] == "hf_distca" and len(parts) > 1}


def test_core_imports_no_optional_room() -> None:
    core = [path for path in FILES if find_room(path) not in OPTIONAL]
    assert {find_room(path) for path in core if path.parent != SOURCE} == {*CORE}
    assert not [
        f"{path.relative_to(SOURCE)} must not import {rooms}"
        for path in core
        if (rooms := list_imported_rooms(path) & OPTIONAL)
    ]


def test_only_tools_import_tools() -> None:
    others = [path for path in FILES if find_room(path) != "tools"]
    assert not [path for path in others if "tools" in list_imported_rooms(path)]


def test_rooms_of_the_core_import_only_earlier_rooms() -> None:
    assert not [
        f"{path.relative_to(SOURCE)} must not import {rooms}"
        for place, room in enumerate(CORE)
        for path in (SOURCE / room).rglob("*.py")
        if (rooms := list_imported_rooms(path) & {*CORE[place + 1 :]})
    ]


def test_package_docstring_describes_the_rooms_of_the_core() -> None:
    described = ast.get_docstring(ast.parse((SOURCE / "__init__.py").read_text())) or ""
    assert re.findall(r"^- `(\w+)`: \w", described, flags=re.MULTILINE) == [*CORE]


def test_rooms_import_no_library_that_is_forbidden_there() -> None:
    assert not [
        f"{path.relative_to(SOURCE)} must not import {name}"
        for path in FILES
        for name in sorted(list_imports(path))
        if name.partition(".")[0] in FREE_OF.get(find_room(path), set())
    ]


def test_rooms_without_torch_load_it_through_no_import() -> None:
    """No import of these rooms may load torch, even indirectly."""
    rooms = (
        "tools.cli",
        "schedule.balance",
        "schedule.placement",
        "tools.report.page",
        "tools.report.run_figures",
    )
    modules = ", ".join(f"hf_distca.{room}" for room in rooms)
    # `hf-distca run` makes settings to report errors at once.
    made = "hf_distca.config.DistCAConfig()"
    code = f"import sys, hf_distca.config, {modules}\n{made}\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Verbs of `GroupObserver`, the most places that may call them, and the steps that ranks take
# together. Each of these steps has a place in `Server`.
OBSERVER_VERBS, MOST_PLACES = {"make_group", "take_step", "enter_phase"}, 4
JOINT_STEPS = {
    "exchange",
    "gather_measurements",
    "make_cost",
    "plan_documents",
    "plan_share",
    "make_layer_plan",
}


def list_nodes_outside_the_pool() -> list[ast.AST]:
    return [node for path in FILES if find_room(path) != "pool" for node in list_nodes(path)]


def test_group_observer_is_called_in_few_places() -> None:
    places = [
        node.func.attr
        for node in list_nodes_outside_the_pool()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    counts = {verb: places.count(verb) for verb in OBSERVER_VERBS}
    assert all(counts.values()), "every verb is called"
    assert sum(counts.values()) <= MOST_PLACES, counts


def test_marked_joint_steps_are_those_of_servers() -> None:
    marked = [
        node.name
        for node in list_nodes_outside_the_pool()
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(name, ast.Name) and name.id == "mark_joint_step"
            for name in node.decorator_list
        )
    ]
    assert sorted(marked) == sorted(JOINT_STEPS)


def test_core_does_not_mention_servers_of_a_pool() -> None:
    said = re.compile(r"(?i)servers? of (?:a|the) pool|pool of servers|server_?pool")
    assert not [
        f"{path.relative_to(SOURCE)}: {line}"
        for path in FILES
        if find_room(path) in CORE
        for line in said.findall(" ".join(path.read_text(encoding="utf-8").split()))
    ]


def test_registered_modules_import_no_trainer() -> None:
    """distca registers while transformers imports a module of a model. An import of the Trainer
    would start within that import.
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


def test_only_four_files_call_current_session() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if path.name != "current_session.py"
        for node in list_nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "current_session"
    }
    assert asking == {
        "integration/hooks/mask.py",
        "integration/hooks/other_models.py",
        "integration/training/callback.py",
        "pipeline/stage_schedule.py",
    }, "other files get the session as an argument"
