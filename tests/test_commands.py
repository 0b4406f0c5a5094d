"""Every command of the pages is run by a test: here, made small, or in the test that is named beside it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from test_example import ROOT, commands, run

PAGES = (
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/placements/README.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)
INLINE = re.compile(r"`((?:python|hf-distca|accelerate) [^`]*)`")

# What makes a command of the pages small enough for a test.
SMALL = {
    "python benchmarks/step_time.py": "--tokens 512 --layers 1 --heads 2 --rounds 1 --sdpa-rounds 0 --json out.json",
    "python benchmarks/overlap.py": "--tokens 512 --layers 1 --heads 2 --rounds 1 --latencies 0 --json out.json",
    "python benchmarks/memory.py": "--tokens 512 --heads 2 --ranks 2 --json out.json",
    "python benchmarks/scheduler.py --placements benchmarks/placements": "--repeats 1 --json out.json",
    "python benchmarks/timeline.py --record traces timeline.png": "--tokens 512 --latency 20",
    "python tests/engines/matrix.py --quick": "--engine FSDP1 --json out.json",
}
ELSEWHERE = {
    "accelerate launch --config_file": "tests/test_example.py",
    "accelerate launch -m hf_distca.run": "tests/lifecycle/test_run.py",
    "python -m hf_distca.run": "tests/lifecycle/test_run.py",
    "hf-distca plan": "tests/test_example.py",
    "echo": "tests/test_example.py",
    "python tests/models/generate.py": "tests/models/test_families.py",  # the same table
    "python benchmarks/placements/make.py": "tests/test_commands.py",
    "python benchmarks/gpu/": "tests/test_gpu_benchmarks.py",
    "python tests/upstream/run.py": "tests/upstream/test_upstream_sample.py",
    "pytest": ".ci/run",
    "python3 -m venv": ".ci/run",
    "pip install": ".ci/run",
    "ruff": ".ci/run",
    "mypy": ".ci/run",
    "bash .ci/run": ".ci/run",
    "make example": "tests/test_example.py",  # the same launch command
    "make test": ".ci/run",
    "mkdocs": ".ci/run",
    "pre-commit install": ".pre-commit-config.yaml",  # sets up git for what .ci/run checks
}


def all_commands() -> set[str]:
    inline = {command for page in PAGES for command in INLINE.findall((ROOT / page).read_text())}
    return inline | {command for page in PAGES for command in commands(page) if command}


def test_every_command_is_run_by_a_test() -> None:
    for command in all_commands():
        assert command in SMALL or any(command.startswith(start) for start in ELSEWHERE), f"nothing runs {command!r}"
    assert SMALL.keys() <= all_commands(), "commands that no page has"
    for place in ELSEWHERE.values():
        assert (ROOT / place).exists(), place


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", SMALL)
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    inputs = [str(ROOT / word) if (ROOT / word).exists() else word for word in words[1:]]
    run([sys.executable, *inputs, *shlex.split(SMALL[command])], tmp_path, 180)
    if "--json" in SMALL[command]:
        assert json.loads((tmp_path / "out.json").read_text())
    else:
        assert (tmp_path / words[-1]).read_bytes().startswith(b"\x89PNG")


def test_the_placements_are_what_their_script_writes(tmp_path: Path) -> None:
    run([sys.executable, str(ROOT / "benchmarks/placements/make.py"), "--out", str(tmp_path)], tmp_path, 60)
    shipped = sorted((ROOT / "benchmarks/placements").glob("*.json"))
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.json"))] == [path.read_bytes() for path in shipped]
    assert len(shipped) == 3
