#!/usr/bin/env python3
"""The structure of the package in figures: sizes of its rooms, imports between rooms, and circles
of files that import each other.

    python tools/house.py [--json FILE] [--source FOLDER]

A room is a folder of `src/hf_distca`, or of `tools`; the files next to the folders are the room
"top". The core is `CORE` and the top. Statements are those of Python's syntax (`ast.stmt`), nested
ones included, without docstrings. Parameters exclude `self` and `cls`. Complexity is that of ruff's
C901.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src" / "hf_distca"
TOP = "top"
CORE = ("schedule", "kernels", "runtime", "agreement", "data", "integration")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Branch = (
    _Function | ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
)


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed file of the package.

    Attributes:
        room: folder of the file, or `TOP`.
        path: path below the package's folder.
        lines: number of all lines.
        nodes: all nodes of the syntax tree.
    """

    room: str
    path: Path
    lines: int
    nodes: tuple[ast.AST, ...]

    @classmethod
    def read(cls, source: Path, path: Path) -> Module:
        """Read one file below the package's folder."""
        text, inside = path.read_text(encoding="utf-8"), path.relative_to(source)
        folders = inside.parts[:-1][: 2 if inside.parts[0] == "tools" else 1]
        room = ".".join(folders) or TOP
        return cls(room, inside, len(text.splitlines()), tuple(ast.walk(ast.parse(text))))

    @property
    def functions(self) -> list[_Function]:
        """All functions and methods, including nested ones."""
        return [node for node in self.nodes if isinstance(node, _Function)]

    @property
    def statements(self) -> int:
        """Number of statements."""
        return sum(map(is_counted, self.nodes))

    @property
    def name(self) -> str:
        """Name under which the file is imported."""
        return ".".join((SOURCE.name, *self.path.with_suffix("").parts)).removesuffix(".__init__")

    @property
    def imported_names(self) -> set[str]:
        """Modules, and names in modules, that any line of the file imports at runtime, without
        imports for types only.
        """
        checks = (
            node.body
            for node in self.nodes
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        for_types = {
            inner for body in checks for statement in body for inner in ast.walk(statement)
        }
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import) and node not in for_types:
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node not in for_types:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        return names

    @property
    def imported_rooms(self) -> set[str]:
        """Other rooms that any line of the file imports; modules of the top level count by their
        own names.
        """
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module == SOURCE.name:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
        inside = [name.split(".") for name in names if name.startswith(f"{SOURCE.name}.")]
        rooms = {".".join(parts[1 : 3 if parts[1] == "tools" else 2]) for parts in inside}
        return rooms - {self.room}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a room, or of all rooms together.

    Attributes:
        files, lines, statements: number of files, lines and statements.
        median_file, longest_file: statements of a file.
        median_function, longest_function: statements of a function, including its `def`; 0 without
            functions.
        parameters: largest number of parameters of a function.
        complexity: largest cyclomatic complexity of a function, including branches of inner
            functions.
    """

    files: int
    lines: int
    statements: int
    median_file: int
    longest_file: int
    median_function: int
    longest_function: int
    parameters: int
    complexity: int

    @classmethod
    def of(cls, modules: list[Module]) -> Size:
        """Add up the sizes of files."""
        files = [module.statements for module in modules]
        functions = [function for module in modules for function in module.functions]
        lengths = [count_statements(function) for function in functions]
        return cls(
            len(files),
            sum(module.lines for module in modules),
            sum(files),
            int(median(files)),
            max(files),
            int(median(lengths or [0])),
            max(lengths, default=0),
            max(map(count_parameters, functions), default=0),
            max(map(measure_complexity, functions), default=0),
        )


def is_counted(node: ast.AST) -> bool:
    """Return whether a node is a statement other than a docstring."""
    constant = (
        node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    )
    return isinstance(node, ast.stmt) and not (
        constant is not None and isinstance(constant.value, str)
    )


def count_statements(function: _Function) -> int:
    """Count the statements of a function, including its `def`."""
    return sum(map(is_counted, ast.walk(function)))


def count_parameters(function: _Function) -> int:
    """Count the parameters of a function, including `*args` and `**kwargs`, without `self` and
    `cls`.
    """
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    first = int(bool(named) and named[0] in {"self", "cls"})
    return (
        len(named)
        - first
        + len(given.kwonlyargs)
        + sum(more is not None for more in (given.vararg, given.kwarg))
    )


def measure_complexity(function: _Function) -> int:
    """Count the paths through a function: one, and one more for each branch."""
    return sum(isinstance(node, _Branch) for node in ast.walk(function))


def find_largest(modules: list[Module]) -> dict[str, str]:
    """Find the file and the functions with the largest figures of `Size`: "path" or "path:line
    name", by the name of the figure.
    """
    functions = [(module, function) for module in modules for function in module.functions]
    measures: dict[str, Callable[[_Function], int]] = {
        "longest_function": count_statements,
        "parameters": count_parameters,
        "complexity": measure_complexity,
    }
    largest = {"longest_file": str(max(modules, key=lambda module: module.statements).path)}
    for name, measure in measures.items() if functions else ():
        module, function = max(functions, key=lambda each: measure(each[1]))
        largest[name] = f"{module.path}:{function.lineno} {function.name}"
    return largest


def find_circles(modules: list[Module]) -> list[list[str]]:
    """Find the circles of files that import each other, as lists of paths."""
    files = {module.name: str(module.path) for module in modules}
    arrows = {}
    for module in modules:
        imported = {
            name if name in files else name.rpartition(".")[0] for name in module.imported_names
        }
        arrows[module.name] = imported & files.keys() - {module.name}
    reached = {name: _reach(name, arrows) for name in arrows}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in arrows
    }
    return sorted(sorted(files[name] for name in circle) for circle in circles if circle)


def _reach(name: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return all files that a file imports directly or indirectly; the file itself only if it is on
    a circle.
    """
    reached, left = set[str](), [name]
    while left:
        more = arrows[left.pop()] - reached
        reached |= more
        left += more
    return reached


