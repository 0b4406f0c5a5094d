from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hf_distca
from hf_distca.schedule.plan import Plan
from hf_distca.tools.cli import app


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def placement(path: Path, content: object) -> Path:
    file = path / "placement.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_help_names_the_verb() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "plan" in result.output


@pytest.mark.parametrize("cost", ["pairs", "cpu", "cuda"])
def test_plan_of_segments(tmp_path: Path, cost: str) -> None:
    rows = {
        "rank_segments": [[[0, 0, 30000, 60000]], [[0, 30000, 60000, 60000]], [[1, 0, 100, 100]]],
        "name": "any",
    }
    output = tmp_path / "plan.json"
    result = run(
        "plan", placement(tmp_path, rows), "--output", output, "--cost", cost, "--head-groups", "1"
    )
    assert result.exit_code == 0, result.output
    assert "imbalance of causal pairs" in result.stdout
    tasks = json.loads(output.read_text())["tasks"]
    covered = sorted(
        (document, position)
        for document, start, end, _, _ in tasks
        for position in range(start, end)
    )
    assert covered == [(0, n) for n in range(60000)] + [(1, n) for n in range(100)]
    assert Plan.from_json(output.read_text()).layout.world_size == 3
    assert run("plan", placement(tmp_path, rows), "--output", output, "--cost", cost).exit_code == 0
    split = Plan.from_json(output.read_text())
    assert split.layout.groups == (1 if cost == "pairs" else 4)
    assert (split.heads * (split.end - split.start)).sum() == 60100


def test_plan_of_lengths_and_options(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    file = placement(tmp_path, {"lengths": [[65536], [1024] * 64, []]})
    options = (
        "--tolerance",
        0.05,
        "--min-gain",
        0.1,
        "--tile",
        256,
        "--query-heads",
        8,
        "--key-value-heads",
        2,
        "--head-dim",
        64,
        "--head-groups",
        1,
    )
    result = run("plan", file, "-o", output, *map(str, options))
    assert result.exit_code == 0, result.output
    ends = [task.end for task in Plan.from_json(output.read_text()).tasks if task.document == 0]
    assert len(ends) > 1
    assert all(end % 256 == 0 for end in ends)


@pytest.mark.parametrize("window", [1024, 65536])
def test_plan_with_a_window(tmp_path: Path, window: int) -> None:
    output = tmp_path / "plan.json"
    file = placement(tmp_path, {"lengths": [[65536], [512] * 128]})
    result = run("plan", file, "-o", output, "--window", str(window))
    assert result.exit_code == 0, result.output
    assert f"{window} keys" in result.stdout
    # No document is longer than the longer of the two.
    assert ("as long as any document" in result.stdout) == (window == 65536)
    assert Plan.from_json(output.read_text()).window == (1024 if window == 1024 else None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("\x80", "is not JSON"),
        ([], "either 'rank_segments' or 'lengths'"),
        ({}, "it has neither"),
        ({"lengths": [[1]], "rank_segments": []}, "it has ['rank_segments', 'lengths']"),
        ({"lengths": []}, "one list per rank"),
        ({"lengths": [1]}, "one list per rank"),
        ({"lengths": [["a"]]}, "'a' must be an integer"),
        ({"lengths": [[1.5]]}, "1.5 must be an integer"),
        ({"lengths": [[0]]}, "length 0"),
        ({"lengths": [[10**30], [2048]]}, f"{10**30} is too large"),
        ({"lengths": [[], []]}, "has no tokens"),
        ({"rank_segments": [[3]]}, "segment 3 must be"),
        ({"rank_segments": [[[0, 1]]]}, "segment [0, 1] must be"),
        ({"rank_segments": [[[0, 1, 2]]]}, "starts at 1 where position 0 is next"),
        (
            {"rank_segments": [[[0, 0, 10, 5]]]},
            "segment [0, 0, 10, 5] ends at 10, behind the document's length of 5",
        ),
        ({"rank_segments": [[[0, 0, 10, "5"]]]}, "'5' must be an integer"),
    ],
)
def test_bad_placements(tmp_path: Path, content: object, message: str) -> None:
    result = run("plan", placement(tmp_path, content), "--output", tmp_path / "plan.json")
    one_line(result, message)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tile", "0"), "tile=0"),
        (("--window", "0"), "window=0"),
        (("--window", str(2**31)), "--window 2147483648: the limit is 2**31"),
        (("--tolerance", "1.5"), "tolerance=1.5"),
        (("--query-heads", "5", "--key-value-heads", "2"), "query_heads=5"),
        (("--head-dim", str(10**21)), "--head-dim 1000000000000000000000: the limit is 2**31"),
        (("--tile", str(10**30)), "--tile 1000000000000000000000000000000: the limit is 2**31"),
        (("--ranks-per-node", str(2**31)), "--ranks-per-node 2147483648: the limit is 2**31"),
        (
            ("--link-gigabytes", "inf"),
            "--link-gigabytes inf: a rate is a number from 1e-9 to 1e9 GB/s",
        ),
    ],
)
def test_bad_options(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    one_line(
        run(
            "plan",
            placement(tmp_path, {"lengths": [[1]]}),
            "--output",
            tmp_path / "plan.json",
            *options,
        ),
        message,
    )


def test_standard_input_and_output(tmp_path: Path) -> None:
    """Without --output the plan goes to standard output, and what there is to say about it
    elsewhere.
    """
    content = json.dumps({"lengths": [[16384], [2048] * 8]})
    for options in ((), ("--output", "-")):
        result = CliRunner().invoke(app, ["plan", "-", *options], input=content)
        assert result.exit_code == 0, result.output
        assert Plan.from_json(result.stdout).layout.world_size == 2
        assert "imbalance of causal pairs" in result.stderr
    wrong = CliRunner().invoke(app, ["plan", "-"], input="{")
    one_line(wrong, "standard input is not JSON")


def test_a_file_that_starts_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    file.write_text('{"lengths": [[16384], [2048]]}', encoding="utf-8-sig")
    assert run("plan", file).exit_code == 0


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As in `hf-distca plan FILE | head -1`: that is nobody's mistake, so nothing is said."""
    file = placement(tmp_path, {"lengths": [[16384], [2048] * 8]})
    read, written = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hf_distca.tools.cli", "plan", str(file)]
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(
            words, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert "hf-distca:" not in done.stderr
    assert "Traceback" not in done.stderr


def test_seconds_are_those_of_a_device(tmp_path: Path) -> None:
    """Where only pairs count there are no seconds: 2**30 pairs were called one."""
    file = placement(tmp_path, {"lengths": [[16384], [2048] * 8]})
    for cost, said in (("pairs", False), ("cuda", True)):
        result = run("plan", file, "--cost", cost)
        assert ("slowest rank, estimated" in result.stderr) == said
        assert "with no move at all" not in result.stderr
    assert "on 1 rank," in run("plan", placement(tmp_path, {"lengths": [[5]]})).stderr


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"hf-distca {hf_distca.__version__}\n"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    one_line(
        run("plan", tmp_path / "none.json", "--output", tmp_path / "plan.json"), "No such file"
    )
    file = placement(tmp_path, {"lengths": [[1]]})
    one_line(run("plan", file, "--output", tmp_path / "none" / "plan.json"), "No such file")


def one_line(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
