r"""A page of the figures of run_all.py: a table of each part's rows.

python benchmarks/gpu/report.py gpu_figures
python benchmarks/gpu/report.py cpu_figures \
    --output benchmarks/results/llama_cpu_2026-11-21.md --note "Other work ran."
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Longer texts and tables are cut.
MOST_LETTERS, MOST_ROWS = 60, 60


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to one column per number: `seconds.distca`."""
    if isinstance(value, Mapping):
        parts = (
            flatten(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()
        )
        return {column: cell for part in parts for column, cell in part.items()}
    return {name: value}


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = ", ".join(show(item) for item in value)
    text = " ".join(str(value).split()).replace("|", "/")
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 3] + "..."


def format_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format rows as a table; columns whose cells are all equal become a line above it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {column: [show(row.get(column, "")) for row in rows] for column in columns}
    same = [column for column in columns if len(rows) > 1 and len(set(cells[column])) == 1]
    shown = [column for column in columns if column not in same] or columns[:1]
    text = [f"All rows: {', '.join(f'{column} {cells[column][0]}' for column in same)}.", ""]
    lines: Iterable[Sequence[str]] = zip(
        *(cells[column][:MOST_ROWS] for column in shown), strict=True
    )
    text = (text if same else []) + [
        "| " + " | ".join(line) + " |" for line in (shown, ["---"] * len(shown), *lines)
    ]
    left = len(rows) - MOST_ROWS
    return [*text, *([f"... and {left} more rows in the JSON."] if left > 0 else []), ""]


def format_section(part: str, data: Mapping[str, Any]) -> list[str]:
    """Format a part: its single figures, then a table for each list of rows."""
    text = [f"## {part}", ""]
    lists = {
        name: value
        for name, value in data.items()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    }
    rest = flatten({name: value for name, value in data.items() if name not in lists})
    text += [
        f"- {name}: {show(value)}" for name, value in rest.items() if value not in ("", [], None)
    ]
    for name, rows in lists.items():
        text += ["", f"**{name}**", "", *format_table([flatten(row) for row in rows])]
    return [*text, ""]


def format_page(folder: Path, notes: Sequence[str]) -> str:
    run = json.loads((folder / "run.json").read_text())
    environment = run["environment"]
    name = environment.get("gpu", environment["processor"])
    text = [f"# Attention on {name}, {environment['date']}", "", *notes, ""]
    text += [f"- {key}: {value}" for key, value in environment.items()]
    text += ["", "Parts, each with the command that ran it:", ""]
    for part, record in run["parts"].items():
        clocks = " at {} to {} MHz".format(*record["clocks"]) if "clocks" in record else ""
        taken = "" if record["seconds"] is None else f" after {record['seconds']} s"
        text.append(f"- {part}: {record['status']}{taken}{clocks}, `{record['command']}`")
    text.append("")
    text += [f"![{path.stem}]({path.name})" for path in sorted(folder.glob("*.png"))] + [""]
    for part in run["parts"]:
        path = folder / f"{part}.json"
        if path.exists():
            text += format_section(part, json.loads(path.read_text()))
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="folder that run_all.py wrote")
    parser.add_argument(
        "--output", type=Path, help="page to write (default: README.md in that folder)"
    )
    parser.add_argument(
        "--note", action="append", default=[], help="a line about the conditions, under the title"
    )
    arguments = parser.parse_args()
    output = arguments.output or arguments.figures / "README.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(format_page(arguments.figures, arguments.note), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
