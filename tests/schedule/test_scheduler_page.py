"""docs/scheduler.md: its example, and the names and files that it mentions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "src" / "hf_distca" / "schedule").glob("*.py")
}


def rows_of_table(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip() for line in section.splitlines()]  # a table may stand in a list
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ][1:]


def test_the_example_is_what_the_planner_does() -> None:
    names: dict[str, Any] = {}
    exec(PAGE.split("```python\n")[1].split("```")[0], names)
    plan, cost = names["plan"], CostModel.make_analytic(names["shape"])
    before, after = PlanLoad(Plan.make_local(names["layout"]), cost), PlanLoad(plan, cost)
    slices = [
        (task.server, f"[{task.start}, {task.end})") for task in plan.tasks if task.document == 0
    ]
    rows = {
        rank: " and ".join(rows for server, rows in slices if server == rank) for rank in range(3)
    }
    columns = (before.compute_seconds, after.compute_seconds, after.exchange_seconds)
    milliseconds = [[f"{1e3 * seconds[rank]:.0f} ms" for seconds in columns] for rank in range(3)]
    expected = [
        [str(rank), first, rows[rank], *rest] for rank, (first, *rest) in enumerate(milliseconds)
    ]
    assert rows_of_table("An example") == expected, "\n".join(
        f"| {' | '.join(row)} |" for row in expected
    )
    text = " ".join(PAGE.split())
    assert (
        f"the slowest rank from {1e3 * before.slowest_seconds:.0f} to"
        f" {1e3 * after.slowest_seconds:.0f} ms" in text
    )
    relayed, direct = (
        float(load.exchange_bytes[0, 0]) / 1e9
        for load in (after, PlanLoad(plan.with_relays(None), cost))
    )
    assert f"rank 0 exchanges {relayed:.2f} GB as a home instead of {direct:.2f}" in text


def test_the_example_of_two_nodes_prints_what_stands_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    for code in PAGE.split("```python\n")[1:]:
        exec(code.split("```")[0], names)
    printed = PAGE.split("### Two nodes")[1].split("```\n")[2].split("```")[0]
    assert capsys.readouterr().out.strip() == printed.strip()
    plan, cost, nodes = names["plan"], CostModel.make_analytic(names["shape"]), Ranks(per_node=2)
    before, after = (
        PlanLoad(one, cost, ranks=nodes) for one in (Plan.make_local(names["layout"]), plan)
    )
    text = " ".join(PAGE.split("### Two nodes")[1].split())
    assert (
        f"from {1e3 * before.slowest_seconds:.0f} to {1e3 * after.slowest_seconds:.0f} ms" in text
    )
    assert after.node_bytes.inter_node.sum() == 0
    assert balance(names["layout"], cost, DistCAConfig(head_groups=1), nodes).digest == plan.digest


@pytest.mark.parametrize("heading", ["From notation to names", "How to change it"])
def test_every_name_is_in_the_sources(heading: str) -> None:
    text = "".join(SOURCES.values())
    for row in rows_of_table(heading):
        for name in re.findall(r"`([\w.]+)`", " ".join(row)):
            if name not in SOURCES:
                assert all(re.search(rf"\b{word}\b", text) for word in name.split(".")), name


def test_every_file_is_there() -> None:
    files = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", PAGE))
    assert {"reference.py", "moves.py"} <= files
    for name in files:
        assert name in SOURCES or any(
            (ROOT / folder / name).exists() for folder in ("benchmarks/schedule", "tests/schedule")
        ), name