@dataclass(frozen=True, slots=True)
class House:
    """The package.

    Attributes:
        rooms: the size of each room, by name.
        core, total: sizes of the core and of all rooms together.
        largest: for each room, and for "all", the file and the functions with the largest figures.
        arrows: the rooms that each room imports.
        circles: files that import each other, including imports inside functions, without imports
            for types only.
    """

    rooms: dict[str, Size]
    core: Size
    total: Size
    largest: dict[str, dict[str, str]]
    arrows: dict[str, list[str]]
    circles: list[list[str]]


def survey(source: Path = SOURCE) -> House:
    """Read all files of the package in a folder."""
    modules = [Module.read(source, path) for path in sorted(source.rglob("*.py"))]
    by_room: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        by_room[module.room].append(module)
    return House(
        {room: Size.of(by_room[room]) for room in sorted(by_room)},
        Size.of([module for module in modules if module.room in {*CORE, TOP}]),
        Size.of(modules),
        {name: find_largest(some) for name, some in {**by_room, "all": modules}.items()},
        {
            room: sorted(set().union(*(module.imported_rooms for module in by_room[room])))
            for room in sorted(by_room)
        },
        find_circles(modules),
    )


def _table(sizes: dict[str, Size]) -> Iterable[str]:
    """Yield the lines of a table with one room per line."""
    rows = [(name, asdict(size)) for name, size in sizes.items()]
    titles = [title.replace("_", " ") for title in rows[0][1]]
    yield "  ".join(["room".ljust(13), *titles])
    for name, figures in rows:
        values = (
            f"{value:>{len(title)},}" for title, value in zip(titles, figures.values(), strict=True)
        )
        yield "  ".join([name.ljust(13), *values])


def _described(house: House) -> Iterable[str]:
    yield from _table({**house.rooms, "core": house.core, "all": house.total})
    yield "\nImports"
    yield from (
        f"  {room} -> {', '.join(rooms) or 'nothing'}" for room, rooms in house.arrows.items()
    )
    yield f"\nCircles of files that import each other: {len(house.circles)}"
    yield from (f"  {', '.join(circle)}" for circle in house.circles)


def main() -> None:
    """Print the figures, and write them to the file of `--json`."""
    parser = argparse.ArgumentParser(
        description="Print the package's rooms: their sizes, and imports."
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to this file, too"
    )
    parser.add_argument(
        "--source",
        type=Path,
        default=SOURCE,
        metavar="FOLDER",
        help="the package's folder (%(default)s)",
    )
    options = parser.parse_args()
    house = survey(options.source)
    print("\n".join(_described(house)))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(house), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
