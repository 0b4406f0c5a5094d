from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_distca
from cli_runs import check_one_line, run, write
from hf_distca.schedule.plan import Plan


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
        "plan",
        write(tmp_path / "placement.json", rows),
        "--output",
        output,
        "--cost",
        cost,
        "--head-groups",
        "1",
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
    assert (
        run(
            "plan", write(tmp_path / "placement.json", rows), "--output", output, "--cost", cost
        ).exit_code
        == 0
    )
    split = Plan.from_json(output.read_text())
    assert split.layout.groups == (1 if cost == "pairs" else 4)
    assert (split.heads * (split.end - split.start)).sum() == 60100


def test_plan_of_lengths_and_options(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    file = write(tmp_path / "placement.json", {"lengths": [[65536], [1024] * 64, []]})
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
    file = write(tmp_path / "placement.json", {"lengths": [[65536], [512] * 128]})
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
        ([], "either 'rank_segments' or 'lengths'"),
        ({}, "it has neither"),
        ({"lengths": [[1]], "rank_segments": []}, "it has ['rank_segments', 'lengths']"),
        ({"lengths": [1]}, "one list per rank"),
        ({"lengths": [[1.5]]}, "1.5 must be an integer"),
        ({"lengths": [[0]]}, "length 0"),
        ({"lengths": [[10**30], [2048]]}, f"{10**30} is too large"),
        ({"rank_segments": [[3]]}, "segment 3 must be"),
        ({"rank_segments": [[[0, 1, 2]]]}, "starts at 1, but position 0 is next"),
        (
            {"rank_segments": [[[0, 0, 10, 5]]]},
            "segment [0, 0, 10, 5] ends at 10, but the document has only 5 tokens",
        ),
    ],
)
def test_bad_placements(tmp_path: Path, content: object, message: str) -> None:
    result = run(
        "plan", write(tmp_path / "placement.json", content), "--output", tmp_path / "plan.json"
    )
    check_one_line(result, message)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tile", "0"), "tile=0"),
        (("--window", "0"), "window=0"),
        (("--tolerance", "1.5"), "tolerance=1.5"),
        (
            ("--link-gigabytes", "inf"),
            "--link-gigabytes inf: a rate is a number from 1e-9 to 1e9 GB/s",
        ),
    ],
)
def test_bad_options(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    check_one_line(
        run(
            "plan",
            write(tmp_path / "placement.json", {"lengths": [[1]]}),
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
        result = run("plan", "-", *options, given=content)
        assert result.exit_code == 0, result.output
        assert Plan.from_json(result.stdout).layout.world_size == 2
        assert "imbalance of causal pairs" in result.stderr
    wrong = run("plan", "-", given="{")
    check_one_line(wrong, "standard input is not JSON")


def test_a_file_that_starts_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    file.write_text('{"lengths": [[16384], [2048]]}', encoding="utf-8-sig")
    assert run("plan", file).exit_code == 0


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As in `hf-distca plan FILE | head -1`: that is nobody's mistake, so nothing is said."""
    file = write(tmp_path / "placement.json", {"lengths": [[16384], [2048] * 8]})
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
    file = write(tmp_path / "placement.json", {"lengths": [[16384], [2048] * 8]})
    for cost, said in (("pairs", False), ("cuda", True)):
        result = run("plan", file, "--cost", cost)
        assert ("slowest rank, estimated" in result.stderr) == said
        assert "with no move at all" not in result.stderr
    assert (
        "on 1 rank," in run("plan", write(tmp_path / "placement.json", {"lengths": [[5]]})).stderr
    )


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"hf-distca {hf_distca.__version__}\n"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    check_one_line(
        run("plan", tmp_path / "none.json", "--output", tmp_path / "plan.json"), "No such file"
    )
    file = write(tmp_path / "placement.json", {"lengths": [[1]]})
    check_one_line(run("plan", file, "--output", tmp_path / "none" / "plan.json"), "No such file")
