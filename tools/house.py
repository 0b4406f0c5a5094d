#!/usr/bin/env python3
"""The house in figures: how large each room of the package is, which names it uses twice, and which room imports which.

    python tools/house.py [--json FILE] [--source FOLDER]

A room is a folder of `src/hf_distca`; the files beside the folders are the room "top". Lines are all lines of a file, comments
and docstrings included; a function has the lines from its `def` to its end. Parameters are counted without `self` and `cls`.
`tests/test_house.py` holds bounds of these figures.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src" / "hf_distca"
TOP = "top"
PRONOUNS = ("one", "at", "each", "found", "made", "own", "these")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """A file of the package, parsed.

    Attributes:
        room: the folder that it is in, or `TOP`.
        path: below the package's folder.
        lines: all lines of the file.
        nodes: all nodes of its syntax tree.
    """

    room: str
    path: Path
    lines: int
    nodes: tuple[ast.AST, ...]

    @classmethod
    def read(cls, source: Path, path: Path) -> Module:
        """Read one file below the package's folder."""
        text, inside = path.read_text(encoding="utf-8"), path.relative_to(source)
        room = inside.parts[0] if len(inside.parts) > 1 else TOP
        return cls(room, inside, len(text.splitlines()), tuple(ast.walk(ast.parse(text))))

    @property
    def functions(self) -> list[_Function]:
        """All functions and methods, those inside others included."""
        return [node for node in self.nodes if isinstance(node, _Function)]

    @property
    def classes(self) -> list[str]:
        """Names of all classes."""
        return [node.name for node in self.nodes if isinstance(node, ast.ClassDef)]

    @property
    def pronouns(self) -> int:
        """How often a pronoun is read or written as a bare name."""
        return sum(isinstance(node, ast.Name) and node.id in PRONOUNS for node in self.nodes)

    @property
    def is_verb(self) -> bool:
        """Whether it is a verb of the command line: its file holds a function of the file's name."""
        return self.room == "cli" and self.path.stem in {function.name for function in self.functions}

    @property
    def imported_rooms(self) -> set[str]:
        """Other rooms that it imports, wherever in the file; modules of the top level by their own names."""
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module == SOURCE.name:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
        inside = [name.split(".") for name in names if name.startswith(f"{SOURCE.name}.")]
        return {parts[1] for parts in inside} - {self.room}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a room, or of all rooms together; lengths are in lines.

    Attributes:
        files, lines: files, and lines of all of them.
        median_file, longest_file: length of a file.
        median_function, longest_function: length of a function; 0 where there is none.
        parameters: the most parameters of a function.
        pronouns: uses of `PRONOUNS` as bare names.
    """

    files: int
    lines: int
    median_file: int
    longest_file: int
    median_function: int
    longest_function: int
    parameters: int
    pronouns: int

    @classmethod
    def of(cls, modules: list[Module]) -> Size:
        """The size of so many files together."""
        files = [module.lines for module in modules]
        functions = [function for module in modules for function in module.functions]
        lengths = [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]
        return cls(
            len(files),
            sum(files),
            int(median(files)),
            max(files),
            int(median(lengths or [0])),
            max(lengths, default=0),
            max(map(parameters, functions), default=0),
            sum(module.pronouns for module in modules),
        )


def parameters(function: _Function) -> int:
    """Parameters of a function, `*args` and `**kwargs` included, without `self` and `cls`."""
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    first = int(bool(named) and named[0] in {"self", "cls"})
    return len(named) - first + len(given.kwonlyargs) + sum(more is not None for more in (given.vararg, given.kwarg))


@dataclass(frozen=True, slots=True)
class House:
    """The package.

    Attributes:
        rooms: the size of each room, by name.
        total: the size of all rooms together.
        shared_file_names: names of files that several rooms have, with those rooms; without verbs of the command line.
        repeated_classes: names of classes that are defined more than once, with the files.
        arrows: the rooms that each room imports.
    """

    rooms: dict[str, Size]
    total: Size
    shared_file_names: dict[str, list[str]]
    repeated_classes: dict[str, list[str]]
    arrows: dict[str, list[str]]


def survey(source: Path = SOURCE) -> House:
    """Look at all files of the package in a folder."""
    modules = [Module.read(source, path) for path in sorted(source.rglob("*.py"))]
    by_room: dict[str, list[Module]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_room[module.room].append(module)
        if not module.is_verb and not module.path.stem.startswith("__"):
            names[module.path.name].add(module.room)
        for name in module.classes:
            classes[name].append(str(module.path))
    return House(
        {room: Size.of(by_room[room]) for room in sorted(by_room)},
        Size.of(modules),
        {name: sorted(rooms) for name, rooms in sorted(names.items()) if len(rooms) > 1},
        {name: files for name, files in sorted(classes.items()) if len(files) > 1},
        {room: sorted(set().union(*(module.imported_rooms for module in by_room[room]))) for room in sorted(by_room)},
    )


def _table(sizes: dict[str, Size]) -> Iterable[str]:
    """Lines of a table, a room in each."""
    rows = [(name, asdict(size)) for name, size in sizes.items()]
    titles = [title.replace("_", " ") for title in rows[0][1]]
    yield "  ".join(["room".ljust(12), *titles])
    for name, figures in rows:
        values = (f"{value:>{len(title)},}" for title, value in zip(titles, figures.values(), strict=True))
        yield "  ".join([name.ljust(12), *values])


def _described(house: House) -> Iterable[str]:
    yield from _table({**house.rooms, "all": house.total})
    uses = Counter({room: size.pronouns for room, size in house.rooms.items() if size.pronouns})
    yield f"\nPronouns ({', '.join(PRONOUNS)}): " + ", ".join(f"{room} {count}" for room, count in uses.most_common())
    yield f"\nFile names of several rooms: {len(house.shared_file_names)}"
    yield from (f"  {name}: {', '.join(rooms)}" for name, rooms in house.shared_file_names.items())
    yield f"\nClass names defined more than once: {len(house.repeated_classes)}"
    yield from (f"  {name}: {', '.join(files)}" for name, files in house.repeated_classes.items())
    yield "\nImports"
    yield from (f"  {room} -> {', '.join(rooms) or 'nothing'}" for room, rooms in house.arrows.items())


def main() -> None:
    """Print the figures, and write them where `--json` says."""
    parser = argparse.ArgumentParser(description="Print the package's rooms: their sizes, names used twice, and imports.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="FOLDER", help="the package's folder (%(default)s)")
    options = parser.parse_args()
    house = survey(options.source)
    print("\n".join(_described(house)))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(house), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
