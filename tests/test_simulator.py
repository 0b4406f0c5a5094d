"""The simulator of benchmarks/simulated: the commands of its page run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scripts
from pages import ROOT, words_of

LARGE = words_of(
    "python benchmarks/simulated/simulate.py --lengths pretrain --ranks 64 --tp 8 --pp 2"
    " --micro-batches 8 --tokens-per-rank 131072 --hardware h200"
)
LONGEST = words_of(
    "python benchmarks/simulated/simulate.py --longest --model qwen3-8b --ranks 8 --kernel"
    " flash_attn_3"
)
CHECKS = words_of('pytest -n 0 -m "slow or not slow" benchmarks/simulated/checks')


def test_simulator_predicts_every_way(tmp_path: Path) -> None:
    words = words_of("python benchmarks/simulated/simulate.py --lengths prolong --ranks 64")
    printed = scripts.run([*words, "--batches", "1", "--json"], tmp_path)
    found = json.loads(printed[printed.index("{") :])  # after the progress bar
    ways = {step["strategy"]: step for step in found["strategies"]}
    assert len(ways) == 11
    assert ways["dealt"]["step_seconds"] < ways["wlb"]["step_seconds"]
    assert all(step["step_seconds"] > 0 for step in ways.values())
    few = ["--batches", "1", "--strategy", "dealt", "plain"]
    assert "\npretrain" in scripts.run([*LARGE, *few], tmp_path)


def test_option_longest_prints_the_table_of_the_page(tmp_path: Path) -> None:
    printed = scripts.run(LONGEST, tmp_path)
    page = (ROOT / "benchmarks" / "simulated" / "README.md").read_text()
    table = page.split("```text\n")[1].split("```")[0]
    assert [line.split() for line in printed.splitlines()] == [
        line.split() for line in table.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checks_of_the_simulator_pass(tmp_path: Path) -> None:
    # The forked process has hypothesis already, of which pytest warns, and warnings are errors.
    options = ["-q", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    assert " passed" in scripts.run([*CHECKS, *options], tmp_path, timeout=900)
