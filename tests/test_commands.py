"""Every command of the pages is run by a test: here, made small, or in the test that is named beside it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from test_example import ROOT, commands, run

PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md")
INLINE = re.compile(r"`((?:python|hf-distca|accelerate) [^`]*)`")

# What makes a command of the pages small enough for a test. DIR is a folder of placements.
SMALL = {
    "python benchmarks/step_time.py": "--tokens 512 --layers 1 --heads 2 --rounds 1 --sdpa-rounds 0 --json out.json",
    "python benchmarks/overlap.py": "--tokens 512 --layers 1 --heads 2 --rounds 1 --latencies 0 --json out.json",
    "python benchmarks/memory.py": "--tokens 512 --heads 2 --ranks 2 --json out.json",
    "python benchmarks/scheduler.py --placements DIR": "--repeats 1 --json out.json",
    "python benchmarks/timeline.py --record traces timeline.png": "--tokens 512 --latency 20",
    "python tests/engines/matrix.py --quick": "--engine FSDP1 --json out.json",
}
ELSEWHERE = {
    "accelerate launch --config_file": "tests/test_example.py",
    "accelerate launch -m hf_distca.run": "tests/lifecycle/test_run.py",
    "python -m hf_distca.run": "tests/lifecycle/test_run.py",
    "hf-distca plan": "tests/test_example.py",
    "echo": "tests/test_example.py",
    "python benchmarks/gpu/": "tests/test_gpu_benchmarks.py",
    "python tests/upstream/run.py": "tests/upstream/test_upstream_sample.py",
    "pytest": ".ci/run",
    "python3 -m venv": ".ci/run",
    "pip install": ".ci/run",
    "ruff": ".ci/run",
    "mypy": ".ci/run",
    "bash .ci/run": ".ci/run",
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
    placements = tmp_path / "placements"
    placements.mkdir()
    (placements / "two_ranks.json").write_text(json.dumps({"lengths": [[4096], [512] * 8]}))
    words = shlex.split(command.replace("DIR", str(placements)))
    script = str(ROOT / words[1])
    run([sys.executable, script, *words[2:], *shlex.split(SMALL[command])], tmp_path, 180)
    if "--json" in SMALL[command]:
        assert json.loads((tmp_path / "out.json").read_text())
    else:
        assert (tmp_path / words[-1]).read_bytes().startswith(b"\x89PNG")
